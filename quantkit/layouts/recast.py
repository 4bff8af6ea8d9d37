"""Recast a record: the same values in another scheme or shape, for a layout that does not hold its
own.

`target` chooses scheme and shape from headers only. `recast` changes the data; values stay the same
bit for bit, or it names the place that forbids it (docs/layouts.md 11). Nothing is rounded here;
`nearest` only chooses the scheme to round to.

`conversions` is the table of conversions between layouts, with their conditions: `convert --list`
and docs/conversions.md. Each scheme of a layout is tried on the other one with `target`, and shapes
with `check`. Only conditions on the contents of a file are stated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.core.formats import FORMATS, Format
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme, Sparsity
from quantkit.errors import LayoutError, RecipeError
from quantkit.layouts import LAYOUTS, Layout

#: A scheme and the shape `[n, k]` that is stored in it.
Target = tuple[Scheme, tuple[int, int]]

#: Group sizes that scales can be repeated for, the coarsest first.
GROUP_SIZES = (128, 64, 32)
RECENTRED = "asymmetric weights fit around zero points of 8"
PRUNED = "dense weights really are 2:4"

SPARSITIES: tuple[Sparsity, ...] = (None, "2:4")
SIZES = (32, 64, 128, 256, None)
SCHEMES = [
    Scheme(fmt, group_size, symmetric, sparsity)
    for fmt, sparsity in product(FORMATS.values(), SPARSITIES)
    for group_size in ([fmt.group_size] if fmt.is_microscaled else SIZES)
    for symmetric in (True, False)
    if (symmetric and sparsity is None) or (not fmt.is_float and (symmetric or sparsity is None))
]
SIZE = 1024


def broken_rule(layout: Layout, scheme: Scheme, n: int, k: int) -> str | None:
    """Give the rule of a layout that a weight breaks, without the way out; None if it fits."""
    try:
        layout.check(scheme, n, k)
    except LayoutError as error:
        return error.rule
    return None


def target(layout: Layout, scheme: Scheme, n: int, k: int, *, pad: bool = False) -> Target | None:
    """Choose the nearest scheme and shape that a layout can hold for an `[n, k]` weight of a
    scheme, if any.

    Whether the data allow it is found by `recast`. With `pad` the shape may be larger
    (`padded_shape`).
    """
    return _first_that_fits(layout, list(candidates(scheme)), n, k, pad)


def nearest(layout: Layout, scheme: Scheme, n: int, k: int, *, pad: bool = False) -> Target | None:
    """Choose the scheme to round a decoded weight to if `target` or the data refuse: lossy, and
    only on request.

    The format stays if the layout holds it. Groups of 128 are preferred to smaller groups, and any
    group to one scale per row.
    """
    own = scheme.format
    formats = sorted(
        FORMATS.values(), key=lambda f: (f != own, f.is_float != own.is_float, -f.bits)
    )
    sparsities: list[Sparsity] = [scheme.sparsity, None, "2:4"]
    found = [
        Scheme(fmt, size, symmetric, sparsity)
        for fmt, sparsity, symmetric in product(formats, sparsities, (scheme.symmetric, True))
        if (symmetric or not fmt.is_float)
        and (sparsity is None or (symmetric and not fmt.is_float))
        for size in (*([scheme.group_size] if fmt == own else []), *GROUP_SIZES, None)
        if fmt.takes(size)
    ]
    return _first_that_fits(layout, found, n, k, pad)


def fitting(
    layout: Layout, scheme: Scheme, n: int, k: int, *, pad: bool = False
) -> tuple[int, int] | None:
    """Give the shape of an `[n, k]` weight in a layout, larger only with `pad`; None if there is
    none.
    """
    if broken_rule(layout, scheme, n, k) is None:
        return n, k
    return padded_shape(layout, scheme, n, k) if pad else None


def padded_shape(layout: Layout, scheme: Scheme, n: int, k: int) -> tuple[int, int] | None:
    """Find the smallest shape of at least `[n, k]` that a layout holds in a scheme; None if there
    is none.
    """
    n_unit, k_unit = layout.multiples(scheme)
    k_unit = lcm(k_unit, scheme.padded_k(1))
    found = -(-max(n, 1) // n_unit) * n_unit, -(-max(k, 1) // k_unit) * k_unit
    return found if broken_rule(layout, scheme, *found) is None else None


def recast(q: QuantizedTensor, scheme: Scheme, shape: tuple[int, int]) -> QuantizedTensor:
    """Recast a record to `scheme` and `shape` with the same values bit for bit, and zeros past
    them.

    A smaller shape drops rows and columns, which must be zeros. LayoutError, with a count and the
    first place, for codes that do not fit around a zero point of 8, or groups of four with more
    than two values.
    """
    if scheme == q.scheme and shape == q.shape:
        return q
    if scheme not in candidates(q.scheme):
        raise LayoutError(
            f"{q.scheme.label} cannot be stated as {scheme.label}: values would change"
        )
    if scheme.format != q.scheme.format:
        table = scheme.format.encode(torch.tensor(q.scheme.format.values)).to(q.codes.device)
        zeros = None if q.zeros is None else table[q.zeros.int()]
        q = QuantizedTensor(
            replace(q.scheme, format=scheme.format),
            table.index_select(0, q.codes.reshape(-1).int()).view(q.shape),
            q.scales,
            zeros,
        )
    if scheme.symmetric and q.zeros is not None:
        q = _recentred(q, q.zeros)
    if q.scheme.group_size is None:  # the scale of a row holds for its new columns too
        q = _reshaped(q, *shape)
    if scheme.group_size != q.scheme.group_size:
        # Smaller groups: each scale and zero point is repeated.
        size = scheme.group_size
        times = q.shape[1] // q.scales.shape[1] // (size or q.shape[1])
        scales = q.scales.repeat_interleave(times, 1)
        zeros = None if q.zeros is None else q.zeros.repeat_interleave(times, 1)
        q = QuantizedTensor(replace(q.scheme, group_size=size), q.codes, scales, zeros)
    q = _reshaped(q, *shape)
    return q if scheme == q.scheme else QuantizedTensor(scheme, q.codes, q.scales, q.zeros)


def check_padding(q: QuantizedTensor, n: int, k: int) -> None:
    """Raise LayoutError unless everything past `[n, k]` decodes to zero."""
    values = q.dequantize() != 0
    values[:n, :k] = False
    if bool(values.any()):
        row, column = values.nonzero()[0].tolist()
        raise LayoutError(
            f"{int(values.sum())} weights past its true shape [{n}, {k}] are not zero, first row "
            f"{row}, column {column}: the file is damaged, or its 'padded' entry is wrong"
        )


def candidates(scheme: Scheme) -> Iterator[Scheme]:
    """Yield every scheme that may hold the values of another: itself first, then by number of
    changes.
    """
    values = set(scheme.format.values)
    wider = [
        f
        for f in FORMATS.values()
        if f.is_float == scheme.format.is_float and values < set(f.values)
    ]
    formats: list[Format] = [scheme.format, *wider]
    size = scheme.group_size
    sizes = [size, *(g for g in GROUP_SIZES if size is None or (size > g and size % g == 0))]
    sparsities: list[Sparsity] = (
        [scheme.sparsity] if scheme.sparsity or scheme.format.is_float else [None, "2:4"]
    )
    for sparsity, symmetric, fmt, g in product(
        sparsities, dict.fromkeys((scheme.symmetric, True)), formats, sizes
    ):
        if (symmetric or sparsity is None) and fmt.takes(g):
            yield Scheme(fmt, g, symmetric, sparsity)


def _first_that_fits(
    layout: Layout, schemes: list[Scheme], n: int, k: int, pad: bool
) -> Target | None:
    for padding in (False, True) if pad else (False,):
        for scheme in schemes:
            shape = fitting(layout, scheme, n, k, pad=padding)
            if shape is not None:
                return scheme, shape
    return None


def _recentred(q: QuantizedTensor, zeros: Tensor) -> QuantizedTensor:
    """Move zero points to 8, which makes a record symmetric; LayoutError unless `0 <= code - zero
    point + 8 <= 15`.
    """
    n, k = q.shape
    g = zeros.shape[1]
    codes = q.codes.view(n, g, -1).short().sub_(zeros.unsqueeze(-1)).add_(q.scheme.format.zero_code)
    outside = (codes < 0) | (codes >= 2**q.scheme.format.bits)
    bad = outside.any(-1)
    if bool(bad.any()):
        row, group = bad.nonzero()[0].tolist()
        column = group * (k // g) + int(outside[row, group].nonzero()[0])
        raise LayoutError(
            f"{int(bad.sum())} of {bad.numel()} zero points cannot be re-centred to 8: first row "
            f"{row}, group {group}, zero point {int(zeros[row, group])} and code "
            f"{int(q.codes[row, column])} of column {column}"
        )
    return QuantizedTensor(
        replace(q.scheme, symmetric=True), codes.to(torch.uint8).view(n, k), q.scales
    )


def _reshaped(q: QuantizedTensor, n: int, k: int) -> QuantizedTensor:
    """Cut a record, or pad it with zeros, to `[n, k]`; new groups have scales of 1 and zero points
    of 8.
    """
    if q.shape == (n, k):
        return q
    if q.shape[0] > n or q.shape[1] > k:
        check_padding(q, min(n, q.shape[0]), min(k, q.shape[1]))
    groups = q.scheme.groups(k)
    zero, added = (
        q.scheme.format.zero_code,
        (0, max(0, groups - q.scales.shape[1]), 0, max(0, n - q.shape[0])),
    )
    codes = pad(q.codes[:n, :k], (0, max(0, k - q.shape[1]), 0, max(0, n - q.shape[0])), value=zero)
    scales = pad(q.scales[:n, :groups], added, value=1.0)
    zeros = None if q.zeros is None else pad(q.zeros[:n, :groups], added, value=zero)
    if zeros is not None and groups == 1:
        codes[:, q.shape[1] :] = zeros
    return QuantizedTensor(q.scheme, codes.contiguous(), scales.contiguous(), zeros)


@dataclass(frozen=True)
class Conversion:
    """The conversion from a layout to another.

    `lossless` is True, None under `condition`, or False because of `condition`. `restated` lists
    the schemes that are recast, with their new schemes.
    """

    source: str
    target: str
    lossless: bool | None
    condition: str | None
    restated: str | None = None

    @property
    def verdict(self) -> str:
        if self.lossless is False:
            return f"not possible because {self.condition}"
        return f"lossless when {self.condition}" if self.condition else "lossless"


def conversions() -> list[Conversion]:
    """List the conversions between all pairs of different layouts."""
    return [_conversion(a, b) for a in LAYOUTS.values() for b in LAYOUTS.values() if a is not b]


def parse(pair: str) -> tuple[str, str]:
    """Split `A-to-B` into source and target; RecipeError unless both are layouts (`gptq` stands for
    both versions).
    """
    source, _, target = pair.partition("-to-")
    sources = {*LAYOUTS, *(layout.family for layout in LAYOUTS.values())}
    if source not in sources or target not in LAYOUTS:
        raise RecipeError(
            f"{pair!r} is no conversion", f"write it A-to-B with layouts among {', '.join(LAYOUTS)}"
        )
    return source, target


def _conversion(a: Layout, b: Layout) -> Conversion:
    held = [scheme for scheme in SCHEMES if broken_rule(a, scheme, SIZE, SIZE) is None]
    asked = ((scheme, target(b, scheme, SIZE, SIZE)) for scheme in held)
    found = {scheme: place[0] for scheme, place in asked if place is not None}
    if not found:
        return Conversion(a.NAME, b.NAME, False, broken_rule(b, held[0], SIZE, SIZE))
    conditions = [
        *_scheme_conditions(held, list(found)),
        *_shape_conditions(a, b, found),
        *_data_conditions(a, b, found),
    ]
    changes = dict.fromkeys(
        change for scheme, now in found.items() for change in _changes(scheme, now)
    )
    condition, restated = "; ".join(conditions) or None, ", ".join(changes) or None
    return Conversion(a.NAME, b.NAME, None if conditions else True, condition, restated)


def _scheme_conditions(held: list[Scheme], found: list[Scheme]) -> list[str]:
    """Name the formats and group sizes that the target takes, if the source holds more."""
    formats = list(dict.fromkeys(scheme.format.name for scheme in found))
    within = [scheme for scheme in held if scheme.format.name in formats]
    sizes = list(dict.fromkeys(scheme.group_size for scheme in found))
    assert found == [scheme for scheme in within if scheme.group_size in sizes], (
        "another rule than format and size"
    )
    lines = [f"the format is {_either(formats)}"] if len(within) < len(held) else []
    some = len(found) < len(within)
    return lines + (
        [f"the group size is {_either(str(size or 'channel') for size in sizes)}"] if some else []
    )


def _shape_conditions(a: Layout, b: Layout, found: dict[Scheme, Scheme]) -> list[str]:
    """Name the multiples that the target needs and the source does not, as one line."""
    scheme = next((scheme for scheme in found if scheme.group_size is None), next(iter(found)))
    lines = []
    for letter in ("n", "k"):
        shapes = [(2**p, SIZE) if letter == "n" else (SIZE, 2**p) for p in range(11)]
        needed_before = next(shape for shape in shapes if broken_rule(a, scheme, *shape) is None)
        needed = next(shape for shape in shapes if target(b, scheme, *shape) is not None)
        if min(needed) > min(needed_before):
            lines.append(f"{letter} % {min(needed)} == 0")
    return [f"{' and '.join(lines)} (or --pad)"] if lines else []


def _data_conditions(a: Layout, b: Layout, found: dict[Scheme, Scheme]) -> list[str]:
    """List the conditions on values, which no header shows."""
    integers, floats = (
        any(scheme.format.is_float is kind for scheme in found) for kind in (False, True)
    )
    asymmetric = any(not now.symmetric for now in found.values())
    lines = [
        a.INTEGERS_IF if integers else None,
        a.FLOATS_IF if floats else None,
        RECENTRED
        if any(scheme.symmetric != now.symmetric for scheme, now in found.items())
        else None,
        PRUNED if any(scheme.sparsity != now.sparsity for scheme, now in found.items()) else None,
        b.ZEROS_IF if asymmetric and a.ZEROS_IF is None else None,
    ]
    return [line for line in lines if line is not None]


def _changes(scheme: Scheme, now: Scheme) -> list[str]:
    """List the properties that change when one scheme is recast to another."""
    one, other = (
        (
            s.format.name,
            str(s.group_size or "channel"),
            s.sparsity or "dense",
            "sym" if s.symmetric else "asym",
        )
        for s in (scheme, now)
    )
    return [f"{a} as {b}" for a, b in zip(one, other, strict=True) if a != b]


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
