"""The Python API as its users meet it: the examples of its page, results, and progress."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.errors import Option, RecipeError, Words
from quantkit.evaluation.divergence import Divergence
from quantkit.evaluation.perplexity import Perplexity
from quantkit.evaluation.verify import Verification
from quantkit.io.files import hash_of_file
from quantkit.pipeline.publish import Result
from quantkit.progress import Event, Progress, Reporter
from tests.properties.pages import Typist, prepare, shell

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
EXAMPLE = re.compile(r"^## (\w+)$|^Example:\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALIBRATED: dict[str, Any] = {"calib": "calibration.txt", "samples": 4, "max_length": 64, "clip": "none", "descent": 0}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with what the page's first block makes for the examples."""
    folder = tmp_path_factory.mktemp("api")
    prepare(folder)
    before = Path.cwd()
    os.chdir(folder)
    for line in SETUP.findall(PAGE.read_text(encoding="utf-8"))[0].splitlines():
        shell(line)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def shown(work: Path) -> dict[str, dict[str, Any]]:
    """The variables after each example of the page; the examples are typed into one prompt, in the page's order."""
    found: dict[str, dict[str, Any]] = {}
    prompt, name = Typist(), ""
    for heading, program in EXAMPLE.findall(PAGE.read_text(encoding="utf-8")):
        name = heading or name
        if program:
            prompt.type(program)
            found[name] = dict(prompt.locals)
    return found


def test_every_function_has_an_example_that_runs(shown: dict[str, dict[str, Any]]) -> None:
    assert shown.keys() == {name for name in quantkit.__all__ if callable(getattr(quantkit, name)) and name.islower()}


def test_a_result_has_the_report(shown: dict[str, dict[str, Any]], work: Path) -> None:
    made = shown["quantize"]["made"]
    assert isinstance(made, Result) and made.path == Path("model-int4")
    report = json.loads((work / "model-int4" / "quantkit_report.json").read_text())
    assert dict(made) == made.report and made.keys() == report.keys() and len(made) == len(report)
    assert made["files"] == report["files"] and made.get("no such key") is None
    assert made.bits_per_weight == report["totals"]["bits_per_weight"] and made.share == report["totals"]["share"]
    assert made.bytes == sum(path.stat().st_size for path in made.path.glob("*.safetensors"))
    assert [layer["name"] for layer in made.layers] == [layer["name"] for layer in report["layers"]]
    assert made.seconds > 0 and made.scheme == "int4:g128" and made.layout == "compressed-tensors"
    thin, packed = shown["prune"]["thin"], shown["pack"]["packed"]
    assert (thin.layout, thin.bits_per_weight) == ("dense", None) and packed.layout == "gptq"
    assert len(packed.notices) == len(packed["notices"]) + len(packed["layout_notices"]) > 0
    assert any("skip them first" in notice for notice in packed.notices)
    of_source = json.loads((work / "model-24-int4" / "quantkit_report.json").read_text())["notices"]
    assert not any("--" in notice for notice in packed.notices if notice not in of_source)


def test_results_print_themselves(shown: dict[str, dict[str, Any]]) -> None:
    made = shown["quantize"]["made"]
    expected = {
        "quantize": (made, "Result(path='model-int4', layout='compressed-tensors', scheme='int4:g128', linears=13, "),
        "plan": (shown["plan"]["planned"], "Plan(layout='marlin', scheme='int4:g128', linears=14, bytes="),
        "verify": (shown["verify"]["proof"], "Verification(ok=True, checked=True, layout='marlin24', linears=14"),
        "ppl": (shown["eval_ppl"]["after"], "Perplexity(perplexity="),
        "kld": (shown["eval_kld"]["found"], "Divergence(kld="),
    }
    for value, start in expected.values():
        assert repr(value).startswith(start), repr(value)
        assert len(repr(value)) < 1500
    assert str(made).startswith("done          quantize: 13 linears") and str(made).count("\n") > 5
    kinds = Perplexity, Divergence, Verification
    assert {type(value) for value, _ in list(expected.values())[2:]} == set(kinds)


def test_a_function_is_told_of_each_step(work: Path) -> None:
    events: list[Event] = []
    quantkit.quantize("model", "told", method="rtn", progress=events.append)
    total = events[0].total
    assert total is not None and events == [Event("quantize", done, total) for done in range(total + 1)]
    for run, label in (
        (lambda tell: quantkit.pack("told", "told-gptq", "gptq", progress=tell), "pack"),
        (lambda tell: quantkit.verify("told-gptq", progress=tell), "verify"),
        (lambda tell: quantkit.eval_ppl("told", data="evaluation.txt", window=512, progress=tell), "perplexity"),
    ):
        events.clear()
        run(events.append)
        assert (
            events[0].label == label and events[0].done == 0 and events[-1].done == events[-1].total == events[0].total
        )


class Enough(Exception):
    """An exception of the caller."""


def test_a_function_that_raises_ends_the_run_and_it_can_be_resumed(work: Path) -> None:
    def stop(event: Event) -> None:
        if event == Event("calibrate", 1, event.total):
            raise Enough

    with pytest.raises(Enough):
        quantkit.quantize("model", "stopped", progress=stop, **CALIBRATED)
    assert not Path("stopped").exists() and len(list(work.glob("stopped.partial-*"))) == 1
    events: list[Event] = []
    resumed = quantkit.quantize("model", "stopped", resume=True, progress=events.append, **CALIBRATED)
    whole = quantkit.quantize("model", "whole", **CALIBRATED)
    (blocks,) = {event.total for event in events if event.label == "calibrate"}
    assert blocks == len({layer["name"].split(".")[2] for layer in whole.layers}) - 1
    assert [hash_of_file(path) for path in sorted(resumed.path.glob("*.safetensors"))] == [
        hash_of_file(path) for path in sorted(whole.path.glob("*.safetensors"))
    ]


def test_a_function_that_raises_leaves_nothing_that_cannot_be_resumed(work: Path) -> None:
    def stop(event: Event) -> None:
        if event.done == 3:
            raise Enough

    quantkit.quantize("model", "dense-int4", method="rtn")
    with pytest.raises(Enough):
        quantkit.pack("dense-int4", "unfinished", "gptq", progress=stop)
    assert not list(work.glob("unfinished*"))


def test_settings_of_torch_change_no_byte_and_come_back(work: Path) -> None:
    """A notebook has set them for its own work."""

    def made(out: str) -> tuple[list[str], float]:
        result = quantkit.quantize("model", out, overwrite=True, **CALIBRATED)
        found = quantkit.eval_ppl(result.path, data="evaluation.txt", window=32, tokens=64)
        return [hash_of_file(path) for path in sorted(result.path.glob("*.safetensors"))], found.perplexity

    expected = made("usual")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert made("unusual") == expected
            assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.bfloat16 and torch.get_default_device() == torch.device("meta")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def test_warnings_are_printed_with_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Reporter(None)
    assert list(quiet.bar(["a", "b"], "letters")) == ["a", "b"]
    quiet.note("not printed")
    quiet.warn(Words("add", Option("pad", True)))
    assert capsys.readouterr().err == "Warning: add pad=True\n"


def test_a_progress_object_is_used_as_it_is(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(work / "noted", ignore_errors=True)
    quantkit.quantize("model", "noted", method="rtn", prune="2:4", progress=Progress())
    assert "2:4 without training costs quality" in capsys.readouterr().err
    quantkit.quantize("model", "noted", method="rtn", prune="2:4", overwrite=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "arguments", "keywords", "message"),
    [
        ("pack", ("told", "o", "gptq"), {"expect": "exl3"}, "unknown layout 'exl3'"),
        ("plan", ("model",), {"target": "abacus", "gpu": "h100"}, "target is 'abacus': use one of "),
        ("plan", ("model",), {"target": "vllm", "gpu": "abacus"}, "gpu is 'abacus': use one of "),
        ("plan", ("model",), {"gpu": "h100"}, "gpu says where a program runs, and none is named: add target"),
        ("quantize", ("model", "o"), {"act_budget": -1}, "act_budget is -1: use an integer from 0"),
    ],
)
def test_a_wrong_value_is_named(
    work: Path, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        getattr(quantkit, name)(*arguments, **keywords)
    assert str(caught.value).startswith(message)
    assert not (work / "o").exists()
