"""Every instance of every kernel compiles for every architecture, with no GPU here, and none spills registers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.kernels import ONLY, SOURCES, loader

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
