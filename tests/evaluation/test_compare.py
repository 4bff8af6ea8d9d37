"""Rows of `compare` are the figures of folders made alone, are made once, and survive kills, parts and neighbours."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import statistics
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit import compare
from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.commands import quantkit as quantkit_cli
from quantkit.evaluation import compare as comparing
from quantkit.io.staging import claimed
from quantkit.keys import keys_of
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.files import from_pairs, load_named_or_scheme, merge
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from quantkit.recipes.schema import RecipeKeys
from quantkit.reporting.recipe_table import (
    QUALITY,
    TASKS,
    as_csv,
    as_markdown,
    cells,
    page,
    plots,
    read_csv,
    sections,
    series,
)
from tests.command_line import call, refused
from tests.evaluation.folders import written
from tests.folders import TEXT

SMALL: dict[str, Any] = {"calibration": {"samples": 2, "max_length": 32}, "clip": "none", "gptq": {"descent": 0}}
RECIPES = ["int4:g64:rtn", "int4:g64:gptq", "fp6:g64:gptq"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "calib.txt").write_text(TEXT)
    (folder / "judge.txt").write_text("\n\n".join(reversed(TEXT.split("\n\n"))))
    return folder


@pytest.fixture(scope="module")
def asked(texts: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"recipes": RECIPES, "calib": f"own={texts / 'calib.txt'}", "seeds": [0, 1]}
    return {**found, "text": str(texts / "judge.txt"), "window": 32, "tokens": 256, "settings": SMALL, "device": "cpu"}


@pytest.fixture(scope="module")
def whole(small_llama: Path, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compare(small_llama, tmp_path_factory.mktemp("made") / "whole", **asked)


def test_a_row_has_the_figures_of_the_folder_that_its_command_makes(
    whole: Any, small_llama: Path, texts: Path, tmp_path: Path
) -> None:
    row = whole.rows[3]
    assert (row["recipe"], row["calibration"], row["seed"]) == ("int4:g64:gptq", "own", 1)
    words = row["command"].split()
    assert words[:2] == ["quantkit", "quantize"]
    call(*["quantize", *words[2:]][:2], "-o", tmp_path / "made", *words[5:], "--device", "cpu", "-q")
    judge = {"data": texts / "judge.txt", "window": 32, "tokens": 256, "device": "cpu"}
    alone = quantkit.eval_kld(tmp_path / "made", small_llama, **judge)  # type: ignore[arg-type]
    assert row["text:judge:kld"] == pytest.approx(alone.kld, rel=1e-4)
    assert row["text:judge:top1"] == alone.top1
    report = json.loads((tmp_path / "made" / "quantkit_report.json").read_text())
    tensors = sum(sum(x.nbytes for x in load_file(path).values()) for path in (tmp_path / "made").glob("*.safetensors"))
    assert (row["bits"], row["bytes"]) == (report["totals"]["bits_per_weight"], tensors)
    plain = quantkit.eval_ppl(small_llama, **judge)  # type: ignore[arg-type]
    assert whole.rows[0]["text:judge:ppl"] == pytest.approx(plain.perplexity)


def test_a_row_of_several_schemes_is_not_named_after_one(
    small_llama: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**SMALL, "overrides": {"down_proj": "int8:g64"}}
    only = {**asked, "recipes": ["int4:g64:rtn"], "seeds": [0], "settings": settings}
    row = compare(small_llama, tmp_path / "mixed", **only).rows[1]
    assert (row["precision"], row["grouping"]) == ("mixed", "") and 4.25 < row["bits"] < 8.25


@pytest.mark.parametrize("label", ["int4:g64:gptq", "fp5:channel:rtn"])
def test_a_scheme_without_a_layout_has_the_values_that_a_layout_would_store(
    label: str, small_llama: Path, texts: Path, tmp_path: Path
) -> None:
    short = {**SMALL, "calibration": {**SMALL["calibration"], "data": str(texts / "calib.txt")}}
    recipe = from_mapping(merge(load_named_or_scheme(label), short))
    unpacked: Any = {"layout": None, "dense_dtype": "float32"}
    quantize(small_llama, tmp_path / "stored", recipe, run=RunOptions(device="cpu"))
    quantize(small_llama, tmp_path / "values", replace(recipe, **unpacked), run=RunOptions(device="cpu"))
    stored, values = (load_dense_model(Checkpoint(tmp_path / name)).state_dict() for name in ("stored", "values"))
    assert all(torch.equal(stored[name], values[name]) for name in stored)


def test_a_scheme_that_no_layout_stores_is_judged_and_says_so(whole: Any) -> None:
    rows = [row for row in whole.rows if row["recipe"] == "fp6:g64:gptq"]
    assert [row["bits"] for row in rows] == [6 + 16 / 64] * 2 and {row["stored"] for row in rows} == {"none"}
    int4 = next(row for row in whole.rows if row["recipe"] == "int4:g64:rtn")
    assert all(0 < row["text:judge:kld"] < int4["text:judge:kld"] for row in rows)
    weights = 8 * (rows[0]["bytes"] - int4["bytes"]) / (6.25 - int4["bits"])
    assert weights == pytest.approx(sum(row.shape[0] * row.shape[1] for row in _planned(whole)), rel=0.01)
    assert "No layout stores fp6:g64:gptq: judged without packing" in (whole.path / "compare.md").read_text()
    assert rows[0]["command"].startswith("quantkit compare")


def _planned(whole: Any) -> Any:
    model = whole.rows[1]["command"].split()[2]
    return quantkit.plan(model, format="int4", group_size=64, method="rtn", device="cpu", probe=False).output.quantized


def test_finished_rows_are_not_made_again_and_new_texts_need_only_judging(
    whole: Any, small_llama: Path, asked: dict[str, Any], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole.path, tmp_path / "table")
    made: list[str] = []
    monkeypatch.setattr(comparing, "load_dense_model", lambda *_, **__: made.append("model"))
    assert compare(small_llama, tmp_path / "table", **{**asked, "seeds": [0, 1, 0]}).rows == whole.rows
    assert not made and not (tmp_path / "table" / "work").exists()
    monkeypatch.undo()
    more = {**asked, "recipes": RECIPES[:1], "text": [asked["text"], f"more={texts / 'calib.txt'}"]}
    found = compare(small_llama, tmp_path / "table", **more)
    assert [row["recipe"] for row in found.rows] == ["unquantized", "int4:g64:rtn"]
    assert found.rows[1]["text:judge:kld"] == whole.rows[1]["text:judge:kld"] and found.rows[1]["text:more:kld"] > 0


def test_a_killed_run_continues_to_the_same_rows(
    whole: Any, small_llama: Path, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, times, few = comparing.token_values, [], {**asked, "recipes": RECIPES[:2], "seeds": [0]}

    def interrupted(*args: Any, **options: Any) -> Any:
        times.append(1)
        if len(times) == 2:
            raise KeyboardInterrupt
        return own(*args, **options)

    monkeypatch.setattr(comparing, "token_values", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(small_llama, tmp_path / "table", **few)
    before = read_csv(tmp_path / "table" / "compare.csv")
    assert [row["recipe"] for row in before] == ["unquantized", "int4:g64:rtn"]
    assert list((tmp_path / "table" / "work").glob("*/model"))  # the third is quantized, not judged
    found = compare(small_llama, tmp_path / "table", **few)
    assert len(times) == 2 + 1 and _figures(found.rows) == _figures(whole.rows[:3])
    assert not found.unfinished and not (tmp_path / "table" / "work").exists()


def test_a_row_of_a_neighbour_is_left_to_it(small_llama: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    one = {**asked, "recipes": ["int4:g64:rtn"]}
    found = compare(small_llama, tmp_path / "other", **one)
    (tmp_path / "table" / "work" / "neighbour").mkdir(parents=True)
    shutil.copytree(tmp_path / "other" / "rows", tmp_path / "table" / "rows")  # as from another machine
    (row,) = (path for path in (tmp_path / "table" / "rows").iterdir() if "rtn" in path.name)
    name = row.stem
    row.unlink()
    (tmp_path / "table" / "work" / name).mkdir()
    with claimed(tmp_path / "table" / "work" / name) as is_ours:
        left = compare(small_llama, tmp_path / "table", **one)
    assert is_ours and left.unfinished == ["int4:g64:rtn"] and not left.failed
    assert _figures(compare(small_llama, tmp_path / "table", **one).rows) == _figures(found.rows)
    kept = [path.name for path in (tmp_path / "table" / "work").iterdir()]
    assert kept == ["neighbour"], "a process that asks for other rows may still make one"
    assert not (tmp_path / "other" / "work").exists()


def test_a_row_that_fails_is_told_and_the_others_are_made(
    small_llama: Path, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = comparing.quantize

    def failing(model: Any, out: Any, recipe: Any, run: Any) -> Any:
        if recipe.scheme.format.is_float:
            raise quantkit.QuantkitError("the scales overflow")
        return own(model, out, recipe, run)

    monkeypatch.setattr(comparing, "quantize", failing)
    line = ("--recipes", "fp6:channel:rtn,int4:g64:rtn", "--text", asked["text"], "--window", 32, "--device", "cpu")
    said = call("compare", small_llama, "-o", tmp_path / "table", *line, code=1)
    assert "fp6:channel:rtn: the scales overflow" in said.stderr and "1 rows failed" in said.stderr
    assert [row["recipe"] for row in read_csv(tmp_path / "table" / "compare.csv")] == ["unquantized", "int4:g64:rtn"]


def test_the_tables_have_the_mean_and_deviation_over_seeds(whole: Any) -> None:
    head, body = cells(whole.rows, sections(whole.rows)[QUALITY])
    values = [row["text:judge:ppl"] for row in whole.rows if row["recipe"] == "int4:g64:gptq"]
    assert len(set(values)) == 2
    cell = dict(zip(head, body[2], strict=True))["ppl judge"]
    assert cell == f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert [line[head.index("calibration")] for line in body] == ["–", "–", "own", "own"]
    with (whole.path / "compare.csv").open(newline="") as file:
        assert [row["command"] for row in csv.DictReader(file)] == [row["command"] for row in whole.rows]


def test_the_csv_says_all_that_the_markdown_needs(whole: Any) -> None:
    read = read_csv(whole.path / "compare.csv")
    assert as_csv(read) == as_csv([{k: float(v) if isinstance(v, int) else v for k, v in row.items()} for row in read])
    assert as_markdown(read) == (whole.path / "compare.md").read_text() == as_markdown(whole.rows)


def test_tasks_are_paired_with_the_unquantized_model_and_asked_once_whatever_the_batch(
    whole: Any, small_llama: Path, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    records = [{"goal": f"the {i}", "sol1": f"rain {i * i}", "sol2": "hail", "label": i % 2} for i in range(12)]
    written(tmp_path / "tasks" / "piqa" / "validation.jsonl", *records)
    options: dict[str, Any] = {"tasks": ["piqa"], "data": tmp_path / "tasks"}
    found = compare(small_llama, tmp_path / "table", **{**asked, "recipes": "int4:g64:rtn"}, **options)
    quantkit.quantize(small_llama, tmp_path / "int4", format="int4", group_size=64, method="rtn", device="cpu")
    alone = quantkit.eval_tasks(tmp_path / "int4", against=small_llama, device="cpu", **options).scores[0]
    row = found.rows[1]
    assert (row["task:piqa:value"], row["task:piqa:stderr"]) == (alone.value, alone.stderr)
    assert (row["task:piqa:difference"], row["tasks:difference"]) == (alone.difference, alone.difference)
    assert "task:piqa:difference" not in {key for key, value in found.rows[0].items() if value is not None}
    head, body = cells(found.rows, sections(found.rows)[QUALITY])
    assert dict(zip(head, body[1], strict=True))["tasks"] == f"{100 * alone.value:.2f}"
    monkeypatch.setattr(comparing, "load_dense_model", lambda *_, **__: pytest.fail("asked again"))
    again = compare(small_llama, tmp_path / "table", **{**asked, "recipes": "int4:g64:rtn"}, **options, batch_size=3)
    assert again.rows == found.rows
    assert all('"batch_size": 8' in path.read_text() for path in (tmp_path / "table" / "rows").iterdir())
    head, body = cells([*found.rows, whole.rows[1]], sections(found.rows)[TASKS])  # one row has no tasks
    assert len(body) == 2 and "calibration" not in head
    assert not any(set(column) == {"–"} for column in zip(*body, strict=True))


def test_the_page_marks_each_row_where_its_figures_are(whole: Any) -> None:
    names = series(whole.rows)
    by_bits, by_bytes = plots(whole.rows, "judge", names)
    rows = whole.rows[1:]
    assert len(by_bits.marks) == len(by_bytes.marks) == len(rows)
    for plot, size in ((by_bits, "bits"), (by_bytes, "bytes")):
        for axis, values in ((0, [row[size] for row in rows]), (1, [-row["text:judge:kld"] for row in rows])):
            places = [mark[axis] for mark in plot.marks]
            assert sorted(range(len(rows)), key=lambda i, v=values: (v[i], i)) == sorted(
                range(len(rows)), key=lambda i, p=places: (round(p[i], 6), i)
            )
    text = (whole.path / "compare.html").read_text()
    assert all(escape(words) in text for *_, words in by_bits.marks) and "judged without packing" in text
    assert "<script" not in page("<script>alert(1)</script>", whole.rows)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ("--recipes int4:g96:rtn", 1, "int4:g96:rtn: group size 96 does not divide"),
        ("--recipes ,", 2, "there is nothing to compare"),
        ("--text none.txt", 1, "file with --text FILE"),
        ("--calib {calib} --samples 9999", 1, "usable documents, 9999 were asked for"),
        ("--tasks piqa --data {empty}", 1, "piqa: has no validation.jsonl and no test.jsonl"),
    ],
)
def test_bad_input_is_told_before_any_work(
    changes: str, code: int, says: str, small_llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "load_dense_model", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(comparing, "quantize", lambda *_, **__: pytest.fail("begun"))
    names = {"judge": texts / "judge.txt", "calib": texts / "calib.txt", "empty": tmp_path}
    usual = {"--recipes": "int4:g64:gptq", "--text": str(texts / "judge.txt"), "--calib": str(texts / "calib.txt")}
    words = changes.format(**names).split()
    usual |= dict(zip(words[::2], words[1::2], strict=True))
    line = [word for pair in usual.items() for word in pair]
    usual_samples = () if "--samples" in line else ("--samples", 4)
    lines = 2 if "g96" in says else 1
    said = refused("compare", small_llama, *line, *usual_samples, code=code, lines=lines, out=tmp_path / "table")
    assert says in said


def test_a_folder_of_something_else_is_not_touched(small_llama: Path, tmp_path: Path, texts: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    line = ("--recipes", "int4:g64:rtn", "--text", texts / "judge.txt")
    assert "is there, and no table" in refused("compare", small_llama, "-o", tmp_path / "notes", *line)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def _figures(rows: Any) -> list[dict[str, Any]]:
    """Return rows without what the clock says."""
    return [{key: value for key, value in row.items() if key not in ("seconds", "command")} for row in rows]


def test_the_command_of_a_row_can_be_given_when_options_were_left_out(
    small_llama: Path, tmp_path: Path, texts: Path
) -> None:
    line = ("--recipes", "int4:g64:gptq", "--calib", texts / "calib.txt", "--samples", 2, "--set", "gptq.descent=0")
    judged = ("--text", texts / "judge.txt", "--window", 32, "--tokens", 64)
    call("compare", small_llama, "-o", tmp_path / "table", *line, *judged)
    (row,) = [row for row in read_csv(tmp_path / "table" / "compare.csv") if row["command"]]
    call("plan", *shlex.split(row["command"])[2:])


@pytest.mark.parametrize(
    "recipe", ["int4:g96:rtn", "int4:g64:rtn --set layout=tcfpx", "int4-tuned --samples 2 --max-length 32"]
)
def test_a_refused_row_names_only_options_that_compare_has_and_takes(
    recipe: str, small_llama: Path, tmp_path: Path, texts: Path
) -> None:
    name, *more = recipe.split()
    asked = ("compare", small_llama, "--text", texts / "judge.txt", "--calib", texts / "calib.txt", "--recipes", name)
    said = call(*asked, *more, "-o", tmp_path / "table", "-q", code=None).stderr
    ways = [way.rstrip(",:") for way in re.findall(r"--set \S+", said)]
    known = {option for param in quantkit_cli.commands["compare"].params for option in param.opts}
    assert ways and set(re.findall(r"--[a-z-]+", said)) <= known, said
    pairs = [way.removeprefix("--set ") for way in ways if "=" in way]
    assert from_pairs(pairs, keys_of(RecipeKeys)), "and takes them"
