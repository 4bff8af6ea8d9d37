"""The sweep of GPTQ and SparseGPT: round column after column; each later column makes up for the
errors so far.

`R` is upper triangular with `R R^T = H + damping`, and `V = R / diag(R)`. The target of column j is
`t_j = w_j + sum_{i<j} D_i V_ij` for the errors `D` so far. The column is rounded to its target, and
its own error joins `D`. The codes equal the published loop's, from one factorisation and without
updating the weights (ALGORITHMS 5.2). Everything is transposed, `[k, n]`, so that a column of the
weight is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.hessian import Factor
from quantkit.algorithms.numerics import (
    Grid,
    Terms,
    part_of,
    product,
    product_dtype,
    renew,
    round_to_codes,
    terms,
    working_dtype,
)
from quantkit.algorithms.options import Options
from quantkit.algorithms.scale_search import (
    GroupError,
    TriangularError,
    choose_scales,
    diagonal_error,
    square_error,
)
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.core.sparsity import QUAD, best_two, quads
from quantkit.core.threads import one_thread, side_by_side
from quantkit.kernels import gptq as kernels
from quantkit.names import Metric

_ROWS = 1024  # rows of a weight whose targets come from one product on a CPU
_ENCODED = 1024  # columns whose codes are made together: few launches, and small temporaries
_STEP = 32  # columns corrected one by one before one product corrects the rest of their block


class Pattern(NamedTuple):
    """Mark the entries of a 2:4 weight that stay: `mask` bool `[k, n]`, in processing order,
    columns in groups of four.

    With `r` and `ahead` the sweep fills in `mask` as each group begins. `r` `[k, 1]` is R's
    diagonal. `ahead` `[k, 4]` says how `t - w` of a group's columns, times that, affects its
    later columns. A target assumes that the earlier columns of its group are done without error; a
    score assumes that they are not done yet.
    """

    mask: Tensor
    r: Tensor | None = None
    ahead: Tensor | None = None

    def part(self, a: int, b: int) -> Pattern:
        """Return the pattern of the columns from `a` to `b`, as views."""
        return Pattern(
            self.mask[a:b], *(None if x is None else x[a:b] for x in (self.r, self.ahead))
        )

    def begin(self, q: int, t: Tensor, w: Tensor) -> None:
        """Choose the two entries to keep of the four at `q`, from targets and weights `[4, n]`."""
        if self.r is not None and self.ahead is not None:
            quad = slice(q, q + QUAD)
            self.mask[quad] = best_two(
                torch.addmm(self.r[quad] * w, self.ahead[quad], t - w).abs_()
            )


def sweep(
    weight: Tensor,
    scheme: Scheme,
    factor: Factor,
    options: Options,
    grid: Grid | None,
    pattern: Pattern | None = None,
) -> QuantizedTensor:
    """Round `weight` `[n, k]` in processing order on `grid` `[n, groups]`.

    Without a grid, scales are chosen as each group begins, in natural order (ALGORITHMS 5.2). With
    a `pattern`, which needs a grid, the removed entries become zero.
    """
    dtype = working_dtype(weight)
    w = weight.to(dtype).T.index_select(0, factor.order)
    k, n = w.shape
    groups = scheme.groups(k)
    scales = torch.empty(groups, n, dtype=dtype, device=w.device)
    zeros = None if scheme.symmetric else torch.empty_like(scales)
    if grid is not None:
        _store(grid, scales.T, None if zeros is None else zeros.T)
    group_of = (factor.order // (k // groups)).int()
    columns = kernels.Columns(scales, zeros, group_of)
    v, kind = factor.unit(dtype), product_dtype(w, dtype)
    values, d = torch.empty_like(w), torch.empty_like(w)
    above, errors = terms(v, kind), terms(d, kind)
    width = k // groups if grid is None else options.block
    for a, b in column_blocks(k, width, pattern):
        before = slice(a)
        t = targets(
            w[a:b], part_of(above, before, slice(a, b)), part_of(errors, before), values[a:b]
        )
        if grid is None:
            # Where this group's columns would go if none of them were rounded: its scales must
            # cover this.
            with one_thread(w.device):
                shift = torch.linalg.solve_triangular(
                    v[a:b, a:b].T, t - w[a:b], upper=False, unitriangular=True
                )
            error = remaining_error(factor, options.metric, a, b, dtype)
            x = (w[a:b] + shift).T.contiguous()
            fitted = choose_scales(x, scheme, options.clip, [error], options.signed, weight.dtype)
            group = slice(a // width, a // width + 1)
            _store(fitted, scales[group].T, None if zeros is None else zeros[group].T)
        part = None if pattern is None else pattern.part(a, b)
        round_block(t, d[a:b], w[a:b], v[a:b, a:b], columns.part(a, b), scheme.format, part)
        renew(errors, slice(a, b), d[a:b])
    codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
    for a in range(0, k, _ENCODED):
        t, places = values[a : a + _ENCODED], slice(a, a + _ENCODED)
        found = (
            scheme.format.encode(t)
            if zeros is None
            else t.add_(zeros[group_of[places]]).to(torch.uint8)
        )
        codes.index_copy_(0, factor.order[places], found)
    half = scales.T.to(torch.float16).contiguous()
    zeros = None if zeros is None else zeros.T.to(torch.uint8).contiguous()
    return QuantizedTensor(scheme, codes.T.contiguous(), half, zeros)


def targets(w: Tensor, v: Terms, d: Terms, out: Tensor) -> Tensor:
    """Fill `out` `[b, n]` with the targets of a block, and return it.

    `w` `[b, n]` are its weights, `v` `[a, b]` the columns of V above it, `d` `[a, n]` the errors so
    far.
    """

    def add(first: int) -> None:
        rows = slice(first, first + width)
        product(transposed, part_of(d, slice(None), rows), to=out[:, rows].copy_(w[:, rows]))

    transposed = tuple(term.T for term in v)
    width = w.shape[1] if w.is_cuda else _ROWS
    side_by_side(w.device, [partial(add, first) for first in range(0, w.shape[1], width)])
    return out


def column_blocks(k: int, width: int, pattern: Pattern | None) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of `width` columns; with a pattern, of the next
    multiple of four.
    """
    width = width if pattern is None else QUAD * quads(width + -width % QUAD)
    for a in range(0, k, width):
        yield a, min(a + width, k)


def round_block(
    t: Tensor,
    d: Tensor,
    w: Tensor,
    v: Tensor,
    columns: kernels.Columns | None,
    fmt: Format | None,
    pattern: Pattern | None = None,
) -> None:
    """Turn the targets `t` `[b, n]` of a block into the values of codes, and fill in their errors
    `d` `[b, n]`.

    `w` `[b, n]` are the weights, `v` `[b, b]` the block of V, `columns` their scales and zeros.
    Without `columns` and `fmt` nothing is rounded. Entries that `pattern` removes become zero; it
    sees the targets of four columns before the first of them is processed. On a GPU a kernel does
    this, where it can be compiled.
    """
    if t.dtype == torch.float32 and kernels.runs_on(t.device):
        for a in range(0, len(t), kernels.COLUMNS):
            b = min(a + kernels.COLUMNS, len(t))
            mask = None if pattern is None else pattern.part(a, b)
            few = None if columns is None else columns.part(a, b)
            kernels.round_block(t[a:b], d[a:b], w[a:b], v[a:b, a:b], few, fmt, mask)
            if b < len(t):
                t[b:].addmm_(v[a:b, b:].T, d[a:b])
        return
    with one_thread(t.device):
        _round_columns(t, d, w, v, columns, fmt, pattern)


def _round_columns(
    t: Tensor,
    d: Tensor,
    w: Tensor,
    v: Tensor,
    columns: kernels.Columns | None,
    fmt: Format | None,
    pattern: Pattern | None,
) -> None:
    group_of = [] if columns is None else columns.group_of.tolist()
    unit = 1 if pattern is None else QUAD
    for a in range(0, len(t), _STEP):
        b = min(a + _STEP, len(t))
        for q in range(a, b, unit):
            if q > a:
                t[q : q + unit].addmm_(v[a:q, q : q + unit].T, d[a:q])
            if pattern is not None:
                pattern.begin(q, t[q : q + unit], w[q : q + unit])
            for j in range(q, q + unit):
                if j > q:
                    t[j : j + 1].addmm_(v[q:j, j : j + 1].T, d[q:j])
                if pattern is not None:
                    t[j].mul_(pattern.mask[j])
                if columns is None or fmt is None:
                    torch.sub(w[j], t[j], out=d[j])
                    continue
                scale = columns.scales[group_of[j]]
                zero = None if columns.zeros is None else columns.zeros[group_of[j]]
                round_to_codes(t[j].div_(scale), fmt, zero)
                torch.addcmul(w[j], t[j], scale, value=-1, out=d[j])
        t[b:].addmm_(v[a:b, b:].T, d[a:b])


def remaining_error(
    factor: Factor, metric: Metric, a: int, b: int, dtype: torch.dtype
) -> GroupError:
    """Return the error of the group of columns [a, b) as its sweep begins.

    For "block" this is the error that remains after the best compensation. It is given by the Schur
    complement of the group in the damped Hessian of itself and all later columns (ALGORITHMS 7).
    """
    if metric == "mse":
        return square_error
    mean = factor.diagonal.mean()
    if metric == "diag":
        return diagonal_error((factor.diagonal[factor.order[a:b]] / mean).to(dtype))
    return TriangularError([(0, (factor.r[a:b, a:b] / mean.sqrt()).to(dtype))])


def _store(grid: Grid, scales: Tensor, zeros: Tensor | None) -> None:
    scales.copy_(grid.scales)
    if zeros is not None and grid.zeros is not None:
        zeros.copy_(grid.zeros)
