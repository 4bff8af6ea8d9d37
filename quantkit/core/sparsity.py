"""2:4: of each aligned four columns of a row, a quad, at most two values are not zero (ALGORITHMS 9).

Which two stay is decided by scores, the larger ones, and by the index where scores are equal. Every entry is compared
with the other three and stays if it beats two of them: no sort, so ties fall alike on every device.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from quantkit.core.tensors import aligned
from quantkit.errors import LayoutError

#: How the two that stay are chosen; `sparsegpt` also moves them, to make up for those that go.
Rule = Literal["magnitude", "wanda", "sparsegpt"]
QUAD = 4
_PAIRS = tuple(combinations(range(QUAD), 2))
_CACHED = 2**19  # values looked at at a time, with what is made of them
_PIECE = 2**20  # scores compared at a time: each of them is copied three times


def quads(k: int) -> int:
    """Return how many quads a row of `k` columns has; LayoutError if 4 does not divide `k`."""
    if k % QUAD:
        raise LayoutError(f"2:4 sparsity needs k to be a multiple of 4, and it is {k}: --skip the weight")
    return k // QUAD


def best_two(scores: Tensor) -> Tensor:
    """Return bool `[4, m]`: the two largest of each column of `scores` `[4, m]` (float), the lower index on ties."""
    pairs, signs, others = _tables(scores.device, scores.dtype)
    first, second = scores.index_select(0, pairs).view(2, len(_PAIRS), -1)
    beaten = torch.addmm(others, signs, (first >= second).to(scores.dtype))  # of the other three, a whole number
    return beaten > 1.5


def mask(scores: Tensor) -> Tensor:
    """Return bool `[n, k]`: the two largest `scores` `[n, k]` (float) of each quad, the lower index on ties.

    LayoutError unless 4 divides k.
    """
    n, k = scores.shape
    kept = torch.empty(n, quads(k), QUAD, dtype=torch.bool, device=scores.device)
    step = max(1, _PIECE // k)
    for a in range(0, n, step):
        part = scores[a : a + step].reshape(-1, QUAD)
        kept[a : a + step] = best_two(part.T).T.view(-1, k // QUAD, QUAD)
    return kept.view(n, k)


def weight_mask(weight: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """Return the mask bool `[n, k]` of a weight by magnitude, or with a Hessian's `diagonal` `[k]` by wanda's score.

    Scores are `abs(w_j)`, or `abs(w_j) sqrt(H_jj)` (ALGORITHMS 9). LayoutError unless 4 divides k.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scores = weight.to(dtype).abs()
    return mask(scores if diagonal is None else scores.mul_(diagonal.sqrt().to(dtype)))


def check(values: Tensor, zero: int = 0) -> None:
    """Raise LayoutError, with row and columns, unless at most two of each quad of `values` `[n, k]` are not `zero`."""
    n, k = values.shape
    total = n * quads(k)
    rows = max(1, n if values.device.type != "cpu" else _CACHED // max(1, k))
    found: list[tuple[int, int, int]] = []
    for start, part in zip(range(0, n, rows), values.split(rows), strict=True):
        # The four bytes of a quad are added up in the highest one.
        counts = flags(part, zero).mul_(0x01010101)
        if counts.numel() and int(counts.max()) >> 24 > 2:
            full = (counts >> 24).view(len(part), -1) > 2
            row, quad = full.nonzero()[0].tolist()
            found.append((start + row, QUAD * quad, int(full.sum())))
    if found:
        row, column, _ = found[0]
        raise LayoutError(
            f"{sum(count for _, _, count in found)} of {total} quads have more than two values that are not "
            f"zero, first row {row}, columns {column} to {column + 3}: this is no 2:4 weight, prune it first"
        )


def flags(values: Tensor, zero: int = 0) -> Tensor:
    """Return one int32 for each quad of `values` `[n, k]`, flat: its byte `i` is 1 if value `i` is not `zero`, or 0."""
    if values.dtype != torch.uint8:
        return (values != zero).contiguous().view(-1).view(torch.int32)
    # A comparison of bytes takes several times as long as these two.
    fours = aligned(values, torch.int32).view(-1).view(torch.int32)
    return (fours ^ zero * 0x01010101).view(torch.uint8).clamp_(max=1).view(torch.int32)


@cache
def _tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Both members of the six pairs, and what turns `first >= second` into how many others each of the four beats."""
    pairs = torch.tensor([pair[side] for side in (0, 1) for pair in _PAIRS], device=device)
    signs = [[(i == first) - (i == second) for first, second in _PAIRS] for i in range(QUAD)]
    others = [[float(sum(i == second for _, second in _PAIRS))] for i in range(QUAD)]
    return pairs, torch.tensor(signs, dtype=dtype, device=device), torch.tensor(others, dtype=dtype, device=device)
