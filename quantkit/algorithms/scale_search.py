"""Choose scales: from the largest magnitude of each group, or by a search over candidates.

The search tries a table of candidates on all groups at once and takes the one with the least error.
The error is a function of the rounding errors of a group; `group_errors` makes it from the Hessian
(ALGORITHMS 4).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from quantkit.algorithms.hessian import factorize_blocks
from quantkit.algorithms.numerics import (
    Grid,
    divide,
    largest_value,
    refuse_overflow,
    round_to_codes,
    row_slices,
    stored_scale,
    working_dtype,
)
from quantkit.algorithms.scale_bounds import ZERO_BITS, Candidates, contenders
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import Scheme
from quantkit.core.threads import one_thread, side_by_side
from quantkit.errors import RecipeError, Setting, Words
from quantkit.kernels import gptq as kernels
from quantkit.names import Clip, Metric

#: From rounding errors `[m, g]`, which it may overwrite, to one number per row `[m]`.
GroupError = Callable[[Tensor], Tensor]

WIDEST_BLOCK = (
    4096  # a wider group uses only the diagonal blocks of its Hessian, _BLOCK columns each
)
_BLOCK = 128
_TEMPORARIES = 4  # arrays of candidates times groups that a search by a kernel holds
_DELTAS = 8  # arrays of candidates times columns that a search of whole rows without one may hold
_LEAST_WEIGHTS = 2**16  # of which bounds exclude candidates: fewer are tried one by one sooner
_GPU_ENTRIES = 2**27  # of candidates times weights, 0.5 GB in float32
_SQUARED_ENTRIES = 2**24  # the same for plain squares, which need no large product
_SEARCHED = 4  # parts of a usual slice of rows that a GPU searches at a time: its caches hold them
_CPU_ENTRIES = 2**19  # the same, which its last cache holds
_MATRICES = (
    7  # float32 matrices of blocks of H while they are factored: the blocks, and three in float64
)
_BATCH = 16  # blocks of columns that one batched product judges on a GPU


def choose_scales(
    weight: Tensor,
    scheme: Scheme,
    clip: Clip,
    errors: list[GroupError] | None,
    signed: bool = False,
    stored: torch.dtype | None = None,
) -> Grid:
    """Return the grid `[n, groups]` of a weight `[n, k]`.

    `errors` has one function per group; None stands for plain `mse`. `stored` is the dtype of the
    original weight, if `weight` has another. Raises the errors of `check_signed` and `fit_scales`.
    """
    check_signed(scheme, signed)
    n, k = weight.shape
    groups, dtype = scheme.groups(k), stored or weight.dtype
    scales = torch.empty(n, groups, dtype=torch.float16, device=weight.device)
    zeros = None if scheme.symmetric else torch.empty_like(scales, dtype=torch.uint8)

    def fit(rows: slice) -> None:
        parts = weight[rows].to(working_dtype(weight)).reshape(-1, groups, k // groups)
        if together is not None:
            fits = [
                fit_scales(
                    parts.flatten(0, 1), scheme, clip, dtype, together, rows.start, groups, signed
                )
            ]
        else:
            fits = [
                fit_scales(
                    parts[:, j].contiguous(), scheme, clip, dtype, error, rows.start, signed=signed
                )
                for j, error in enumerate(errors or ())
            ]
        scales[rows] = torch.stack([f.scales for f in fits], 1).view(-1, groups)
        if zeros is not None:
            zeros[rows] = torch.stack([f.zeros for f in fits if f.zeros is not None], 1).view(
                -1, groups
            )

    together: GroupError | None
    if errors is None:  # squares and their sums in a row have the same bits by many threads
        parts = 1 / torch.get_num_threads() if weight.is_cpu else _SEARCHED
        together, slices = square_error, row_slices(weight, max(1, int(parts * k)))
        for rows in slices:
            fit(rows)
        return Grid(scales, zeros)
    if (together := _row_errors(weight, errors)) is not None:
        entries = _TEMPORARIES * groups if _has_kernel(weight, k // groups) else _DELTAS * k
        slices = row_slices(weight, entries * len(_ratios(scheme.format, clip)))
    else:  # a product reads a whole block of H, which pays only for many rows
        slices = row_slices(weight, k // groups, least=512, most=2**18)
    side_by_side(weight.device, [partial(fit, rows) for rows in slices])
    return Grid(scales, zeros)


def fit_scales(
    x: Tensor,
    scheme: Scheme,
    clip: Clip,
    stored: torch.dtype,
    error: GroupError,
    row: int = 0,
    groups: int = 1,
    signed: bool = False,
) -> Grid:
    """Return the grid `[m]` for groups of weights `x` `[m, g]` (float32 or float64), the larger
    scale on ties.

    `stored` is the dtype of the original weight. NumericError, naming the row, if a base scale
    overflows float16; group `i` belongs to row `row + i // groups` (ALGORITHMS 3 and 4).
    """
    fmt = scheme.format
    if _has_bounds(x, scheme, clip, error, signed):
        return _least_square(x, scheme, clip, stored, row, groups)
    scales, zeros = _candidates(x, scheme, clip, stored, signed)
    overflow = ~(scales.abs() * largest_value(fmt, zeros) <= fmt.largest_weight)
    refuse_overflow(overflow[_ratios(fmt, clip).index(1.0)], row, groups, fmt)
    if len(scales) == 1:
        best = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
    else:
        errors = _errors(x, scales.masked_fill(overflow, torch.nan), zeros, fmt, error)
        errors.masked_fill_(overflow, torch.inf)
        if error is square_error and not x.is_cpu:
            errors = _decided(x, None, scales, zeros, errors, fmt)
        best = errors.argmin(0, keepdim=True)
    chosen = scales.gather(0, best)[0].to(torch.float16)
    return Grid(chosen, None if zeros is None else zeros.gather(0, best)[0].to(torch.uint8))


def _errors(
    x: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format, error: GroupError
) -> Tensor:
    """Return the error `[c, m]` of each candidate of `scales` and `zeros` `[c, m]` for the groups
    `x` `[m, g]`.
    """
    if isinstance(error, RowErrors) and _has_kernel(x, x.shape[1]):
        return kernels.search_errors(x, scales, zeros, error.factors, fmt)
    errors = torch.empty_like(scales)
    # Each call takes many candidates, because on a GPU it starts several kernels.
    at_once = _SQUARED_ENTRIES if error is square_error else _GPU_ENTRIES
    step = max(1, (_CPU_ENTRIES if x.is_cpu else at_once) // x.numel())
    for i in range(0, len(scales), step):
        zero = None if zeros is None else zeros[i : i + step]
        delta = _deltas(x, scales[i : i + step], zero, fmt)
        errors[i : i + step] = error(delta.view(-1, x.shape[1])).view(-1, len(x))
    return errors


def _deltas(x: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Return the rounding errors `[..., m, g]` of groups `x` `[m, g]` for scales `[..., m]`."""
    delta = x / scales.unsqueeze(-1)
    round_to_codes(delta, fmt, None if zeros is None else zeros.unsqueeze(-1))
    return torch.addcmul(x, delta, scales.unsqueeze(-1), value=-1, out=delta)


def _has_bounds(x: Tensor, scheme: Scheme, clip: Clip, error: GroupError, signed: bool) -> bool:
    """Return True if `_least_square` finds the scales, sooner than by trying all candidates."""
    fmt = scheme.format
    is_tabled = not fmt.is_microscaled and (scheme.symmetric or fmt.bits <= ZERO_BITS)
    is_plain = clip == "search" and error is square_error and not signed
    large = x.dtype == torch.float32 and x.numel() >= _LEAST_WEIGHTS
    return large and is_plain and is_tabled


def _least_square(
    x: Tensor, scheme: Scheme, clip: Clip, stored: torch.dtype, row: int, groups: int
) -> Grid:
    """Find the grid of `fit_scales` for the least squared error: only contenders are tried."""
    fmt, ratios = scheme.format, _ratios(scheme.format, clip)
    candidates, ratio = _candidates_of(x, scheme, stored), torch.tensor(ratios, device=x.device)

    def overflow(scales: Tensor, zeros: Tensor | None) -> Tensor:
        return ~(scales * largest_value(fmt, zeros) <= fmt.largest_weight)

    refuse_overflow(overflow(*candidates.of(torch.ones(1, device=x.device))), row, groups, fmt)
    at, numbers = contenders(x, candidates, tuple(ratios))
    scales, zeros = candidates.of(ratio[numbers], at)
    errors = _square_errors(x, at, scales, zeros, fmt)
    errors.masked_fill_(overflow(scales, zeros), torch.inf)
    if not x.is_cpu:
        errors = _decided(x, at, scales, zeros, errors, fmt)
    best = errors == _least(errors, at, len(x))[at]
    first = torch.full_like(candidates.base, len(ratios), dtype=torch.int64)
    first.scatter_reduce_(0, at[best], numbers[best], "amin")
    scales, zeros = candidates.of(ratio[first])
    return Grid(scales.to(torch.float16), None if zeros is None else zeros.to(torch.uint8))


def _square_errors(
    x: Tensor, at: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format
) -> Tensor:
    """Return the squared errors `[p]` of candidates `[p]` for the groups `at` `[p]` of `x`."""
    errors = torch.empty_like(scales)
    entries = _CPU_ENTRIES * torch.get_num_threads() if x.is_cpu else _SQUARED_ENTRIES
    step = max(2, entries // x.shape[1])
    for i in range(0, len(at), step):
        some = slice(i, i + step)
        zero = None if zeros is None else zeros[some]
        errors[some] = square_error(_deltas(x.index_select(0, at[some]), scales[some], zero, fmt))
    return errors


def _decided(
    x: Tensor, at: Tensor | None, scales: Tensor, zeros: Tensor | None, errors: Tensor, fmt: Format
) -> Tensor:
    """Let a CPU add up the squared `errors` of candidates of the groups `x` that are nearly the
    best; all worse become infinite. All have one shape: `[c, m]`, or `[p]` with the groups `at`.

    A GPU gives the bits of a CPU in all but sums, whose order differs. In any order a sum of g
    numbers errs by at most (g - 1) 2^-24 of it (Jeannerod and Rump, 2013), and zeros by nothing.
    """
    at = (torch.arange(len(x), device=x.device).expand_as(errors) if at is None else at).flatten()
    found, bound = errors.flatten(), (x.shape[1] + 8) * torch.finfo(x.dtype).eps
    close = found * (1 - bound) <= _least(found, at, len(x))[at] * (1 + bound)
    rivals = torch.bincount(at[close], minlength=len(x))[at]
    tied = (close & (found > 0) & (rivals > 1)).nonzero().flatten()
    groups, places = at[tied].unique(return_inverse=True)
    scale, zero = (None if y is None else y.flatten()[tied].cpu() for y in (scales, zeros))
    assert scale is not None
    with one_thread(torch.device("cpu")):
        sums = _square_errors(x[groups].cpu(), places.cpu(), scale, zero, fmt)
    found = found.masked_fill(~close, torch.inf).index_copy_(0, tied, sums.to(x.device))
    return found.view_as(errors)


def _least(errors: Tensor, at: Tensor, count: int) -> Tensor:
    """Return the least of the `errors` `[p]` of each of `count` groups."""
    return errors.new_full((count,), torch.inf).scatter_reduce_(0, at, errors, "amin")


def takes_signed(scheme: Scheme) -> bool:
    """Whether a scheme gains from signed scales: symmetric integers."""
    return scheme.symmetric and not scheme.format.is_float


def check_signed(scheme: Scheme, signed: bool) -> None:
    """Raise RecipeError if signed scales are asked of a scheme that gains nothing from them."""
    if signed and not takes_signed(scheme):
        raise RecipeError(
            Words(Setting("signed", True), f"is for symmetric integers, not for {scheme.label}"),
            Words("use", Setting("signed", False)),
            Words("use", Setting("format", "int4"), Setting("asym", False)),
        )


def group_errors(
    h: Tensor, diagonal: Tensor, groups: int, metric: Metric, dtype: torch.dtype
) -> list[GroupError] | None:
    """Return the error function of `metric` for each group of columns of `h` `[k, k]`; None for
    plain `mse`.

    `diagonal` `[k]` replaces the diagonal of `h` (damped, dead channels raised). Errors are
    relative to its mean, so that large activations cannot overflow them. NumericError if `h` is no
    covariance.
    """
    if metric == "mse":
        return None
    mean = diagonal.mean()
    g = len(diagonal) // groups
    if metric == "diag":
        return [diagonal_error(part) for part in (diagonal / mean).to(dtype).split(g)]
    size = g if g <= WIDEST_BLOCK else _BLOCK
    parts = [
        (a, min(a + size, first + g))
        for first in range(0, groups * g, g)
        for a in range(first, first + g, size)
    ]
    factors: dict[int, Tensor] = {}
    for width in {b - a for a, b in parts}:
        alike = [(a, b) for a, b in parts if b - a == width]
        blocks = torch.stack([h[a:b, a:b] for a, b in alike]) / mean
        diagonals = torch.stack([diagonal[a:b] for a, b in alike]) / mean
        found = factorize_blocks(blocks, diagonals).to(dtype)
        factors.update({a: r for (a, _), r in zip(alike, found, strict=True)})
    return [
        TriangularError([(a - first, factors[a]) for a in range(first, first + g, size)])
        for first in range(0, groups * g, g)
    ]


def search_bytes(k: int, group_sizes: Iterable[int | None]) -> int:
    """Compute the bytes of the blocks of H `[k, k]` that the metric `block` factors, for the widest
    group.
    """
    wide = max((size or WIDEST_BLOCK for size in group_sizes), default=0)
    if wide >= WIDEST_BLOCK:
        wide = k if k <= WIDEST_BLOCK else 0
    return _MATRICES * 4 * k * wide


class TriangularError:
    """The error `sum ||delta R||^2` over `blocks` on the diagonal, each a first column and an upper
    `R`.
    """

    def __init__(self, blocks: list[tuple[int, Tensor]]) -> None:
        self.blocks = blocks

    @cached_property
    def _panels(self) -> list[tuple[int, int, Tensor]]:
        """Panels of columns, so that only the upper triangle is multiplied."""
        found = []
        for first, r in self.blocks:
            width = max(32, r.shape[0] // 8)
            for a in range(0, r.shape[0], width):
                panel = r[: a + width, a : a + width]
                found.append((first, first + panel.shape[0], panel.contiguous()))
        return found

    @cached_property
    def _batches(self) -> list[tuple[int, int, Tensor]]:
        """Neighbouring blocks of equal width, up to `_BATCH` of them: the bounds of their columns,
        and every R.
        """
        found = []
        for width, group in itertools.groupby(self.blocks, lambda block: len(block[1])):
            alike = list(group)
            for i in range(0, len(alike), _BATCH):
                some = alike[i : i + _BATCH]
                found.append((some[0][0], some[-1][0] + width, torch.stack([r for _, r in some])))
        return found

    def __call__(self, delta: Tensor) -> Tensor:
        # The panels of many blocks are thousands of launches. Batched products do twice their work,
        # but do not wait.
        return (
            self.by_batches(delta)
            if delta.is_cuda and len(self.blocks) > 1
            else self.by_panels(delta)
        )

    def by_batches(self, delta: Tensor) -> Tensor:
        """Return the errors from products with whole blocks, many at a time."""
        parts = [
            (delta[:, a:b].unflatten(1, (len(factors), -1)).transpose(0, 1) @ factors)
            .square_()
            .sum((0, 2))
            for a, b, factors in self._batches
        ]
        return torch.stack(parts).sum(0)

    def by_panels(self, delta: Tensor) -> Tensor:
        """Compute the errors from products with upper triangles only."""
        parts = [(delta[:, a:b] @ panel).square_().sum(-1) for a, b, panel in self._panels]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class RowErrors:
    """The errors `||delta R||^2` of groups of whole rows, by `factors` `[groups, g, g]`, each an
    `R`.
    """

    factors: Tensor

    def __call__(self, delta: Tensor) -> Tensor:
        groups = delta.unflatten(0, (-1, len(self.factors))).transpose(0, 1)
        products: Tensor = groups @ self.factors
        return products.square_().sum(-1).T.flatten()


def _row_errors(weight: Tensor, errors: list[GroupError]) -> RowErrors | None:
    """Return the errors of all groups of `weight` `[n, k]` together on a GPU, where one group after
    the other would wait for its launches; None for wide groups.
    """
    if not weight.is_cuda or weight.shape[1] // len(errors) > max(kernels.SEARCHED):
        return None
    factors = [error.blocks[0][1] for error in errors if isinstance(error, TriangularError)]
    return RowErrors(torch.stack(factors)) if len(factors) == len(errors) else None


def _has_kernel(weight: Tensor, size: int) -> bool:
    """Return True if a kernel computes the `RowErrors` of groups of this size."""
    is_float32 = working_dtype(weight) == torch.float32
    return size in kernels.SEARCHED and is_float32 and kernels.runs_on(weight.device)


def diagonal_error(weights: Tensor) -> GroupError:
    """Return the error `sum_j weights_j delta_j^2`: it knows the size of each input channel, but no
    correlation.
    """
    return lambda delta: delta.square_() @ weights


def square_error(delta: Tensor) -> Tensor:
    """Return the error `sum_j delta_j^2`, which needs no calibration."""
    with one_thread(delta.device) if len(delta) == 1 else nullcontext():  # one sum is shared out
        return delta.square_().sum(-1)


def _ratios(fmt: Format, clip: Clip) -> list[float]:
    """Return candidate scales relative to the base scale, largest first (ALGORITHMS 4)."""
    if clip == "none":
        return [1.0]
    if fmt.is_microscaled:  # every scale from twice to half the base scale
        steps = fmt.scale_steps
        return [2 ** (i / steps) for i in range(steps, -steps - 1, -1)]
    return (
        [2 ** (i / 16) for i in range(16, -9, -1)]
        if fmt.is_float
        else [1 - i / 100 for i in range(76)]
    )


def _candidates(
    x: Tensor, scheme: Scheme, clip: Clip, stored: torch.dtype, signed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return candidate scales `[c, m]`, float16 values in the dtype of `x`, and zeros for the
    groups `x` `[m, g]`.
    """
    fmt = scheme.format
    ratios = torch.tensor(_ratios(fmt, clip), dtype=x.dtype, device=x.device).unsqueeze(-1)
    if signed:
        low, high = x.aminmax(dim=-1)
        base = divide(
            torch.where(high > -low, -high, -low), fmt.largest
        )  # the extreme weight gets the code of -8
        scales = ratios * base
        if (
            clip == "search"
        ):  # of weights that are all +c, -c or 0, both extremes are exact with -7 and 7
            even = ((x.abs() == high.unsqueeze(-1)) | (x == 0)).all(-1) & (high == -low)
            scales = torch.cat(
                [scales, torch.where(even, divide(high, fmt.largest - 1), base).unsqueeze(0)]
            )
        return stored_scale(scales, stored, fmt), None
    return _candidates_of(x, scheme, stored).of(ratios)


def _candidates_of(x: Tensor, scheme: Scheme, stored: torch.dtype) -> Candidates:
    """Return the candidates of groups `x` `[m, g]` with unsigned scales."""
    fmt = scheme.format
    if scheme.symmetric:
        return Candidates(fmt, divide(x.abs().amax(-1), fmt.absmax), None, stored)
    low, high = x.amin(-1).clamp_(max=0), x.amax(-1).clamp_(min=0)
    return Candidates(fmt, divide(high - low, 2**fmt.bits - 1), low, stored)
