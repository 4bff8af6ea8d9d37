"""`Layout`: the interface of a file layout, the code that all layouts share, and the checks of
stored tensors.

Checkpoints are untrusted input: type, shape and contents are checked before anything is used. A
failure is one line that names the tensor, and the rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from quantkit.core.formats import INT4, Format, dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, Shape, Shapes, Tensors
from quantkit.errors import (
    CheckpointError,
    Command,
    LayoutError,
    Option,
    RecipeError,
    Setting,
    Words,
)
from quantkit.layouts.arrangement import OnRows
from quantkit.layouts.schemes import ORIGINAL, Schemes, read
from quantkit.names import Json, JsonView

Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]
#: A number of rows that is a whole number of tiles in every layout.
TILE = 128
#: Names the layout that holds every scheme.
USUAL = Words("use", Setting("layout", "compressed-tensors"))
DAMAGED = "the checkpoint is damaged or in another layout than its config states, fetch it again"
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class SideFile(NamedTuple):
    """A file that readers look for beside config.json: its name, and its contents, made from
    `quantization_config`.
    """

    name: str
    contents: Callable[[JsonView], Json] = dict


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
    shape: Shape
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

    def records(self, codes: int) -> Iterator[tuple[slice, QuantizedTensor]]:
        """Unpack some rows at a time, about `codes` codes, into one buffer: it yields their numbers
        and their record. LayoutError as `record`.
        """
        n, k = self.shape
        step = TILE * -(-codes // (TILE * k))
        buffer = torch.empty((min(n, step), k), dtype=torch.uint8, device=self.scales.device)
        for first in range(0, n, step):
            some = slice(first, min(n, first + step))
            part = buffer[: some.stop - first]
            self.fill(first, part)
            zeros = None if self.zeros is None else self.zeros[some]
            yield some, QuantizedTensor(self.scheme, part, self.scales[some], zeros)


class Layout(ABC):
    """The place of each code, scale and zero point in a checkpoint's tensors, and the form of its
    config.json.

    Other packages read all properties of a layout here, and never ask for a layout by its name.
    """

    NAME: ClassVar[str]
    #: The layout that this one varies; `convert A-to-B` takes its name for both.
    VARIANT_OF: ClassVar[str | None] = None
    #: Each `quant_method` of the configs that `read_config` reads, the written one first.
    QUANT_METHODS: ClassVar[tuple[str, ...]]
    #: The other entries of these configs, in their order in the file.
    CONFIG: ClassVar[type[msgspec.Struct]]
    #: The formats that `holds` accepts, in words.
    HOLDS: ClassVar[str] = "int4"
    #: Every suffix that the layout may store behind a module's name, such as ("B", "s").
    TENSORS: ClassVar[tuple[str, ...]]
    #: Suffixes that a file may leave out.
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    #: The suffix of the tensor with the group of each column, if a source may state any order.
    ORDER: ClassVar[str | None] = None
    #: A tensor with this suffix marks a module as packed in this layout.
    MARKER: ClassVar[str]
    #: The additional config file, or None if no reader looks for it.
    SIDE_FILE: ClassVar[SideFile | None] = None
    #: The layout's name in messages, the multiples that `n` and `k` must be, and the way out if
    #: they are not.
    TITLE: ClassVar[str]
    MULTIPLES: ClassVar[Shape]
    #: The multiples of a weight with zero points, if they differ.
    MULTIPLES_WITH_ZEROS: ClassVar[Shape | None] = None
    WAY_OUT: ClassVar[str] = Words(USUAL, ", or", Setting("skip"), "the weight")
    #: The way out for a format that `holds` does not accept.
    OTHER_FORMAT: ClassVar[str] = USUAL
    #: Weights can be stacked if each `n` is a multiple of this: then no two share a tile. None: not
    #: stacked.
    STACKING_UNIT: ClassVar[int | None] = None
    #: Whether the packed rows of a weight can be gathered one by one, as embeddings need.
    GATHERS: ClassVar[bool] = False
    #: Conditions under which another layout holds the contents of a file: on integers, and on
    #: floats.
    INTEGERS_IF: ClassVar[str | None] = None
    FLOATS_IF: ClassVar[str | None] = None
    #: The condition under which this layout holds another layout's zero points.
    ZEROS_IF: ClassVar[str | None] = None
    #: The warning before asymmetric weights are stored, or None.
    ZEROS_NOTICE: ClassVar[str | None] = None
    #: A doubt that remains about the zero points of a file, or None.
    ZEROS_IN_DOUBT: ClassVar[str | None] = None

    @abstractmethod
    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        """Give the dtype and shape of every tensor that `pack` stores for an `[n, k]` weight, by
        suffix.
        """

    @abstractmethod
    def size(self, shapes: Shapes, scheme: Scheme) -> Shape:
        """Compute `(n, k)` of a packed weight from the shapes of its stored tensors, by suffix."""

    def shape_in_words(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Convert the shape of a tensor in a file, which may hold packed words as another dtype,
        for `size`.
        """
        return shape

    @abstractmethod
    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        """Fill in the scales and zero points of empty `tensors`, by suffix, and make the function
        that packs rows of codes.

        Scheme and shape are checked, and `scales` are contiguous float16. It raises LayoutError for
        values that cannot be stored.
        """

    @abstractmethod
    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        """Read the scales and zero points of checked `tensors`, and make the function that unpacks
        rows of codes; LayoutError for values that the record does not have.
        """

    @abstractmethod
    def config(self, schemes: Schemes) -> msgspec.Struct:
        """Make the CONFIG that public readers of the layout expect."""

    @abstractmethod
    def schemes(self, config: Any) -> Schemes:
        """Read the schemes from a CONFIG. CheckpointError for an entry that cannot be read."""

    def claims(self, config: JsonView) -> bool:
        """Return True if a config with one of QUANT_METHODS is of this layout."""
        return True

    def entries(self, config: JsonView) -> JsonView:
        """Return the entries of a config under the names of CONFIG; configs of older versions may
        lack some.
        """
        return config

    def packing(
        self, scheme: Scheme, shape: Shape, scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        """Make a row-wise packer with its output tensors; scales and zero points are already filled
        in.

        It raises LayoutError for schemes and shapes that `check` refuses, and as `packer`.
        """
        self.check(scheme, *shape)
        tensors = {
            suffix: torch.empty(size, dtype=dtype, device=scales.device)
            for suffix, (dtype, size) in self.stored(scheme, *shape).items()
        }
        return Packing(tensors, self.packer(tensors, scheme, shape, half(scales), zeros))

    def unpacking(self, tensors: Tensors, scheme: Scheme) -> Unpacking:
        """Make a row-wise unpacker; raise LayoutError for wrong dtypes, shapes, scales or zero
        points.
        """
        shape = self.check_tensors(tensors, scheme)
        scales, zeros, fill = self.unpacker(tensors, scheme, shape)
        return Unpacking(scheme, shape, half(scales), zeros, fill)

    def write_config(self, schemes: Schemes) -> Json:
        """Make the `quantization_config` that public readers of the layout expect."""
        self.check_all(schemes)
        return {"quant_method": self.QUANT_METHODS[0], **msgspec.to_builtins(self.config(schemes))}

    def read_config(self, config: JsonView) -> Schemes | None:
        """Read the schemes from a `quantization_config`; None if it is of another layout.

        CheckpointError for a config of this layout that is malformed or cannot be read.
        """
        if config.get("quant_method") not in self.QUANT_METHODS or not self.claims(config):
            return None
        try:
            schemes = self.schemes(read(self.CONFIG, self.entries(config)))
            self.check_all(schemes)
        except (LayoutError, RecipeError) as error:
            raise CheckpointError(error.rule, *error.ways_out) from error
        return schemes

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
                f"{self.TITLE} holds {self.HOLDS}, not {scheme.format.name}", self.OTHER_FORMAT
            )
        is_by_row = scheme.format.is_float and not scheme.format.is_microscaled
        if is_by_row and scheme.group_size is not None:
            raise LayoutError(
                f"{self.TITLE} holds {scheme.format.name} with one scale per row",
                Words("quantize with", Setting("group_size", "channel")),
            )

    def multiples(self, scheme: Scheme) -> Shape:
        """Give the multiples that `n` and `k` of a weight of the scheme must be, groups aside."""
        return self.MULTIPLES if scheme.symmetric else self.MULTIPLES_WITH_ZEROS or self.MULTIPLES

    def check(self, scheme: Scheme, n: int, k: int) -> None:
        """Raise LayoutError unless the layout holds an `[n, k]` weight of the scheme; the message
        names a way out.
        """
        self.check_scheme(scheme)
        units = self.multiples(scheme)
        title = self.TITLE if units == self.MULTIPLES else f"{self.TITLE} with zero points"
        for letter, size, unit in zip("nk", (n, k), units, strict=True):
            if size < 1 or size % unit:
                rule = f"a multiple of {unit}" if unit > 1 else "positive"
                raise LayoutError(
                    f"{title} needs {letter} to be {rule}, and it is {size}", self.WAY_OUT
                )
        scheme.groups(k)

    def check_all(self, schemes: Schemes) -> None:
        """Raise LayoutError unless the layout holds the default scheme and every override."""
        for scheme in (schemes.default, *(scheme for _, scheme in schemes.overrides)):
            self.check_scheme(scheme)

    def check_tensors(self, tensors: Tensors, scheme: Scheme) -> Shape:
        """Compute `(n, k)` of a stored weight; raise LayoutError unless dtypes and shapes agree
        with `stored`.
        """
        n, k = self.size({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme)
        self.check(scheme, n, k)
        match(tensors, self.stored(scheme, n, k), self.OPTIONAL)
        return n, k

    def pack(self, q: QuantizedTensor) -> dict[str, Tensor]:
        """Pack a record into tensors, by suffix; raise LayoutError as `packing`."""
        packing = self.packing(q.scheme, q.shape, q.scales, q.zeros)
        packing.add(0, q.codes)
        return packing.tensors

    def unpack(self, tensors: Tensors, scheme: Scheme) -> QuantizedTensor:
        """Unpack tensors, by suffix, to a record; raise LayoutError for wrong dtypes, shapes or
        contents.
        """
        return self.unpacking(tensors, scheme).record()

    def decode_ordered(self, tensors: Tensors, scheme: Scheme, dtype: torch.dtype) -> Tensor:
        """Decode a weight `[n, k]` whose columns are in the groups that the tensor ORDER states.

        LayoutError as `unpack`, and unless each group has as many columns as the scheme says.
        """
        q = self.unpack({part: tensors[part] for part in tensors if part != self.ORDER}, scheme)
        static = static_groups(scheme, q.shape[1], q.codes.device)
        order = tensors.get(str(self.ORDER), static).int()
        if order.shape != static.shape or not torch.equal(order.sort().values, static):
            raise LayoutError(f"{self.ORDER} does not name each group for its columns", DAMAGED)
        columns = order.argsort()
        weight = torch.empty(q.shape, dtype=dtype, device=q.codes.device)
        weight[:, columns] = QuantizedTensor(
            scheme, q.codes[:, columns].contiguous(), q.scales, q.zeros
        ).dequantize(dtype)
        return weight

    def stack(self, scheme: Scheme, parts: Sequence[Tensors]) -> dict[str, Tensor]:
        """Stack the packed tensors, by suffix, of weights of one scheme and `k` to `[n + n', k]`,
        in new memory.

        Here `n` lies along the columns of every tensor, so that they are joined side by side.
        """
        return {suffix: torch.cat([part[suffix] for part in parts], 1) for suffix in parts[0]}

    def cut(self, scheme: Scheme, tensors: Tensors, n: int, rows: range) -> dict[str, Tensor]:
        """Copy the packed tensors of some rows of a stacked weight `[n, k]`: the inverse of
        `stack`.
        """
        return {
            suffix: tensor.unflatten(1, (n, -1))[:, rows.start : rows.stop].clone().flatten(1)
            for suffix, tensor in tensors.items()
        }

    def gather(self, scheme: Scheme, tensors: Tensors, rows: Tensor, k: int) -> Tensor:
        """Decode the rows with the numbers `rows`, int64 `[t]`, of a checked weight `[n, k]` to
        float32 `[t, k]`, without waiting for a GPU. Only layouts with GATHERS have it.
        """
        raise NotImplementedError

    def stored_as(self, tensors: Tensors, scheme: Scheme) -> str:
        """Name the variant of this layout that the data show; it may differ from the label in the
        config.
        """
        return self.NAME


def static_groups(scheme: Scheme, k: int, device: torch.device) -> Tensor:
    """Give the group of each column without act-order, `k // group_size`, as int32 `[k]`."""
    return torch.arange(k, dtype=torch.int32, device=device) // (scheme.group_size or k)


def half(scales: Tensor) -> Tensor:
    """Copy scales `[n, g]` to contiguous float16. Zero and negative scales are legal.

    LayoutError for NaN, infinity, and values that float16 would change (docs/layouts.md 11).
    """
    if scales.numel() and not isfinite(float(scales.abs().amax())):  # amax propagates NaN
        row, group = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise LayoutError(
            f"the scale of row {row}, group {group} is {float(scales[row, group])}",
            "quantize again",
        )
    exact = scales.to(torch.float16, copy=True, memory_format=torch.contiguous_format)
    changed = exact.float() != scales.float()
    if bool(changed.any()):
        row, group = changed.nonzero()[0].tolist()
        fits = bool(torch.isfinite(exact).all())
        rounding = Words(
            "round them (reported) by", Command("pack"), "with", Option("requantize_scales", True)
        )
        raise LayoutError(
            f"{int(changed.sum())} {dtype_name(scales.dtype)} scales are no float16 values, first "
            f"{float(scales[row, group])} at row {row}, group {group}",
            rounding if fits else "the largest is 65504, " + ORIGINAL,
        )
    return exact


def match(
    tensors: Tensors,
    stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    optional: Collection[str] = (),
) -> None:
    """Raise LayoutError unless `tensors` have the dtypes and shapes of `stored`; scales may be
    bfloat16 or float32.
    """
    for name, (dtype, shape) in stored.items():
        if name not in tensors:
            if name in optional:
                continue
            raise LayoutError(f"tensor {name!r} is missing: the checkpoint is incomplete")
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise LayoutError(
                f"tensor {name!r} must have shape {list(shape)}, it has {list(found.shape)}",
                DAMAGED,
            )
        if found.dtype != dtype and not (dtype == torch.float16 and found.dtype in _SCALES):
            was = dtype_name(found.dtype)
            raise LayoutError(f"tensor {name!r} must be {dtype_name(dtype)}, it is {was}", DAMAGED)
    for name in tensors:
        if name not in stored:
            raise LayoutError(
                f"tensor {name!r} does not belong to this scheme: it would be ignored"
            )


def matrix(shapes: Shapes, name: str) -> Shape:
    """Give both sizes of the stored matrix `name`; raise LayoutError if it is missing
    or no matrix.
    """
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise LayoutError(
            f"tensor {name!r} must be a matrix, it is {'missing' if shape is None else list(shape)}"
        )
    return shape[0], shape[1]


def codes_in_words(words: int, fmt: Format) -> int:
    """Count the codes in 32-bit `words` of a row; raise LayoutError unless they hold a multiple of
    32 codes.
    """
    if words % fmt.bits:
        raise LayoutError(f"{words} words a row are no multiple of {fmt.bits}, as {fmt.name} has")
    return words // fmt.bits * 32
