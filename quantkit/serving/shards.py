"""A rank's share of a linear: collect its packed tensors as an engine reads them, then pack them
for a kernel.

An engine joins several stored weights into one linear (queries, keys and values), or finds them
joined on disk. It splits a linear over its ranks by rows or by columns. A slice of a packed tensor
is no slice of the weight, so each stored weight is unpacked, sliced and packed again, without a
change of values. At most one linear is unpacked at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, concatenated
from quantkit.errors import CheckpointError, LayoutError, about
from quantkit.inference.products import (
    KernelWeight,
    pack_for_kernel,
    places,
    places_of_experts,
)
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import recast


@dataclass(frozen=True)
class Part:
    """One of the weights that are joined: its name, its rows in the folder, and how many rows a
    rank has.

    `own` names them in the folder where they are no equal share, as in a vocabulary. Rows of zeros
    follow them up to `rows`.
    """

    name: str
    total: int
    rows: int
    own: range | None = None


@dataclass
class JoinedWeight:
    """The packed tensors of one linear of an engine, on `rank` of `ranks`.

    `columns` are the input features of the whole linear, and of a rank. All parts have the same
    `scheme`. An expert is packed as all experts of its scheme and shape. A table, whose rows may
    be gathered, stays a record.
    """

    name: str
    layout: Layout
    scheme: Scheme
    parts: Sequence[Part]
    columns: tuple[int, int]
    rank: int = 0
    ranks: int = 1
    is_expert: bool = False
    is_table: bool = False
    _stored: dict[tuple[int, ...], dict[str, Tensor]] = field(default_factory=dict, init=False)
    _packed: KernelWeight | QuantizedTensor | None = field(default=None, init=False)

    @property
    def out(self) -> int:
        """The output features of a rank."""
        return sum(part.rows for part in self.parts)

    @property
    def stored(self) -> dict[str, torch.dtype]:
        """The suffixes of the tensors of each stored weight, and their dtypes in the layout."""
        n, k = sum(part.total for part in self.parts), self.scheme.padded_k(self.columns[0])
        return {
            suffix: dtype for suffix, (dtype, _) in self.layout.stored(self.scheme, n, k).items()
        }

    def check(self) -> None:
        """Raise LayoutError unless the columns can be split, and a kernel may take a
        rank's share.
        """
        k = self.columns[1]
        if self.columns[0] != k and not _is_whole(self.scheme, k):
            sizes = [
                str(size)
                for size in range(1, 9)
                if not self.columns[0] % size
                and (size == 1 or _is_whole(self.scheme, self.columns[0] // size))
            ]
            group = self.scheme.group_size or 4  # 2:4 sparsity
            raise LayoutError(
                f"its {self.columns[0]} columns in groups of {group} cannot be split over "
                f"{self.ranks} GPUs",
                f"use --tensor-parallel-size {' or '.join(sizes)}",
                subject=self.name,
            )
        found = (places_of_experts if self.is_expert else places)(
            self.layout.NAME, self.scheme, self.out, self.scheme.padded_k(k)
        )
        if not any(True for _ in found):
            raise LayoutError(
                f"no kernel takes {self.scheme.label} of [{self.out}, {k}]",
                "serve the folder without --quantization quantkit",
                subject=self.name,
            )

    def add(self, which: Sequence[int], suffix: str, tensor: Tensor) -> None:
        """Take one packed tensor of the stored weight that has the consecutive parts `which`.

        Once all tensors are there, the rank's share is packed and they are freed. CheckpointError
        for a repeated tensor; LayoutError for tensors that do not fit the weight.
        """
        tensors = self._stored.setdefault(tuple(which), {})
        if suffix in tensors or self._packed is not None:
            raise CheckpointError(f"{self.named(which)}.{suffix} is there twice")
        tensors[suffix] = tensor
        covered = sorted(part for found in self._stored for part in found)
        whole = covered == list(range(len(self.parts)))
        if whole and all(found.keys() == self.stored.keys() for found in self._stored.values()):
            self._packed = self._pack()

    @property
    def is_packed(self) -> bool:
        """Whether all tensors have come, and the share is packed."""
        return self._packed is not None

    def packed(self) -> Any:
        """Give up the packed share, of a table its record; CheckpointError if a tensor is
        missing.
        """
        if self._packed is None:
            covered = {part for which in self._stored for part in which}
            for index, part in enumerate(self.parts):
                if index not in covered:
                    raise CheckpointError(
                        f"{part.name} is not in the folder, or not packed", "fetch the folder again"
                    )
            self._packed = self._pack()
        found, self._packed = self._packed, None
        return found

    def named(self, which: Sequence[int]) -> str:
        """Name the stored weight that has the parts `which`."""
        return self.parts[which[0]].name if len(which) == 1 else self.name

    def _pack(self) -> KernelWeight | QuantizedTensor:
        pieces: list[QuantizedTensor] = []
        for which in sorted(self._stored):
            with about(self.named(which)):
                pieces += self._cut(which, self._stored[which])
            self._stored[which] = {}
        self._stored = {}
        with about(self.name):
            q = concatenated(pieces)
            return q if self.is_table else pack_for_kernel(q, self.layout.NAME, self.is_expert)

    def _cut(self, which: Sequence[int], tensors: dict[str, Tensor]) -> Iterator[QuantizedTensor]:
        """Unpack a stored weight, and cut the rank's share out of each of its parts."""
        q = self.layout.unpack(tensors, self.scheme)
        n, k = sum(self.parts[part].total for part in which), self.scheme.padded_k(self.columns[0])
        if q.shape[0] < n or q.shape[1] < k:
            raise CheckpointError(
                f"it is packed from {list(q.shape)}, config.json asks for {[n, self.columns[0]]}"
            )
        q = recast(q, self.scheme, (n, k))
        columns = (
            share(*self.columns, self.rank, self.ranks)
            if self.columns[0] != self.columns[1]
            else range(k)
        )
        start = 0
        for part in (self.parts[index] for index in which):
            rows = (
                share(part.total, part.rows, self.rank, self.ranks)
                if part.own is None
                else part.own
            )
            yield recast(
                cut(q, range(start + rows.start, start + rows.stop), columns),
                self.scheme,
                (part.rows, len(columns)),
            )
            start += part.total


class StackedWeight:
    """The packed weights of several experts, stacked `[experts, ...]`, each as soon as its tensors
    are there.
    """

    def __init__(self, experts: Sequence[JoinedWeight]) -> None:
        self.experts = experts
        self._missing = set(range(len(experts)))
        self._stack: KernelWeight | None = None

    def named(self, which: Sequence[int]) -> str:
        """Name the stored weight that is an expert's part; `which` are both numbers."""
        expert, part = which
        return self.experts[expert].named((part,))

    def add(self, which: Sequence[int], suffix: str, tensor: Tensor) -> None:
        """Take one packed tensor of an expert's part; errors as `JoinedWeight.add`."""
        expert, part = which
        if expert not in self._missing:
            raise CheckpointError(f"{self.named(which)}.{suffix} is there twice")
        self.experts[expert].add((part,), suffix, tensor)
        if self.experts[expert].is_packed:
            self._stack_up(expert)

    def packed(self) -> KernelWeight:
        """Return and release the stack of experts of `shape`. CheckpointError if a tensor is
        missing.
        """
        for expert in sorted(self._missing):
            self._stack_up(expert)
        assert self._stack is not None
        found, self._stack = self._stack, None
        return found

    def _stack_up(self, expert: int) -> None:
        found = self.experts[expert].packed()
        if self._stack is None:
            count = len(self.experts)
            empty = {
                suffix: tensor.new_empty((count, *tensor.shape))
                for suffix, tensor in found.tensors.items()
            }
            self._stack = found._replace(tensors=empty)
        assert found[:3] == self._stack[:3]
        for suffix, tensor in found.tensors.items():
            self._stack.tensors[suffix][expert].copy_(tensor)
        self._missing.discard(expert)


def share(total: int, size: int, rank: int, ranks: int) -> range:
    """Give the rows or columns of a rank, `size` of `total`; neighbouring ranks share them if the
    parts are fewer.
    """
    first = rank * (total // size) // ranks * size
    return range(first, first + size)


def cut(q: QuantizedTensor, rows: range, columns: range) -> QuantizedTensor:
    """Cut rows and columns out of a record; the columns must be whole groups."""
    n, k = q.shape
    if len(rows) == n and len(columns) == k:
        return q
    size = q.scheme.group_size
    groups = slice(columns.start // size, columns.stop // size) if size else slice(None)
    of_rows = slice(rows.start, rows.stop)
    codes, scales = q.codes[of_rows, columns.start : columns.stop], q.scales[of_rows, groups]
    zeros = None if q.zeros is None else q.zeros[of_rows, groups].contiguous()
    return QuantizedTensor(q.scheme, codes.contiguous(), scales.contiguous(), zeros)


def _is_whole(scheme: Scheme, columns: int) -> bool:
    """Return True if a number of columns is whole groups and, for 2:4, a multiple of four."""
    return scheme.padded_k(columns) == columns
