"""Every instance of every kernel compiles for every architecture, with no GPU here, and none spills registers."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.kernels import ONLY, SOURCES, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES
from quantkit.kernels.weights import SPLITS
from quantkit.tensor import Scheme
from tests.kernels.test_hopper import CASES

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    problem = loader.toolchain()["problem"]
    if problem is not None:
        pytest.skip(f"needs CuPy and NVRTC, which compile without a GPU: {problem}")


def test_every_source_is_listed() -> None:
    assert SOURCES.keys() == {path.stem for path in loader.source_dir().glob("*.cu")}


@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name in SOURCES for arch in ARCHITECTURES if arch in ONLY.get(name, (arch,))]
)
def test_every_instance_compiles_and_none_spills(name: str, arch: str) -> None:
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:  # the compiler runs outside of Python's lock
        parts = [SOURCES[name][i::cores] for i in range(min(cores, len(SOURCES[name])))]
        binaries = list(pool.map(lambda part: loader.compile(name, part, arch), parts))
    for part, binary in zip(parts, binaries, strict=True):
        assert list(binary.names) == list(part)
        assert "warning" not in binary.log, binary.log
        for instance, usage in binary.usage().items():
            assert usage.spills == 0, f"{instance} on {arch}: {usage}"
            assert 0 < usage.registers <= 255


#: layout -> its weight's type on Hopper, by X, words, warpgroups, group or bits, whether stages are shared.
WEIGHTS = {
    "marlin": "Marlin<{x}, {words}, {groups}, {about}, {shared}>",
    "marlin24": "Marlin24<{x}, {words}, {groups}, {about}, {shared}>",
    "quick": "Quick<{x}, {words}, {groups}, {about}, {shared}>",
    "tcfpx": "Tcfpx<{x}, {about}, {words}, {groups}, {shared}, !IS_HALF<{x}>>",
}


@pytest.mark.parametrize("layout", WEIGHTS)
def test_a_block_is_given_the_shared_memory_that_its_kernel_lays_out(layout: str, tmp_path: Path) -> None:
    """A byte too few is a write into nothing, which only a GPU would show."""
    case, checks = CASES[layout], []
    for label, dtype in itertools.product(case.labels, ACTIVATIONS):
        scheme = Scheme.parse(label)
        fmt, group = scheme.format, scheme.group_size
        for tile in case.all_tiles(label, dtype):
            room = case.module.room(tile, fmt if layout == "tcfpx" else group)
            about = SPLITS[fmt] if layout == "tcfpx" else group or 0
            sizes = {"words": tile.words, "groups": tile.warpgroups, "shared": str(tile.shared).lower()}
            weight = WEIGHTS[layout].format(x=TYPES[dtype], about=about, **sizes)
            given = tile.bytes(room, layout == "marlin24") - 1024 - 16 * tile.stages - 16
            checks.append(
                f"static_assert(laid_out<{weight}, {tile.tokens}, {tile.stages}, {tile.cluster}>() == {given});"
            )
    laid_out = """
    template <class W, int TOKENS, int STAGES, int CLUSTER>
    DEVICE constexpr int laid_out() {  // as Block::place
        using F = Frame<W, TOKENS, STAGES, CLUSTER>;
        return STAGES * (F::X_BYTES + W::ROOM) + F::HANDED + 4 * F::OWNERS * F::OUT_BYTES + F::APART_BYTES;
    }
    """
    for header in loader.source_dir().glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = (loader.source_dir() / f"{layout}_hopper.cu").read_text()
    (tmp_path / "sizes.cu").write_text("\n".join([source, laid_out, *checks, "__global__ void nothing() {}"]))
    assert len(checks) > 20
    loader.compile("sizes", ("nothing",), "sm_90a", tmp_path)


def test_a_spill_is_seen(tmp_path: Path) -> None:
    """The figures are the compiler's: a kernel that cannot hold its values in registers has spills in them."""
    source = """
    __global__ void __launch_bounds__(1024, 2) crowded(float *y, int n) {
        float a[96];
        for (int i = 0; i < 96; i++) a[i] = y[i * n + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 96; i++) y[i * n + threadIdx.x] = a[95 - i] * a[i];
    }
    """
    (tmp_path / "crowded.cu").write_text(source)
    binary = loader.compile("crowded", ("crowded",), "sm_90a", tmp_path)
    assert binary.usage()["crowded"].spills > 0
