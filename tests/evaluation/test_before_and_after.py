"""`--eval`: perplexity before and after, and the divergence, measured before an output is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint import report
from quantkit.checkpoint.report import KLD
from quantkit.evaluation import divergence
from quantkit.recipes.options import RunOptions
from tests.command_line import RTN, call, refused
from tests.folders import TEXT


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(TEXT[:1100])
    return path


@pytest.fixture(scope="module")
def out(small_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "int4"
    said = call("quantize", small_llama, "-o", out, *RTN, "--group-size", 32, "--eval", text).stdout
    assert "perplexity " in said and "on held-out.txt (as it is): the first 2 windows of 512 tokens" in said
    return out


def test_the_report_holds_what_the_evaluation_commands_find_and_no_other_file_changes(
    small_llama: Path, text: Path, out: Path, tmp_path: Path
) -> None:
    found = report.load(out)["evaluation"]
    before, after = (quantkit.eval_ppl(each, data=str(text)) for each in (small_llama, out))
    apart = quantkit.eval_kld(out, small_llama, data=str(text))
    assert (found["before"], found["after"]) == (before.perplexity, after.perplexity)
    assert {key: found[key] for key in KLD} == {key: getattr(apart, key) for key in KLD}
    assert found["top1"] == apart.top1 and 0 < found["kld_low"] < found["kld"] < found["kld_p999"]
    assert (found["window"], found["windows"], found["tokens"]) == (512, 2, 2 * 511)
    assert f"perplexity {before.perplexity:.4f} before" in (out / "README.md").read_text()
    assert quantkit.verify(out).ok
    call("quantize", small_llama, "-o", tmp_path / "plain", *RTN, "--group-size", 32, "-q")
    assert report.load(tmp_path / "plain")["files"] == report.load(out)["files"]


def test_a_lossless_conversion_keeps_the_figures(out: Path, tmp_path: Path) -> None:
    call("pack", out, "--layout", "gptq", "-o", tmp_path / "gptq", "-q")
    assert report.load(tmp_path / "gptq")["evaluation"] == report.load(out)["evaluation"]
    call("pack", out, "--layout", "tcfpx", "--requantize", "-o", tmp_path / "fp6", "-q")
    assert "evaluation" not in report.load(tmp_path / "fp6"), "other values have other figures"


def test_a_pruned_model_is_measured_too(small_llama: Path, text: Path, tmp_path: Path) -> None:
    quantkit.prune(small_llama, tmp_path / "thin", method="magnitude", eval=str(text))
    found = report.load(tmp_path / "thin")["evaluation"]
    assert found["after"] == quantkit.eval_ppl(tmp_path / "thin", data=str(text)).perplexity != found["before"]


def test_no_more_than_the_stated_tokens_are_read(
    small_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "MOST_TOKENS", 600)
    made = quantkit.quantize(small_llama, tmp_path / "out", method="rtn", clip="none", eval=str(text))
    assert (made["evaluation"]["windows"], made["evaluation"]["tokens"]) == (1, 511)
    assert made["evaluation"]["text_tokens"] == 600


def test_a_short_text_is_not_estimated_as_the_longest(small_llama: Path, text: Path) -> None:
    assert divergence.measurement(str(text), small_llama, RunOptions(device="cpu")).tokens == 1100


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "no such text"), (" ", "no text"), ("a", "too few for --eval")]
)
def test_a_text_that_cannot_be_used_is_found_before_the_work(
    content: str | None, problem: str, small_llama: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_text(content)
    said = refused("quantize", small_llama, *RTN, "--eval", tmp_path / "text.txt", out=tmp_path / "out")
    assert problem in said and "--data" not in said


def test_too_little_memory_is_found_before_the_work(
    small_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "free_memory", lambda: 10**5)
    said = refused("quantize", small_llama, *RTN, "--device", "cpu", "--eval", text, out=tmp_path / "out")
    assert "--eval needs about" in said and "leave --eval out" in said


def test_a_run_that_fails_while_it_measures_is_resumed(
    small_llama: Path, text: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("quantize", small_llama, "-o", tmp_path / "out", *RTN, "--group-size", 32, "-q")

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(divergence, "token_values", fail)
        said = call(*command, "--eval", text, code=1).stderr
    assert "--eval: out of memory: continue with --resume" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    call(*command, "--eval", text, "--resume")
    assert report.load(tmp_path / "out")["evaluation"] == report.load(out)["evaluation"]
