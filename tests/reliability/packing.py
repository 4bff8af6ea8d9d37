"""The laws of packing, and faults planted for verify to find (B1, B2)."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError, QuantkitError
from quantkit.evaluation.verify import verify
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.layouts.laws import UNITS, obeys, same_bytes
from tests.layouts.samples import HELD, record, write_folder
from tests.reliability import samples
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


def one_code(q: QuantizedTensor, rng: random.Random) -> QuantizedTensor:
    codes, zero = q.codes.clone(), q.scheme.format.zero_code
    row, column = rng.choice((codes != zero).nonzero().tolist())
    codes[row, column] = rng.choice(sorted({*range(2**q.scheme.format.bits)} - {int(codes[row, column]), zero}))
    return replace(q, codes=codes)


def tile_turned(q: QuantizedTensor, rng: random.Random) -> QuantizedTensor:
    """Transpose a tile of codes; one of 2:4 is only turned upside down."""
    codes = q.codes.clone()
    row, column = (16 * rng.randrange(size // 16) for size in q.shape)
    tile = codes[row : row + 16, column : column + 16]
    tile.copy_(tile.flip(0) if q.scheme.sparsity is not None else tile.T.clone())
    return replace(q, codes=codes)


def one_scale(q: QuantizedTensor, rng: random.Random) -> QuantizedTensor:
    scales = q.scales.clone()
    scales.view(-1)[rng.randrange(scales.numel())] *= 2
    return replace(q, scales=scales)


def groups_off_by_one(q: QuantizedTensor, rng: random.Random) -> QuantizedTensor:
    return replace(q, scales=q.scales.view(-1).roll(1).view(q.scales.shape))


def zeros_shifted(q: QuantizedTensor, rng: random.Random) -> QuantizedTensor:
    return q if q.zeros is None else replace(q, zeros=(q.zeros % 15) + 1)


#: Changes of a record, and of the tensors of a folder.
RECORD_FAULTS = (one_code, tile_turned, one_scale, groups_off_by_one, zeros_shifted)
TENSOR_FAULTS = ("exchanged", "a bit of a dense tensor", "a byte of a packed tensor")
#: Tensors of one shape that are exchanged, packed or dense.
PAIRS = (("q_proj", "k_proj"), ("gate_proj", "up_proj"), ("input_layernorm", "post_attention_layernorm"))


def planted(folder: Path, rng: random.Random) -> str:
    """Plant a fault as a careful attacker would: nothing in the folder states a hash; returns what it is."""
    path = folder / "model.safetensors"
    src, tensors = Checkpoint(folder), load_file(path)
    module = rng.choice(src.modules())
    fault = rng.choice((*RECORD_FAULTS, *TENSOR_FAULTS))
    packed = {name for each in src.modules() for name in src.parts(each).values()}
    if fault == "exchanged":
        a, b = rng.choice(PAIRS)
        for name in [name for name in tensors if f".{a}." in name]:
            tensors[name], tensors[name.replace(a, b)] = tensors[name.replace(a, b)], tensors[name]
        module = f"{a} and {b}"
    elif isinstance(fault, str):
        module = rng.choice([name for name in tensors if (name in packed) == ("packed" in fault)])
        data = tensors[module].contiguous().view(-1).view(torch.uint8).clone()
        data[rng.randrange(data.numel())] ^= 1 << rng.randrange(8) if "bit" in fault else rng.randrange(1, 256)
        tensors[module] = data.view(tensors[module].dtype).view(tensors[module].shape)
    else:
        q = src.quantized(module)
        other = fault(q, rng)
        if other.equal(q):  # two equal scales, a symmetric tile, or no zeros
            other = one_code(q, rng)
        assert src.layout is not None
        tensors |= {f"{module}.{suffix}": t.contiguous() for suffix, t in src.layout.pack(other).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{fault if isinstance(fault, str) else fault.__name__}: {module}"


def attack_verify(found: Run) -> None:
    source = samples.model(found.folder / "source", blocks=1, dtype="float16")
    good: list[Path] = []
    alarms = {"pr": 20, "nightly": 500, "release": 500}[found.column]
    cases = [(layout, label) for layout, (labels, _) in HELD.items() for label in labels]
    for i in range(alarms):
        rng = found.random("B2 good", i)
        layout, label = cases[i % len(cases)]
        folder = written(source, found.folder / f"good {i}", layout, label, rng)
        with found.case(f"good: {layout} {label}"):
            alone, beside = verify(folder, device="cpu", unsealed=True), verify(folder, against=folder, device="cpu")
            assert alone.ok and not alone.checked and beside.ok and beside.checked, (alone.failures, beside.failures)
        if len(good) < len(cases):
            good.append(folder)
        else:
            shutil.rmtree(folder)
    unreadable = 0
    for i, rng in found.draws("B2"):
        reference = rng.choice(good)
        folder = shutil.copytree(reference, found.folder / "broken")
        what = planted(folder, rng)
        with found.case(f"case {i}: {what}, {json.loads((folder / 'config.json').read_text())['quantization_config']}"):
            try:
                assert not verify(folder, against=reference, device="cpu").ok, "passed"
            except QuantkitError as error:
                assert "\n" not in str(error)
                unreadable += 1
            if i % 25 == 0:
                samples.quantkit(found.folder, "verify", folder, "--against", reference, "-q", code=None)
        shutil.rmtree(folder)
    found.facts = {"good_checkpoints": alarms, "planted_faults": found.least, "of_them_unreadable": unreadable}


def written(source: Path, folder: Path, layout: str, label: str, rng: random.Random) -> Path:
    """Write random codes and scales in a layout, without a report and without digests."""
    records = write_folder(source, folder, layout, Schemes(Scheme.parse(label), ignore=("lm_head",)))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for module, q in records.items():  # of its own seed
        other = record(q.scheme, *q.shape, seed=rng.getrandbits(32), lowest_zero=1)
        q = replace(q, codes=other.codes, zeros=other.zeros)
        tensors |= {f"{module}.{suffix}": t.contiguous() for suffix, t in LAYOUTS[layout].pack(q).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


FAMILIES = [
    Family("B1", "the laws of packing on random shapes, and changed nibbles", (500, 50_000, 50_000), attack_laws),
    Family("B2", "faults planted for verify, and good checkpoints", (50, 200, 200), attack_verify),
]
