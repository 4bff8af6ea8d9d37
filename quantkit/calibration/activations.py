"""The inputs of the next block for every calibration document: in memory, beyond a budget on disk,
and in snapshots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.budget import stays_on_gpu
from quantkit.core.formats import dtype_name
from quantkit.io import files
from quantkit.models.interception import State
from quantkit.names import Json

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
        self.work, self.budget, self.rows = work, budget, list(rows)
        self.rank, self._kind = rank, kind
        shape = (sum(rows), *like)
        size = prod(shape) * dtype.itemsize
        self._in_ram = 0
        self._is_mapped = budget is not None and size > budget
        if self._is_mapped:
            self.hidden = files.mapped_tensor(file_of(work, f"{kind}live", rank), shape, dtype)
        else:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
            where = device if stays_on_gpu(size, free) else CPU
            self.hidden, self._in_ram = torch.empty(shape, dtype=dtype, device=where), size
        self._starts = [0, *accumulate(self.rows)]
        self._passed: list[tuple[Tensor, ...]] = [()] * len(self.rows)
        self._mapped: list[int | None] = [None] * len(self.rows)

    def get(self, number: int) -> State:
        """Read the state of a document; its hidden state is a view."""
        start, end = self._starts[number : number + 2]
        return State(self.hidden[start:end], self._passed[number])

    @property
    def hidden_only(self) -> bool:
        """Whether every document is a hidden state and nothing else."""
        return not any(self._passed)

    def get_batch(self, numbers: Sequence[int]) -> State:
        """Read the hidden states of adjacent documents of one length, a view
        `[documents, t, h]`.
        """
        start, end = self._starts[numbers[0]], self._starts[numbers[-1] + 1]
        return State(self.hidden[start:end].unflatten(0, (len(numbers), self.rows[numbers[0]])))

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
        path = file_of(self.work, f"{self._kind}passed-{number}-{turn}", self.rank)
        forms = _forms(tensors)
        places = _views(files.mapped_tensor(path, (_starts(forms)[-1],), torch.uint8), forms)
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

    def save(self, parity: int) -> Json:
        """Write a snapshot and return the facts with which `load` reads it."""
        facts: Json = {
            "hash": files.save_tensor(file_of(self.work, f"{parity}", self.rank), self.hidden),
            "shape": list(self.hidden.shape),
            "dtype": dtype_name(self.hidden.dtype),
            "rows": self.rows,
        }
        forms = list(map(_forms, self._passed))
        if any(forms):
            parts = []
            for tensor in (tensor for tensors in self._passed for tensor in tensors):
                parts += [tensor, torch.zeros(-tensor.nbytes % ALIGNED, dtype=torch.uint8)]
            digest = files.save_tensor(file_of(self.work, f"passed-{parity}", self.rank), *parts)
            facts["passed"] = {"hash": digest, "forms": forms}
        return facts

    @classmethod
    def load(
        cls,
        work: Path,
        budget: int | None,
        parity: int,
        parts: Sequence[Json],
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
        first = -documents.start
        for saved_by, part in enumerate(parts):
            inside = [n for n in range(len(part["rows"])) if 0 <= first + n < len(rows)]
            states = _saved(work, parity, saved_by, part) if inside else []
            for number in inside:
                made.put(first + number, states[number])
            first += len(part["rows"])
        return made


def _saved(work: Path, parity: int, rank: int, part: Json) -> list[State]:
    """Read the states of all documents of a rank's part of a snapshot."""
    shape, dtype = tuple(part["shape"]), getattr(torch, part["dtype"])
    hidden = files.load_tensor(file_of(work, f"{parity}", rank), shape, dtype, part["hash"])
    passed: list[tuple[Tensor, ...]] = [()] * len(part["rows"])
    if found := part.get("passed"):
        sizes = [_starts(forms)[-1] for forms in found["forms"]]
        buffer = files.load_tensor(
            file_of(work, f"passed-{parity}", rank), (sum(sizes),), torch.uint8, found["hash"]
        )
        passed = list(map(_views, buffer.split(sizes), found["forms"]))
    return list(map(State, hidden.split(part["rows"]), passed))


def file_of(work: Path, kind: str, rank: int, suffix: str = ".bin") -> Path:
    """Name the file of a kind that a rank keeps in the folder of a run."""
    return work / f"activations-{kind}{f'-rank{rank}' if rank else ''}{suffix}"


def _forms(tensors: Iterable[Tensor]) -> list[tuple[str, list[int]]]:
    """List the dtype and the shape of each tensor, as JSON keeps them."""
    return [(dtype_name(t.dtype), list(t.shape)) for t in tensors]


def _starts(forms: Iterable[tuple[str, list[int]]]) -> list[int]:
    """Compute the byte at which each tensor of a file begins, aligned, and the end of the file."""
    sizes = (prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in forms)
    return [0, *accumulate(size + -size % ALIGNED for size in sizes)]


def _views(buffer: Tensor, forms: Sequence[tuple[str, list[int]]]) -> tuple[Tensor, ...]:
    """View `buffer`, the uint8 bytes of a file, as tensors of these dtypes and shapes."""
    found = []
    for start, (dtype, shape) in zip(_starts(forms), forms, strict=False):
        kind = getattr(torch, dtype)
        found.append(buffer[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape))
    return tuple(found)
