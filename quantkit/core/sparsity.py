"""2:4 sparsity: of each aligned group of four columns in a row, at most two values are nonzero
(docs/algorithms.md 9).

The two larger scores stay; of equal scores, the lower index. Every entry is compared with the other
three and stays if it beats two of them. There is no sort, so ties have the same result on every
device.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from quantkit.core.formats import aligned
from quantkit.errors import LayoutError, Setting, Words

QUAD = 4
_PAIRS = tuple(combinations(range(QUAD), 2))
#: Values that are checked or compared at a time, so that intermediate tensors stay small.
BLOCK = 2**19


def quads(k: int) -> int:
    """Count the groups of four in a row of `k` columns. Raises LayoutError if 4 does not divide
    `k`.
    """
    if k % QUAD:
        raise LayoutError(
            f"2:4 sparsity needs k to be a multiple of 4, and it is {k}",
            Words(Setting("skip"), "the weight"),
        )
    return k // QUAD


def best_two(scores: Tensor) -> Tensor:
    """Mark the two largest of each column of `scores` `[4, m]` (float), the lower index on ties, as
    bool `[4, m]`.
    """
    pairs, signs, others = _tables(scores.device, scores.dtype)
    first, second = scores.index_select(0, pairs).view(2, len(_PAIRS), -1)
    beaten = torch.addmm(
        others, signs, (first >= second).to(scores.dtype)
    )  # the number of the other three
    return beaten > 1.5


def mask(scores: Tensor) -> Tensor:
    """Mark the two largest `scores` `[n, k]` (float) of each group of four, the lower index on
    ties, as bool `[n, k]`.

    NaN counts as the least score, so that two stay in every group. LayoutError unless 4 divides k.
    """
    n, k = scores.shape
    chosen = torch.empty(n, quads(k), QUAD, dtype=torch.bool, device=scores.device)
    step = max(1, BLOCK // k)
    for a in range(0, n, step):
        part = scores[a : a + step].reshape(-1, QUAD)
        part = part.masked_fill(part.isnan(), -torch.inf)
        chosen[a : a + step] = best_two(part.T).T.view(-1, k // QUAD, QUAD)
    return chosen.view(n, k)


def weight_mask(weight: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """Mask a weight `[n, k]` by magnitude, or with a Hessian's `diagonal` `[k]` by wanda's score,
    as bool `[n, k]`.

    Scores are `abs(w_j)`, or `abs(w_j) sqrt(H_jj)` (docs/algorithms.md 9). LayoutError unless 4
    divides k.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scores = weight.to(dtype).abs()
    return mask(scores if diagonal is None else scores.mul_(diagonal.sqrt().to(dtype)))


def check(values: Tensor, zero: int = 0) -> None:
    """Raise LayoutError, with row and columns, unless at most two of each group of four `values`
    `[n, k]` differ from `zero`.

    `values` are bool or uint8.
    """
    n, k = values.shape
    total = n * quads(k)
    rows = max(1, BLOCK // max(1, k) if values.device.type == "cpu" else n)
    bad = 0
    first: tuple[int, int] | None = None
    for start, part in zip(range(0, n, rows), values.split(rows), strict=True):
        counts = (
            _nonzero(part, zero).mul_(0x01010101).bitwise_right_shift_(24)
        )  # the sum of the four bytes
        if counts.numel() and int(counts.max()) > 2:
            full = counts.view(len(part), -1) > 2
            row, quad = full.nonzero()[0].tolist()
            first = first or (start + row, QUAD * quad)
            bad += int(full.sum())
    if first is not None:
        row, column = first
        raise LayoutError(
            f"{bad} of {total} quads have more than two values that are not "
            f"zero, first row {row}, columns {column} to {column + 3}: this is no 2:4 weight"
        )


def _nonzero(values: Tensor, zero: int) -> Tensor:
    """Give one int32 for each group of four, flat: byte `i` is 1 if value `i` is not `zero`, else
    0.
    """
    quad = aligned(values.view(torch.uint8), torch.int32).view(-1).view(torch.int32)
    return (
        (quad ^ zero * 0x01010101).view(torch.uint8).clamp_(max=1).view(torch.int32)
    )  # faster than `!=` of bytes


@cache
def _tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tabulate both members of the six pairs, and the matrix and offset that count wins from `first
    >= second`.
    """
    pairs = torch.tensor([pair[side] for side in (0, 1) for pair in _PAIRS], device=device)
    signs = [[(i == first) - (i == second) for first, second in _PAIRS] for i in range(QUAD)]
    others = [[float(sum(i == second for _, second in _PAIRS))] for i in range(QUAD)]
    return (
        pairs,
        torch.tensor(signs, dtype=dtype, device=device),
        torch.tensor(others, dtype=dtype, device=device),
    )
