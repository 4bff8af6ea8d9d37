"""Refine a swept weight: move single codes by coordinate descent, then refit all scales of a row by
least squares.

With all other codes fixed, the loss of a row is a parabola in each of its weights; with all codes
fixed, it is a quadratic form in the row's scales. Both also fit the noise of the calibration tokens
(ALGORITHMS 8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.hessian import row_losses
from quantkit.algorithms.numerics import (
    Terms,
    factor_dtype,
    largest_value,
    part_of,
    product,
    product_dtype,
    renew,
    round_to_codes,
    stored_scale,
    terms,
    working_dtype,
)
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.sparsity import QUAD
from quantkit.core.threads import one_thread
from quantkit.kernels import gptq as kernels

_BLOCK = 128  # columns with slopes from one product over the whole row
_PANEL = 512  # the same by bfloat16 terms, of which fewer leave much of a GPU idle
_STEP = 32  # columns corrected one by one before one product corrects the rest of their block
_ROWS = 256  # rows whose normal equations are in memory together
_ENTRIES = 2**25  # on a GPU more rows, up to so many entries of each matrix
_RIDGE = 1e-8
#: Pairs of columns this near to being the same do not replace a four, nor does a smaller relative
#: fall of the loss; kernels/gptq_fours.cu has the same.
_SINGULAR = _FALL = 1e-6


class Refined(NamedTuple):
    """Hold a refined tensor, and what changed: counts or marks by row `[n]`.

    `loss`, float64 `[n]`, is the loss of the tensor with the damped Hessian, where a step has
    computed it.
    """

    tensor: QuantizedTensor
    changes: dict[str, Tensor]
    loss: Tensor | None = None


def refine(
    weight: Tensor,
    tensor: QuantizedTensor,
    h: Tensor,
    *,
    descent: int = 0,
    refit: bool = False,
    masks: bool = False,
) -> Refined:
    """Improve a quantized weight `[n, k]` by `descent` passes over its columns, then by a `refit`
    of its scales. Those of eight bits lie too far apart to be solved for, and stay.

    `h` `[k, k]` is the damped Hessian: the undamped one ruins texts unlike those that calibrate
    (ALGORITHMS 8). Every row takes the better of before and after, so its loss never rises. Zero
    points stay. With `masks`, descent chooses the mask of a 2:4 scheme too; else its zero codes
    stay. The changes of each step that was asked for: `descent_changed` counts codes, `refit_rows`
    marks new scales.
    """
    if not (descent or refit):
        return Refined(tensor, {})
    changes, found, fell = dict[str, Tensor](), tensor, None
    loss = row_losses(weight, tensor, h)
    if descent:
        with one_thread(h.device):
            found = descend(weight, tensor, h, descent, masks)
    if refit and not tensor.scheme.format.is_microscaled:
        with one_thread(h.device):
            found, new, fell = _refit(weight, found, h)
    else:
        new = row_losses(weight, found, h)
    taken = new < loss
    if descent:
        changes["descent_changed"] = ((found.codes != tensor.codes) & taken.unsqueeze(-1)).sum(-1)
    if fell is not None:
        changes["refit_rows"] = fell & taken
    return Refined(rows_of(taken, found, tensor), changes, torch.minimum(new, loss))


def rows_of(taken: Tensor, one: QuantizedTensor, other: QuantizedTensor) -> QuantizedTensor:
    """Take rows of `one` where `taken` bool `[n]` is set, and rows of the `other` elsewhere."""
    taken, zeros = taken.unsqueeze(-1), None
    if one.zeros is not None and other.zeros is not None:
        zeros = torch.where(taken, one.zeros, other.zeros)
    return QuantizedTensor(
        one.scheme,
        torch.where(taken, one.codes, other.codes),
        torch.where(taken, one.scales, other.scales),
        zeros,
    )


def descend(
    weight: Tensor, tensor: QuantizedTensor, h: Tensor, passes: int = 1, masks: bool = False
) -> QuantizedTensor:
    """Return the tensor `[n, k]` after some passes over its columns in natural order, fewer if a
    pass changes nothing; with `masks`, over its aligned fours.
    """
    dtype = working_dtype(weight)
    fmt = tensor.scheme.format
    v = tensor.values(dtype).flatten(1).T.contiguous()
    k, groups = len(v), tensor.scales.shape[1]
    scales = tensor.scales.to(dtype).T.contiguous()
    zeros = None if tensor.zeros is None else tensor.zeros.to(dtype).T.contiguous()
    group_of = torch.arange(k, dtype=torch.int32, device=h.device) // (k // groups)
    columns, frozen = kernels.Columns(scales, zeros, group_of), tensor.scheme.sparsity is not None
    move = descend_fours if masks else partial(descend_block, frozen=frozen)
    _descend(weight.to(dtype).T.contiguous(), v, h.to(dtype), columns, fmt, passes, move)
    codes = (
        fmt.encode(v)
        if zeros is None
        else v.add_(zeros.repeat_interleave(k // groups, 0)).to(torch.uint8)
    )
    return QuantizedTensor(tensor.scheme, codes.T.contiguous(), tensor.scales, tensor.zeros)


def descend_pruned(weight: Tensor, values: Tensor, h: Tensor, passes: int) -> Tensor:
    """Return the 2:4 `values` `[n, k]` of a pruned weight after some passes over their fours."""
    dtype = working_dtype(weight)
    w, v = (x.to(dtype).T.contiguous() for x in (weight, values))
    _descend(w, v, h.to(dtype), None, None, passes, descend_fours)
    return v.T.to(weight.dtype).contiguous()


def _descend(
    w: Tensor,
    v: Tensor,
    h: Tensor,
    columns: kernels.Columns | None,
    fmt: Format | None,
    passes: int,
    descend_some: Callable[..., None],
) -> None:
    """Move the values `v` towards the weights `w`, both transposed `[k, n]`, so that a column of
    the weight is contiguous.
    """
    scale = w.new_ones(1, 1) if columns is None else columns.scales
    groups = len(scale), -1, w.shape[1]
    dtype = product_dtype(w, w.dtype)
    matrix, width = terms(h, dtype), _PANEL if dtype == torch.bfloat16 else _BLOCK
    for _ in range(passes):
        before = v.clone()
        e = (w.view(groups) - v.view(groups) * scale.unsqueeze(1)).view_as(w)
        errors = terms(e, dtype)
        for first in range(0, len(v), width):
            panel = slice(first, first + width)
            slopes, old = product(part_of(matrix, panel), errors), e[panel].clone()
            for a in range(first, first + len(old), _BLOCK):
                block, inside = slice(a, min(a + _BLOCK, first + len(old))), slice(a - first)
                slope = slopes[a - first : block.stop - first]
                if a > first:
                    slope.addmm_(h[block, first:a], e[first:a] - old[inside])
                part = None if columns is None else columns.part(block.start, block.stop)
                descend_some(slope, e[block], v[block], h[block, block], part, fmt)
            renew(errors, panel, e[panel])
        if torch.equal(v, before):
            break


def descend_block(
    slope: Tensor,
    e: Tensor,
    v: Tensor,
    h: Tensor,
    columns: kernels.Columns,
    fmt: Format,
    frozen: bool,
) -> None:
    """Move the values `v` `[b, n]` of a block, one column after the other, and update their errors
    `e` `[b, n]`.

    `slope` `[b, n]` is `H e` as the block begins, and is overwritten. `h` `[b, b]` is the block of
    H, `columns` the scales and zeros. A dead column (`H_jj = 0`) stays; with `frozen` so does every
    zero. On a GPU a kernel does this, where it can be compiled.
    """
    if v.dtype == torch.float32 and kernels.runs_on(v.device):
        kernels.descend_block(slope, e, v, h, columns, fmt, frozen)
        return
    group_of = columns.group_of.tolist()
    moves = torch.zeros_like(e)  # changes of the errors in this block
    diagonal = h.diagonal().tolist()
    for a in range(0, len(e), _STEP):
        b = min(a + _STEP, len(e))
        for j in range(a, b):
            if j > a:
                slope[j : j + 1].addmm_(h[j : j + 1, a:j], moves[a:j])
            if not diagonal[j] > 0:
                continue
            scale = columns.scales[group_of[j]]
            zero = None if columns.zeros is None else columns.zeros[group_of[j]]
            distance = slope[j] / (
                scale * diagonal[j]
            )  # to the parabola's minimum, in steps of the grid
            target = v[j] + distance
            nearest = round_to_codes(target.clone(), fmt, zero)
            # On ties the code stays; it also stays if its target is infinite.
            moved = (target - nearest).abs_() < distance.abs_()
            if frozen:
                moved &= v[j] != 0
            nearest = torch.where(moved, nearest, v[j])
            torch.mul(v[j] - nearest, scale, out=moves[j])
            v[j] = nearest
            e[j] += moves[j]
        slope[b:].addmm_(h[b:, a:b], moves[a:b])


def descend_fours(
    slope: Tensor,
    e: Tensor,
    v: Tensor,
    h: Tensor,
    columns: kernels.Columns | None,
    fmt: Format | None,
) -> None:
    """Move the values `v` `[b, n]` of a block of a 2:4 weight, one aligned four after the other,
    and update their errors `e` `[b, n]`.

    All else in a row given, each pair of the four may stay. The first of the pair is rounded as if
    the second were not, and the second makes up for it; both orders are tried. The best of these
    twelve replaces the four if the loss falls. Arguments are those of `descend_block`. Without
    `columns` and `fmt` nothing is rounded. On a GPU a kernel does this, where it can be compiled.
    """
    if v.dtype == torch.float32 and kernels.runs_on(v.device):
        kernels.descend_fours(slope, e, v, h, columns, fmt)
        return
    first, second = torch.tensor([*permutations(range(QUAD), 2)], device=v.device).T
    group_of = [] if columns is None else columns.group_of.tolist()
    moves = torch.zeros_like(e)  # changes of the errors in this block
    for q in range(0, len(e), QUAD):
        four = slice(q, q + QUAD)
        block = h[four, four]
        a, b = (block[i, i].unsqueeze(-1) for i in (first, second))
        between = block[first, second].unsqueeze(-1)
        both = a * b - between * between
        scale = 1.0 if columns is None else columns.scales[group_of[q]]
        step = slope[four].addmm_(h[four, :q], moves[:q])
        x = v[four] * scale
        aim = torch.addmm(step, block, x)  # the slope if all four were zero
        one = _rounded((aim[first] * b - aim[second] * between) / both / scale, fmt)
        y = one * scale
        rest = aim[second] - between * y
        other = _rounded(rest / b / scale, fmt)
        z = other * scale
        loss = y * (a * y - 2 * aim[first]) + z * (b * z - 2 * rest)
        loss.masked_fill_(~(both > _SINGULAR * a * b), torch.inf)
        least, best = loss.min(0, keepdim=True)
        gain = (x * (step + aim)).sum(0)
        found = torch.zeros_like(x).scatter_(0, first[best], one.gather(0, best))
        found.scatter_(0, second[best], other.gather(0, best))
        found = torch.where(least < -gain - _FALL * gain.abs(), found, v[four])
        torch.mul(v[four] - found, scale, out=moves[four])
        v[four] = found
    e += moves


def _rounded(x: Tensor, fmt: Format | None) -> Tensor:
    return x if fmt is None else round_to_codes(x, fmt, None)


def _refit(
    weight: Tensor, tensor: QuantizedTensor, h: Tensor
) -> tuple[QuantizedTensor, Tensor, Tensor]:
    """Return the tensor with the scales of least loss for its codes, rounded to their stored dtype.
    Return also its loss, float64 `[n]`, and marks of the rows with new scales `[n]`.

    A row's scales stay if a new one would be zero, of the other sign, or too large, or if the loss
    would not fall. A group's scale stays if nothing depends on it: all its weights are zero, or all
    its channels are dead.
    """
    dtype, fmt = product_dtype(weight, factor_dtype(h.device)), tensor.scheme.format
    matrix, scales = terms(h, dtype), tensor.scales.clone()
    losses, marks = list[Tensor](), list[Tensor]()
    together = max(_ROWS, _ENTRIES // max(len(h), scales.shape[1] ** 2)) if h.is_cuda else _ROWS
    for first in range(0, len(scales), together):
        rows = slice(first, first + together)
        some = tensor.rows(rows)
        a, b, loss = _normal_equations(weight[rows], some, matrix, dtype)
        own = some.scales.to(a.dtype)
        diagonal = a.diagonal(dim1=1, dim2=2)
        exact, idle = diagonal.clone(), diagonal == 0
        diagonal.add_(diagonal.mean(-1, keepdim=True), alpha=_RIDGE)
        lower, failed = torch.linalg.cholesky_ex(a)
        found = own + torch.cholesky_solve(b.unsqueeze(-1), lower).squeeze(-1)
        found = torch.where(idle, own, stored_scale(found, weight.dtype, fmt))
        zeros = None if some.zeros is None else some.zeros.to(own.dtype)
        usable = found * own > fmt.smallest_scale * own.abs()  # the smallest one stands for zero
        usable &= found.abs() * largest_value(fmt, zeros) <= fmt.largest_weight
        new = found.to(torch.float16)
        # The loss is quadratic in the scales, and need not be computed from the errors.
        diagonal.copy_(exact)
        step = (new.to(own.dtype) - own).unsqueeze(-1)
        slope = (a @ step + a.mT @ step).squeeze(-1) - exact * step.squeeze(-1)
        gain = (step.squeeze(-1) * (2 * b - slope)).sum(-1)
        marks.append(usable.all(-1) & (failed == 0) & (gain > 0))
        scales[rows] = torch.where(marks[-1].unsqueeze(-1), new, some.scales)
        losses.append(torch.where(marks[-1], loss - gain, loss))
    fitted = QuantizedTensor(tensor.scheme, tensor.codes, scales, tensor.zeros)
    return fitted, torch.cat(losses).double().clamp_(min=0), torch.cat(marks)


def _normal_equations(
    weight: Tensor, tensor: QuantizedTensor, h: Terms, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower triangle of `A` `[m, g, g]`, and `b` `[m, g]`, of `A x = b` for the best
    changes of scales, and the losses `[m]` without changes. Terms have `dtype`.
    """
    q = tensor.values(dtype).flatten(1)
    (m, k), groups = q.shape, tensor.scales.shape[1]
    size = k // groups
    a = q.new_zeros(m, groups, groups, dtype=factor_dtype(q.device))
    for g in range(groups):
        rest, own = slice(g * size, None), slice(g * size, (g + 1) * size)
        products = product((q[:, own],), part_of(h, own, rest)).mul_(q[:, rest])
        a[:, g:, g] = products.view(m, groups - g, size).sum(-1)
    e = weight.to(working_dtype(weight)) - tensor.dequantize(working_dtype(weight))
    outputs = product(terms(e, dtype), h)
    loss = (outputs * e).sum(-1, dtype=a.dtype)
    return a, outputs.mul_(q).view(m, groups, size).sum(-1).to(a.dtype), loss
