"""The order of a matrix in memory, and its codes packed into 32-bit words: an `Arrangement`, or one
stream of bits for each row.

`Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")` names the axes of rows and
columns (slow to fast), and their order in memory. The inverse is derived, so this line gives both
directions.

A stream of bits has no gaps (docs/layouts.md 9 and 9b). Code `j` of a row has the bits from `j *
bits` on, in little-endian int32 words. The bits after the last code are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.core.formats import aligned
from quantkit.core.quantized_tensor import Scheme, Shape
from quantkit.errors import LayoutError

#: Codes that a CPU packs or unpacks at a time, so that intermediate tensors stay in its cache, and
#: a GPU, so that they are few bytes.
BLOCK, GPU_BLOCK = 1 << 20, 1 << 26

#: Packs or unpacks some rows of a matrix, given the number of the first one.
OnRows = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Arrangement:
    """A permutation of a matrix given by axis names.

    The first axis of the rows and of the columns has no size: it follows from the other sizes.
    `reverse` names axes in descending order; for packed codes they must lie within a word.
    """

    rows: str
    cols: str
    order: str
    reverse: str = ""

    def __call__(self, matrix: Tensor) -> Tensor:
        """Copy the entries of `matrix` `[rows, cols]` in memory order, flat and contiguous."""
        split = matrix.reshape(self._sizes(*matrix.shape))
        return split.flip(self._reversed).permute(self._permutation).reshape(-1)

    def inverse(self, flat: Tensor, shape: Shape) -> Tensor:
        """Copy the entries of `flat`, in memory order, to a matrix of `shape` `[rows, cols]`."""
        sizes = self._sizes(*shape)
        if flat.numel() != prod(sizes):
            raise LayoutError(
                f"{flat.numel()} packed entries do not fill a {shape[0]} x {shape[1]} matrix"
            )
        arranged = flat.reshape([sizes[axis] for axis in self._permutation])
        return arranged.permute(_inverse(self._permutation)).flip(self._reversed).reshape(shape)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Pack uint8 `codes` `[rows, cols]` of `bits` each in memory order into flat int32 words,
        the first lowest.
        """
        words = torch.empty([codes.numel() * bits // 32], dtype=torch.int32, device=codes.device)
        self.packer(words, bits, (len(codes), codes.shape[1]))(0, codes)
        return words

    def unpack(self, words: Tensor, bits: int, shape: Shape) -> Tensor:
        """Unpack int32 `words` (any shape) to uint8 codes `[rows, cols]` of `shape`, the inverse of
        `pack`.
        """
        codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
        self.unpacker(words, bits, shape)(0, codes)
        return codes

    def packer(self, words: Tensor, bits: int, shape: Shape) -> OnRows:
        """Make a function that packs uint8 rows `[some, cols]` of a matrix of `shape` into its flat
        int32 `words`.

        The number of rows and that of the first row must be multiples of the product of the row
        axes' sizes. The codes of a word are joined pair by pair while all other axes still have
        their order in the matrix. Then only words are permuted, which are fewer than codes.
        """
        split = _split_words(self, bits, shape)
        split.check(words)

        def pack_rows(first: int, codes: Tensor) -> None:
            for part, out in split.blocks(first, aligned(codes), words):
                parts, width = part.reshape(-1), bits
                for stride, reverse in split.strides(part.shape):
                    parts = _join(parts, stride, width, reverse)
                    width *= 2
                out.copy_(split.in_memory_order(parts.view(torch.int32), part.shape))

        return pack_rows

    def unpacker(self, words: Tensor, bits: int, shape: Shape) -> OnRows:
        """Make a function that fills contiguous uint8 rows from `words` (any shape): the inverse of
        `packer`.
        """
        split, words = _split_words(self, bits, shape), aligned(words).view(-1)
        split.check(words)

        def unpack_rows(first: int, codes: Tensor) -> None:
            for part, some in split.blocks(first, codes, words):
                parts, width = some.permute(_inverse(split.outer)).contiguous().view(-1), 32
                for stride, reverse in reversed(split.strides(part.shape)):
                    width //= 2
                    parts = _separate(parts, stride, width, reverse)
                part.copy_(parts.view(part.shape))

        return unpack_rows

    @cached_property
    def _names(self) -> list[str]:
        return [axis.split(":")[0] for axis in (self.rows + " " + self.cols).split()]

    @cached_property
    def _permutation(self) -> list[int]:
        return [self._names.index(name) for name in self.order.split()]

    @cached_property
    def _reversed(self) -> list[int]:
        return [self._names.index(name) for name in self.reverse.split()]

    def _sizes(self, rows: int, cols: int) -> list[int]:
        sizes = []
        for line, total in ((self.rows, rows), (self.cols, cols)):
            inner = [int(axis.split(":")[1]) for axis in line.split()[1:]]
            if total % prod(inner):
                raise LayoutError(
                    f"{total} is not a multiple of {prod(inner)}, as the layout needs"
                )
            sizes += [total // prod(inner), *inner]
        return sizes


@dataclass(frozen=True, eq=False)
class _Split:
    """The axes of a packed matrix, of `sizes`: `inner` lie within a word, fastest first, `outer`
    are the others.

    Axes within a word have size 2.
    """

    order: Arrangement
    bits: int
    sizes: list[int]
    inner: list[int]
    outer: list[int]

    def check(self, words: Tensor) -> None:
        """Raise LayoutError unless the number of `words` fits the matrix."""
        if words.numel() * 32 != prod(self.sizes) * self.bits:
            rows = len(self.order.rows.split())
            n, k = prod(self.sizes[:rows]), prod(self.sizes[rows:])
            raise LayoutError(f"{words.numel()} packed words do not fill a {n} x {k} matrix")

    def blocks(self, first: int, codes: Tensor, words: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of rows of `codes`, split into axes, with the words of each, split into
        outer axes.
        """
        split, axis = codes.view(self.order._sizes(*codes.shape)), self.outer.index(0)
        count = split.shape[0]
        start = first * count // len(codes)
        own = words.view([self.sizes[a] for a in self.outer]).narrow(axis, start, count)
        rows = max(1, _block(codes) * count // max(1, codes.numel()))
        return zip(split.split(rows), own.split(rows, axis), strict=True)

    def in_memory_order(self, words: Tensor, sizes: torch.Size) -> Tensor:
        """View flat `words` in the order of the matrix as outer axes in memory order; all axes have
        `sizes`.
        """
        axes = sorted(self.outer)
        return words.view([sizes[axis] for axis in axes]).permute(
            [axes.index(axis) for axis in self.outer]
        )

    def strides(self, sizes: torch.Size) -> list[tuple[int, bool]]:
        """Give the stride, in parts, of each axis within a word when it is joined, and if it is
        reversed.
        """
        behind = [
            [axis for axis in range(last + 1, len(sizes)) if axis not in self.inner[:i]]
            for i, last in enumerate(self.inner)
        ]
        return [
            (prod(sizes[b] for b in axes), axis in self.order._reversed)
            for axis, axes in zip(self.inner, behind, strict=True)
        ]


@lru_cache(maxsize=64)
def _split_words(order: Arrangement, bits: int, shape: Shape) -> _Split:
    """Find the axes within a word; raise LayoutError if the axes do not divide `shape`."""
    order, inner = _halved(order, bits)
    outer = [axis for axis in order._permutation if axis not in inner]
    assert not set(order._reversed) & set(outer), "only axes within a word may be reversed"
    return _Split(order, bits, order._sizes(*shape), inner, outer)


@lru_cache
def _halved(order: Arrangement, bits: int) -> tuple[Arrangement, list[int]]:
    """Split every axis within a word into axes of size 2; return the same order, and these axes,
    fastest first.
    """
    inner: list[int] = []
    sizes = dict(axis.split(":") for axis in f"{order.rows} {order.cols}".split() if ":" in axis)
    for name in reversed(order.order.split()):
        if bits << len(inner) == 32:
            break
        size = int(sizes[name])
        if size > 2:
            two = {f"{name}:{size}": f"{name}':{size // 2} {name}:2", name: f"{name}' {name}"}
            lines = (order.rows, order.cols, order.order, order.reverse)
            return _halved(
                Arrangement(*(" ".join(two.get(a, a) for a in line.split()) for line in lines)),
                bits,
            )
        inner.append(order._names.index(name))
    return order, inner


def blocks(k: int, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of all `matrices`, each of `k` codes, a block at a time."""
    rows = max(1, _block(matrices[0]) // max(1, k))
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)


def _block(codes: Tensor) -> int:
    return BLOCK if codes.device.type == "cpu" else GPU_BLOCK


def _inverse(permutation: list[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def _join(parts: Tensor, stride: int, width: int, reverse: bool) -> Tensor:
    """Join flat `parts` `[..., 2, stride]` as `low | high << width`; `reverse` swaps
    low and high.
    """
    if stride == 1 and not reverse:
        if width >= 8:
            return parts.view(_integer(2 * width))
        pairs = parts.view(torch.int16)
        return (pairs >> (8 - width)).bitwise_or_(pairs).to(torch.uint8)
    lanes = _lanes(stride, width)
    low, high = parts.view(lanes).view(-1, 2, stride * parts.itemsize // lanes.itemsize).unbind(1)
    low, high = (high, low) if reverse else (low, high)
    if width >= 8:
        wide = _integer(2 * width)
        low, high = low.to(wide).bitwise_and_((1 << width) - 1), high.to(wide)
    return torch.add(low, high, alpha=1 << width).view(-1).view(_integer(2 * width))


def _separate(parts: Tensor, stride: int, width: int, reverse: bool) -> Tensor:
    """Separate flat `parts` `[..., stride]` into `[..., 2, stride]` of `width` bits each: the
    inverse of `_join`.
    """
    narrow = _integer(width)
    if stride == 1 and not reverse:
        if width >= 8:
            return parts.view(narrow)
        pairs = parts.to(torch.int16)
        return (
            (pairs << (8 - width))
            .bitwise_or_(pairs)
            .bitwise_and_(_mask(width, torch.int16))
            .view(torch.uint8)
        )
    if width >= 8:
        pair = parts.to(narrow), (parts >> width).to(narrow)
    else:
        parts = parts.view(_lanes(stride, width))
        pair, stride = (parts, parts >> width), stride // parts.itemsize
    both = torch.stack([half.view(-1, stride) for half in (reversed(pair) if reverse else pair)], 1)
    return (
        (both if width >= 8 else both.bitwise_and_(_mask(width, both.dtype))).view(-1).view(narrow)
    )


def _integer(bits: int) -> torch.dtype:
    return torch.uint8 if bits <= 8 else torch.int16 if bits == 16 else torch.int32


def _lanes(stride: int, width: int) -> torch.dtype:
    """Choose the integer type to join parts in: parts that share bytes are joined eight at a time
    if possible.
    """
    return _integer(width) if width >= 8 or stride % 8 else torch.int64


def _mask(width: int, dtype: torch.dtype = torch.int64, every: int = 8) -> int:
    """Set the lowest `width` bits of every `every` bits of an integer."""
    return sum(((1 << width) - 1) << at for at in range(0, 8 * dtype.itemsize, every))


def stream_words(k: int, bits: int) -> int:
    """Count the words of a row of `k` codes."""
    return -(-k * bits // 32)


def stream_packer(words: Tensor, bits: int, k: int) -> OnRows:
    """Make a function that packs uint8 rows `[some, k]` into contiguous int32 `words` `[n,
    stream_words(k)]`.
    """
    whole = _whole(k, bits)

    def pack_rows(first: int, codes: Tensor) -> None:
        out = words[first : first + len(codes)]
        padded = out if whole == k else words.new_empty(len(codes), whole * bits // 32)
        _pack(codes if whole == k else pad(codes, (0, whole - k)), padded, bits)
        if whole != k:
            out.copy_(padded[:, : out.shape[1]])

    return pack_rows


def stream_unpacker(words: Tensor, bits: int, k: int, name: str | None = None) -> OnRows:
    """Make a function that fills contiguous uint8 rows `[some, k]` from `words`: the inverse of
    `stream_packer`.

    With the `name` of the tensor it raises LayoutError if bits after the last code are not 0.
    """
    whole, words = _whole(k, bits), words.contiguous()

    def unpack_rows(first: int, codes: Tensor) -> None:
        some = words[first : first + len(codes)]
        if whole == k:
            _unpack(some, codes, bits)
            return
        padded = codes.new_empty(len(codes), whole)
        _unpack(pad(some, (0, whole * bits // 32 - some.shape[1])), padded, bits)
        if name is not None and bool(padded[:, k:].any()):
            raise LayoutError(
                f"{name!r} holds codes past its true shape, where it must be 0: the file is damaged"
            )
        codes.copy_(padded[:, :k])

    return unpack_rows


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Pack zero points uint8 `[n, g]` down their columns into int32 `[stream_words(n), g]`."""
    n, groups = zeros.shape
    words = torch.empty((groups, stream_words(n, bits)), dtype=torch.int32, device=zeros.device)
    stream_packer(words, bits, n)(0, zeros.t().contiguous())
    return words.t().clone(memory_format=torch.contiguous_format)


def unpack_zeros(words: Tensor, bits: int, n: int, name: str) -> Tensor:
    """Unpack zero points uint8 `[n, g]`, the inverse of `pack_zeros`."""
    zeros = torch.empty((words.shape[1], n), dtype=torch.uint8, device=words.device)
    stream_unpacker(words.t(), bits, n, name)(0, zeros)
    return zeros.t().clone(memory_format=torch.contiguous_format)


def decoded_rows(
    scheme: Scheme, rows: Tensor, k: int, words: Tensor, scales: Tensor, zeros: Tensor | None
) -> Tensor:
    """Decode the rows with the numbers `rows`, int64 `[t]`, of a weight `[n, k]` to float32 `[t,
    k]`, without waiting for a GPU.

    `words` are those of `stream_packer`, `scales` are `[n, g]`, and `zeros` those of `pack_zeros`.
    """
    fmt, found = scheme.format, words.index_select(0, rows)
    codes = torch.empty((len(rows), k), dtype=torch.uint8, device=words.device)
    stream_unpacker(found, fmt.bits, k)(0, codes)
    of_rows = scales.index_select(0, rows).float()
    values = fmt.decode(codes).view(*of_rows.shape, -1)
    if zeros is not None:
        at = rows * fmt.bits  # of a bit; a zero point may lie in two words
        low = zeros.index_select(0, at // 32).long() & 0xFFFFFFFF
        high = zeros.index_select(0, (at // 32 + 1).clamp_(max=len(zeros) - 1)).long()
        pair = (high << 32).bitwise_or_(low) >> (at % 32).unsqueeze(1)
        values -= fmt.decode(pair.bitwise_and_(2**fmt.bits - 1)).unsqueeze(-1)
    return values.mul_(of_rows.unsqueeze(-1)).view(codes.shape)


def _whole(k: int, bits: int) -> int:
    """Round `k` up to a number of codes that fills whole words."""
    unit = 32 // gcd(32, bits)
    return -(-k // unit) * unit


def _pack(codes: Tensor, words: Tensor, bits: int) -> None:
    """Pack rows of whole words: eight codes, in one 64-bit word, become `bits` bytes."""
    if 32 % bits == 0:
        _order(bits).packer(words.view(-1), bits, (len(codes), codes.shape[1]))(0, codes)
        return
    unit = _unit(bits)
    for some, out in blocks(codes.shape[1], codes, words):
        wide = aligned(some.reshape(-1)).view(torch.int64)
        for lane in (8, 16, 32):
            width = lane * bits // 8
            low = _mask(width, every=2 * lane)
            high = (wide >> (lane - width)).bitwise_and_(low << width)
            wide = high.bitwise_or_(wide & low)
        stream = out.view(-1).view(unit).view(wide.numel(), -1)
        stream.copy_(wide.view(unit).view(wide.numel(), -1)[:, : stream.shape[1]])


def _unpack(words: Tensor, codes: Tensor, bits: int) -> None:
    """Unpack rows of whole words into contiguous `codes`: the inverse of `_pack`."""
    if 32 % bits == 0:
        _order(bits).unpacker(words, bits, (len(codes), codes.shape[1]))(0, codes)
        return
    unit = _unit(bits)
    for some, out in blocks(codes.shape[1], words, codes):
        wide = torch.empty(out.numel() // 8, dtype=torch.int64, device=out.device)
        stream = some.reshape(-1).view(unit).view(wide.numel(), -1)
        wide.view(unit).view(wide.numel(), -1)[:, : stream.shape[1]] = stream
        for lane in (32, 16, 8):  # the first step drops bits that were not written
            width = lane * bits // 8
            low = _mask(width, every=2 * lane)
            high = (wide & (low << width)).bitwise_left_shift_(lane - width)
            wide = wide.bitwise_and_(low).bitwise_or_(high)
        out.copy_(wide.view(torch.uint8).view(out.shape))


def _order(bits: int) -> Arrangement:
    """Give the order of codes that do not straddle words."""
    return Arrangement("N", f"K i:{32 // bits}", "N K i")


def _unit(bits: int) -> torch.dtype:
    """Choose the integer type to copy `bits` bytes in: wider types are copied faster."""
    return torch.uint8 if bits % 2 else torch.int16
