"""`Layout`: the interface of a file layout, and `pack` and `unpack` over its `packing` and
`unpacking`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quantkit.core.formats import INT4, Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError, Setting, Words
from quantkit.layouts import validation
from quantkit.layouts.arrangement import OnRows
from quantkit.layouts.schemes import Schemes

Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]
#: A number of rows that is a whole number of tiles in every layout.
TILE = 128


class SideFile(NamedTuple):
    """A file that readers look for beside config.json: its name, and its contents, made from
    `quantization_config`.
    """

    name: str
    contents: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


class Packing(NamedTuple):
    """The tensors of a weight, with scales and zero points filled in, and the function that packs
    rows of codes.

    `add` takes the number of the first row and uint8 codes `[some, k]`. Both numbers are multiples
    of TILE, except that the last rows may be fewer.
    """

    tensors: dict[str, Tensor]
    add: OnRows


class Unpacking(NamedTuple):
    """The record of a stored weight without its codes, and the function that unpacks rows of them,
    as `Packing.add`.
    """

    scheme: Scheme
    shape: tuple[int, int]
    scales: Tensor
    zeros: Tensor | None
    fill: OnRows

    def codes(self) -> Tensor:
        """Unpack all codes, uint8 `[n, k]`."""
        codes = torch.empty(self.shape, dtype=torch.uint8, device=self.scales.device)
        self.fill(0, codes)
        return codes

    def record(self) -> QuantizedTensor:
        """Unpack the record; raise LayoutError for codes that the scheme does not have."""
        return QuantizedTensor(self.scheme, self.codes(), self.scales, self.zeros)


class Layout(ABC):
    """The place of each code, scale and zero point in a checkpoint's tensors, and the form of its
    config.json.

    All that other rooms must know of a layout is declared here, so that none asks for a layout by
    its name.
    """

    NAME: ClassVar[str]
    #: The layout that this one varies; `convert A-to-B` takes its name for both.
    VARIANT_OF: ClassVar[str | None] = None
    #: Each `quant_method` of the configs that `read_config` reads.
    QUANT_METHODS: ClassVar[tuple[str, ...]]
    #: The formats that `holds` accepts, in words.
    HOLDS: ClassVar[str] = "int4"
    #: Every suffix that the layout may store behind a module's name, such as ("B", "s").
    TENSORS: ClassVar[tuple[str, ...]]
    #: Suffixes that a file may leave out.
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    #: A tensor with this suffix marks a module as packed in this layout.
    MARKER: ClassVar[str]
    #: The file beside config.json, or None where no reader looks for one.
    SIDE_FILE: ClassVar[SideFile | None] = None
    #: The layout's name in messages, the multiples that `n` and `k` must be, and the way out if
    #: they are not.
    TITLE: ClassVar[str]
    MULTIPLES: ClassVar[tuple[int, int]]
    WAY_OUT: ClassVar[str] = Words(validation.USUAL, ", or", Setting("skip"), "the weight")
    #: Weights can be stacked if each `n` is a multiple of this: then no two share a tile. None: not
    #: stacked.
    STACKING_UNIT: ClassVar[int | None] = None
    #: Conditions under which another layout holds the contents of a file: on integers, and on
    #: floats.
    INTEGERS_IF: ClassVar[str | None] = None
    FLOATS_IF: ClassVar[str | None] = None
    #: The condition under which this layout holds the zero points of another one.
    ZEROS_IF: ClassVar[str | None] = None
    #: What to say before asymmetric weights are stored, or None.
    ZEROS_NOTICE: ClassVar[str | None] = None
    #: A doubt that remains about the zero points of a file, or None.
    ZEROS_IN_DOUBT: ClassVar[str | None] = None

    @abstractmethod
    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        """Give the dtype and shape of every tensor that `pack` stores for an `[n, k]` weight, by
        suffix.
        """

    @abstractmethod
    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        """Compute `(n, k)` of a packed weight from the shapes of its stored tensors, by suffix."""

    def shape_in_words(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Convert the shape of a tensor in a file, which may hold packed words as another dtype,
        for `size`.
        """
        return shape

    @abstractmethod
    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        """Make a row-wise packer with its output tensors; scales and zero points are already filled
        in.

        It raises LayoutError for schemes and shapes that `check` refuses, and for values that
        cannot be stored.
        """

    @abstractmethod
    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        """Make a row-wise unpacker; raise LayoutError for wrong dtypes, shapes, scales or zero
        points.
        """

    @abstractmethod
    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the `quantization_config` that public readers of the layout expect."""

    @abstractmethod
    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes from a `quantization_config`; None if it is of another layout.

        CheckpointError for a config of this layout that is malformed or cannot be read.
        """

    @property
    def family(self) -> str:
        """The name that `convert A-to-B` uses for this layout: both GPTQ versions are `gptq`."""
        return self.VARIANT_OF or self.NAME

    def holds(self, fmt: Format) -> bool:
        """Return True if the layout has a place for the codes of a format."""
        return fmt == INT4

    def check_scheme(self, scheme: Scheme) -> None:
        """Raise LayoutError unless the layout holds the scheme; the message names a way out."""
        if not self.holds(scheme.format):
            raise LayoutError(
                f"{self.TITLE} holds {self.HOLDS}, not {scheme.format.name}", validation.USUAL
            )

    def check(self, scheme: Scheme, n: int, k: int) -> None:
        """Raise LayoutError unless the layout holds an `[n, k]` weight of the scheme; the message
        names a way out.
        """
        self.check_scheme(scheme)
        validation.check_multiples(self.TITLE, (n, k), self.MULTIPLES, self.WAY_OUT)
        scheme.groups(k)

    def check_all(self, schemes: Schemes) -> None:
        """Raise LayoutError unless the layout holds the default scheme and every override."""
        for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
            self.check_scheme(scheme)

    def check_tensors(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> tuple[int, int]:
        """Compute `(n, k)` of a stored weight; raise LayoutError unless dtypes and shapes agree
        with `stored`.
        """
        n, k = self.size({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme)
        self.check(scheme, n, k)
        validation.match(tensors, self.stored(scheme, n, k), self.OPTIONAL)
        return n, k

    def pack(self, q: QuantizedTensor) -> dict[str, Tensor]:
        """Pack a record into tensors, by suffix; raise LayoutError as `packing`."""
        packing = self.packing(q.scheme, q.shape, q.scales, q.zeros)
        packing.add(0, q.codes)
        return packing.tensors

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
        """Unpack tensors, by suffix, to a record; raise LayoutError for wrong dtypes, shapes or
        contents.
        """
        return self.unpacking(tensors, scheme).record()

    def stack(self, scheme: Scheme, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the packed tensors, by suffix, of weights of one scheme and `k` to `[n + n', k]`,
        in new memory.

        Here `n` lies along the columns of every tensor, so that they are joined side by side.
        """
        return {suffix: torch.cat([part[suffix] for part in parts], 1) for suffix in parts[0]}

    def cut(
        self, scheme: Scheme, tensors: Mapping[str, Tensor], n: int, rows: range
    ) -> dict[str, Tensor]:
        """Copy the packed tensors of some rows of a stacked weight `[n, k]`: the inverse of
        `stack`.
        """
        found = {}
        for suffix, tensor in tensors.items():
            each = tensor.shape[1] // n
            found[suffix] = tensor[:, each * rows.start : each * rows.stop].clone(
                memory_format=torch.contiguous_format
            )
        return found

    def stored_as(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> str:
        """Name the variant of this layout that the data show; it may differ from the label in the
        config.
        """
        return self.NAME


def static_groups(scheme: Scheme, k: int, device: torch.device) -> Tensor:
    """Give the group of each column without act-order, `k // group_size`, as int32 `[k]`."""
    return torch.arange(k, dtype=torch.int32, device=device) // (scheme.group_size or k)
