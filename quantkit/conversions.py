"""Which layout can become which, and what that depends on (LAYOUTS 11): `convert --list`.

Nothing is claimed that the layouts do not say themselves: schemes and shapes are tried on their own `check`. Only what
depends on a file's contents is written down here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from quantkit.errors import LayoutError, RecipeError
from quantkit.formats import FORMATS
from quantkit.layouts import LAYOUTS, family
from quantkit.layouts.protocol import Layout
from quantkit.tensor import Scheme

#: What a source's tensors must not hold, since no record could: act-order that moves columns between groups.
OF_SOURCES = {
    "compressed-tensors": "no act-order",
    "gptq": "g_idx is static (k // group size)",
    "gptq-v2": "g_idx is static (k // group size)",
}
#: What a target cannot store although its `check` takes the scheme and the shape.
OF_TARGETS = {"gptq": "no zero point is 0"}

SCHEMES = [
    Scheme(FORMATS[name], group_size, symmetric)
    for name, group_size, symmetric in product(FORMATS, (32, 64, 128, None), (True, False))
    if symmetric or not FORMATS[name].is_float
]
SIZE = 1024


@dataclass(frozen=True)
class Conversion:
    """One pair of layouts: `lossless` True always, None under `condition`, False never, and then that is the reason."""

    source: str
    target: str
    lossless: bool | None
    condition: str | None

    @property
    def verdict(self) -> str:
        if self.lossless is False:
            return f"not possible: {self.condition}"
        return f"lossless when {self.condition}" if self.condition else "lossless"


def conversions() -> list[Conversion]:
    """Return the verdict of every pair of different layouts."""
    return [_conversion(a, b) for a in LAYOUTS.values() for b in LAYOUTS.values() if a is not b]


def parse(pair: str) -> tuple[str, str]:
    """Return source and target of `A-to-B`; RecipeError unless both are layouts (a source may be a family: `gptq`)."""
    source, _, target = pair.partition("-to-")
    sources = {*LAYOUTS, *(family(name) for name in LAYOUTS)}
    if source not in sources or target not in LAYOUTS:
        raise RecipeError(f"{pair!r} is no conversion: write it A-to-B with layouts among {', '.join(LAYOUTS)}")
    return source, target


def _conversion(a: Layout, b: Layout) -> Conversion:
    held = [scheme for scheme in SCHEMES if _holds(a, scheme, SIZE, SIZE)]
    shared = [scheme for scheme in held if _holds(b, scheme, SIZE, SIZE)]
    if not shared:
        return Conversion(a.NAME, b.NAME, False, _reason(b, held[0]))
    conditions = [] if shared == held else [f"the scheme is {_named(shared)}"]
    for letter in ("n", "k"):
        # k is a multiple of every group size, so only one scale per row shows what the layout itself asks.
        ours, theirs = (_unit(layout, letter, shared[-1]) for layout in (a, b))
        conditions += [f"{letter} is a multiple of {theirs}"] if theirs > ours else []
    if a.NAME in OF_SOURCES and any(not scheme.format.is_float for scheme in shared):
        conditions.append(OF_SOURCES[a.NAME])
    if b.NAME in OF_TARGETS and any(not scheme.symmetric for scheme in shared) and a.NAME not in OF_TARGETS:
        conditions.append(OF_TARGETS[b.NAME])
    return Conversion(a.NAME, b.NAME, None if conditions else True, "; ".join(conditions) or None)


def _named(schemes: list[Scheme]) -> str:
    """Return the schemes in words; a format is named alone when each of its schemes is among them."""
    names = []
    for fmt in FORMATS.values():
        found = [scheme for scheme in schemes if scheme.format is fmt]
        every = len(found) == sum(scheme.format is fmt for scheme in SCHEMES)
        names += [fmt.name] if every else [scheme.label for scheme in found]
    return " or ".join(names)


def _holds(layout: Layout, scheme: Scheme, n: int, k: int) -> bool:
    try:
        layout.check(scheme, n, k)
    except LayoutError:
        return False
    return True


def _reason(layout: Layout, scheme: Scheme) -> str:
    try:
        layout.check(scheme, SIZE, SIZE)
    except LayoutError as error:
        return str(error).split(": ")[0]
    raise AssertionError(f"{layout.NAME} holds {scheme.label}")


def _unit(layout: Layout, letter: str, scheme: Scheme) -> int:
    """Return the smallest power of two that `n` or `k` may be."""
    sizes = (2**power for power in range(11))
    return next(s for s in sizes if _holds(layout, scheme, *((s, SIZE) if letter == "n" else (SIZE, s))))
