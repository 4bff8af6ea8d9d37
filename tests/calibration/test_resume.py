"""A stopped run continues with the same bits, from snapshots or without them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.census import families
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.calibration.loop import calibrated
from quantkit.calibration.preflight import new_run
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter, Item
from quantkit.layouts import LAYOUTS
from quantkit.models.block_runner import BlockRunner
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import (
    COARSE,
    digests,
    interrupted,
    quantized,
    resumed,
    sequences,
)
from tests.tiny_models import write_model


@pytest.fixture(scope="module")
def stopped(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, dict[str, Item]]]:
    """Return a function that gives the folder of a run that ended after some blocks, and what it had yielded."""

    @cache
    def after(blocks: int) -> tuple[Path, dict[str, Item]]:
        partial = tmp_path_factory.mktemp("stopped")
        return partial, interrupted(Checkpoint(three), from_mapping(COARSE), partial, blocks)

    return after


@pytest.mark.parametrize(("blocks", "damage"), [(1, "none"), (1, "flipped"), (2, "short"), (2, "gone"), (4, "gone")])
def test_a_stopped_run_continues_with_the_same_bits(
    blocks: int,
    damage: str,
    three: Path,
    whole: dict[str, Item],
    stopped: Callable[[int], tuple[Path, dict[str, Item]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, first = stopped(blocks)
    partial = Path(shutil.copytree(before, tmp_path / "partial"))
    for path in partial.glob("activations-*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= damage == "flipped"
        path.write_bytes(data[:-1] if damage == "short" else data)
        if damage == "gone":
            path.unlink()
    second = resumed(Checkpoint(three), from_mapping(COARSE), partial, Progress())
    assert not first.keys() & second.keys()
    assert digests(first) | digests(second) == digests(whole)
    assert first.keys() | second.keys() == whole.keys()
    warned = "computed again" in capsys.readouterr().err
    assert warned == (damage != "none" and blocks < 3)  # after the last block nothing needs activations


def test_a_stop_between_snapshot_and_commit_loses_one_block_only(
    three: Path, whole: dict[str, Item], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = Checkpoint(three)
    recipe = from_mapping(COARSE)
    partial = tmp_path / "partial"
    partial.mkdir()
    writer = CheckpointWriter(partial, src, LAYOUTS[recipe.layout])
    writer.identify({"recipe": recipe.sha256()}, lambda before, now: None)
    for item in calibrated(new_run(src, recipe, BlockRunner(src, device="cpu"), sequences(), partial), writer.done):
        if isinstance(item, Item):
            writer.add(item)
        elif item.facts["block"] == 1:  # its snapshot is written, its commit is not
            break
        else:
            writer.commit(item.facts)
    second = resumed(src, recipe, partial, Progress())
    assert "computed again" not in capsys.readouterr().err  # the snapshot of the last commit was not overwritten
    assert {n: d for n, d in digests(whole).items() if ".layers.0." not in n} == digests(second)


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_without_a_snapshot_are_computed_again_with_the_same_bits(
    blocks: int,
    three: Path,
    whole: dict[str, Item],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SAVED_BLOCKS, "cpu", 2)
    src, recipe, partial = Checkpoint(three), from_mapping(COARSE), tmp_path / "partial"
    partial.mkdir()
    first = interrupted(src, recipe, partial, blocks)
    assert len(list(partial.glob("activations-*"))) == (blocks > 1)
    second = resumed(src, recipe, partial, Progress())
    assert not first.keys() & second.keys()
    assert digests(first) | digests(second) == digests(whole)
    assert "computed again" not in capsys.readouterr().err  # that is said of snapshots that should be there


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "every"), [(1, 8), (2, 8), (2, 1), (3, 2)])
def test_a_stopped_run_on_a_gpu_continues_with_the_same_bits(
    blocks: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAVED_BLOCKS, "cuda", every)
    changes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    folder, recipe = write_model("llama", tmp_path / "model", **changes), from_mapping({})
    docs = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)) for n in (500, 500, 500, 7, 500, 500)]
    partials = [tmp_path / "whole", tmp_path / "stopped"]
    for partial in partials:
        partial.mkdir()
    src = Checkpoint(folder)
    whole = interrupted(src, recipe, partials[0], 5, docs, "cuda")
    first = interrupted(src, recipe, partials[1], blocks, docs, "cuda")
    second = resumed(src, recipe, partials[1], Progress(), docs, "cuda")
    assert digests(first) | digests(second) == digests(whole) and not first.keys() & second.keys()
    assert bool(list(partials[1].glob("activations-*"))) == (every < 4)


@pytest.mark.parametrize(("family", "damage"), [("gemma3n_text", "gone"), ("glm_moe_dsa", "none"), ("gpt_oss", "gone")])
def test_a_stopped_run_of_experts_or_of_blocks_that_pass_tensors_on_continues_with_the_same_bits(
    family: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, recipe = families.write(family, tmp_path / "m"), from_mapping(COARSE)
    whole, commits = quantized(folder, recipe, tmp_path)
    src, last = Checkpoint(folder), len(commits) - 2
    partial = tmp_path / "stopped"
    partial.mkdir()
    first = interrupted(src, recipe, partial, last)
    if damage == "gone":
        kind = "" if family == "gpt_oss" else "passed-"
        (partial / f"activations-{kind}{(last - 1) % 2}.bin").unlink()
    second = resumed(src, recipe, partial, Progress())
    assert not first.keys() & second.keys() and digests(first) | digests(second) == digests(whole)
    assert ("computed again" in capsys.readouterr().err) == (damage == "gone")
