"""How far a solved weight lies from its source, for the report."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms.numerics import check_weight, row_slices, working_dtype
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.threads import one_thread

#: A weight counts as far smaller than another if their ratio is below this.
FAR_SMALLER = 2.0**-20


def relative_error(weight: Tensor, value: QuantizedTensor | Tensor) -> float:
    """Compute `||W - Q|| / ||W||`, 0 for a weight of zeros; padding columns of Q do not count."""
    decoded = (
        value.dequantize()
        if isinstance(value, QuantizedTensor)
        else value.to(torch.float32, copy=True)
    )
    difference = decoded[:, : weight.shape[1]]
    difference.sub_(weight)  # in place, without a float32 copy of the weight: memory peaks here
    with one_thread(weight.device):
        norm = torch.linalg.vector_norm(weight, dtype=working_dtype(weight)).clamp_min(1e-30)
        return float(torch.linalg.vector_norm(difference) / norm)


def zeroed(weight: Tensor, tensor: QuantizedTensor) -> dict[str, int]:
    """Count weights `[n, k]` that became 0 because others of their group are far larger; {} if
    there are none.

    Weights below 2^-20 of the largest are counted, in groups where they are at least an eighth of
    the nonzero weights. Single small weights among normal weights are not counted.
    """
    columns = tensor.codes.shape[1]  # padded, so that the last group is whole
    count = 0
    for rows in row_slices(weight, columns):
        parts = widened(weight[rows], columns).abs().unflatten(1, (tensor.scales.shape[1], -1))
        small = (parts < parts.amax(-1, keepdim=True).to(working_dtype(weight)) * FAR_SMALLER) & (
            parts > 0
        )
        small &= 8 * small.sum(-1, keepdim=True) >= (parts > 0).sum(-1, keepdim=True)
        if bool(small.any()):
            count += int((small.flatten(1) & (tensor.rows(rows).dequantize() == 0)).sum())
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
