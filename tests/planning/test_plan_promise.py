"""A plan refuses what a run refuses, with the same line and exit code, and neither reads nor writes anything for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import RecipeError
from quantkit.io import staging as folders
from quantkit.io.staging import JOURNAL, append_journal
from quantkit.models.weights import BlockWeights
from quantkit.planning.needs import Memory
from quantkit.planning.output import dense_totals
from quantkit.recipes.recipe import from_mapping, nearest_names, require_effect
from tests.command_line import RTN, call
from tests.folders import restate

GPTQ = ("--samples", 2, "--max-length", 64)


class Places:
    """The folders of one case: the model, which a case may change, the output, and a calibration text."""

    def __init__(self, model: Path, out: Path, text: Path) -> None:
        self.model, self.out, self.text = model, out, text

    def copied(self) -> Path:
        self.model = Path(shutil.copytree(self.model, self.out.parent / "model"))
        return self.model


def unchanged(places: Places) -> None:
    pass


def holds_other_things(places: Places) -> None:
    places.out.mkdir()
    (places.out / "mine.txt").write_text("keep")


def lies_in_the_source(places: Places) -> None:
    places.out = places.copied() / "out"


def is_unfinished(places: Places) -> None:
    with suppress(KeyError), folders.staging(places.out) as partial:
        append_journal(partial / JOURNAL, {"recipe_sha256": "another", "source": {}})
        append_journal(partial / JOURNAL, {"files": {}, "items": [], "facts": {}, "bytes": 0, "packed_bytes": 0})
        raise KeyError


def lacks_a_tokenizer(places: Places) -> None:
    for path in places.copied().glob("*token*.json"):
        path.unlink()


def has_a_link(places: Places) -> None:
    path = places.copied() / "tokenizer.json"
    path.rename(places.out.parent / "elsewhere.json")
    path.symlink_to(places.out.parent / "elsewhere.json")


def is_of_family(**changes: object) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        restate(places.copied() / "config.json", **changes)

    return change


#: What is wrong, the options, and the exit code; `TEXT` is the calibration text.
BAD = {
    "skip": (unchanged, (*RTN, "--skip", "dwn_proj"), 2),
    "skip in GPTQ": (unchanged, (*GPTQ, "--calib", "TEXT", "--skip", "layers.7.mlp.up_proj"), 2),
    "override": (unchanged, (*RTN, "--override", "v_prj=int4:g64"), 2),
    "override of what is skipped": (unchanged, (*RTN, "--skip", "v_proj", "--override", "v_proj=int4:g64"), 2),
    "everything skipped": (unchanged, (*RTN, "--skip", ".*"), 2),
    "misfits": (unchanged, (*RTN, "--layout", "marlin", "--group-size", 64), 1),
    "share": (unchanged, (*RTN, "--skip", "mlp.*"), 4),
    "device": (unchanged, (*RTN, "--device", "abacus"), 2),
    "no such GPU": (unchanged, (*RTN, "--device", "cuda:99"), 2),
    "no text": (unchanged, (*GPTQ, "--calib", "missing.txt"), 1),
    "few documents": (unchanged, (*GPTQ, "--calib", "TEXT", "--samples", 100_000), 1),
    "tokenizer": (lacks_a_tokenizer, (*GPTQ, "--calib", "TEXT"), 1),
    "a link": (has_a_link, RTN, 1),
    "family": (is_of_family(model_type="abacus"), RTN, 1),
    "tensors of another model": (is_of_family(model_type="t5", architectures=["T5Model"]), RTN, 1),
    "shape": (is_of_family(intermediate_size=320), RTN, 1),
    "output holds other things": (holds_other_things, (*RTN, "--overwrite"), 1),
    "output lies in the source": (lies_in_the_source, RTN, 1),
    "unfinished work": (is_unfinished, RTN, 1),
    "another run's work": (is_unfinished, (*RTN, "--resume"), 1),
}


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*")}


@pytest.mark.parametrize("case", BAD)
def test_a_plan_ends_as_the_run_would(case: str, small_llama: Path, calib: Path, tmp_path: Path) -> None:
    spoil, options, code = BAD[case]
    places = Places(small_llama, tmp_path / "out", calib)
    spoil(places)
    before = tree(tmp_path)
    args = [calib if option == "TEXT" else option for option in options]
    planned, ran = (
        call(command, places.model, "-o", places.out, *args, "-q", code=code) for command in ("plan", "quantize")
    )
    assert planned.stderr == ran.stderr
    assert planned.stderr.startswith("Error: ") and not ran.stdout
    assert tree(tmp_path) == before


def test_what_helps_where_too_few_sequences_tune_helps_with_a_recipe_that_tunes(small_llama: Path, calib: Path) -> None:
    """Without `--set tune` on the command line there is none to drop."""
    words = ("plan", small_llama, "--recipe", "int4-best", "--group-size", 64, "--calib", calib, *GPTQ, "-q")
    line = call(*words, code=2).stderr.strip()
    ways = line.rpartition(": ")[2].split(", or use ")
    assert ways == ["use --samples 8 or more", "--set tune=0 and --set output_aware=false"]
    for way in (["--samples", "8"], ways[1].replace(" and", "").split()):
        call(*words, *way)


def test_a_pattern_without_effect_names_the_nearest_linears() -> None:
    names = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkvo"]
    assert nearest_names(r"model\.layers\.3\.self_attn\.q_proj", names)[0].endswith("self_attn.q_proj")
    assert nearest_names(".*attn.q_prj$", names)[0] == "self_attn.q_proj"
    assert nearest_names("xyz", names) == ["q_proj", "k_proj", "v_proj"]


def test_a_pattern_of_the_middle_of_a_name_is_told_to_reach_its_end_as_it_was_typed() -> None:
    recipe = from_mapping({"method": "rtn", "overrides": {r"layers\.0\.": "int8:channel"}})
    with pytest.raises(RecipeError) as caught:
        require_effect(recipe, ["model.layers.0.mlp.up_proj", "lm_head"], [])
    assert r"override 'layers\.0\.' to int8:channel matches no linear" in str(caught.value)
    assert str(caught.value).endswith(r"reach the end of a name: write 'layers\.0\..*'")


def test_a_head_is_tied_to_dense_embeddings_alone_among_those_that_take_room() -> None:
    stored = {"embed_tokens.weight": (1000, 16), "norm.weight": (10, 16)}
    assert dense_totals(stored, ["q_proj"], ["lm_head"])["tied_head"]
    packed = {"embed_tokens.weight_packed": (500, 32), "norm.weight": (10, 16)}
    assert not dense_totals(packed, ["q_proj", "embed_tokens"], ["lm_head"])["tied_head"]


def test_the_default_skip_may_match_nothing_and_a_skip_may_name_what_stays_dense() -> None:
    recipe = from_mapping({"method": "rtn", "skip": ["lm_head", "router"]})
    assert require_effect(recipe, ["h.0.up_proj"], ["h.0.router"]) == ["skip 'lm_head' matches no linear"]
    with pytest.raises(RecipeError, match="skip 'router' matches no linear: the nearest names are up_proj"):
        require_effect(recipe, ["h.0.up_proj"], [])


def test_an_output_that_is_being_written_is_refused_by_both(small_llama: Path, tmp_path: Path) -> None:
    with folders.staging(tmp_path / "out"):
        lines = {
            call(command, small_llama, "-o", tmp_path / "out", *RTN, "-q", code=1).stderr
            for command in ("plan", "quantize")
        }
    assert len(lines) == 1 and f"is being written by process {os.getpid()}" in lines.pop()


def test_the_disk_must_hold_snapshots_of_the_activations_too(
    small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (small_llama, "-o", tmp_path / "out", *GPTQ, "--calib", calib, "-q")
    found = json.loads(call("plan", *args, "--json").stdout)
    snapshot = found["calibration"]["tokens"] * 128 * 4  # float32; one of two blocks is followed by another
    usage = shutil.disk_usage(tmp_path)
    needed = found["files"]["total"] + snapshot
    for free, code in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        result = call("plan", *args, code=code)
        assert ("free some or use another -o" in result.stderr) == bool(code)
    assert call("quantize", *args, code=1).stderr == result.stderr


def test_a_plan_reads_no_weight(
    small_llama: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "get", read)
    monkeypatch.setattr(BlockWeights, "load_block", read)
    args = (small_llama, "-o", tmp_path / "out", *GPTQ, "--calib", calib, "--target", "vllm", "--gpu", "h100")
    found = json.loads(call("plan", *args, "--json").stdout)
    assert found["refusal"] is None and found["calibration"]["sequences"] == 2
    assert f"2 sequences, {found['calibration']['tokens']} tokens of {calib.name}" in call("plan", *args).stdout


def test_a_refused_plan_says_so_in_its_json(small_llama: Path) -> None:
    result = call("plan", small_llama, *RTN, "--skip", "mlp.*", "--json", code=4)
    refusal = json.loads(result.stdout)["refusal"]
    assert refusal["exit_code"] == 4 and f"Error: {refusal['message']}\n" == result.stderr


def test_a_gpu_that_is_not_here_is_judged_by_its_memory(small_llama: Path, calib: Path) -> None:
    args = ("plan", small_llama, *GPTQ, "--calib", calib)
    memory = json.loads(call(*args, "--gpu-memory", "80GB", "--json").stdout)["peak_memory"]
    assert memory["gpu_memory"] == 80 * 10**9 and 0 < memory["vram_least"] < memory["vram"]
    needed = memory["vram"] - memory["vram_parts"]["passes that wait"]  # which then do not wait
    few = call(*args, "--gpu-memory", needed - 1).stdout
    assert "peak GPU memory is estimated at" in few and "--device cpu" in few
    assert "peak GPU memory" not in call(*args, "--gpu-memory", needed).stdout
    line = call(*args, "--gpu-memory", memory["vram_least"] - 1, code=1).stderr
    assert "the weights of the largest block take" in line and "use --device cpu" in line
    line = call("plan", small_llama, *RTN, "--gpu-memory", 1, code=1).stderr
    assert "rounding takes" in line and "use --device cpu" in line
    assert "drop one of them" in call(*args, "--gpu-memory", "1GB", "--device", "cpu", code=2).stderr


def test_a_plan_explains_the_size_as_the_closing_table_does(small_llama: Path, tmp_path: Path) -> None:
    plan = call("plan", small_llama, *RTN).stdout
    made = call("quantize", small_llama, *RTN, "-o", tmp_path / "out").stdout
    says = [[line for line in text.splitlines() if "--embeddings int8:channel" in line] for text in (plan, made)]
    assert len(says[0]) == 1 and [line.split(maxsplit=1) for line in says[0]] == [x.split(maxsplit=1) for x in says[1]]


def test_long_documents_name_another_way_out_than_large_blocks() -> None:
    small = {"block": 10, "one document": 100}
    assert "--max-length" in "\n".join(Memory({}, small, least_vram=10, gpu_memory=50).notices())
    assert "--device cpu" in "\n".join(Memory({}, {"block": 100}, least_vram=10, gpu_memory=50).notices())
