"""The kernels compile for every architecture, without a GPU, and none spills registers.

All instances take minutes to compile, so that is left to machines with a GPU. Elsewhere a sample of a portable kernel
has each type on some architectures, and every pair of template arguments on one of them: sources ask only whether it is
sm_90 or later. That of a Hopper kernel has every argument. What compiled is kept in a cache between runs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES
from tests.kernels.hopper_cases import CASES
from tests.kernels.sources import SOURCES

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
#: Those that a machine without a GPU compiles for: one on each side of sm_90, which is all that sources ask for.
SAMPLED = ("sm_80", "sm_90a")

pytestmark = pytest.mark.usefixtures("nvrtc", "kernel_cache")
#: Instances that are compiled together. Not the number of cores, or a cache would not serve another machine.
TOGETHER = 4


def test_every_source_is_listed() -> None:
    assert SOURCES.keys() == {path.stem for path in loader.source_dir().glob("*.cu")}


def architectures(name: str, known: Iterable[str] = SAMPLED) -> list[str]:
    return [arch for arch in known if arch == "sm_90a" or not name.endswith("_hopper")]


def test_sources_ask_only_whether_the_architecture_is_sm_90_or_later() -> None:
    texts = [path.read_text() for path in loader.source_dir().iterdir()]
    assert {line for text in texts for line in re.findall("#.*__CUDA_ARCH.*", text)} == {"#if __CUDA_ARCH__ >= 900"}


def groups(instance: str, size: int) -> set[tuple[object, ...]]:
    """List all groups of `size` template arguments of an instance, with their positions."""
    return set(itertools.combinations(enumerate(re.findall(r"[\w!]+", instance)), size))


def samples(name: str) -> dict[str, list[str]]:
    """Select instances with all that is `wanted` on each architecture, and every pair if there are several of these."""
    instances, pairs, found = SOURCES[name], set[tuple[object, ...]](), dict[str, list[str]]()
    *_, second, last = ("", *architectures(name))
    for arch in architectures(name):
        left, found[arch] = wanted(name, instances), []
        if second and arch == last:
            left |= covered(instances, 2) - pairs
        while left:
            best = max(instances, key=lambda i: (len((groups(i, 1) | groups(i, 2)) & left), len(groups(i, 2) - pairs)))
            left, pairs = left - groups(best, 1) - groups(best, 2), pairs | groups(best, 2)
            found[arch].append(best)
    return found


def covered(instances: Iterable[str], size: int) -> set[tuple[object, ...]]:
    return set().union(*(groups(instance, size) for instance in instances))


def wanted(name: str, instances: Iterable[str]) -> set[tuple[object, ...]]:
    """List the arguments that each architecture must see: all of one, functions and types of several."""
    count = 2 if len(architectures(name)) > 1 else None
    return covered((",".join(re.findall(r"[\w!]+", instance)[:count]) for instance in instances), 1)


def usage(binary: loader.Binary, instance: str) -> tuple[int, int]:
    """Find the registers of a thread, and the bytes that are spilled or held in memory, in the log of ptxas.

    An array of a loop that was not unrolled is in memory, and the kernel takes several times as long.
    """
    (log,) = re.findall(rf"Compiling entry function '{binary.names[instance]}'(.*?)(?=Compiling|\Z)", binary.log, re.S)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame", log)
    assert spills and registers and frame, log
    return int(registers[1]), int(frame[1]) + int(spills[1]) + int(spills[2])


@pytest.mark.parametrize(
    ("name", "arch", "every"),
    [
        *((name, arch, False) for name in SOURCES for arch in architectures(name)),
        *(
            pytest.param(name, arch, True, marks=pytest.mark.gpu)
            for name in SOURCES
            for arch in architectures(name, ARCHITECTURES)
        ),
    ],
)
def test_instances_compile_and_none_spills(name: str, arch: str, every: bool) -> None:
    instances = SOURCES[name] if every else samples(name)[arch]
    parts = [instances[i : i + TOGETHER] for i in range(0, len(instances), TOGETHER)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # the compiler runs outside of Python's lock
        binaries = list(pool.map(lambda part: loader.cached(name, part, arch), parts))
    for part, binary in zip(parts, binaries, strict=True):
        assert list(binary.names) == list(part)
        assert "warning" not in binary.log, binary.log
        for instance in part:
            registers, spills = usage(binary, instance)
            assert spills == 0 and 0 < registers <= 255, f"{instance} on {arch}: {registers} registers, {spills} bytes"


#: layout -> its weight's type on Hopper, by X, words, warpgroups, group or bits, whether stages are shared.
WEIGHTS = {
    "marlin": "MarlinWeight<{x}, {words}, {groups}, {variant}, {shared}>",
    "marlin24": "Marlin24Weight<{x}, {words}, {groups}, {variant}, {shared}>",
    "quick": "QuickWeight<{x}, {words}, {groups}, {variant}, {shared}>",
    "tcfpx": "TcfpxWeight<{x}, {variant}, {words}, {groups}, {shared}, !IS_HALF<{x}>>",
}


@pytest.mark.parametrize("layout", WEIGHTS)
def test_a_launch_has_the_shared_memory_that_its_kernel_uses(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte too few is a write past the end, which only a GPU would show."""
    case, checks = CASES[layout], []
    for label, dtype in itertools.product(case.labels, ACTIVATIONS):
        kernel = case.kernel(label)
        for tile in kernel.choice.tiles_for(dtype):
            sizes = {"words": tile.words, "groups": tile.warpgroups, "shared": str(tile.shared).lower()}
            weight = WEIGHTS[layout].format(x=TYPES[dtype], variant=kernel.variant, **sizes)
            given = kernel.choice.shared_bytes(tile) - 1024 - 16 * tile.stages - 16
            checks.append(
                f"static_assert(laid_out<{weight}, {tile.tokens}, {tile.stages}, {tile.cluster}>() == {given});"
            )
    laid_out = """
    template <class W, int TOKENS, int STAGES, int CLUSTER>
    DEVICE constexpr int laid_out() {  // as Block::place
        using F = Frame<W, TOKENS, STAGES, CLUSTER>;
        const int stages = STAGES * (F::X_BYTES + W::PADDED_BYTES);
        return stages + F::HANDED_OVER + 4 * F::OWNERS * F::OUT_BYTES + F::EXCHANGE_BYTES;
    }
    """
    for header in loader.source_dir().glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = (loader.source_dir() / f"{layout}_hopper.cu").read_text()
    (tmp_path / "sizes.cu").write_text("\n".join([source, laid_out, *checks, "__global__ void nothing() {}"]))
    assert len(checks) > 20
    monkeypatch.setattr(loader, "source_dir", lambda: tmp_path)
    loader.cached("sizes", ("nothing",), "sm_90a")
