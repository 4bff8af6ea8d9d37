"""The errors of a report's linears: which are worst and why, and how they vary with depth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from quantkit.core.quantized_tensor import Scheme
from quantkit.core.threads import grouped
from quantkit.core.units import format_percent
from quantkit.engines.joined import is_expert
from quantkit.errors import QuantkitError

Layer = Mapping[str, Any]
Error = Callable[[Layer], "float | None"]

#: An input channel is an outlier if its RMS is this many times the median channel's.
OUTLIER = 10.0
NO_CAUSE = "no cause recorded"


def number(value: object) -> float | None:
    """Take a finite number from a report, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def weight_error(layer: Layer) -> float | None:
    """Return `||W - Q|| / ||W||`, None if it is not recorded."""
    return number(layer.get("relative_error"))


def output_error(layer: Layer) -> float | None:
    """Return the relative RMS error of the outputs on the calibration text, None if it is not
    recorded.

    It is the root of `tr(D H D^T) / tr(W H W^T)`, the recorded `loss` over `norm` (ALGORITHMS 1).
    """
    loss, norm = number(layer.get("loss")), number(layer.get("norm"))
    if loss is None or loss < 0 or norm is None or norm <= 0:
        return None
    return number(math.sqrt(loss / norm))


def leading_error(layers: Sequence[Layer]) -> Error:
    """Choose the error that ranks the linears: the output error if at least half of
    them have it.
    """
    count = sum(output_error(layer) is not None for layer in layers)
    return output_error if 2 * count >= len(layers) else weight_error


def worst(layers: Iterable[Layer], error: Error, most: int) -> list[tuple[float, Layer]]:
    """List the linears with the largest errors, largest first; ties are sorted by name."""
    found = [(value, layer) for layer in layers if (value := error(layer)) is not None]
    return sorted(found, key=lambda item: (-item[0], str(item[1].get("name"))))[:most]


def bits(layer: Layer) -> float | None:
    """Count the bits for each weight of a linear, with scales, zero points and 2:4 indices; None
    for a dense one.
    """
    columns = _shape(layer)[1]
    try:
        scheme = Scheme.parse(str(layer.get("scheme")))
    except QuantkitError:
        return None
    if not columns:
        return None
    kept = 0.5 if scheme.sparsity else 1.0
    per_scale = 8 * scheme.format.scale_dtype.itemsize + (
        0 if scheme.symmetric else scheme.format.bits
    )
    index = 2 * kept if scheme.sparsity else 0.0
    return scheme.format.bits * kept + index + per_scale / (scheme.group_size or columns)


def weights(layer: Layer) -> int:
    """Count the weights of a linear without its padding, 0 if the shape is not recorded."""
    return math.prod(_shape(layer))


def _shape(layer: Layer) -> tuple[int, int]:
    """Return the rows and columns of a linear without padding, 0 and 0 if they are not recorded."""
    match layer.get("true_shape", layer.get("shape")):
        case [int(n), int(k)] if n > 0 and k > 0:
            return n, k
    return 0, 0


def causes(layer: Layer, most_bits: float | None = None) -> list[str]:
    """List the recorded reasons for the error of a linear; `most_bits` is the width of the model's
    widest scheme.
    """
    found = [words.format(layer[key]) for key, words in _FALLBACKS.items() if layer.get(key)]
    tokens, peak = (number(layer.get(key)) for key in ("tokens", "channel_peak"))
    columns = _shape(layer)[1]
    if tokens and tokens < columns and not layer.get("few_routed"):
        found.append(f"few tokens: {tokens:.0f} for {columns} input channels")
    if peak and peak >= OUTLIER:
        found.append(f"outlier channel: {peak:.0f} times the median input channel")
    if len(rungs := layer.get("rungs", [])) > 1:
        found.append(f"damping raised from {rungs[0]} to {rungs[-1]}")
    found += [
        words.format(f"{layer[key]:.0f}") for key, words in _COUNTED.items() if layer.get(key)
    ]
    kept, zeros = layer.get("kept"), layer.get("zeros")
    if kept is not None and zeros and kept + zeros > 0:
        found.append(f"2:4 pruning: {100 * zeros / (kept + zeros):.1f} % of the weights are zero")
    own = bits(layer)
    if own is not None and most_bits is not None and own < 0.9 * most_bits:
        found.append(f"fewer bits: {own:.2f}, elsewhere up to {most_bits:.2f}")
    return found or [NO_CAUSE]


_FALLBACKS = {
    "reason": "fallback to rounding: {}",
    "by_magnitude": "fallback to pruning by magnitude: {}",
    "requantized_from": "rounded a second time, from {}",
    "few_routed": "few tokens routed to this expert: {} (calibrated on all of the layer)",
}
_COUNTED = {
    "dead_columns": "input channels that no token reached: {}",
    "guard_rows": "rows where rounding was better, and kept: {}",
    "floored_scales": "scales raised to 2^-20: {}",
    "subnormal_scales": "scales below the normal float16 range: {}",
    "zeroed": "weights that became 0 beside far larger ones: {}",
    "zero_scales": "rows whose stored scale is 0: {}",
    "rounded_scales": "scales rounded to the layout's type: {}",
}


@dataclass(frozen=True)
class Point:
    """The errors of `count` linears of a kind in a block."""

    block: int
    low: float
    mid: float
    high: float
    count: int

    @property
    def text(self) -> str:
        """The errors in words."""
        if self.count == 1:
            return format_percent(self.mid)
        low, mid, high = map(format_percent, (self.low, self.mid, self.high))
        return f"median {mid}, {low} to {high} ({self.count} linears)"


@dataclass(frozen=True)
class Series:
    """One kind of linear over the blocks of a model; `experts` if a point stands for all experts of
    its block.
    """

    kind: str
    points: tuple[Point, ...]
    experts: bool


def by_depth(layers: Iterable[Layer], error: Error) -> list[Series]:
    """Arrange the errors by kind of linear and by block; linears outside of numbered blocks are
    left out.
    """
    named = ((str(layer.get("name")), error(layer)) for layer in layers)
    placed = ((_place(name), is_expert(name), value) for name, value in named if value is not None)
    found = grouped(
        ((place[0], expert), (place[1], value)) for place, expert, value in placed if place
    )
    short = _short_names([kind for kind, _ in found])
    blocks = {kind: sorted(grouped(values).items()) for kind, values in found.items()}
    return [
        Series(
            f"{short[kind]} (experts)" if expert else short[kind],
            tuple(Point(i, min(each), median(each), max(each), len(each)) for i, each in of_kind),
            any(len(each) > 1 for _, each in of_kind),
        )
        for (kind, expert), of_kind in blocks.items()
    ]


def _place(name: str) -> tuple[str, int] | None:
    """Split the name of a linear into its kind, which has no numbers, and the number of
    its block.
    """
    parts = name.split(".")
    numbers = [part for part in parts if part.isascii() and part.isdigit() and len(part) < 10]
    if not numbers:
        return None
    return ".".join(part for part in parts if part not in numbers), int(numbers[0])


def _short_names(kinds: Sequence[str]) -> dict[str, str]:
    """Shorten each dotted kind to the shortest end that no other kind has."""
    ends = {
        kind: [".".join(kind.split(".")[-i:]) for i in range(1, kind.count(".") + 2)]
        for kind in kinds
    }
    seen = Counter(end for own in ends.values() for end in own)
    return {kind: next((end for end in own if seen[end] == 1), kind) for kind, own in ends.items()}
