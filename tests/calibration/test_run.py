"""Documents on their way through the blocks: batches, memory that runs out, and passes that wait."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.hessian import Hessian
from quantkit.calibration import budget
from quantkit.calibration.loop import calibrated, new_run
from quantkit.calibration.run import Waiting
from quantkit.calibration.stages import solve
from quantkit.calibration.stages.base import Task, find_groups
from quantkit.calibration.stages.solve import Solve
from quantkit.calibration.stages.statistics import collect
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Item
from quantkit.errors import QuantkitError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import State
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import COARSE, PLAIN_SUM, digests, distance, sequences, start
from tests.tiny_models import write_model


def test_a_gpu_without_memory_takes_fewer_documents_at_a_time_and_says_so(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first pass over each block fails in its second batch, and the last pass of the first block too."""
    monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", 160)
    src, recipe, docs = Checkpoint(tiny_llama), from_mapping(COARSE), sequences((20,) * 9)
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
        items = calibrated(new_run(recipe, model, docs, tmp_path, progress=Progress()), [])
        found.append(digests({item.name: item for item in items if isinstance(item, Item)}))
    said = capsys.readouterr().err
    assert found[0] == found[1]
    assert "for 160 tokens at a time, 80 are tried" in said and "for 80 tokens at a time, 40 are tried" in said
    fits(10)
    with pytest.raises(QuantkitError, match=r"layers\.0: .* a document of 20 tokens: use a smaller --max-length"):
        list(calibrated(new_run(recipe, BlockRunner(src, device="cpu"), docs, tmp_path), []))


@pytest.mark.parametrize("family", ["gemma2", "opt", "gpt_neox", "gpt2", "gpt_oss", "llama4_text"])
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
                model.weights.load_block(block.index)
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
    new_run(from_mapping(COARSE), model, sequences(), tmp_path / "first")  # imports take memory too
    small = [torch.ones(2**14) for _ in range(2000)]  # 131 MB, each below the size that is mapped on its own
    kept = small[::50]  # between them the C library gives nothing back by itself, wherever the heap ends
    del small
    before = resident()
    new_run(from_mapping(COARSE), model, sequences(), tmp_path / "second")
    assert before - resident() > 100e6 and len(kept) == 40


def test_a_document_that_calls_its_linears_in_another_order_loses_no_token(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = start(three, from_mapping(PLAIN_SUM), tmp_path)
    attention = block.run.model.module.get_submodule("model.layers.0").self_attn
    groups = find_groups(block, [name for name in block.goals if "self_attn" in name])
    plain = attention.forward

    def turned(hidden_states: Tensor, **kwargs: Any) -> Any:
        if hidden_states.shape[1] != 17:
            return plain(hidden_states, **kwargs)
        out = attention.o_proj(hidden_states)  # the third document calls the last linear first
        attention.q_proj(hidden_states)
        return out, None

    attention.forward = turned
    waiting, alone = list[Hessian](), list[Hessian]()
    for found, most in ((waiting, 2**31), (alone, 0)):
        monkeypatch.setattr(budget, "PASSES_BYTES", most)
        found += [collect(block, [group])[0] for group in groups]
        block.stream.waiting.close()
    for one, other in zip(waiting, alone, strict=True):
        assert one.tokens == sum(map(len, sequences())) and torch.equal(one.matrix(), other.matrix())


def test_memory_that_ends_while_passes_wait_ends_them_and_changes_no_batch(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(budget.TOKENS_AT_ONCE, "cpu", 40)
    src, docs, found = Checkpoint(tiny_llama), sequences((20,) * 6), []
    waits = Waiting.wait

    def refused(self: Waiting) -> bool:
        going_on = waits(self)
        if going_on:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return going_on

    for wait in (waits, refused):
        monkeypatch.setattr(Waiting, "wait", wait)
        run = new_run(from_mapping(COARSE), BlockRunner(src, device="cpu"), docs, tmp_path, progress=Progress())
        found.append(digests({item.name: item for item in calibrated(run, []) if isinstance(item, Item)}))
    assert found[0] == found[1]
    assert "not enough memory" not in capsys.readouterr().err


def test_a_solver_that_lacks_memory_gets_that_of_the_passes_that_wait(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*args: Any, **kwargs: Any) -> list[Item]:
        if (0,) in block.stream.waiting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(*args, **kwargs)

    block, own = start(three, from_mapping(COARSE), tmp_path), solve.solve
    groups = find_groups(block, list(block.goals))
    facts: dict[str, Any] = {name: {} for name in groups[1].linears}
    task = Task(groups[1], facts, collect(block, [groups[1]])[0])
    assert (0,) in block.stream.waiting
    monkeypatch.setattr(solve, "solve", short)
    Solve().work(block, [task])
    assert block.solved.keys() == {f"{name}.weight" for name in groups[1].linears}


def test_passes_wait_within_the_budget_of_activations_only(three: Path, tmp_path: Path) -> None:
    block = start(three, from_mapping(COARSE), tmp_path)
    store, x = block.stream.activations, torch.zeros(1, len(sequences()[0]), 256)
    needed = 4 * len(store.hidden) * (256 + 4 * store.hidden.shape[1])
    for store.budget, may in ((None, True), (needed, True), (needed - 1, False)):
        assert block.stream.may_wait([0], x) is may


def test_a_pass_that_is_dropped_leaves_the_model_as_it_was(three: Path, tmp_path: Path) -> None:
    block = start(three, from_mapping(COARSE), tmp_path)
    stream, groups = block.stream, find_groups(block, list(block.goals))
    before = stream.run(0, [0])
    collect(block, [groups[1]])
    assert (0,) in stream.waiting and torch.is_grad_enabled()
    assert stream.waiting.close() and not stream.waiting.close()
    after = stream.run(0, [0])
    assert before and after and torch.equal(before.hidden, after.hidden)
