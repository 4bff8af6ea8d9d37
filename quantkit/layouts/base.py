"""What every layout module offers; a layout is a module with these names, no class and no instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.layouts.arrangement import RowsOf
from quantkit.layouts.schemes import Schemes

Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]
#: Rows of codes that are whole tiles in every layout.
TILE = 128


class SideFile(NamedTuple):
    """A file that readers look for beside config.json: its name, and what it holds, made of `quantization_config`."""

    name: str
    contents: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


class Packing(NamedTuple):
    """A weight on its way into a file: what is stored of it, and what packs rows of its codes into that.

    `add` is given the number of the first row and uint8 codes `[some, k]`, both multiples of TILE, or all that follow.
    """

    tensors: dict[str, Tensor]
    add: RowsOf

    def whole(self, codes: Tensor) -> dict[str, Tensor]:
        """Return the tensors with all codes `[n, k]` in them."""
        self.add(0, codes)
        return self.tensors


class Unpacking(NamedTuple):
    """A weight on its way from a file: its record but for the codes, and what fills rows of them, as `Packing.add`."""

    scheme: Scheme
    shape: tuple[int, int]
    scales: Tensor
    zeros: Tensor | None
    fill: RowsOf

    def codes(self) -> Tensor:
        """Return all codes, uint8 `[n, k]`."""
        codes = torch.empty(self.shape, dtype=torch.uint8, device=self.scales.device)
        self.fill(0, codes)
        return codes

    def record(self) -> QuantizedTensor:
        """Return the record; LayoutError for codes that the scheme does not have."""
        return QuantizedTensor(self.scheme, self.codes(), self.scales, self.zeros)


class Layout(Protocol):
    """Where each code, scale and zero point lies in a checkpoint's tensors, and what its config.json says of it."""

    NAME: str
    #: Every suffix that the layout may store behind a module's name, e.g. ("B", "s").
    TENSORS: tuple[str, ...]
    #: The suffix whose presence marks a module as packed in this layout, e.g. "B".
    MARKER: str
    #: The file beside config.json, or None where no reader looks for one.
    SIDE_FILE: SideFile | None

    def check(self, scheme: Scheme, n: int, k: int) -> None:
        """Raise LayoutError naming the rule that a scheme or an `[n, k]` shape breaks, and the way out."""

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        """Return suffix -> (dtype, shape) of everything `pack` would store for an `[n, k]` weight."""

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        """Return `(n, k)` of a packed weight from the shapes of its stored tensors (suffix -> shape)."""

    def pack(self, q: QuantizedTensor) -> dict[str, Tensor]:
        """Return suffix -> tensor; LayoutError for what `check` refuses or a value that cannot be stored."""

    def packing(self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
        """Return what `pack` does with rows of codes, and its tensors, of which those without codes are filled."""

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
        """Return the record of suffix -> tensor; LayoutError for wrong dtypes, shapes or contents."""

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        """Return what `unpack` does, rows of codes at a time; LayoutError for all that shows before the codes."""

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Return the `quantization_config` that the layout's public readers expect."""

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Return the schemes that a `quantization_config` states, or None if it is not of this layout."""
