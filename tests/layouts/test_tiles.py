"""Compiled loops: the same words as torch in every order, block and width, and torch where they have no way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core import cpu_dispatch as dispatch
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import (
    LAYOUTS,
    arrangement,
    awq,
    compressed_tensors,
    gptq,
    marlin,
    marlin24,
    quick,
    sparse24,
    tcfpx,
)
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.cpu import tiles
from tests.layouts.samples import expanded, record

ROOT = Path(__file__).resolve().parents[2]
#: Every order of codes that a layout has, and their width.
ORDERS = [
    *((order, 4) for order in (compressed_tensors.CODES, gptq.CODES, awq.WORDS, marlin.CODES, quick.CODES)),
    *((order, 4) for order in (tcfpx.LOW, marlin24.KEPT, sparse24.SPARSE_MARLIN, *sparse24.CUTLASS.values())),
    *((tcfpx.HIGH[bits], bits - 4) for bits in (6, 5)),
]


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Loops for all tensors; yields the names of those that ran."""
    names: list[str] = []
    module = dispatch._compiled()

    class Spied:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(module, name)

    monkeypatch.setattr(dispatch, "LARGE", 0)
    monkeypatch.setattr(dispatch, "_compiled", Spied)
    arrangement._tiles.cache_clear()
    yield names
    arrangement._tiles.cache_clear()


def packed(order: Arrangement, codes: torch.Tensor, bits: int, above: int | None = None) -> torch.Tensor:
    words = torch.empty(codes.numel() * bits // 32, dtype=torch.int32)
    order.packing(words, bits, (len(codes), codes.shape[1]), above)(0, codes)
    return words


def by_torch(order: Arrangement, codes: torch.Tensor, bits: int, above: int | None = None) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "LARGE", 2**60)
        return packed(order, codes, bits, above)


@pytest.mark.parametrize(("high", "wide"), [(128, 1024), (1, 1), (32, 24)])
@pytest.mark.parametrize("shape", [(128, 128), (384, 640), (896, 256)])
@pytest.mark.parametrize(("order", "bits"), ORDERS, ids=lambda x: getattr(x, "order", x))
def test_every_order_of_ours_is_the_one_of_torch(
    order: Arrangement,
    bits: int,
    shape: tuple[int, int],
    high: int,
    wide: int,
    used: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever blocks a matrix is worked on in, the last of which may be smaller."""
    monkeypatch.setattr(tiles, "HIGH", high)
    monkeypatch.setattr(tiles, "WIDE", wide)
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 2**bits, shape, generator=random, dtype=torch.uint8)
    words = order.pack(codes, bits)
    assert used == ["pack"]
    assert torch.equal(words, by_torch(order, codes, bits))
    assert torch.equal(order.unpack(words, bits, shape), codes)
    assert used == ["pack", "unpack"]


@pytest.mark.parametrize(("order", "bits"), ORDERS, ids=lambda x: getattr(x, "order", x))
def test_bits_above_others_are_added_to_those_there(order: Arrangement, bits: int, used: list[str]) -> None:
    random = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (256, 384), generator=random, dtype=torch.uint8)
    for above in range(0, 9 - bits):
        words = packed(order, codes, bits, above)
        assert torch.equal(words, by_torch(order, codes, bits, above))
        there = codes & ~(((1 << bits) - 1) << above)
        order.unpacking(words, bits, (256, 384), onto=True, above=above)(0, there)
        assert torch.equal(there, codes)
    assert set(used) == {"pack", "unpack"}


@st.composite
def orders(draw: st.DrawFn) -> tuple[Arrangement, int, tuple[int, int]]:
    """Any order of axes of two to eight, some of them backwards, that fills words; loops have a way for some."""
    bits = draw(st.sampled_from([1, 2, 4, 8]))
    names = [[f"{side}{i}" for i in range(draw(st.integers(0, 3)))] for side in "rc"]
    sizes = {name: draw(st.sampled_from([2, 4, 8])) for side in names for name in side}
    sizes["last"] = 32 // bits  # so that a word is full, whatever comes before
    names[draw(st.integers(0, 1))].append("last")
    lines = [" ".join(["N" if i == 0 else "K", *(f"{n}:{sizes[n]}" for n in side)]) for i, side in enumerate(names)]
    axes = draw(st.permutations(["N", "K", *names[0], *names[1]]))
    axes.remove("last")
    flip = [name for name in sizes if draw(st.integers(0, 3)) == 0]
    shape = []
    for side in names:
        shape.append(draw(st.integers(1, 6)) * torch.Size([sizes[n] for n in side]).numel())
    return Arrangement(*lines, " ".join([*axes, "last"]), " ".join(flip)), bits, (shape[0], shape[1])


@settings(max_examples=300)
@given(orders())
def test_any_order_is_the_one_of_torch(case: tuple[Arrangement, int, tuple[int, int]]) -> None:
    order, bits, shape = case
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    words = order.pack(codes, bits)
    assert torch.equal(words, by_torch(order, codes, bits))
    assert torch.equal(order.unpack(words, bits, shape), codes)


def test_words_that_begin_between_wide_ones_are_filled_by_torch(used: list[str]) -> None:
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    out = torch.zeros(1 + 64 * 16, dtype=torch.int32)
    marlin.CODES.packing(out[1:], 4, (64, 128))(0, codes)
    assert used == [] and torch.equal(out[1:], marlin.CODES.pack(codes, 4)) and out[0] == 0
    assert torch.equal(marlin.CODES.unpack(out[1:], 4, (64, 128)), codes)
    assert used == ["pack", "unpack"]  # what is read may be copied


@pytest.mark.parametrize("zero", [0, 8])
def test_quads_of_more_than_two_are_found_wherever_they_are(zero: int, used: list[str]) -> None:
    random = torch.Generator().manual_seed(6)
    values = torch.full((8, 64), zero, dtype=torch.uint8)
    values[:, ::4] = torch.randint(0, 256, (8, 16), generator=random, dtype=torch.uint8)
    values[:, 3::4] = torch.randint(0, 256, (8, 16), generator=random, dtype=torch.uint8)
    sparsity.check(values, zero)
    for row, column in product((0, 7), (1, 2, 61, 62)):
        wrong = values.clone()
        wrong[row, column // 4 * 4] = wrong[row, column // 4 * 4 + 3] = 255
        wrong[row, column] = 128 if zero != 128 else 1
        with pytest.raises(LayoutError, match=f"row {row}, columns {column // 4 * 4} to"):
            sparsity.check(wrong, zero)
    assert set(used) == {"at_most_two"}


def test_every_quad_of_four_bits_is_judged_as_torch_does() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    quad = torch.stack([every >> shift & 15 for shift in (0, 4, 8, 12)], 1).to(torch.uint8)
    legal = (quad != 8).sum(1) <= 2
    kept, codes = sparse24.compress4(quad[legal], 8)
    assert torch.equal(codes, sparse24.encode(quad[legal], 8))
    assert torch.equal(kept, sparse24.compress(quad[legal], codes))
    assert torch.equal(expanded(kept, codes, 8), quad[legal])
    for one in quad[~legal][::97]:
        with pytest.raises(LayoutError, match="quads have more than two values"):
            sparse24.compress4(torch.cat((quad[legal][:8], one[None])), 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_that_pack_at_once_do_not_meet(layout: str) -> None:
    labels = {
        "humming": "fp6:channel",
        "tcfpx": "fp5:channel",
        "marlin24": "int4:g128:24",
        "marlin24-ct": "int4:g128:24",
    }
    q = record(Scheme.parse(labels.get(layout, "int4:g128")), 256, 512, lowest_zero=1)
    module = LAYOUTS[layout]
    expected = {name: tensor.clone() for name, tensor in module.pack(q).items()}

    def both(_: int) -> bool:
        packed = module.pack(q)
        same = all(torch.equal(packed[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
        return same and module.unpack(packed, q.scheme).equal(q)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(both, range(40)))


@pytest.mark.parametrize("missing", ["numba", "a folder to keep loops in", "room on the disk"])
def test_without_a_compiler_or_a_place_for_what_it_makes(missing: str, tmp_path: Path) -> None:
    """Torch packs; or what is compiled is not kept."""
    code = """
import sys, torch
if sys.argv[1] == "numba":
    sys.modules["numba"] = None
else:
    from numba.core import caching
    def full(*args):
        raise OSError(28, "No space left on device")
    if sys.argv[1] == "room on the disk":
        caching.IndexDataCacheFile.save = full
    else:
        caching.CacheImpl._locator_classes = []
from quantkit import loops
from quantkit.layouts import compressed_tensors
loops.LARGE = 0
codes = torch.arange(64, dtype=torch.uint8).view(4, 16)
found = torch.empty_like(codes)
compressed_tensors._translate(codes, compressed_tensors._in_pairs(torch.arange(256).flip(0).byte()), found)
assert torch.equal(found, 255 - codes)
print(loops._compiled() is None)
"""
    argv, env = [sys.executable, "-c", code, missing], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [str(missing == "numba")]
    assert not list(tmp_path.rglob("*.nbi"))


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_file_of_compiled_loops_that_is_cut_off_is_written_again(kind: str, tmp_path: Path) -> None:
    """As a machine that loses its power leaves one."""
    code = """
import numpy as np
from quantkit import compiled
assert compiled.all_rise(np.zeros(4, np.uint64)) == False
"""
    argv, env = [sys.executable, "-c", code], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run(argv, cwd=ROOT, check=True, env=env)
    (cut,) = tmp_path.rglob(f"*.{kind}")
    whole = cut.stat().st_size
    cut.write_bytes(b"")
    subprocess.run(argv, cwd=ROOT, check=True, env=env)
    assert cut.stat().st_size == whole


def test_few_codes_are_packed_without_loading_a_compiler() -> None:
    code = "import sys, torch; from quantkit.layouts import gptq; gptq.CODES.pack(torch.zeros(64, 64).byte(), 4)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('numba' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False"]
