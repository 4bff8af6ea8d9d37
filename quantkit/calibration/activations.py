"""The inputs of the next block for every calibration document: in memory, beyond a budget on disk,
and in snapshots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.budget import stays_on_gpu
from quantkit.core.tensors import dtype_name
from quantkit.io import files
from quantkit.models.interception import State

#: Tensors of a document begin at a multiple of these bytes, so that they can be viewed in their
#: dtype.
ALIGNED = 64
CPU = torch.device("cpu")


class Activations:
    """Hold the state of every document.

    `hidden` `[T, h]`, or `[T, streams, h]`, concatenates the hidden states of all documents; `rows`
    has the length of each. It is on `device` where that is a GPU with space for it, else in RAM.
    Other tensors that blocks pass on are stored in RAM for each document. Activations beyond
    `budget` bytes are in files in `work`, with `kind` in their names. With several ranks, each
    holds its own documents, and its files have `rank` in their names.
    """

    def __init__(
        self,
        work: Path,
        budget: int | None,
        rows: Sequence[int],
        like: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device = CPU,
        rank: int = 0,
        kind: str = "",
    ) -> None:
        self.work, self.budget, self.rows, self.rank, self._kind = (
            work,
            budget,
            list(rows),
            rank,
            kind,
        )
        shape = (sum(rows), *like)
        size = prod(shape) * dtype.itemsize
        self._in_ram = 0
        self._is_mapped = budget is not None and size > budget
        if self._is_mapped:
            self.hidden = files.mapped_tensor(_file(work, f"{kind}live", rank), shape, dtype)
        else:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
            where = device if stays_on_gpu(size, free) else CPU
            self.hidden, self._in_ram = torch.empty(shape, dtype=dtype, device=where), size
        self._starts = [sum(self.rows[:number]) for number in range(len(self.rows))]
        self._passed: list[tuple[Tensor, ...]] = [()] * len(self.rows)
        self._mapped: list[int | None] = [None] * len(self.rows)

    @staticmethod
    def bytes(tokens: int, hidden: int, itemsize: int) -> int:
        """Compute the bytes of the hidden states of some tokens."""
        return tokens * hidden * itemsize

    def get(self, number: int) -> State:
        """Read the state of a document; its hidden state is a view."""
        start = self._starts[number]
        return State(self.hidden[start : start + self.rows[number]], self._passed[number])

    @property
    def hidden_only(self) -> bool:
        """Whether every document is a hidden state and nothing else."""
        return not any(self._passed)

    def get_batch(self, numbers: Sequence[int]) -> State:
        """Read the hidden states of adjacent documents of one length, a view
        `[documents, t, h]`.
        """
        rows, start = self.rows[numbers[0]], self._starts[numbers[0]]
        return State(
            self.hidden[start : start + len(numbers) * rows].unflatten(0, (len(numbers), rows))
        )

    def put(self, number: int, state: State) -> None:
        """Replace the state of a document; the number of rows must not change."""
        self.get(number).hidden.copy_(state.hidden)
        self._put_passed(number, state.passed)

    def put_batch(self, numbers: Sequence[int], state: State) -> None:
        """Replace the hidden states of documents, in the form of `get_batch`, when blocks pass on
        nothing else.
        """
        self.get_batch(numbers).hidden.copy_(state.hidden)
        for number in numbers:
            self._put_passed(number, ())

    def _put_passed(self, number: int, tensors: Sequence[Tensor]) -> None:
        if self._mapped[number] is None:
            self._in_ram -= sum(tensor.nbytes for tensor in self._passed[number])
        needed = sum(tensor.nbytes for tensor in tensors)
        if self.budget is None or self._in_ram + needed <= self.budget:
            # A view would keep its whole tensor in memory.
            self._passed[number] = tuple(
                torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in tensors
            )
            self._in_ram += needed
            self._mapped[number] = None
            return
        # Two files alternate, because one may hold the old state while the new one is computed from
        # it.
        turn = 1 - (self._mapped[number] or 0)
        path = _file(self.work, f"{self._kind}passed-{number}-{turn}", self.rank)
        forms = [(dtype_name(t.dtype), list(t.shape)) for t in tensors]
        places = _views(files.mapped_tensor(path, (_size(forms),), torch.uint8), forms)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        self._passed[number], self._mapped[number] = places, turn

    def copied(self, device: torch.device) -> Activations | None:
        """Copy the activations in the memory of `device`, so that `save` may write them while these
        change.

        None if a part is elsewhere, or there is no memory for a copy.
        """
        in_files = self._is_mapped or any(number is not None for number in self._mapped)
        if in_files or self.hidden.device.type != device.type:
            return None
        made = copy.copy(self)
        made._passed = list(self._passed)  # no tensor in it is changed in place
        try:
            made.hidden = self.hidden.clone()
        except torch.OutOfMemoryError:
            return None
        return made

    def save(self, parity: int) -> dict[str, Any]:
        """Write a snapshot and return the facts with which `load` reads it."""
        facts: dict[str, Any] = {
            "hash": files.save_tensor(_file(self.work, f"{parity}", self.rank), self.hidden),
            "shape": list(self.hidden.shape),
            "dtype": dtype_name(self.hidden.dtype),
            "rows": self.rows,
        }
        forms = [
            [(dtype_name(t.dtype), list(t.shape)) for t in tensors] for tensors in self._passed
        ]
        if any(forms):
            parts = []
            for tensor in (tensor for tensors in self._passed for tensor in tensors):
                parts += [tensor, torch.zeros(-tensor.nbytes % ALIGNED, dtype=torch.uint8)]
            digest = files.save_tensor(_file(self.work, f"passed-{parity}", self.rank), *parts)
            facts["passed"] = {"hash": digest, "forms": forms}
        return facts

    @classmethod
    def load(
        cls,
        work: Path,
        budget: int | None,
        parity: int,
        parts: Sequence[dict[str, Any]],
        documents: range,
        device: torch.device = CPU,
        rank: int = 0,
    ) -> Activations:
        """Read some documents of a snapshot, from the facts of the part that each rank has saved.

        CheckpointError if a file is missing, short, long or changed.
        """
        rows = [count for part in parts for count in part["rows"]][documents.start : documents.stop]
        like, dtype = parts[0]["shape"][1:], getattr(torch, parts[0]["dtype"])
        made = cls(work, budget, rows, tuple(like), dtype, device, rank)
        first = 0
        for saved_by, part in enumerate(parts):
            inside = [n for n in range(len(part["rows"])) if first + n in documents]
            if inside:
                made._fill(first - documents.start, inside, parity, saved_by, part)
            first += len(part["rows"])
        return made

    def _fill(
        self, first: int, inside: Sequence[int], parity: int, saved_by: int, part: dict[str, Any]
    ) -> None:
        """Take the documents `inside` a rank's part of a snapshot; its first document has the
        number `first` here.
        """
        dtype = getattr(torch, part["dtype"])
        found = files.load_tensor(
            _file(self.work, f"{parity}", saved_by), tuple(part["shape"]), dtype, part["hash"]
        )
        begin, end = sum(part["rows"][: inside[0]]), sum(part["rows"][: inside[-1] + 1])
        start = self._starts[first + inside[0]]
        self.hidden[start : start + end - begin].copy_(found[begin:end])
        if passed := part.get("passed"):
            starts = [0, *accumulate(map(_size, passed["forms"]))]
            path = _file(self.work, f"passed-{parity}", saved_by)
            buffer = files.load_tensor(path, (starts[-1],), torch.uint8, passed["hash"])
            for number in inside:
                views = _views(buffer[starts[number] : starts[number + 1]], passed["forms"][number])
                self._put_passed(first + number, views)


def _file(work: Path, kind: str, rank: int) -> Path:
    return work / f"activations-{kind}{f'-rank{rank}' if rank else ''}.bin"


def _size(forms: Sequence[tuple[str, list[int]]]) -> int:
    """Add up the bytes of tensors of these dtypes and shapes, each aligned."""
    return sum(_aligned(dtype, shape) for dtype, shape in forms)


def _aligned(dtype: str, shape: Sequence[int]) -> int:
    size: int = prod(shape) * getattr(torch, dtype).itemsize
    return -(-size // ALIGNED) * ALIGNED


def _views(buffer: Tensor, forms: Sequence[tuple[str, list[int]]]) -> tuple[Tensor, ...]:
    """View `buffer`, uint8 of `_size` bytes, as tensors of these dtypes and shapes."""
    found, start = [], 0
    for dtype, shape in forms:
        kind = getattr(torch, dtype)
        found.append(buffer[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape))
        start += _aligned(dtype, shape)
    return tuple(found)
