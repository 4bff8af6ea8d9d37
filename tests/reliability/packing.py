"""The laws of packing (B1)."""

from __future__ import annotations

import math
import random

import torch

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from tests.layouts.laws import UNITS, obeys, same_bytes
from tests.layouts.samples import HELD, record
from tests.reliability.campaign import Family, Run

#: Nibbles of each packed tensor that B1 changes, one after the other.
NIBBLES = 4
#: Sizes of weights that no layout with a unit holds, beside those that it holds.
ODD_SIZES = (1, 2, 3, 5, 7, 31, 33, 127, 129)


def drawn(rng: random.Random) -> tuple[str, QuantizedTensor]:
    """Draw a layout and a random record that it holds."""
    layout = rng.choice(sorted(UNITS))
    scheme = Scheme.parse(rng.choice(HELD[layout][0]))
    unit_n, unit_k = UNITS[layout]
    step = math.lcm(unit_k, scheme.group_size or 1, 4)
    n = unit_n * rng.randint(1, max(2, 128 // unit_n) if unit_n > 1 else 24)
    k = step * rng.randint(1, max(2, 256 // step))
    return layout, record(scheme, n, k, seed=rng.getrandbits(32), lowest_zero=1)


def attack_laws(found: Run) -> None:
    for i, rng in found.draws("B1"):
        layout, q = drawn(rng)
        with found.case(f"{layout} {q.scheme.label} {list(q.shape)}"):
            if i % 4 == 0:
                obeys(layout, q)
            elif i % 4 == 1:
                rows_in_any_order(layout, q, rng)
            elif i % 4 == 2:
                refuses_or_holds(layout, q.scheme, rng)
            else:
                changed_nibbles(layout, q, rng)


def rows_in_any_order(layout: str, q: QuantizedTensor, rng: random.Random) -> None:
    unit = min(128, len(q.codes))
    starts = rng.sample(range(0, len(q.codes), unit), -(-len(q.codes) // unit))
    packing = LAYOUTS[layout].packing(q.scheme, q.shape, q.scales, q.zeros)
    for start in starts:
        packing.add(start, q.codes[start : start + unit])
    assert same_bytes(packing.tensors, LAYOUTS[layout].pack(q))


def refuses_or_holds(layout: str, scheme: Scheme, rng: random.Random) -> None:
    """Give a layout any shape: it names the rule in one line, or obeys the laws."""
    n, k = (rng.choice(ODD_SIZES) if rng.random() < 0.5 else 32 * rng.randint(1, 6) for _ in range(2))
    try:
        LAYOUTS[layout].check(scheme, n, k)
    except LayoutError as error:
        assert "\n" not in str(error) and layout_unit_is_broken(layout, scheme, n, k), f"[{n}, {k}]: {error}"
    else:
        obeys(layout, record(scheme, n, k, seed=rng.getrandbits(32), lowest_zero=1))


def layout_unit_is_broken(layout: str, scheme: Scheme, n: int, k: int) -> bool:
    """Return whether a shape is no multiple of the units in LAYOUTS, as this test states them on its own."""
    unit_n, unit_k = UNITS[layout]
    sparse = 4 if scheme.sparsity is not None else 1
    return bool(n % unit_n or k % math.lcm(unit_k, scheme.group_size or 1, sparse))


def changed_nibbles(layout: str, q: QuantizedTensor, rng: random.Random) -> None:
    """Each change gives other values, or bytes that the same values do not pack to, as verify asks, or is refused.

    The second occurs with 2:4: metadata may move a kept code that is zero.
    """
    packed = LAYOUTS[layout].pack(q)
    for name, tensor in packed.items():
        stored = tensor.view(torch.uint8).view(-1)  # shares memory with what is unpacked
        for _ in range(NIBBLES):
            place, change = rng.randrange(2 * stored.numel()), rng.randrange(1, 16)
            stored[place // 2] ^= change << 4 * (place % 2)
            try:
                back = LAYOUTS[layout].unpack(packed, q.scheme)
                again = LAYOUTS[layout].pack(back)[name]
                canonical = torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))
                assert not (back.equal(q) and canonical), f"{name} nibble {place}"
            except LayoutError as error:
                assert "\n" not in str(error), error
            stored[place // 2] ^= change << 4 * (place % 2)
    assert LAYOUTS[layout].unpack(packed, q.scheme).equal(q)


FAMILIES = [
    Family("B1", "the laws of packing on random shapes, and changed nibbles", (500, 50_000, 50_000), attack_laws),
]
