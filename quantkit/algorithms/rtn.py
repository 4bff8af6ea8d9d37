"""Round to nearest (RTN): choose scales, then take the nearest code (ALGORITHMS 3, 4 and 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms.grid import (
    LARGEST_HALF,
    SMALLEST_SCALE,
    divide,
    encode,
    half_precision,
    refuse_overflow,
)
from quantkit.algorithms.hessian import check_size, live_diagonal
from quantkit.algorithms.masks import fixed_mask
from quantkit.algorithms.numerics import check_weight, row_slices, working_dtype
from quantkit.algorithms.scale_search import check_signed, choose_scales, group_errors
from quantkit.core.formats import Format
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RecipeError
from quantkit.names import Clip, Metric, Rule

#: Bytes for each weight while it is rounded, packed or unpacked: the source, its float32 copy, the
#: scale search's scratch, the codes, the words (measured: 11.4).
ROUNDING_BYTES = 12


def quantize(
    weight: Tensor,
    scheme: Scheme,
    *,
    clip: Clip = "none",
    metric: Metric = "mse",
    hessian: Tensor | None = None,
    signed: bool = False,
    prune: Rule = "magnitude",
) -> tuple[QuantizedTensor, dict[str, Any]]:
    """Round `weight` `[n, k]` to nearest; also return the counts of `scale_facts`.

    `clip="search"` searches each scale for the least `metric`; "diag" and "block" need `hessian`
    `[k, k]`. FP6 and FP5 without search follow the published rule: codes from the unrounded scale
    (LAYOUTS 6.3). `signed` allows negative scales. A weight of a 2:4 scheme is first pruned by the
    mask that `fixed_mask` makes for `prune`. NumericError if the weight is not finite, or if
    dequantized weights overflow float16. LayoutError if the group size does not divide k.
    RecipeError as `check_signed` and `fixed_mask`.
    """
    check_weight(weight)
    if hessian is not None:
        check_size(hessian, weight.shape[1])
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


def scale_facts(tensor: QuantizedTensor) -> dict[str, Any]:
    """Count for the report: scales at the floor 2^-20, subnormal float16 scales, and scales of
    zero, by magnitude.

    For a 2:4 weight, also count zero and nonzero codes.
    """
    scales = tensor.scales.abs()
    sparse: dict[str, int] = {}
    if tensor.scheme.sparsity is not None:
        sparse["kept"] = int((tensor.codes != tensor.scheme.format.zero_code).sum())
        sparse["zeros"] = tensor.codes.numel() - sparse["kept"]
    return {
        **sparse,
        "floored_scales": int((scales == SMALLEST_SCALE).sum()),
        "subnormal_scales": int((scales < torch.finfo(torch.float16).smallest_normal).sum()),
        "zero_scales": int((scales == 0).sum()),
    }


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
        refuse_overflow(~(half * fmt.largest <= LARGEST_HALF).flatten(), rows.start, groups)
        codes[rows], scales[rows] = part.view(-1, k), half
    return QuantizedTensor(scheme, codes, scales)


def published_codes(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return codes uint8 `[..., g]` and unrounded scales `[...]` of float32 `x` `[..., g]` (LAYOUTS
    6.3).
    """
    scale = divide(x.abs().amax(-1).clamp_(min=1e-12), fmt.largest)
    return fmt.encode(x / scale.unsqueeze(-1)), scale
