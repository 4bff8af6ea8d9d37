"""Folders that fit a size: never larger, never worse than uniform, the same after any stop, refused before work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration import divergence
from quantkit.checkpoint.report import load as load_report
from quantkit.errors import CheckpointError, RecipeError
from quantkit.pipeline import fit, quantize as pipeline
from quantkit.pipeline.quantize import quantize
from quantkit.planning import survey
from quantkit.recipes.files import load
from quantkit.recipes.options import FitOptions, RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping
from quantkit.reporting.html import page
from quantkit.reporting.summary import summary
from tests.command_line import call, refused
from tests.faults import Killed, faults, stop_at
from tests.folders import gptq, hashes
from tests.tiny_models import write_model

SHORT = ("--samples", 8, "--max-length", 64)
ALLOWED = "int4:g64,int5:g64"
ASKED = FitOptions(target_bits=4.4, allowed=ALLOWED)


@pytest.fixture(scope="module", autouse=True)
def all_within_reach() -> Iterator[None]:
    """Let each run measure the uniform schemes, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "REACH", 1e9)
        yield


def write_small(family: str, folder: Path, **changes: Any) -> Path:
    """Write a model of two very small blocks."""
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    return write_model(family, folder, **shape, num_key_value_heads=2, **changes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("llama", tmp_path_factory.mktemp("model") / "model")


def test_a_size_above_the_sources_is_not_refused_for_what_the_search_left_dense(calib: Path, tmp_path: Path) -> None:
    model = write_small("llama", tmp_path / "model", vocab_size=2048)
    fit.quantize(model, tmp_path / "out", recipe(calib, method="rtn"), FitOptions(10**12, allowed="int8:g64,dense"))
    assert 0.9 <= load_report(tmp_path / "out")["totals"]["share"] < 1


@pytest.fixture(scope="module")
def whole(small: Path, calib: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    fit.quantize(small, out, recipe(calib, method="rtn"), ASKED)
    return out


def recipe(calib: Path, **changes: Any) -> Recipe:
    short = {"data": str(calib), "samples": 4, "max_length": 32}
    return from_mapping({**gptq(str(calib), clip="none", **changes), "calibration": short})


def same_but_card(a: Path, b: Path) -> bool:
    """Compare two folders by all files but the card, which names the hash of the report."""
    ours, theirs = hashes(a), hashes(b)
    return bool(ours.pop("README.md") and theirs.pop("README.md")) and ours == theirs


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_folder_is_never_larger_than_asked(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "REACH", 1.0)
    model, target = shared / "models" / "tiny-llama-1m", 3_020_000
    options = ("--calib", shared / "data" / "wikitext2" / "valid.txt", *SHORT, "--method", "rtn")
    smallest = re.search(r"smallest folder takes (\d+)", refused("plan", model, "--target-size", 1, *options, code=2))
    assert smallest is not None and int(smallest[1]) < target
    done = call("quantize", model, "-o", tmp_path / "out", "--target-size", target, *options)
    assert 0.98 * target < size(tmp_path / "out") <= target
    found = load_report(tmp_path / "out")["fit"]
    assert found["kld"].keys() == {"mixed", found["best_uniform"]}  # the best uniform scheme, though it is out of reach
    assert "mixed chosen: KL divergence on" in done.stdout
    report = load_report(tmp_path / "out")  # its time is that of the search too, and not of the last folder alone
    assert report["totals"]["seconds"] == pytest.approx(sum(report["phases"].values()))
    assert {"sensitivities", "divergence", found["best_uniform"]} <= report["phases"].keys()
    assert report["totals"]["seconds"] >= 0.9 * sum(found["seconds"].values())
    assert all(row["fits"] == (row["bytes"] <= target) for row in found["curve"])


@pytest.mark.parametrize(("family", "keys"), [("qwen2", ["embeddings"]), ("llama", ["embeddings", "head"])])
def test_a_size_below_that_of_dense_embeddings_is_met_only_where_a_key_lets_the_target_choose_for_them(
    family: str, keys: list[str], calib: Path, tmp_path: Path
) -> None:
    model = write_small(family, tmp_path / "model", vocab_size=4096)
    asked = FitOptions(target_size=len(keys) * 700_000 + 250_000, allowed="int4:g64,int8:g64,dense")
    with pytest.raises(RecipeError, match=r"too few: .*let it choose for embeddings too with --embeddings auto"):
        fit.quantize(model, tmp_path / "out", recipe(calib, method="rtn"), asked)
    report = fit.quantize(model, tmp_path / "out", recipe(calib, method="rtn", **dict.fromkeys(keys, "auto")), asked)
    assert size(tmp_path / "out") <= (asked.target_size or 0)
    names = {"embeddings": "model.embed_tokens", "head": "lm_head"}
    found = {each["name"]: each["scheme"] for each in report["layers"]}
    assert all(report["fit"]["harm"][names[key]] > 0 and report["recipe"][key] == found[names[key]] for key in keys)
    assert all(value > 0 for value in report["fit"]["kld"].values())
    assert not any("auto" in notice for notice in report["notices"])
    made = from_mapping(load(tmp_path / "out" / "quantkit_recipe.yaml"))
    quantize(model, tmp_path / "again", made)
    assert same_but_card(tmp_path / "again", tmp_path / "out")


def test_embeddings_stay_dense_where_the_layout_or_the_program_has_no_place_for_them(small: Path, calib: Path) -> None:
    options = ("--target-bits", 5, "--allowed", "int4:g64", "--embeddings", "auto", "--head", "auto")
    for more in (("--layout", "gptq"), ("--target", "sglang")):
        found = json.loads(call("plan", small, *options, *more, "--calib", calib, *SHORT, "--json").stdout)
        assert "model.embed_tokens" not in {row["module"] for row in found["linears"]}
    plain = call("plan", small, "--embeddings", "auto", "--method", "rtn").stdout
    assert "--embeddings auto chooses for a target size alone: they stay dense" in plain


@pytest.mark.parametrize(("bits", "warns"), [(3.3, True), (4.6, False)])
def test_few_bits_are_announced_with_their_loss_before_work(bits: float, warns: bool, small: Path, calib: Path) -> None:
    options = ("--target-bits", bits, "--allowed", "int2:g64,int3:g64,int4:g64,int5:g64", "--calib", calib, *SHORT)
    found = call("plan", small, *options).stdout
    assert ("expect a KL divergence of about" in " ".join(found.split())) is warns
    assert ("--target-bits 4.258 fits int4:g64, with about 0.06 nats" in " ".join(found.split())) is warns


def test_pins_of_many_bits_do_not_hide_the_loss_of_the_few_that_they_leave(small: Path, calib: Path) -> None:
    pinned = ("--override", ".*mlp.*=int8:g64", "--allowed", "int2:g64,int3:g64,int8:g64", "--calib", calib, *SHORT)
    found = " ".join(call("plan", small, "--target-bits", 6, *pinned).stdout.split())
    assert re.search(r"the target leaves [23]\.\d\d bits a weight: expect a KL divergence of about", found), found


def test_rounding_to_a_size_expects_more_divergence_than_gptq(small: Path, calib: Path) -> None:
    options = ("--target-bits", 3.3, "--allowed", "int2:g64,int3:g64,int4:g64", "--method", "rtn", "--calib", calib)
    found = " ".join(call("plan", small, *options, *SHORT).stdout.split())
    assert "expect a KL" in found and "by gptq, and several times that by rounding:" in found
    assert "no weight depends on" in found and "no text is read" not in found


def test_the_duration_of_a_search_counts_the_text_that_it_measures_on(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "quantkit.planning.survey.estimate_duration", lambda *given: (asked.append(given[-1]), (None, []))[1]
    )
    call("plan", small, "--target-bits", 4.5, "--method", "rtn", "--max-length", 64)
    assert asked == [16 * 64]


def test_the_recipe_of_a_folder_makes_the_same_bytes_without_a_search(
    small: Path, whole: Path, calib: Path, tmp_path: Path
) -> None:
    made = load(whole / "quantkit_recipe.yaml")
    assert bool(made["overrides"]) == (load_report(whole)["fit"]["chosen"] == "mixed")
    quantize(
        small, tmp_path / "again", from_mapping({**made, "calibration": recipe(calib).to_mapping()["calibration"]})
    )
    assert same_but_card(tmp_path / "again", whole)


@pytest.mark.parametrize(("samples", "source", "sequences"), [(6, "calib.txt", 3), (7, "packaged", 7)])
def test_a_text_is_drawn_once_and_its_other_documents_judge_unless_they_are_few(
    samples: int, source: str, sequences: int, small: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, drawn = survey.draw_calibration, list[object]()
    monkeypatch.setattr(
        survey, "draw_calibration", lambda data, *args, **o: drawn.append(data) or draw(data, *args, **o)
    )
    text = {"data": str(calib), "samples": samples, "max_length": 16}
    asked = from_mapping({"method": "rtn", "clip": "none", "calibration": text})
    found = fit.quantize(small, tmp_path / "out", asked, ASKED)["fit"]["held_out"]
    assert drawn == [str(calib), "packaged"][: 1 + (source == "packaged")]
    assert (found["source"], found["sequences"]) == (source, sequences)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_the_defaults_leave_documents_of_the_packaged_text_to_judge_by(method: str, small: Path) -> None:
    """Where nothing calibrates, nothing is said to."""
    options = ("--target-bits", 4.4, "--allowed", ALLOWED, "--method", method, "--max-length", 16)
    rest = "228 of 256 sequences calibrate, and the rest of the text that comes with quantkit judges"
    assert (rest in call("plan", small, *options).stdout) is (method == "gptq")


def test_a_mix_that_is_worse_on_held_out_text_is_not_written(
    small: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = divergence.divergences
    monkeypatch.setattr(divergence, "divergences", lambda *args: {**judge(*args), "mixed": 9.0})
    report = fit.quantize(small, tmp_path / "out", recipe(calib, method="rtn"), ASKED)
    assert report["fit"]["chosen"] == "uniform" and report["fit"]["best_uniform"] == "int4:g64"
    assert {layer["scheme"] for layer in report["layers"]} == {"int4:g64"}
    quantize(small, tmp_path / "plain", recipe(calib, method="rtn", scheme={"group_size": 64}))
    assert same_but_card(tmp_path / "out", tmp_path / "plain")
    monkeypatch.setattr(divergence, "divergences", lambda *args: {**judge(*args), "mixed": 0.0})
    report = fit.quantize(small, tmp_path / "mixed", recipe(calib, method="rtn"), ASKED)
    assert len({layer["scheme"] for layer in report["layers"]}) > 1


def test_the_page_has_the_curve_with_what_was_measured(whole: Path) -> None:
    report = load_report(whole)
    drawn, found = page(report), report["fit"]
    assert "<h2>Target size</h2>" in drawn and "KL divergence on" in summary(report)
    rows = [re.sub(r"<[^>]*>", " ", row).split() for row in drawn.split("<tr>")]
    (row,) = [row for row in rows if row[:1] == ["int4:g64"] and len(row) == 7]
    assert row[4:] == [f"{found['predicted']['int4:g64']:.6f}", f"{found['kld']['int4:g64']:.6f}", "yes"]


@pytest.mark.parametrize(
    ("operation", "name", "number"),
    [
        ("write", "activations-entered", 2),  # in the sensitivities
        ("rename", "/config.json", 3),  # while the files of the chosen folder move up
        ("unlink", "/mixed", 1),
    ],
)
def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_folder(
    operation: str, name: str, number: int, small: Path, whole: Path, calib: Path, tmp_path: Path
) -> None:
    with faults(stop_at(operation, name, number)), pytest.raises(Killed):
        fit.quantize(small, tmp_path / "out", recipe(calib, method="rtn"), ASKED)
    assert not (tmp_path / "out").exists()
    fit.quantize(small, tmp_path / "out", recipe(calib, method="rtn"), ASKED, run=RunOptions(resume=True))
    assert same_but_card(tmp_path / "out", whole)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize(
    ("operation", "name", "number", "first"),
    [
        ("write", "journal.jsonl", 4, ("int5-g64", True)),  # at the second block of the first folder, which goes on
        ("write", "activations-entered", 2, ("int4-g64", False)),  # behind int5-g64, which is not made again
    ],
)
def test_a_kill_before_the_loss_increases_are_known_loses_no_finished_block(
    operation: str,
    name: str,
    number: int,
    first: tuple[str, bool],
    small: Path,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = FitOptions(target_bits=5.4, allowed=ALLOWED)
    with faults(stop_at(operation, name, number)), pytest.raises(Killed):
        fit.quantize(small, tmp_path / "out", recipe(calib), asked)
    with pytest.raises(CheckpointError, match="holds an interrupted run's work"):
        fit.quantize(small, tmp_path / "out", recipe(calib), asked)
    with pytest.raises(CheckpointError, match=r"was begun with other settings \(target\)"):
        fit.quantize(small, tmp_path / "out", recipe(calib), ASKED, run=RunOptions(resume=True))
    made: list[tuple[str, bool]] = []

    def watched(model: Path, out: Path, asked: Any, run: RunOptions, **options: Any) -> Any:
        made.append((out.name, run.resume))
        raise Killed

    monkeypatch.setattr(pipeline, "quantize", watched)
    with pytest.raises(Killed):
        fit.quantize(small, tmp_path / "out", recipe(calib), asked, run=RunOptions(resume=True))
    assert made == [first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target-bits", 2], r"2 bits are too few: the smallest schemes take 2\.\d+: use --target-bits 2\.\d+, or "),
        (
            ["--target-size", "50kB"],
            r"50000 bytes are too few: the smallest folder takes \d+ \(.*\): use --target-size",
        ),
        (["--target-bits", 4.3, "--pin", ".*=fp6"], r"4.3 bits .* take 6\.\d+: .*drop --override '\.\*'"),
        (
            ["--target-bits", 6.3, "--target", "sglang", "--layout", "marlin"],
            "sglang opens none of the allowed schemes in the layout marlin: allow others with --allowed, or use",
        ),
        (["--target-bits", 4.5, "--target-size", "1MB"], "--target-bits: a size and a number of bits are two targets"),
        (["--allowed", "int4"], "--allowed: there is no target to fit: add --target-size"),
        (["--target-bits", 6.5, "--format", "fp6"], "a target chooses among formats, and fp6 is one: add --allowed"),
        (["--target-bits", 4.5, "--prune", "2:4"], "a size is fitted by dense schemes: drop --prune"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_any_work(
    options: list[object], message: str, small: Path, calib: Path, tmp_path: Path
) -> None:
    command = ("quantize", small, *options, "--calib", calib, *SHORT)
    assert re.search(message, refused(*command, code=2, out=tmp_path / "out"))


def test_a_plan_shows_each_uniform_scheme_and_which_one_is_the_best_that_fits(small: Path, calib: Path) -> None:
    options = ("--target-bits", 6.2, "--allowed", "int4,fp6,dense", "--calib", calib, *SHORT)
    found = json.loads(call("plan", small, *options, "--json").stdout)
    assert found["fit"]["best_uniform"] == "fp6:channel" == found["scheme"]
    rows = {(row["scheme"], row["layout"]): row for row in found["fit"]["curve"]}
    assert rows["fp6:channel", "humming"]["fits"] and not rows["fp6:channel", "compressed-tensors"]["fits"]
    assert rows["int4:g32", "compressed-tensors"]["harm"] > rows["fp6:channel", "humming"]["harm"]
    assert re.search(r"fp6:channel +humming +\d+ +6.125 +2.66e-03  best", call("plan", small, *options).stdout)
    rounded = json.loads(call("plan", small, *options, "--method", "rtn", "--json").stdout)
    assert rounded["peak_memory"]["ram_parts"]["errors of a block"] > 4 * 7 * 128**2
