"""After the sweep: move single codes, then all scales of a row, wherever that lowers the loss (ALGORITHMS 8).

With all other codes held, the loss of a row is a parabola in each of its weights, so the best code for a column is the
one nearest to the parabola's lowest point: coordinate descent. With all codes held, the loss is a quadratic form in the
row's scales: least squares. Both see the calibration tokens alone and fit their noise too, so a recipe must ask for
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.hessian import precise
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor

#: Tokens a column below which descent fits the noise of the calibration text (ALGORITHMS 8).
TOKENS_PER_COLUMN = 16
_BLOCK = 128  # columns whose targets are made by one product over the whole row
_STEP = 32  # of these, columns that are corrected one by one before the rest of the block is corrected by one product
_ROWS = 256  # rows whose systems of G x G are in memory together
_RIDGE = 1e-8


def refine(
    weight: Tensor, tensor: QuantizedTensor, h: Tensor, *, descent: int = 0, refit: bool = False
) -> tuple[QuantizedTensor, dict[str, Tensor]]:
    """Improve a quantized weight `[n, k]`: `descent` passes over its columns, then a refit of its scales if asked.

    `h` `[k, k]` is the undamped Hessian; after each step every row keeps the better of before and after, so its loss
    never rises. Also returns what changed, row by row `[n]`: `descent_changed` counts codes, `refit_rows` marks rows
    with new scales; each is there if it was asked for. Zeros stay, and so do the zero codes of a 2:4 scheme
    (ALGORITHMS 8).
    """
    changes = {}
    loss = rtn.losses(weight, tensor, h) if descent or refit else weight.new_empty(0)
    if descent:
        before = tensor.codes
        for _ in range(descent):
            found = _descended(weight, tensor, h)
            if torch.equal(found.codes, tensor.codes):
                break
            tensor, loss, _ = _better(weight, found, tensor, loss, h)
        changes["descent_changed"] = (tensor.codes != before).sum(-1)
    if refit:
        tensor, _, changes["refit_rows"] = _better(weight, _refitted(weight, tensor, h), tensor, loss, h)
    return tensor, changes


def _better(
    weight: Tensor, found: QuantizedTensor, before: QuantizedTensor, loss: Tensor, h: Tensor
) -> tuple[QuantizedTensor, Tensor, Tensor]:
    """Return, row by row, the better of two tensors with equal zeros, its loss, and whether it is the one found."""
    new = rtn.losses(weight, found, h)
    fell = new < loss
    keep = fell.unsqueeze(-1)
    codes, scales = torch.where(keep, found.codes, before.codes), torch.where(keep, found.scales, before.scales)
    return QuantizedTensor(before.scheme, codes, scales, before.zeros), torch.where(fell, new, loss), fell


def _values(tensor: QuantizedTensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return the multiples of its scale that each weight is, `[rows, k]`."""
    decode = tensor.scheme.format.decode
    values = decode(tensor.codes[rows]).to(dtype)
    if tensor.zeros is not None:
        values -= decode(tensor.zeros[rows]).to(dtype).repeat_interleave(values.shape[1] // tensor.zeros.shape[1], 1)
    return values


def _descended(weight: Tensor, tensor: QuantizedTensor, h: Tensor) -> QuantizedTensor:
    """Return the tensor after one pass over the columns in natural order.

    Everything is transposed, `[k, n]`, so that a column of the weight is contiguous.
    """
    dtype = rtn.working_dtype(weight)
    fmt = tensor.scheme.format
    h = h.to(dtype)
    e = (weight.to(dtype) - tensor.dequantize(dtype)).T.contiguous()
    v = _values(tensor, slice(None), dtype).T.contiguous()
    k, groups = len(v), tensor.scales.shape[1]
    scales = tensor.scales.to(dtype).T.contiguous()
    zeros = None if tensor.zeros is None else tensor.zeros.to(dtype).T.contiguous()
    frozen = tensor.scheme.sparsity is not None
    for a in range(0, k, _BLOCK):
        b = min(a + _BLOCK, k)
        of = [j * groups // k for j in range(a, b)]
        grids = [(scales[g], None if zeros is None else zeros[g]) for g in of]
        _descend_block(h[a:b] @ e, e[a:b], v[a:b], h[a:b, a:b], grids, fmt, frozen)
    codes = fmt.encode(v) if zeros is None else v.add_(zeros.repeat_interleave(k // groups, 0)).to(torch.uint8)
    return QuantizedTensor(tensor.scheme, codes.T.contiguous(), tensor.scales, tensor.zeros)


def _descend_block(
    slope: Tensor,
    e: Tensor,
    v: Tensor,
    h: Tensor,
    grids: list[tuple[Tensor, Tensor | None]],
    fmt: Format,
    frozen: bool,
) -> None:
    """Move the values `v` `[b, n]` of a block of columns, one column after the other, and their errors `e` with them.

    `slope` `[b, n]` is `H e` as the block begins, `h` `[b, b]` its block of H, `grids` scales and zeros `[n]` of each
    column. A column that never moved in calibration (`H_jj = 0`) stays; with `frozen` so does every value of zero.
    """
    moves = torch.zeros_like(e)  # of the errors, in this block
    diagonal = h.diagonal().tolist()
    for a in range(0, len(e), _STEP):
        b = min(a + _STEP, len(e))
        for j in range(a, b):
            if j > a:
                slope[j : j + 1].addmm_(h[j : j + 1, a:j], moves[a:j])
            if not diagonal[j] > 0:
                continue
            scale, zero = grids[j]
            away = slope[j] / (scale * diagonal[j])  # from the lowest point of the parabola, in steps of the grid
            target = v[j] + away
            nearest = rtn.snap(target.clone(), fmt, zero)
            # A code as near stays, and so does one whose target is infinite.
            moved = (target - nearest).abs_() < away.abs_()
            if frozen:
                moved &= v[j] != 0
            nearest = torch.where(moved, nearest, v[j])
            torch.mul(v[j] - nearest, scale, out=moves[j])
            v[j] = nearest
            e[j] += moves[j]
        slope[b:].addmm_(h[b:, a:b], moves[a:b])


def _refitted(weight: Tensor, tensor: QuantizedTensor, h: Tensor) -> QuantizedTensor:
    """Return the tensor with the scales of least loss for its codes, rounded to what is stored.

    A row keeps its own scales if one of the new ones would be zero, of the other sign, or too large; a group keeps its
    own if nothing depends on it (all its weights zero, or none of its channels ever moved).
    """
    h = h.to(precise(h.device))
    fmt = tensor.scheme.format
    scales = tensor.scales.clone()
    for first in range(0, len(scales), _ROWS):
        rows = slice(first, first + _ROWS)
        own = tensor.scales[rows].to(h.dtype)
        a, b = _normal_equations(weight[rows].to(h.dtype), _values(tensor, rows, h.dtype), h, own.shape[1])
        diagonal = a.diagonal(dim1=1, dim2=2)
        idle = diagonal == 0
        diagonal.add_(diagonal.mean(-1, keepdim=True), alpha=_RIDGE)
        lower, failed = torch.linalg.cholesky_ex(a)
        found = torch.cholesky_solve(b.unsqueeze(-1), lower).squeeze(-1)
        found = torch.where(idle, own, rtn.stored_scale(found, weight.dtype))
        zeros = None if tensor.zeros is None else tensor.zeros[rows].to(h.dtype)
        usable = (found * own > 0) & (found.abs() * rtn.largest_value(fmt, zeros) <= rtn.LARGEST_HALF)
        usable = usable.all(-1, keepdim=True) & (failed == 0).unsqueeze(-1)
        scales[rows] = torch.where(usable, found, own).to(torch.float16)
    return QuantizedTensor(tensor.scheme, tensor.codes, scales, tensor.zeros)


def _normal_equations(w: Tensor, q: Tensor, h: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return `A` `[m, g, g]` and `b` `[m, g]` of `A s = b` for rows of weights and of values `[m, k]`."""
    m, k = q.shape
    size = k // groups
    a = q.new_empty(m, groups, groups)
    for g in range(groups):
        first = g * size
        products = (q[:, first : first + size] @ h[first : first + size, first:]).mul_(q[:, first:])
        a[:, g, g:] = a[:, g:, g] = products.view(m, groups - g, size).sum(-1)
    return a, (w @ h).mul_(q).view(m, groups, size).sum(-1)
