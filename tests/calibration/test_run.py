"""Documents on their way through the blocks: batches, memory that runs out, and where activations are."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration import budget
from quantkit.calibration.loop import calibrated
from quantkit.calibration.preflight import new_run
from quantkit.calibration.stages.base import find_groups
from quantkit.calibration.stages.hessians import collect
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Item
from quantkit.errors import QuantkitError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.passing import State
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import (
    COARSE,
    GROUPS,
    PLAIN_SUM,
    digests,
    distance,
    sequences,
    start,
)
from tests.tiny_models import write_model


def test_a_gpu_without_memory_takes_fewer_documents_at_a_time_and_says_so(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first pass over each block fails in its second batch, and the last pass of the first block too."""
    monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", 160)
    src, recipe, docs = Checkpoint(three), from_mapping(COARSE), sequences((20,) * 9)
    run, calls = BlockRunner.run, list[int]()

    def fits(most: int) -> None:
        def refused(model: BlockRunner, index: int, tokens: Tensor, state: State) -> Any:
            calls.append(tokens.numel())
            if tokens.numel() > most and len(calls) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(model, index, tokens, state)

        calls.clear()
        monkeypatch.setattr(BlockRunner, "run", refused)

    found = []
    for most in (160, 40):
        fits(most)
        model = BlockRunner(src, device="cpu")
        items = calibrated(new_run(src, recipe, model, docs, tmp_path, progress=Progress()), [])
        found.append(digests({item.name: item for item in items if isinstance(item, Item)}))
    said = capsys.readouterr().err
    assert found[0] == found[1]
    assert "for 160 tokens at a time, 80 are tried" in said and "for 80 tokens at a time, 40 are tried" in said
    fits(10)
    with pytest.raises(QuantkitError, match=r"layers\.0: .* a document of 20 tokens: use a smaller --max-length"):
        list(calibrated(new_run(src, recipe, BlockRunner(src, device="cpu"), docs, tmp_path), []))


@pytest.mark.parametrize("family", [*GROUPS, "gpt2", "mixtral", "gpt_oss", "llama4_text"])
def test_a_batch_of_documents_gives_the_hessians_and_states_of_single_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(family, tmp_path / "model")
    docs = sequences((16, 16, 16, 9, 16, 2, 2))
    found: list[list[Tensor]] = []
    for tokens in (0, 40):
        monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", tokens)
        block = start(folder, from_mapping(PLAIN_SUM), tmp_path, docs)
        model, stream = block.run.model, block.stream
        taken = [len(numbers) for numbers in stream.forwards(0)]
        found.append([])
        for block.index in range(len(model.blocks)):
            if block.index:
                model.load_block(block.index)
            groups = find_groups(block, model.targets(block.index))
            found[-1] += [hessian.matrix() for hessian in collect(block, groups) if hessian.tokens]
            stream.forward(block.index)
            found[-1].append(stream.activations.hidden.clone())
        assert taken == ([2, 1, 1, 1, 2] if tokens else [1] * 7)
    assert all(distance(batch, single) < 1e-5 for single, batch in zip(*found, strict=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides itself what it gives back")
def test_a_run_does_not_begin_on_top_of_memory_that_earlier_work_has_freed(three: Path, tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = BlockRunner(Checkpoint(three), device="cpu")
    small = [torch.ones(2**14) for _ in range(2000)]  # 131 MB, each below the size that is mapped on its own
    last = small[-1]  # which keeps all below it in the heap
    del small
    before = resident()
    new_run(model.src, from_mapping(COARSE), model, sequences(), tmp_path)
    assert before - resident() > 100e6 and len(last)
