"""`verify --engine`: an engine that computes something else is caught, and one that does not run is one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from torch import nn

import quantkit
from quantkit.evaluation import engine_check
from quantkit.evaluation.engine_check import EngineProof
from quantkit.evaluation.engine_child import describe, main
from quantkit.evaluation.verify import Verification
from quantkit.names import VERIFICATION
from quantkit.pipeline import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.command_line import call, refused

DEMO = Path(__file__).parents[2] / "quantkit" / "demo_model"
Engine = Callable[[str], Verification]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine") / "packed"
    quantize.quantize(
        DEMO, out, from_mapping({"method": "rtn", "clip": "none", "layout": "marlin"}), run=RunOptions(device="cpu")
    )
    return out


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the stand-in in the place of vLLM, here and for other processes; returns the choice of its fault."""
    (tmp_path / "site/vllm").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "fake_vllm.py", tmp_path / "site/vllm/__init__.py")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{Path(__file__).parents[2]}")
    monkeypatch.setattr(engine_check, "PROMPTS", 2)
    monkeypatch.setattr(engine_check, "LENGTH", 64)
    monkeypatch.setattr(engine_check, "NEW", 4)
    return lambda fault: monkeypatch.setenv("FAULT", fault)


def test_an_engine_that_computes_the_folder_is_within_the_bound(folder: Path, stand_in: Callable[[str], None]) -> None:
    found = quantkit.verify(folder, engine="vllm", device="cpu")
    assert found.ok and found.engine is not None, found.failures
    assert 0 < found.engine.mean <= found.engine.mean_bound < 0.2
    assert found.engine.tokens == 2 * (64 + 4 - 1)
    assert found.engine.layers["q_proj"] == {"StandInLinearMethod MacheteLinearKernel": 2}
    assert "vllm 0.26.0 in bfloat16" in found.note and "by StandInLinearMethod MacheteLinearKernel" in found.note


def test_the_kernel_of_experts_is_named() -> None:
    """vLLM 0.26.0 and 0.33.0 hold it inside a frame; the plug-in writes its layout and kernel on the layer."""
    kinds = {name: type(name, (), {}) for name in ("FusedMoEKernel", "MarlinExperts", "TheirMethod", "OurMethod")}
    frame, theirs = kinds["FusedMoEKernel"](), kinds["TheirMethod"]()
    frame.fused_experts, theirs.moe_kernel = kinds["MarlinExperts"](), frame  # type: ignore[attr-defined]
    model = nn.ModuleDict({name: nn.ModuleDict({"routed_experts": nn.Module()}) for name in ("a", "b")})
    for name, method in (("a", theirs), ("b", kinds["OurMethod"]())):
        model[name].routed_experts.quant_method = method  # type: ignore[union-attr]
    ours = model["b"].routed_experts  # type: ignore[union-attr]
    ours.quantkit_layout, ours.quantkit_kernel = "tcfpx", "grouped"
    assert describe(model) == {"routed_experts": {"TheirMethod MarlinExperts": 1, "tcfpx grouped OurMethod": 1}}


def test_figures_that_are_not_numbers_are_caught() -> None:
    assert EngineProof("vllm", "0.26.0", "bfloat16", 9, 0.1, 0.1, 0.2, 0.2, {}).ok
    assert not EngineProof("vllm", "0.26.0", "bfloat16", 9, math.nan, math.nan, 0.2, 0.2, {}).ok


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dies", "code 1: ValueError: No available memory for the cache blocks: -v prints its log"),
        ("killed", "code -6"),
    ],
)
def test_an_engine_that_dies_is_a_failure_of_one_line(
    fault: str, says: str, folder: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in(fault)
    found = quantkit.verify(folder, engine="vllm", device="cpu")
    (failure,) = found.failures
    assert says in failure and "\n" not in failure and found.engine is None


def test_an_engine_that_hangs_ends(
    folder: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_check, "LIMIT", 0.2)
    (failure,) = quantkit.verify(folder, engine="vllm", device="cpu").failures
    assert failure == "vllm gave no answer in 0.2 s"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_the_engine_one_line_says_what_to_install_and_nothing_is_written(folder: Path) -> None:
    said = refused("verify", folder, "--engine", "vllm")
    assert "the package vllm is not installed: pip install 'vllm>=0.26'" in said
    assert not (folder / VERIFICATION).exists()
    for wrong in ("[1]", "{"):
        assert "--engine-args" in call("verify", folder, "--engine", "vllm", "--engine-args", wrong, code=2).stderr


def test_arguments_of_no_engine_are_refused_because_no_engine_is_asked(folder: Path) -> None:
    said = call("verify", folder, "--engine-args", '{"dtype": "float16"}', code=2).stderr
    assert "--engine-args are of an engine, and none is named: add --engine vllm" in said


class Fork:
    """The engine's process as a fork of this one, which has all imports loaded."""

    def __init__(self, command: list[str], stdin: int, stdout: BinaryIO, **others: Any) -> None:
        request, self.write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.dup2(stdout.fileno(), 1)
            sys.stdin = os.fdopen(request)
            os.close(self.write)
            main(command[-1])

    def communicate(self, request: bytes, timeout: float) -> None:
        os.write(self.write, request)
        os.close(self.write)
        self.wait()

    def wait(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def test_a_wrong_engine_is_exit_code_3_and_recorded(
    folder: Path, tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    stand_in("8-bit activations")
    monkeypatch.setattr("subprocess.Popen", Fork)
    arguments = ("--engine", "vllm", "--engine-args", '{"quantization": "quantkit"}', "--device", "cpu")
    assert "vllm does not compute what the folder holds" in call("verify", copy, *arguments, code=3).stdout
    written = json.loads((copy / VERIFICATION).read_text())
    assert written["ok"] is False and written["engine"]["mean"] > written["engine"]["mean_bound"]
    assert written["engine"]["layers"]["down_proj"]
