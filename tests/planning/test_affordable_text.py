"""Without a GPU a default draws what ten minutes take: by the model alone, recorded, if no number is stated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration import budget
from quantkit.planning.survey import plan
from quantkit.recipes.files import load
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.command_line import call
from tests.folders import hashes
from tests.tiny_models import write_model

#: The documents of a text, and the tokens that are affordable in these tests.
DOCUMENTS, TOKENS = 300, 640


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that is not the reproducer's, and a text of many short documents."""
    folder = tmp_path_factory.mktemp("affordable")
    words = "the quick brown fox jumps over the lazy dog and finds nothing there"
    (folder / "text.txt").write_text("\n\n".join(f"{number} {words}" for number in range(DOCUMENTS)))
    return write_model("qwen2", folder / "model")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tiny model be as slow as a large one."""
    monkeypatch.setattr(budget, "RATE", {"cpu": 1.0, "cuda": 1.0})
    monkeypatch.setattr(budget, "LEAST_TOKENS", TOKENS)


def calibration(model: Path, *options: object, command: str = "plan") -> dict[str, Any]:
    found = json.loads(call(command, model, "--calib", model.parent / "text.txt", "--json", *options).stdout)
    return found["calibration"]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("options", "limited"),
    [
        ((), True),
        (("--max-length", 16), True),
        (("--recipe", "fp6-humming"), True),
        (("--method", "rtn", "--set", "metric=block"), True),
        (("--samples", 256), False),
        (("--set", "calibration.tokens=100"), False),
        (("--gpu-memory", "80GB"), False),
    ],
)
def test_only_a_number_that_nobody_stated_is_limited(options: tuple[object, ...], limited: bool, model: Path) -> None:
    drawn = calibration(model, *options, "--no-probe")
    longest = drawn["tokens"] / drawn["sequences"] * 4
    assert (TOKENS <= drawn["tokens"] < TOKENS + longest) is limited, drawn
    notes = call("plan", model, "--calib", model.parent / "text.txt", *options, "--no-probe").stdout
    assert ("twice as many lose less" in " ".join(notes.split())) is limited
    assert not limited or f"--set calibration.tokens={2 * TOKENS}" in " ".join(notes.split())


def test_a_small_model_has_the_whole_default(model: Path) -> None:
    assert calibration(model)["sequences"] == 256


@pytest.mark.usefixtures("slow")
def test_pruning_is_limited_too_and_the_recipe_repeats_the_bytes_anywhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ("--calib", model.parent / "text.txt")
    done = json.loads(call("prune", model, *text, "--method", "wanda", "-o", tmp_path / "thin", "--json").stdout)
    assert done["recipe"]["calibration"]["tokens"] == TOKENS and any("without a GPU" in n for n in done["notices"])
    call("quantize", model, *text, "--set", "clip=none", "--set", "gptq.descent=0", "-o", tmp_path / "one")
    monkeypatch.undo()
    monkeypatch.chdir(model.parent)
    assert load(tmp_path / "one" / "quantkit_recipe.yaml")["calibration"]["tokens"] == TOKENS
    call("quantize", model, "--recipe", tmp_path / "one" / "quantkit_recipe.yaml", "-o", tmp_path / "two")
    one, two = (
        {name: digest for name, digest in hashes(tmp_path / out).items() if name.endswith(".safetensors")}
        for out in ("one", "two")
    )
    assert one == two and one


def test_shapes_alone_decide(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "RATE", {"cpu": 1e6, "cuda": 1.0})
    monkeypatch.setattr(budget, "LEAST_TOKENS", 1)
    monkeypatch.setattr(budget, "STEP", 1)
    text = {"calibration": {"data": str(model.parent / "text.txt")}}
    found = set()
    for count in (os.cpu_count() or 1, 1):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        found.add(str(plan(model, from_mapping(text), run=RunOptions(device="cpu")).calibration["sha256"]))
    assert len(found) == 1


def test_more_weights_afford_fewer_tokens() -> None:
    """SmolLM2-135M calibrates on five times the least, a model of 1.5 B weights on the least."""
    block = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    assert 65536 <= budget.affordable_tokens(block * 30) <= 131072
    assert budget.affordable_tokens([(8960, 1536), (8960, 1536), (1536, 8960)] * 28) == 2**14
    assert budget.affordable_tokens([]) > 2**20
