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
    factor_dtype,
    largest_value,
    round_to_codes,
    stored_scale,
    working_dtype,
)
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.sparsity import QUAD
from quantkit.core.threads import one_thread
from quantkit.kernels import gptq as kernels

_BLOCK = 128  # columns with slopes from one product over the whole row
_STEP = 32  # columns corrected one by one before one product corrects the rest of their block
_ROWS = 256  # rows whose normal equations are in memory together
_ENTRIES = 2**23  # on a GPU more rows, up to so many entries of each matrix
_RIDGE = 1e-8
#: Pairs of columns this near to being the same do not replace a four, nor does a smaller relative
#: fall of the loss; kernels/gptq_fours.cu has the same.
_SINGULAR = _FALL = 1e-6


class Refined(NamedTuple):
    """Hold a refined tensor, and what changed: counts or marks by row `[n]`.

    `loss` and `norm`, float64 `[n]`, are the losses of the tensor and of a zero weight with the
    damped Hessian, where the steps have computed them.
    """

    tensor: QuantizedTensor
    changes: dict[str, Tensor]
    loss: Tensor | None = None
    norm: Tensor | None = None


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
    (ALGORITHMS 8). After all passes, and after the refit, every row takes the better of before and
    after, so its loss never rises. Zero points stay. With `masks`, descent chooses the mask of a
    2:4 scheme too; else its zero codes stay.
    The changes of each step that was asked for: `descent_changed` counts codes, `refit_rows` marks
    new scales.
    """
    if not (descent or refit):
        return Refined(tensor, {})
    changes, norm = dict[str, Tensor](), None
    loss = row_losses(weight, tensor, h)
    if descent:
        with one_thread(h.device):
            found = descend(weight, tensor, h, descent, masks)
        before, new = tensor.codes, row_losses(weight, found, h)
        tensor, loss = rows_of(new < loss, found, tensor), torch.minimum(new, loss)
        changes["descent_changed"] = (tensor.codes != before).sum(-1)
    if refit and not tensor.scheme.format.is_microscaled:
        with one_thread(h.device):
            found, gain, norm = _refit(weight, tensor, h)
        changes["refit_rows"] = fell = gain > 0
        tensor, loss = rows_of(fell, found, tensor), torch.where(fell, loss - gain, loss)
    return Refined(tensor, changes, loss, norm)


def rows_of(taken: Tensor, one: QuantizedTensor, other: QuantizedTensor) -> QuantizedTensor:
    """Take rows of `one` where `taken` bool `[n]` is set, and rows of the `other` elsewhere."""
    taken, zeros = taken.unsqueeze(-1), None
    if one.zeros is not None and other.zeros is not None:
        zeros = torch.where(taken, one.zeros, other.zeros)
    codes = torch.where(taken, one.codes, other.codes)
    return QuantizedTensor(one.scheme, codes, torch.where(taken, one.scales, other.scales), zeros)


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
    scale = 1.0 if columns is None else columns.scales[columns.group_of.long()]
    for _ in range(passes):
        before = v.clone()
        e = w - v * scale
        for a in range(0, len(v), _BLOCK):
            b = min(a + _BLOCK, len(v))
            part = None if columns is None else columns.part(a, b)
            descend_some(h[a:b] @ e, e[a:b], v[a:b], h[a:b, a:b], part, fmt)
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
    Return also how far the loss of each row falls, and the loss of a zero weight, float64 `[n]`.

    A row's scales stay if a new one would be zero, of the other sign, or too large. A group's scale
    stays if nothing depends on it: all its weights are zero, or all its channels are dead.
    """
    h = h.to(factor_dtype(h.device))
    fmt = tensor.scheme.format
    scales = tensor.scales.clone()
    gains, norms = list[Tensor](), list[Tensor]()
    together = max(_ROWS, _ENTRIES // max(len(h), scales.shape[1] ** 2)) if h.is_cuda else _ROWS
    for first in range(0, len(scales), together):
        rows = slice(first, first + together)
        some = tensor.rows(rows)
        own = some.scales.to(h.dtype)
        a, b, norm = _normal_equations(
            weight[rows].to(h.dtype), some.values(h.dtype).flatten(1), h, own.shape[1]
        )
        diagonal = a.diagonal(dim1=1, dim2=2)
        exact, idle = diagonal.clone(), diagonal == 0
        diagonal.add_(diagonal.mean(-1, keepdim=True), alpha=_RIDGE)
        lower, failed = torch.linalg.cholesky_ex(a)
        found = torch.cholesky_solve(b.unsqueeze(-1), lower).squeeze(-1)
        found = torch.where(idle, own, stored_scale(found, weight.dtype, fmt))
        zeros = None if some.zeros is None else some.zeros.to(h.dtype)
        usable = (found * own > 0) & (found.abs() * largest_value(fmt, zeros) <= fmt.largest_weight)
        usable = usable.all(-1, keepdim=True) & (failed == 0).unsqueeze(-1)
        scales[rows] = torch.where(usable, found, own).to(torch.float16)
        # The loss is quadratic in the scales, and need not be computed from the errors.
        diagonal.copy_(exact)
        new = scales[rows].to(h.dtype)
        both = (own + new).unsqueeze(-1)
        slope = (a @ both + a.mT @ both).squeeze(-1) - exact * both.squeeze(-1)
        gains.append(((new - own) * (2 * b - slope)).sum(-1))
        norms.append(norm)
    fitted = QuantizedTensor(tensor.scheme, tensor.codes, scales, tensor.zeros)
    return fitted, torch.cat(gains).double(), torch.cat(norms).double()


def _normal_equations(
    w: Tensor, q: Tensor, h: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower triangle of `A` `[m, g, g]`, and `b` `[m, g]`, of `A s = b` for weights and
    values `[m, k]`, and the losses `w H w^T` `[m]`.
    """
    m, k = q.shape
    size = k // groups
    a = q.new_zeros(m, groups, groups)
    for g in range(groups):
        first = g * size
        products = (q[:, first : first + size] @ h[first : first + size, first:]).mul_(q[:, first:])
        a[:, g:, g] = products.view(m, groups - g, size).sum(-1)
    product = w @ h
    norm = (product * w).sum(-1)
    return a, product.mul_(q).view(m, groups, size).sum(-1), norm
