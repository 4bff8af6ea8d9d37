"""Exclude candidate scales that cannot have the least squared error of their group (ALGORITHMS 4).

A group, divided by its base scale, is a point. The error of a candidate is the squared distance of
the point to the nearest values of codes. For a point on a grid it is a sum of rows of a table. The
triangle inequality bounds how much the error of the group itself differs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from quantkit.algorithms.numerics import half_precision, round_to_codes, stored_scale
from quantkit.core.formats import Format

#: Numbers of the grid, and candidates of one table, beside a bound for all later ones.
POINTS, COLUMNS = 2**13, 31
#: The most bits of a code if there are zero points: each zero point has its part of the table.
ZERO_BITS = 4
#: Bounds hold for groups with at least this base scale, and at most this largest value of a
#: candidate. Their scales change by less than `_ROUNDED` when they are stored.
LEAST_BASE, LARGEST = 2.0**-15, 6e4
_ROUNDED = 2**-7


class Candidates(NamedTuple):
    """The candidate scales of groups, as ratios to a `base` scale `[m]` before it is rounded.

    `low` `[m]` are the lowest weights of asymmetric groups, else None. `stored` is the dtype of the
    weight.
    """

    fmt: Format
    base: Tensor
    low: Tensor | None
    stored: torch.dtype

    def of(self, ratios: Tensor, groups: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return scales, float16 values in the dtype of `base`, and zero points of all groups or
        some, in the shape of `ratios * base`.
        """
        base, low = (x if x is None or groups is None else x[groups] for x in (self.base, self.low))
        assert base is not None
        scales = stored_scale(ratios * base, self.stored, self.fmt)
        if low is None:
            return scales, None
        return scales, (ratios * -low / scales).round_().clamp_(0, 2**self.fmt.bits - 1)


def contenders(
    x: Tensor, candidates: Candidates, ratios: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Return the groups and the numbers of the candidates that can have the least error, `[p]`.

    `x` are groups float32 `[m, g]`; `ratios` are descending.
    """
    fmt, is_asymmetric = candidates.fmt, candidates.low is not None
    base = candidates.base.clamp(min=LEAST_BASE).unsqueeze(1)
    size, low, step = _grid(fmt, is_asymmetric)
    at = (x / (base * step)).add_(0.5 - low / step)
    device = x.device
    tried, left = torch.tensor(ratios, device=device), torch.arange(len(x), device=device)
    zeros = candidates.of(torch.ones(1, device=device))[1]
    if zeros is not None:
        at.add_((zeros * (1 / step + size)).unsqueeze(1))
    moved = math.sqrt(x.shape[1]) * step / 2 * 1.05
    rounding = (x.shape[1] + 8) * 2.0**-23  # of sums
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True).div_(base).add_(moved)
    largest = ratios[0] * (2**fmt.bits if is_asymmetric else fmt.largest)
    beyond = (candidates.base < LEAST_BASE) | (candidates.base > LARGEST / largest)
    least = torch.full_like(base, torch.inf)
    parts = [at.clamp_(min=0).int(), base, norm, beyond.unsqueeze(1)]
    found = list[tuple[int, Tensor, Tensor]]()
    for first in range(0, len(ratios), COLUMNS):
        some, later = ratios[first : first + COLUMNS], ratios[first + COLUMNS :]
        points, base, norm, beyond = parts
        table = _table(fmt, some, later[:1], is_asymmetric, device)
        distance = embedding_bag(points, table, mode="sum").sqrt_()
        exact = tried[first : first + COLUMNS + 1] * base
        width = half_precision(exact, candidates.stored).sub_(exact).abs_().div_(exact)
        width.mul_(1.03).add_(rounding).mul_(distance + norm).add_(moved)
        width.masked_fill_(beyond, torch.inf)
        if zeros is not None:
            moves = candidates.of(tried[first:].unsqueeze(1), left)[1]
            assert moves is not None
            other = moves != zeros[left]
            other[len(some) : width.shape[1]] = other[len(some) :].any(0)
            width.masked_fill_(other[: width.shape[1]].t(), torch.inf)
        most = (distance + width)[:, : len(some)].amin(1, keepdim=True)
        least[left] = torch.minimum(least[left], most)
        lowest = distance.sub_(width)
        found.append((first, left, lowest[:, : len(some)]))
        still = (lowest[:, -1:] <= least[left]).flatten().nonzero().flatten()
        if not later or not len(still):
            break
        left, parts = left[still], [part.index_select(0, still) for part in parts]
    pairs = [
        (left[i], number.add_(first))
        for first, left, lowest in found
        for i, number in [(lowest <= least[left]).nonzero(as_tuple=True)]
    ]
    groups, numbers = zip(*pairs, strict=True)
    return torch.cat(groups), torch.cat(numbers)


def _grid(fmt: Format, is_asymmetric: bool) -> tuple[int, float, float]:
    """Return the size of the grid, its first number in base scales, and the step; with a zero
    point, numbers count from the lowest value.
    """
    if is_asymmetric:
        return POINTS // 2, -1.5, (2**fmt.bits + 2) / (POINTS // 2 - 1)
    return POINTS, -fmt.absmax, 2 * fmt.absmax / (POINTS - 1)


@cache  # never freed: threads read it in streams of their own
def _table(
    fmt: Format,
    ratios: tuple[float, ...],
    later: tuple[float, ...],
    is_asymmetric: bool,
    device: torch.device,
) -> Tensor:
    """Return squared errors `[points, c]` of the numbers of the grid for candidate scales, for each
    zero point one after the other.

    For a ratio `later`, the last column has the errors that clipping alone causes.
    """
    zeros = torch.arange(2.0**fmt.bits).view(-1, 1, 1) if is_asymmetric else None
    size, low, step = _grid(fmt, is_asymmetric)
    x = torch.arange(size, dtype=torch.float32).mul_(step).add_(low).view(1, -1, 1)
    x = x if zeros is None else x - zeros
    columns = [round_to_codes(x / ratio, fmt, zeros).mul_(ratio) for ratio in ratios]
    for ratio in later:
        ends = (round_to_codes(torch.full_like(x, end), fmt, zeros) for end in (-1e6, 1e6))
        lowest, highest = (end.mul_(ratio * (1 + _ROUNDED)) for end in ends)
        columns.append(torch.minimum(torch.maximum(x, lowest), highest))
    table = torch.cat([column.sub_(x).square_() for column in columns], 2).flatten(0, 1)
    return table.to(device)
