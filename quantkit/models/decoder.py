"""The weights of a model's decoder, from tensor names and headers only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from math import prod

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.families import TOWER


def decoder_weights(src: Checkpoint, inside: Collection[str] | None = None) -> dict[str, int]:
    """Return name -> elements of each tensor of two or more dimensions in the decoder's blocks,
    named as in `logical`.

    `inside` names the tensors of the blocks, as a built model knows them. Without it, the blocks
    are the largest numbered list, by elements, that is not named as a tower.
    """
    shapes = {name: src.true_shape(name) for name in src.logical()}
    sizes = {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    if inside is not None:
        return {name: size for name, size in sizes.items() if name in inside}
    lists: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        if numbered := re.match(r"(.+?)\.\d+\.", name):
            lists.setdefault(numbered[1], {})[name] = size
    best = max(
        lists, key=lambda path: (not TOWER.search(path), sum(lists[path].values())), default=""
    )
    return lists.get(best, {})


def share_of(weights: Mapping[str, int], modules: Collection[str]) -> float | None:
    """Return the share of a decoder's weights that belong to `modules`; None without any."""
    total = sum(weights.values())
    return sum(weights.get(f"{module}.weight", 0) for module in modules) / total if total else None


def largest_others(weights: Mapping[str, int], modules: Collection[str]) -> list[tuple[str, float]]:
    """Return the weights outside `modules`, summed over all blocks: name of the first, and share of
    the whole.
    """
    total, inside = sum(weights.values()), {f"{module}.weight" for module in modules}
    groups: dict[str, str] = {}
    found: Counter[str] = Counter()
    for name, size in weights.items():
        if name not in inside:
            first = groups.setdefault(re.sub(r"\.\d+\.", ".N.", name), name)
            found[first] += size
    return [(first, size / total) for first, size in found.most_common()]
