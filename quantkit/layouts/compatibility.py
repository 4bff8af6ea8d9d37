"""The table of conversions between layouts, with their conditions: `convert --list` and
docs/conversions.md.

The table is derived: each scheme of a source is tried on the target with `recast.target`, and
shapes with `check`. Only conditions on the contents of a file are stated here (docs/layouts.md 11).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from quantkit.core.formats import FORMATS
from quantkit.core.scheme import Scheme, Sparsity
from quantkit.errors import RecipeError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import broken_rule, target

RECENTRED = "asymmetric weights fit around zero points of 8"
PRUNED = "dense weights really are 2:4"

SPARSITIES: tuple[Sparsity, ...] = (None, "2:4")
SIZES = (32, 64, 128, 256, None)
SCHEMES = [
    Scheme(FORMATS[name], group_size, symmetric, sparsity)
    for name, sparsity, group_size, symmetric in product(FORMATS, SPARSITIES, SIZES, (True, False))
    if (symmetric and sparsity is None)
    or (not FORMATS[name].is_float and (symmetric or sparsity is None))
]
SIZE = 1024


@dataclass(frozen=True)
class Conversion:
    """The conversion from a layout to another.

    `lossless` is True, None under `condition`, or False because of `condition`. `restated` lists
    the schemes that are recast, with their new schemes.
    """

    source: str
    target: str
    lossless: bool | None
    condition: str | None
    restated: str | None = None

    @property
    def verdict(self) -> str:
        if self.lossless is False:
            return f"not possible because {self.condition}"
        return f"lossless when {self.condition}" if self.condition else "lossless"


def conversions() -> list[Conversion]:
    """List the conversions between all pairs of different layouts."""
    return [_conversion(a, b) for a in LAYOUTS.values() for b in LAYOUTS.values() if a is not b]


def parse(pair: str) -> tuple[str, str]:
    """Split `A-to-B` into source and target; RecipeError unless both are layouts (`gptq` stands for
    both versions).
    """
    source, _, target = pair.partition("-to-")
    sources = {*LAYOUTS, *(layout.family for layout in LAYOUTS.values())}
    if source not in sources or target not in LAYOUTS:
        raise RecipeError(
            f"{pair!r} is no conversion", f"write it A-to-B with layouts among {', '.join(LAYOUTS)}"
        )
    return source, target


def _conversion(a: Layout, b: Layout) -> Conversion:
    held = [scheme for scheme in SCHEMES if broken_rule(a, scheme, SIZE, SIZE) is None]
    asked = ((scheme, target(b, scheme, SIZE, SIZE)) for scheme in held)
    found = {scheme: place[0] for scheme, place in asked if place is not None}
    if not found:
        return Conversion(a.NAME, b.NAME, False, broken_rule(b, held[0], SIZE, SIZE))
    conditions = [
        *_scheme_conditions(held, list(found)),
        *_shape_conditions(a, b, found),
        *_data_conditions(a, b, found),
    ]
    changes = dict.fromkeys(
        change for scheme, now in found.items() for change in _changes(scheme, now)
    )
    condition, restated = "; ".join(conditions) or None, ", ".join(changes) or None
    return Conversion(a.NAME, b.NAME, None if conditions else True, condition, restated)


def _scheme_conditions(held: list[Scheme], found: list[Scheme]) -> list[str]:
    """Name the formats and group sizes that the target takes, if the source holds more."""
    formats = list(dict.fromkeys(scheme.format.name for scheme in found))
    within = [scheme for scheme in held if scheme.format.name in formats]
    sizes = list(dict.fromkeys(scheme.group_size for scheme in found))
    assert found == [scheme for scheme in within if scheme.group_size in sizes], (
        "another rule than format and size"
    )
    lines = [f"the format is {_either(formats)}"] if len(within) < len(held) else []
    some = len(found) < len(within)
    return lines + (
        [f"the group size is {_either(str(size or 'channel') for size in sizes)}"] if some else []
    )


def _shape_conditions(a: Layout, b: Layout, found: dict[Scheme, Scheme]) -> list[str]:
    """Name the multiples that the target needs and the source does not, as one line."""
    scheme = next((scheme for scheme in found if scheme.group_size is None), next(iter(found)))
    lines = []
    for letter in ("n", "k"):
        shapes = [(2**p, SIZE) if letter == "n" else (SIZE, 2**p) for p in range(11)]
        needed_before = next(shape for shape in shapes if broken_rule(a, scheme, *shape) is None)
        needed = next(shape for shape in shapes if target(b, scheme, *shape) is not None)
        if min(needed) > min(needed_before):
            lines.append(f"{letter} % {min(needed)} == 0")
    return [f"{' and '.join(lines)} (or --pad)"] if lines else []


def _data_conditions(a: Layout, b: Layout, found: dict[Scheme, Scheme]) -> list[str]:
    """List the conditions on values, which no header shows."""
    integers, floats = (
        any(scheme.format.is_float is kind for scheme in found) for kind in (False, True)
    )
    asymmetric = any(not now.symmetric for now in found.values())
    lines = [
        a.INTEGERS_IF if integers else None,
        a.FLOATS_IF if floats else None,
        RECENTRED
        if any(scheme.symmetric != now.symmetric for scheme, now in found.items())
        else None,
        PRUNED if any(scheme.sparsity != now.sparsity for scheme, now in found.items()) else None,
        b.ZEROS_IF if asymmetric and a.ZEROS_IF is None else None,
    ]
    return [line for line in lines if line is not None]


def _changes(scheme: Scheme, now: Scheme) -> list[str]:
    """List the properties that change when one scheme is recast to another."""
    sizes = [str(s.group_size or "channel") for s in (scheme, now)]
    pairs = [(scheme.format.name, now.format.name), (sizes[0], sizes[1])]
    pairs += [
        ("dense" if s is None else s, "dense" if t is None else t)
        for s, t in [(scheme.sparsity, now.sparsity)]
    ]
    pairs += [("sym" if scheme.symmetric else "asym", "sym" if now.symmetric else "asym")]
    return [f"{before} as {after}" for before, after in pairs if before != after]


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
