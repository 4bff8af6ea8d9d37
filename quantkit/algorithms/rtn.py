"""Round to nearest (RTN): choose scales, then take the nearest code (ALGORITHMS 3, 4 and 10).

The facts of the report about any solved weight are computed here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms.hessian import live_diagonal
from quantkit.algorithms.numerics import (
    check_weight,
    divide,
    encode,
    extent,
    half_precision,
    refuse_overflow,
    row_slices,
    working_dtype,
)
from quantkit.algorithms.pruning import fixed_mask
from quantkit.algorithms.scale_search import check_signed, choose_scales, group_errors
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.core.threads import one_thread
from quantkit.errors import RecipeError
from quantkit.names import Clip, Json, Metric, Rule

#: Bytes for each weight while it is pruned and rounded, or rounded again: the source, a float32
#: copy, masks, codes, words (measured: 11.4).
ROUNDING_BYTES = 12
#: A weight counts as far smaller than another if their ratio is below this.
FAR_SMALLER = 2.0**-20


def quantize(
    weight: Tensor,
    scheme: Scheme,
    *,
    clip: Clip = "none",
    metric: Metric = "mse",
    hessian: Tensor | None = None,
    signed: bool = False,
    prune: Rule = "magnitude",
) -> tuple[QuantizedTensor, Json]:
    """Round `weight` `[n, k]` to nearest; also return the counts of `scale_facts`.

    `clip="search"` searches each scale for the least `metric`; "diag" and "block" need `hessian`
    `[k, k]`. FP6 and FP5 without search follow the published rule: codes from the unrounded scale
    (LAYOUTS 6.3). `signed` allows negative scales. A weight of a 2:4 scheme is first pruned by the
    mask that `fixed_mask` makes for `prune`. NumericError if the weight is not finite, or if
    dequantized weights overflow float16. LayoutError if the group size does not divide k.
    RecipeError as `check_signed` and `fixed_mask`.
    """
    check_weight(weight)
    check_signed(scheme, signed)
    groups = scheme.groups(weight.shape[1])
    rule: Json = {}
    if scheme.sparsity is not None:
        weight, rule = weight.masked_fill(~fixed_mask(weight, prune, hessian), 0), {"prune": prune}
    if rounds_codes_first(scheme.format, clip):
        tensor = _published(weight, scheme)
        return tensor, scale_facts(tensor)
    errors = None
    if clip == "search" and metric != "mse":
        if hessian is None:
            raise RecipeError(
                f"metric {metric} needs calibration data",
                "give a calibration set",
                "use metric mse",
            )
        errors = group_errors(
            hessian, live_diagonal(hessian)[0], groups, metric, working_dtype(weight)
        )
    grid = choose_scales(weight, scheme, clip, errors, signed)
    tensor = QuantizedTensor(scheme, encode(weight, scheme, grid), *grid)
    return tensor, {**rule, **scale_facts(tensor)}


def rounds_codes_first(fmt: Format, clip: Clip) -> bool:
    """Return True for FP6 and FP5 without search, whose scales are rounded after the codes."""
    return fmt.is_float and not fmt.is_microscaled and clip == "none"


def scale_facts(tensor: QuantizedTensor) -> Json:
    """Count for the report: scales at the floor 2^-20, subnormal float16 scales, and scales of
    zero, by magnitude.

    For a 2:4 weight, also count zero and nonzero codes.
    """
    scales, fmt = tensor.scales.abs(), tensor.scheme.format
    which: dict[str, Tensor] = {}
    if tensor.scheme.sparsity is not None:
        which = {"kept": (kept := tensor.codes != fmt.zero_code), "zeros": ~kept}
    which |= {
        "floored_scales": scales == fmt.smallest_scale,
        "subnormal_scales": scales < torch.finfo(torch.float16).smallest_normal,
        "zero_scales": scales == 0,
    }
    counts = torch.stack([each.sum() for each in which.values()]).tolist()  # a GPU waits once
    return dict(zip(which, counts, strict=True))


def _published(weight: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Quantize to FP6 or FP5 as the reference code does: codes first, then the scale is rounded to
    float16.
    """
    fmt = scheme.format
    n, k = weight.shape
    groups = scheme.groups(k)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.float16, device=weight.device)
    for rows in row_slices(weight, weight.shape[1]):
        part, scale = published_codes(weight[rows].float().reshape(-1, groups, k // groups), fmt)
        half = half_precision(scale, weight.dtype)
        overflow = ~(half * fmt.largest <= fmt.largest_weight).flatten()
        refuse_overflow(overflow, rows.start, groups, fmt)
        codes[rows], scales[rows] = part.view(-1, k), half
    return QuantizedTensor(scheme, codes, scales)


def published_codes(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return codes uint8 `[..., g]` and unrounded scales `[...]` of float32 `x` `[..., g]` (LAYOUTS
    6.3).
    """
    scale = divide(x.abs().amax(-1).clamp_(min=1e-12), fmt.largest)
    return fmt.encode(x / scale.unsqueeze(-1)), scale


def relative_error(weight: Tensor, value: QuantizedTensor | Tensor) -> float:
    """Compute `||W - Q|| / ||W||`, 0 for a weight of zeros; padding columns of Q do not count."""
    return ratio([error_norms(weight, value)])


def error_norms(weight: Tensor, value: QuantizedTensor | Tensor) -> Tensor:
    """Compute `||W - Q||` and `||W||` of some rows at a time, float64 `[s, 2]` on the CPU."""
    norms = list[Tensor]()
    for some in row_slices(weight, weight.shape[1]):  # a float32 copy of all rows is large
        part = value.rows(some).dequantize() if isinstance(value, QuantizedTensor) else value[some]
        rows = weight[some].to(working_dtype(weight))
        difference = part[:, : rows.shape[1]].float() - rows
        with one_thread(weight.device):
            norms.append(torch.stack([torch.linalg.vector_norm(x) for x in (difference, rows)]))
    return torch.stack(norms).double().cpu()


def ratio(norms: Sequence[Tensor]) -> float:
    """Compute the `relative_error` of a weight from the `error_norms` of all its rows."""
    error, norm = torch.linalg.vector_norm(torch.cat([*norms]), dim=0).tolist()
    return float(error / max(norm, 1e-30))


def zeroed(weight: Tensor, tensor: QuantizedTensor) -> dict[str, int]:
    """Count weights `[n, k]` that became 0 because others of their group are far larger; {} if
    there are none.

    Weights below 2^-20 of the largest are counted, in groups where they are at least an eighth of
    the nonzero weights. Single small weights among normal weights are not counted.
    """
    columns = tensor.codes.shape[1]  # padded, so that the last group is whole
    groups, count = (tensor.scales.shape[1], -1), 0
    for rows in row_slices(weight, columns):
        parts = widened(weight[rows], columns).unflatten(1, groups)
        least, largest = (x.to(working_dtype(weight)) for x in extent(parts))
        at = (least < largest * FAR_SMALLER).nonzero(as_tuple=True)  # few groups
        if not len(at[0]):
            continue
        some = parts[at]
        small = (some.abs() < largest[at].unsqueeze(-1) * FAR_SMALLER) & (some != 0)
        small &= 8 * small.sum(-1, keepdim=True) >= (some != 0).sum(-1, keepdim=True)
        if bool(small.any()):
            values = tensor.rows(rows).dequantize().unflatten(1, groups)[at]
            count += int((small & (values == 0)).sum())
    return {"zeroed": count} if count else {}


def total(losses: Tensor) -> float | None:
    """Add up the losses of rows; None if the sum is not finite, as with an unusable Hessian."""
    with one_thread(losses.device):
        found = float(losses.sum(dtype=torch.float64))
    return found if math.isfinite(found) else None


def widened(weight: Tensor, width: int) -> Tensor:
    """Add columns of zeros to a weight, up to `width`; they do not change the scale of a last
    group.
    """
    if weight.shape[1] == width:
        return weight
    check_weight(weight)  # an error must name the shape without padding
    return pad(weight, (0, width - weight.shape[1]))
