"""Without `layout`, a run takes the first one that opens; with it, the refusal names one that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quantkit
from benchmarks.census import families
from quantkit.engines.tables import UNTRIED
from quantkit.errors import CheckpointError
from quantkit.models.families import REFUSED_BY_VLLM
from tests.tiny_models import write_model

RTN = {"method": "rtn", "clip": "none"}
FILLED = "would open the output and fill with random values"


@pytest.mark.parametrize(("family", "layout"), [("openai-gpt", "awq"), ("granitemoe", "humming")])
def test_a_family_that_transformers_fills_gets_another_layout(family: str, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    model = families.write(family, tmp_path / "model")
    asked = quantkit.plan(model, **RTN, group_size=64, layout="compressed-tensors").refusal
    assert isinstance(asked, CheckpointError) and FILLED in str(asked)
    assert str(asked).endswith(f': use layout="{layout}"')
    made = quantkit.quantize(model, tmp_path / "out", **RTN, group_size=64)
    said = [line for line in made["notices"] if FILLED in line]
    assert made.layout == layout and len(said) == 1 and "--layout compressed-tensors" in said[0]
    readers = [reader for reader in made["readers"] if not reader.endswith(UNTRIED)]
    assert said[0].startswith(f"--layout {layout} is taken, which {readers[0]} opens") and len(readers) > 1
    assert ("vLLM" in readers) is (family not in REFUSED_BY_VLLM)
    assert made["opened_by"] == ["quantkit.load"]


def test_a_shape_that_the_usual_layout_does_not_hold_gets_another(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", hidden_size=96, intermediate_size=200)
    found = quantkit.plan(model, **RTN, format="fp6")
    assert found.refusal is None and found.layout == "compressed-tensors"
    assert any("is taken" in line and 'layout="humming"' in line for line in found.notices)
    refused = quantkit.plan(model, **RTN, format="fp6", layout="humming").refusal
    assert refused is not None and 'layout="compressed-tensors"' in str(refused)


def test_a_target_size_is_fitted_in_layouts_that_open(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    model = families.write("gpt2", tmp_path / "model")
    fit = quantkit.plan(model, **RTN, target_bits=5).fit
    assert fit is not None and {row["layout"] for row in fit["curve"]} == {"awq", "humming"}


def test_linears_that_are_too_small_are_no_fault_of_skip(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", hidden_size=36, intermediate_size=70, num_attention_heads=2)
    refused = str(quantkit.plan(model, **RTN).refusal)
    assert "fewer than 64 inputs or outputs: take a larger model" in refused and "skip" not in refused


def test_a_family_that_opens_only_with_padding_is_told_so(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    model = write_model("gpt2", tmp_path / "model", n_embd=68, n_inner=71)
    assert str(quantkit.plan(model, **RTN).refusal).endswith(': use layout="humming" pad=True')
    assert quantkit.plan(model, **RTN, layout="humming", pad=True).refusal is None


def test_no_way_out_names_the_layout_that_was_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the compressed-tensors library, which is not installed")
    found = quantkit.plan(write_model("gpt_oss", tmp_path / "model"), **RTN)
    assert found.layout == "humming" and not any('use layout="compressed' in line for line in found.notices)
    assert str(quantkit.plan(tmp_path / "model", **RTN, format="mxfp4").refusal).endswith(': use format="int4"')


def test_mxfp4_is_advised_against_where_integers_of_its_bits_lose_less(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", torch.bfloat16)
    notices = {label: quantkit.plan(model, method="rtn", format=label).notices for label in ("mxfp4", "nvfp4")}
    advised = [any("group_size=64" in line for line in lines) for lines in notices.values()]
    assert advised == [True, False]
