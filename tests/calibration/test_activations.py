"""Activations of documents: in RAM up to a budget, then in files, and back from a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.calibration.activations import Activations
from quantkit.errors import CheckpointError
from quantkit.models.interception import State

ROWS = [3, 1, 5]


def state(number: int, scale: int = 1) -> State:
    """Return a state with tensors of three dtypes and of odd sizes."""
    rows = ROWS[number]
    wide = torch.arange(2 * rows * 3).reshape(2, rows, 3) * scale + number
    return State(wide[0].float() * 2, (wide[1, :, 1].int(), wide.to(torch.bfloat16)[:, :, :1], wide[0, 0, 0] > 1))


def same(a: State, b: State) -> bool:
    pairs = zip((a.hidden, *a.passed), (b.hidden, *b.passed), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def filled(work: Path, budget: int | None) -> Activations:
    made = Activations(work, budget, ROWS, (3,), torch.float32)
    for number in range(3):
        made.put(number, state(number, scale=7))
        made.put(number, state(number))
    return made


@pytest.mark.parametrize(
    ("budget", "mapped"),
    [
        (None, set()),
        (10**6, set()),
        (9 * 3 * 4 + 30, {1, 2}),  # the hidden states and the first document's tensors
        (0, {0, 1, 2}),
    ],
)
def test_the_budget_decides_where_tensors_are_and_changes_none(
    budget: int | None, mapped: set[int], tmp_path: Path
) -> None:
    found = filled(tmp_path, budget)
    assert all(same(found.get(number), state(number)) for number in range(3))
    assert {int(path.name.split("-")[2]) for path in tmp_path.glob("activations-passed-*")} == mapped
    assert (tmp_path / "activations-live.bin").exists() == (budget == 0)


def test_a_document_leaves_the_budget_when_its_tensors_are_replaced(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in state(0).passed)
    made = Activations(tmp_path, 9 * 3 * 4 + size, ROWS, (3,), torch.float32)
    for _ in range(3):
        made.put(0, state(0))
    assert not list(tmp_path.glob("activations-passed-*"))
    made.put(0, State(state(0).hidden))
    made.put(1, State(state(1).hidden, state(0).passed))
    assert not list(tmp_path.glob("activations-passed-*"))


@pytest.mark.parametrize("budget", [None, 0])
def test_a_snapshot_gives_the_same_states(budget: int | None, tmp_path: Path) -> None:
    facts = filled(tmp_path, budget).save(1)
    loaded = Activations.load(tmp_path, budget, 1, [facts], range(3))
    assert loaded.rows == ROWS and all(same(loaded.get(number), state(number)) for number in range(3))
    path = tmp_path / "activations-passed-1.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="its bytes changed"):
        Activations.load(tmp_path, budget, 1, [facts], range(3))


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("now", [[range(3)], [range(1), range(1, 3)], [range(1), range(1, 2), range(2, 3)]])
@pytest.mark.parametrize("before", [[range(3)], [range(2), range(2, 3)], [range(1), range(1, 2), range(2, 3)]])
def test_a_snapshot_of_some_ranks_is_read_by_others(
    before: list[range], now: list[range], budget: int | None, tmp_path: Path
) -> None:
    parts = []
    for rank, documents in enumerate(before):
        saved = Activations(tmp_path, budget, ROWS[documents.start : documents.stop], (3,), torch.float32, rank=rank)
        for number in documents:
            saved.put(number - documents.start, state(number))
        parts.append(saved.save(0))
    for rank, documents in enumerate(now):
        loaded = Activations.load(tmp_path, budget, 0, parts, documents, rank=rank)
        assert loaded.rows == ROWS[documents.start : documents.stop]
        assert all(same(loaded.get(number - documents.start), state(number)) for number in documents)


def test_a_view_does_not_keep_the_tensor_that_it_is_a_part_of(tmp_path: Path) -> None:
    made = Activations(tmp_path, None, [2], (1,), torch.float32)
    made.put(0, State(torch.zeros(2, 1), (torch.zeros(1000, 8)[:2],)))
    assert made.get(0).passed[0].untyped_storage().nbytes() == 2 * 8 * 4
