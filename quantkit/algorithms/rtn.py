"""Round to nearest: scales by the largest magnitude or by a search, then the nearest code (ALGORITHMS 3 and 4).

A scale is rounded to float16 before anything is done with it, so the scale that was judged is the scale that is stored.
A search tries a table of candidates on all groups at once and keeps the one of least error; what "error" means is a
function of the rounding errors, made by `group_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.hessian import live_diagonal, precise, root
from quantkit.core import sparsity
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import FLOATS
from quantkit.errors import NumericError, RecipeError

Clip = Literal["none", "search"]
Metric = Literal["mse", "diag", "block"]
#: From rounding errors `[m, g]`, which it may overwrite, to one figure a row `[m]`.
Error = Callable[[Tensor], Tensor]

LARGEST_HALF = 65504.0
SMALLEST_SCALE = 2.0**-20
_WIDEST_BLOCK = 4096  # columns of a group for which the whole block of H is used, else blocks of _BLOCK on its diagonal
_BLOCK = 128


class Grid(NamedTuple):
    """Scales float16 and, if asymmetric, zeros uint8, both of one shape: what turns a group's codes into numbers."""

    scales: Tensor
    zeros: Tensor | None


def check_weight(weight: Tensor) -> None:
    """Refuse what is no weight: NumericError unless it is a non-empty float matrix `[n, k]` of finite numbers."""
    if weight.ndim != 2 or not weight.numel() or weight.dtype not in FLOATS:
        raise NumericError(
            f"a weight is a non-empty float16, bfloat16, float32 or float64 matrix, not {weight.dtype} "
            f"{list(weight.shape)}: convert it, or leave it dense with --skip"
        )
    check_finite(weight)


def check_finite(tensor: Tensor) -> None:
    """Raise NumericError, with count and first index, if a float tensor of any shape holds NaN or infinity."""
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    count, first = 0, 0
    for part in _row_slices(flat, 1):
        found = flat[part] if tensor.itemsize > 1 else flat[part].float()
        finite = torch.isfinite(found)
        if not bool(finite.all()):
            first = first if count else part.start + int((~finite).nonzero()[0])
            count += int((~finite).sum())
    if count:
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
        raise NumericError(
            f"{count} of {tensor.numel()} weights are NaN or infinite, the first {index} = {flat[first].item()}: "
            "repair or download it again"
        )


def quantize(
    weight: Tensor,
    scheme: Scheme,
    *,
    clip: Clip = "none",
    metric: Metric = "mse",
    hessian: Tensor | None = None,
    signed: bool = False,
    prune: sparsity.Rule = "magnitude",
) -> tuple[QuantizedTensor, dict[str, Any]]:
    """Round `weight` `[n, k]` to nearest; also return counts of scales that lost precision.

    `clip="search"` looks for each scale, judged by `metric`; "diag" and "block" need `hessian` `[k, k]`. FP6 and FP5
    without search follow the published rule, codes from the unrounded scale (LAYOUTS 6.3). `signed` gives scales a
    sign. For a 2:4 scheme the weight is pruned first, by what `fixed_mask` takes for `prune`. Raises NumericError for
    what `check_weight` refuses and for rows whose dequantized weights would overflow float16, LayoutError for a group
    size that does not divide k, RecipeError for what `check_signed` and `fixed_mask` refuse (ALGORITHMS 3, 4 and 9).
    """
    check_weight(weight)
    check_signed(scheme, signed)
    groups = scheme.groups(weight.shape[1])
    rule: dict[str, Any] = {}
    if scheme.sparsity is not None:
        weight, rule = weight.masked_fill(~fixed_mask(weight, prune, hessian), 0), {"prune": prune}
    if scheme.format.is_float and clip == "none":
        tensor = _published(weight, scheme)
        return tensor, scale_facts(tensor)
    errors = None
    if clip == "search" and metric != "mse":
        if hessian is None:
            raise RecipeError(f"metric {metric} needs calibration data: give a calibration set, or use metric mse")
        errors = group_errors(hessian, live_diagonal(hessian)[0], groups, metric, working_dtype(weight))
    grid = choose(weight, scheme, clip, errors, signed)
    tensor = QuantizedTensor(scheme, encode(weight, scheme, grid), *grid)
    return tensor, {**rule, **scale_facts(tensor)}


def fixed_mask(weight: Tensor, rule: sparsity.Rule, h: Tensor | None) -> Tensor:
    """Return the mask bool `[n, k]` of a rule that looks at the weight as it is: magnitude, or wanda with `h` `[k, k]`.

    RecipeError for what `check_fixed` refuses, and for wanda without a Hessian (ALGORITHMS 9).
    """
    check_fixed(rule)
    if rule == "wanda" and h is None:
        raise RecipeError("wanda needs calibration data: give a calibration set, or use --prune-method magnitude")
    if rule == "magnitude" or h is None:
        return sparsity.weight_mask(weight)
    diagonal, dead = live_diagonal(h)
    if bool(dead.all()):
        raise NumericError("no input channel ever moved in calibration: use other text, or magnitude instead of wanda")
    return sparsity.weight_mask(weight, diagonal)


def check_fixed(rule: sparsity.Rule) -> None:
    """Raise RecipeError if a rule cannot be followed by rounding alone."""
    if rule == "sparsegpt":
        raise RecipeError(
            "sparsegpt moves the weights that stay, rounding does not: use --method gptq, or --prune-method magnitude "
            "on what quantkit prune --method sparsegpt wrote"
        )


def check_signed(scheme: Scheme, signed: bool) -> None:
    """Raise RecipeError if scales with a sign are asked of a scheme that gains nothing by them."""
    if signed and (scheme.format.is_float or not scheme.symmetric):
        raise RecipeError(
            f"signed scales are for symmetric INT4, whose codes reach further below zero than above, not for "
            f"{scheme.label}: drop signed (--unsigned), or use int4 without --asym"
        )


def scale_facts(tensor: QuantizedTensor) -> dict[str, Any]:
    """Return counts for the report: scales at the floor 2^-20, subnormal float16 scales, and scales of zero.

    A negative scale counts by its magnitude. Of a 2:4 weight also the codes that are zero and that are not.
    """
    scales = tensor.scales.abs()
    kept: dict[str, int] = {}
    if tensor.scheme.sparsity is not None:
        kept["kept"] = int((tensor.codes != tensor.scheme.format.zero_code).sum())
        kept["zeros"] = tensor.codes.numel() - kept["kept"]
    return {
        **kept,
        "floored_scales": int((scales == SMALLEST_SCALE).sum()),
        "subnormal_scales": int((scales < torch.finfo(torch.float16).smallest_normal).sum()),
        "zero_scales": int((scales == 0).sum()),
    }


def losses(weight: Tensor, tensor: QuantizedTensor | None, h: Tensor) -> Tensor:
    """Return `d H d^T` for each row of `weight - tensor` (None: of the weight itself), float64 `[n]`."""
    h = h.to(precise(h.device))
    d = weight.to(working_dtype(weight))
    if tensor is not None:
        d = d - tensor.dequantize(d.dtype)
    parts = [((part @ h) * part).sum(-1) for part in (rows.to(h.dtype) for rows in d.split(1024))]
    return torch.cat(parts).double().clamp_(min=0)


def working_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype that the arithmetic on a weight is done in: float64 for float64, else float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def group_errors(h: Tensor, diagonal: Tensor, groups: int, metric: Metric, dtype: torch.dtype) -> list[Error] | None:
    """Return for each group of columns the error that `metric` sees, from `h` `[k, k]`; None where it is plain `mse`.

    `diagonal` `[k]` replaces the diagonal of `h` (damped, dead channels raised). Errors are relative to its mean, so
    that the size of the activations cannot overflow them.
    """
    if metric == "mse":
        return None
    mean = diagonal.mean()
    g = len(diagonal) // groups
    if metric == "diag":
        return [diagonal_error(part) for part in (diagonal / mean).to(dtype).split(g)]
    size = g if g <= _WIDEST_BLOCK else _BLOCK
    errors = []
    for first in range(0, groups * g, g):
        blocks = []
        for a in range(first, first + g, size):
            b = min(a + size, first + g)
            blocks.append((a - first, root(h[a:b, a:b] / mean, diagonal[a:b] / mean).to(dtype)))
        errors.append(triangular_error(blocks))
    return errors


def triangular_error(blocks: list[tuple[int, Tensor]]) -> Error:
    """Return the error `sum ||delta R||^2` over blocks on the diagonal, each a first column and an upper `R`."""
    panels = []
    for first, r in blocks:
        width = max(32, r.shape[0] // 8)  # multiply only what lies above the diagonal, in panels of columns
        for a in range(0, r.shape[0], width):
            panel = r[: a + width, a : a + width]
            panels.append((first, first + panel.shape[0], panel.contiguous()))

    def error(delta: Tensor) -> Tensor:
        parts = [(delta[:, a:b] @ panel).square_().sum(-1) for a, b, panel in panels]
        return torch.stack(parts).sum(0)

    return error


def diagonal_error(weights: Tensor) -> Error:
    """Return the error `sum_j weights_j delta_j^2`, which sees the size of each input channel and no correlation."""
    return lambda delta: delta.square_() @ weights


def square_error(delta: Tensor) -> Tensor:
    """The error `sum_j delta_j^2`, which sees the weights alone."""
    return delta.square_().sum(-1)


def choose(weight: Tensor, scheme: Scheme, clip: Clip, errors: list[Error] | None, signed: bool = False) -> Grid:
    """Return the grid `[n, groups]` of a weight `[n, k]`, with one error function per group or None for plain `mse`.

    RecipeError for what `check_signed` refuses.
    """
    check_signed(scheme, signed)
    n, k = weight.shape
    groups = scheme.groups(k)
    scales = torch.empty(n, groups, dtype=torch.float16, device=weight.device)
    zeros = None if scheme.symmetric else torch.empty_like(scales, dtype=torch.uint8)
    # A whole row's block of H is read once per product: worth it for many rows only.
    for rows in _row_slices(weight, k) if errors is None else _row_slices(weight, k // groups, least=512):
        parts = weight[rows].to(working_dtype(weight)).reshape(-1, groups, k // groups)
        if errors is None:
            fits = [fit(parts.flatten(0, 1), scheme, clip, weight.dtype, square_error, rows.start, groups, signed)]
        else:
            fits = [
                fit(parts[:, j].contiguous(), scheme, clip, weight.dtype, errors[j], rows.start, signed=signed)
                for j in range(groups)
            ]
        scales[rows] = torch.stack([f.scales for f in fits], 1).view(-1, groups)
        if zeros is not None:
            zeros[rows] = torch.stack([f.zeros for f in fits if f.zeros is not None], 1).view(-1, groups)
    return Grid(scales, zeros)


def encode(weight: Tensor, scheme: Scheme, grid: Grid) -> Tensor:
    """Return the codes uint8 `[n, k]` nearest to `weight` `[n, k]` on a grid `[n, groups]`."""
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    dtype = working_dtype(weight)
    for rows in _row_slices(weight, weight.shape[1]):
        x = weight[rows].to(dtype).reshape(-1, grid.scales.shape[1], k // grid.scales.shape[1])
        x = x / grid.scales[rows].to(dtype).unsqueeze(-1)
        if grid.zeros is None:
            codes[rows] = scheme.format.encode(x).view(-1, k)
        else:
            zeros = grid.zeros[rows].to(dtype).unsqueeze(-1)
            codes[rows] = snap(x, scheme.format, zeros).add_(zeros).view(-1, k)
    return codes


def snap(x: Tensor, fmt: Format, zeros: Tensor | None) -> Tensor:
    """Round `x` (a weight over its scale) in place to the nearest value of a code, ties to the even code."""
    if zeros is not None:
        return x.add_(zeros).clamp_(0, 2**fmt.bits - 1).round_().sub_(zeros)
    if fmt.is_float:
        return x.copy_(fmt.nearest(x))
    return x.round_().clamp_(fmt.values[0], fmt.values[-1])


def fit(
    x: Tensor,
    scheme: Scheme,
    clip: Clip,
    stored: torch.dtype,
    error: Error,
    row: int = 0,
    groups: int = 1,
    signed: bool = False,
) -> Grid:
    """Return the grid `[m]` for groups of weights `x` `[m, g]` (float32 or float64), the larger scale on ties.

    `stored` is the dtype of the original weight. NumericError naming the row, where group `i` is of row
    `row + i // groups`, if a base scale overflows (ALGORITHMS 3 and 4).
    """
    fmt = scheme.format
    scales, zeros = _candidates(x, scheme, clip, stored, signed)
    overflow = ~(scales.abs() * largest_value(fmt, zeros) <= LARGEST_HALF)
    _refuse_overflow(overflow[_ratios(fmt, clip).index(1.0)], row, groups)
    if len(scales) == 1:
        best = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
    else:
        errors = torch.empty_like(scales)
        delta = torch.empty_like(x)
        for i, candidate in enumerate(scales.unsqueeze(-1)):
            torch.div(x, candidate, out=delta)
            snap(delta, fmt, None if zeros is None else zeros[i].unsqueeze(-1))
            errors[i] = error(torch.addcmul(x, delta, candidate, value=-1, out=delta))
        best = errors.masked_fill_(overflow, torch.inf).argmin(0, keepdim=True)
    chosen = scales.gather(0, best)[0].to(torch.float16)
    return Grid(chosen, None if zeros is None else zeros.gather(0, best)[0].to(torch.uint8))


def largest_value(fmt: Format, zeros: Tensor | None) -> Tensor | float:
    """Return the largest magnitude of a code in steps of the scale, given float `zeros` of any shape."""
    return fmt.largest if zeros is None else torch.maximum(zeros, 2**fmt.bits - 1 - zeros)


def _ratios(fmt: Format, clip: Clip) -> list[float]:
    """Candidate scales relative to the base scale, largest first: MARLIN's grid, and for FP one and a half octaves."""
    if clip == "none":
        return [1.0]
    return [2 ** (i / 16) for i in range(16, -9, -1)] if fmt.is_float else [1 - i / 100 for i in range(76)]


def _candidates(
    x: Tensor, scheme: Scheme, clip: Clip, stored: torch.dtype, signed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return candidate scales `[c, m]`, float16 values in the dtype of `x`, and zeros for the groups `x` `[m, g]`."""
    fmt = scheme.format
    ratios = torch.tensor(_ratios(fmt, clip), dtype=x.dtype, device=x.device).unsqueeze(-1)
    if signed:
        low, high = x.aminmax(dim=-1)
        base = _divided(torch.where(high > -low, -high, -low), fmt.largest)  # the code of -8 meets the extreme
        return stored_scale(ratios * base, stored), None
    if scheme.symmetric:
        return stored_scale(ratios * _divided(x.abs().amax(-1), fmt.absmax), stored), None
    low, high = x.amin(-1).clamp_(max=0), x.amax(-1).clamp_(min=0)
    top = 2**fmt.bits - 1
    scales = stored_scale(ratios * _divided(high - low, top), stored)
    return scales, (ratios * -low / scales).round_().clamp_(0, top)


def _divided(x: Tensor, by: float) -> Tensor:
    # On a GPU torch multiplies by the reciprocal of a plain number, which is not the division that the rules name.
    return x / torch.full_like(x, by)


def stored_scale(scale: Tensor, stored: torch.dtype) -> Tensor:
    """Round scales to float16 values, at least 2^-20 in magnitude, and 1 for groups of zeros; dtype and sign stay.

    For a bfloat16 weight they are bfloat16 values as well, so that a loader that runs the model in bfloat16 reads the
    same scale.
    """
    half = _half(scale, stored).abs_().clamp_(min=SMALLEST_SCALE)
    return half.copysign_(scale).masked_fill_(scale == 0, 1.0)


def _half(scale: Tensor, stored: torch.dtype) -> Tensor:
    through = scale.to(torch.bfloat16) if stored == torch.bfloat16 else scale
    return through.to(torch.float16).to(scale.dtype)


def _refuse_overflow(overflow: Tensor, row: int, groups: int) -> None:
    if bool(overflow.any()):
        rows = sorted({row + i // groups for i in overflow.nonzero().flatten().tolist()})
        raise NumericError(
            f"row {', '.join(map(str, rows[:5]))}{' ...' if len(rows) > 5 else ''} has weights too large: its scale or "
            f"its dequantized weights pass {LARGEST_HALF:.0f}, the end of float16: leave it dense with --skip"
        )


def _published(weight: Tensor, scheme: Scheme) -> QuantizedTensor:
    """FP6 and FP5 as their reference does: codes from the float32 scale, then that scale rounded (LAYOUTS 6.3)."""
    fmt = scheme.format
    n, k = weight.shape
    groups = scheme.groups(k)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.float16, device=weight.device)
    for rows in _row_slices(weight, weight.shape[1]):
        part, scale = published_codes(weight[rows].float().reshape(-1, groups, k // groups), fmt)
        half = _half(scale, weight.dtype)
        _refuse_overflow(~(half * fmt.largest <= LARGEST_HALF).flatten(), rows.start, groups)
        codes[rows], scales[rows] = part.view(-1, k), half
    return QuantizedTensor(scheme, codes, scales)


def published_codes(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return codes uint8 `[..., g]` and unrounded scales `[...]` of float32 `x` `[..., g]` (LAYOUTS 6.3)."""
    scale = _divided(x.abs().amax(-1).clamp_(min=1e-12), fmt.largest)
    return fmt.encode(x / scale.unsqueeze(-1)), scale


def _row_slices(weight: Tensor, width: int, least: int = 1) -> Iterator[slice]:
    """Slices of at least so many rows that keep temporaries `width` columns wide small: in cache, on a CPU."""
    entries = 2**18 if weight.device.type == "cpu" else 2**26
    rows = max(least, entries // width)
    for a in range(0, len(weight), rows):
        yield slice(a, min(a + rows, len(weight)))
