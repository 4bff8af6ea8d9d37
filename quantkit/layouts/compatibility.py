"""Which layout can become which, and what that depends on (LAYOUTS 11): `convert --list` and docs/conversions.md.

Nothing is claimed that the layouts do not say themselves: every scheme that one holds is asked of the other by
`restate.target`, shapes are tried on `check`. Only what depends on a file's contents is written down here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from quantkit.core.formats import FORMATS
from quantkit.core.scheme import Scheme
from quantkit.errors import RecipeError
from quantkit.layouts import LAYOUTS, family
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import broken_rule, target

#: What a source's INT4 tensors must not hold, since no record could: act-order that moves columns between groups.
OF_SOURCES = {
    "compressed-tensors": "there is no act-order",
    "gptq": "g_idx is static (k // group size)",
    "gptq-v2": "g_idx is static (k // group size)",
}
#: What FP6 and FP5 must be like where a source carries them in a wider format.
OF_CARRIERS = {"compressed-tensors": "every FP8 value is one of the format"}
#: What a target cannot store although its `check` takes the scheme and the shape.
OF_TARGETS = {"gptq": "no zero point is 0"}
RECENTRED = "asymmetric weights fit around zero points of 8"
PRUNED = "dense weights really are 2:4"

SPARSITIES: tuple[Literal["2:4"] | None, ...] = (None, "2:4")
SIZES = (32, 64, 128, 256, None)
SCHEMES = [
    Scheme(FORMATS[name], group_size, symmetric, sparsity)
    for name, sparsity, group_size, symmetric in product(FORMATS, SPARSITIES, SIZES, (True, False))
    if (symmetric and sparsity is None) or (not FORMATS[name].is_float and (symmetric or sparsity is None))
]
SIZE = 1024

PAGE = """# Which layout can become which

Made by `quantkit.conversions.markdown` from the layouts' own checks; a test holds this page to it, and another one does
every conversion of the table. `quantkit convert --list` prints the verdicts, with `--json` all of it.

*Lossless* means that every weight decodes to the same bits. A conversion that is lossless under a condition is tried:
the weight that breaks the condition is named, and nothing is written. `--requantize` rounds such weights again, which
loses something, and says how much; it is never implied.

- **Schemes.** A layout holds some formats and group sizes. *Restated* says how the values of a scheme that the target
  lacks are written in one that it has: a scale repeated for smaller groups, a format inside a wider one.
- **Shapes.** `n` and `k` must be multiples of what the target's kernel works on. `--pad` fills weights up with zeros;
  the true shape stays in the `quantkit` key of config.json, and the way back cuts the zeros off again.
- **Zero points.** A symmetric target has zero points of 8 alone. An asymmetric weight goes there if all its codes still
  fit when they are moved (`0 <= code - zero point + 8 <= 15`), as they do if the zero points are 8 already. GPTQ v1
  stores zero points less one, so it has no place for 0.
- **2:4.** Sparse-MARLIN keeps two of each four values along `k`, and a dense weight must have no more. The values come
  back; which two of a quad with fewer were marked as kept does not, since that is decided by a convention.
- **Act-order.** Columns whose group is not `k // group size` have no place in other layouts, and are not read.
- **FP8 carriers.** compressed-tensors holds FP6 and FP5 as FP8 values; they are read if each is a value of the format.
- **Scales.** All are float16 here. bfloat16 and float32 scales of other programs are read if float16 has them exactly.

| from | to | lossless | restated |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Conversion:
    """One pair of layouts: `lossless` True always, None under `condition`, False never, and then that is the reason.

    `restated` says which schemes are written as which others of the same values.
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
    """Return the verdict of every pair of different layouts."""
    return [_conversion(a, b) for a in LAYOUTS.values() for b in LAYOUTS.values() if a is not b]


def parse(pair: str) -> tuple[str, str]:
    """Return source and target of `A-to-B`; RecipeError unless both are layouts (a source may be a family: `gptq`)."""
    source, _, target = pair.partition("-to-")
    sources = {*LAYOUTS, *(family(name) for name in LAYOUTS)}
    if source not in sources or target not in LAYOUTS:
        raise RecipeError(f"{pair!r} is no conversion: write it A-to-B with layouts among {', '.join(LAYOUTS)}")
    return source, target


def markdown() -> str:
    """Return the page docs/conversions.md."""
    rows = [(c.source, c.target, c.verdict, c.restated or "") for c in conversions()]
    return PAGE + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _conversion(a: Layout, b: Layout) -> Conversion:
    held = [scheme for scheme in SCHEMES if broken_rule(a, scheme, SIZE, SIZE) is None]
    asked = ((scheme, target(b, scheme, SIZE, SIZE)) for scheme in held)
    found = {scheme: place[0] for scheme, place in asked if place is not None}
    if not found:
        return Conversion(a.NAME, b.NAME, False, broken_rule(b, held[0], SIZE, SIZE))
    conditions = [*_of_schemes(held, list(found)), *_of_shapes(a, b, found), *_of_data(a, b, found)]
    changes = dict.fromkeys(change for scheme, now in found.items() for change in _changes(scheme, now))
    condition, restated = "; ".join(conditions) or None, ", ".join(changes) or None
    return Conversion(a.NAME, b.NAME, None if conditions else True, condition, restated)


def _of_schemes(held: list[Scheme], found: list[Scheme]) -> list[str]:
    """Return which formats and group sizes are asked for, where those held are more."""
    formats = list(dict.fromkeys(scheme.format.name for scheme in found))
    within = [scheme for scheme in held if scheme.format.name in formats]
    sizes = list(dict.fromkeys(scheme.group_size for scheme in found))
    assert found == [scheme for scheme in within if scheme.group_size in sizes], "another rule than format and size"
    lines = [f"the format is {_either(formats)}"] if len(within) < len(held) else []
    some = len(found) < len(within)
    return lines + ([f"the group size is {_either(str(size or 'channel') for size in sizes)}"] if some else [])


def _of_shapes(a: Layout, b: Layout, found: dict[Scheme, Scheme]) -> list[str]:
    """Return which multiples the target asks for and the source does not, as one line."""
    scheme = next((scheme for scheme in found if scheme.group_size is None), next(iter(found)))
    lines = []
    for letter in ("n", "k"):
        shapes = [(2**p, SIZE) if letter == "n" else (SIZE, 2**p) for p in range(11)]
        ours = next(shape for shape in shapes if broken_rule(a, scheme, *shape) is None)
        theirs = next(shape for shape in shapes if target(b, scheme, *shape) is not None)
        if min(theirs) > min(ours):
            lines.append(f"{letter} % {min(theirs)} == 0")
    return [f"{' and '.join(lines)} (or --pad)"] if lines else []


def _of_data(a: Layout, b: Layout, found: dict[Scheme, Scheme]) -> list[str]:
    """Return what the tensors must be like, which no header says."""
    integers = any(not scheme.format.is_float for scheme in found)
    lines = [OF_SOURCES[a.NAME]] if a.NAME in OF_SOURCES and integers else []
    carried = any(scheme.format.is_float for scheme in found)
    lines += [OF_CARRIERS[a.NAME]] if a.NAME in OF_CARRIERS and carried else []
    lines += [RECENTRED] if any(scheme.symmetric != now.symmetric for scheme, now in found.items()) else []
    lines += [PRUNED] if any(scheme.sparsity != now.sparsity for scheme, now in found.items()) else []
    asymmetric = any(not now.symmetric for now in found.values())
    return lines + ([OF_TARGETS[b.NAME]] if b.NAME in OF_TARGETS and asymmetric and a.NAME not in OF_TARGETS else [])


def _changes(scheme: Scheme, now: Scheme) -> list[str]:
    """Return what is written otherwise when one scheme is stated as another."""
    sizes = [str(s.group_size or "channel") for s in (scheme, now)]
    pairs = [(scheme.format.name, now.format.name), (sizes[0], sizes[1])]
    pairs += [("dense" if s is None else s, "dense" if t is None else t) for s, t in [(scheme.sparsity, now.sparsity)]]
    pairs += [("sym" if scheme.symmetric else "asym", "sym" if now.symmetric else "asym")]
    return [f"{before} as {after}" for before, after in pairs if before != after]


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
