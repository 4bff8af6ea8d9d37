"""How fast layouts are packed, unpacked and converted: in memory by weight, and whole folders beside copies of them.

Prints one JSON object. `first_use`: seconds that a process' first large weight takes longer. `memory`: bytes of float16
weights a second for one `[14336, 4096]` record, on one thread. `folders`: bytes of packed weights read a second, from
one interchange layout into each other and back, each in a fresh process, so that the peak memory is its own, after it
has loaded what packing needs; `busy` is how much of the time of all processors that it may use (`threads`) it took.
`larger_gb_s` counts the larger of what is read and what is written, and so do the shares of copies, which write what
they read. Files are as the public library writes them, sorted by dtype. What is read lies on the disk and not in the
page cache, like a model that is larger than the memory; what is written is synced. `copy` does no more than that with
the same bytes, through the page cache, reading and writing at once; so does `copy into touched memory`, right after as
much memory was used and given back, since the host of a virtual machine gives it slowly, and the system's own command,
`cp into touched memory`. `disk` does it past the cache, which is what the disk itself gives; `disk with hashes` also
hashes what it reads and what it writes, each in a thread, as a report demands. All are measured between the others.
Folders are medians of some (`repeats`), since what a disk and a host give changes from one second to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.io import direct, files, room
from quantkit.io.hashing import Hash
from quantkit.io.safetensors_header import INDEX, dump_json
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.base import Layout
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline.quantize import pack

N, K = 14336, 4096
#: Bytes from which on a folder's weights go on in another file.
FILE = 2**28
#: Requests of a copy that are under way at once.
PIECES = 6
#: What ends the name of a copy before which as much memory is touched as it reads and writes, and a third more.
TOUCHING = " into touched memory"
#: What of each layout is measured.
LABELS = {
    "compressed-tensors": ["int4:g128", "int4:g128:asym", "fp6:channel"],
    "humming": ["fp6:channel", "fp5:channel"],
    "gptq": ["int4:g128"],
    "gptq-v2": ["int4:g128:asym"],
    "awq": ["int4:g128:asym"],
    "marlin": ["int4:g128"],
    "marlin24": ["int4:g128:24"],
    "marlin24-ct": ["int4:g128:24"],
    "tcfpx": ["fp6:channel", "fp5:channel"],
    "quick": ["int4:g128:asym"],
}
#: What holds all of these schemes, for others to be converted from and to.
HUB = "compressed-tensors"


def record(label: str, n: int = N, k: int = K, seed: int = 0) -> QuantizedTensor:
    """Return a random record of a scheme."""
    random = torch.Generator().manual_seed(seed)
    scheme = Scheme.parse(label)
    g, top = scheme.groups(k), 2**scheme.format.bits
    codes = torch.randint(0, top, (n, k), generator=random, dtype=torch.uint8)
    if scheme.sparsity:
        dropped = torch.tensor([[i in pair for i in range(4)] for pair in combinations(range(4), 2)])
        which = torch.randint(0, len(dropped), (n * k // 4,), generator=random, dtype=torch.int32)
        codes.view(-1, 4).masked_fill_(dropped.index_select(0, which), scheme.format.zero_code)
    scales = (0.01 + torch.rand(n, g, generator=random) / 100).half()
    zeros = None if scheme.symmetric else torch.randint(1, top, (n, g), generator=random, dtype=torch.uint8)
    return QuantizedTensor(scheme, codes, scales, zeros)


def in_memory(wanted: list[str]) -> dict[str, dict[str, int]]:
    """Return, by layout and scheme, megabytes of float16 weights packed and unpacked a second (medians of five)."""
    found: dict[str, dict[str, int]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, labels in LABELS.items():
        for label in [label for label in labels if label in wanted]:
            q, layout = record(label), LAYOUTS[name]
            packed = layout.pack(q)
            with room.kept():
                rates = [2 * N * K / 1e6 / _median(work) for work in _both_ways(layout, q, packed)]
            found[f"{name} {label}"] = {"pack_mb_s": round(rates[0]), "unpack_mb_s": round(rates[1])}
            print(f"{name} {label}", found[f"{name} {label}"], file=sys.stderr)
    torch.set_num_threads(threads)
    return found


def folders(
    work: Path, wanted: list[str], modules: int, shape: tuple[int, int], repeats: int
) -> dict[str, dict[str, float]]:
    """Return, by source, target and scheme, gigabytes of packed weights a second and the peak memory in megabytes."""
    found: dict[str, dict[str, float]] = {}
    for label in wanted:
        hub = work / "hub"
        write_folder(hub, label, modules, shape)
        names = [name for name, labels in LABELS.items() if label in labels and name != HUB]
        runs = [run for _ in range(repeats) for run in _once(work, hub, label, names)]
        for key in dict.fromkeys(key for key, _ in runs):
            same = [figures for name, figures in runs if name == key]
            found[key] = {unit: statistics.median(one[unit] for one in same) for unit in same[0]}
        for key in [key for key in found if key.endswith(f" {label}") and "-to-" in key]:
            for copy in COPIES:
                share = found[key]["larger_gb_s"] / found[f"{copy} {label}"]["gb_s"]
                found[key][f"of {copy}"] = round(share, 2)
        shutil.rmtree(hub)
    return found


def _once(work: Path, hub: Path, label: str, names: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what is found by one copy of `hub` and one conversion there and back for each of `names`."""
    there, back = work / "there", work / "back"
    for name, copy in COPIES.items():
        _settled(hub)
        if name.endswith(TOUCHING):
            room.empty([_size(hub) * 8 // 3], torch.uint8).fill_(1)
        seconds = _timed(partial(copy, hub, work / "copy"))
        shutil.rmtree(work / "copy")
        yield f"{name} {label}", {"gb_s": round(_size(hub) / 1e9 / seconds, 3)}
    for name in names:
        yield f"{HUB}-to-{name} {label}", _converted(hub, there, name)
        yield f"{name}-to-{HUB} {label}", _converted(there, back, HUB)
        shutil.rmtree(there)
        shutil.rmtree(back)


def write_folder(out: Path, label: str, modules: int, shape: tuple[int, int]) -> None:
    """Write a folder of packed linears, with as little around them as a conversion needs."""
    out.mkdir()
    schemes = Schemes(Scheme.parse(label), ignore=("lm_head",))
    index: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for i in range(modules):
        for suffix, tensor in LAYOUTS[HUB].pack(record(label, *shape, seed=i)).items():
            tensors[f"model.layers.{i}.mlp.up_proj.{suffix}"] = tensor
        if i == modules - 1 or sum(tensor.nbytes for tensor in tensors.values()) > FILE:
            name = f"model-{len(set(index.values())) + 1:05}.safetensors"
            save_file(tensors, out / name)
            index |= dict.fromkeys(tensors, name)
            tensors.clear()
    (out / INDEX).write_bytes(dump_json({"weight_map": index}))
    public = LAYOUTS[HUB].write_config(schemes) | {"quantkit": quantkit_key(HUB, schemes, "0", None)}
    (out / "config.json").write_bytes(dump_json({"dtype": "float16", "quantization_config": public}))


def _both_ways(layout: Layout, q: QuantizedTensor, packed: dict[str, torch.Tensor]) -> list[Callable[[], object]]:
    return [lambda: layout.pack(q), lambda: layout.unpack(packed, q.scheme)]


def _median(work: Callable[[], object]) -> float:
    work()
    return statistics.median(_timed(work) for _ in range(5))


def first_use() -> dict[str, float]:
    """Return what the first large weight of a process takes, beside packing it: seconds where loops are to be compiled.

    And where they were, and the megabytes that the compiler takes.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as kept:
        argv, env = [sys.executable, __file__, "--first"], os.environ | {"NUMBA_CACHE_DIR": kept}
        for name in ("compiled_s", "loaded_s"):
            done = subprocess.run(argv, check=True, capture_output=True, text=True, env=env)
            seconds, kilobytes = map(float, done.stdout.split())
            found |= {name: round(seconds, 1), "mb": round(kilobytes / 1e3)}
    return found


def _first() -> None:
    """Pack and unpack a weight that is just large enough; print seconds, and kilobytes that stay resident."""
    layout, q = LAYOUTS["marlin"], record("int4:g128", 256, 4096)
    before = _resident("VmRSS")
    print(_timed(lambda: layout.unpack(layout.pack(q), q.scheme)), _resident("VmRSS") - before)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _copied(source: Path, out: Path, *, past: bool, hashed: bool = False) -> None:
    """Copy files, reading and writing at once; `past` the page cache, or through it."""
    out.mkdir()
    free = deque((room.empty([direct.PIECE], torch.uint8).numpy().data, []) for _ in range(PIECES))
    with ExitStack() as stack:
        disk, *hashers = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3 if hashed else 1))
        for path in source.iterdir():
            hashes = [Hash() for _ in hashers]
            with files.open_regular(path) as read, files.create(out / path.name) as written:
                direct.bypass(read, past)
                direct.bypass(written, past)
                for at in range(0, path.stat().st_size, direct.PIECE):
                    memory, due = free.popleft()
                    _wait(due)
                    piece = memory[: direct.read_at(read, at, memory, path)]
                    due = [pool.submit(seen.update, piece) for pool, seen in zip(hashers, hashes, strict=True)]
                    free.append((memory, [*due, disk.submit(direct.append, written, piece, out / path.name)]))
                for _, due in free:
                    _wait(due)
                os.fsync(written.fileno())


def _wait(due: list[Future[None]]) -> None:
    for future in due:
        future.result()


def _cp(source: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", source, out], check=True)
    for path in out.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


COPIES: dict[str, Callable[[Path, Path], None]] = {
    "copy": partial(_copied, past=False),
    f"copy{TOUCHING}": partial(_copied, past=False),
    f"cp{TOUCHING}": _cp,
    "disk": partial(_copied, past=True),
    "disk with hashes": partial(_copied, past=True, hashed=True),
}


def _settled(source: Path) -> None:
    """Let the disk finish what came before, and take the files of `source` from the page cache."""
    os.sync()
    for path in source.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _converted(source: Path, out: Path, target: str) -> dict[str, float]:
    argv = [sys.executable, __file__, "--convert", str(source), str(out), target]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    seconds, busy, before, peak = map(float, done.stdout.split())
    rates = [round(size / 1e9 / seconds, 3) for size in (_size(source), max(_size(source), _size(out)))]
    found = {"gb_s": rates[0], "larger_gb_s": rates[1], "busy": round(busy, 2), "peak_mb": round((peak - before) / 1e3)}
    print(source.name, target, found, file=sys.stderr)
    return found


def _convert(source: str, out: str, target: str) -> None:
    """Convert in this process; print seconds, how busy processors were, resident kilobytes before and at the peak."""
    src = Checkpoint(Path(source))
    scheme = src.scheme(src.modules()[0])
    for name in (HUB, target, src.layout.NAME if src.layout else HUB):  # loads what the first call loads
        LAYOUTS[name].unpack(LAYOUTS[name].pack(record(scheme.label, 512, 4096)), scheme)
    _settled(Path(source))
    Path("/proc/self/clear_refs").write_text("5")  # what was touched is no peak
    before, spent = _resident("VmRSS"), _processor_seconds()
    seconds = _timed(lambda: pack(source, out, target))
    busy = (_processor_seconds() - spent) / seconds / torch.get_num_threads()
    print(seconds, busy, before, _resident("VmHWM"))


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help="folder on the disk to measure; a few gigabytes")
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    every = list(dict.fromkeys(label for labels in LABELS.values() for label in labels))
    parser.add_argument("--schemes", nargs="+", choices=every, default=every, help="what is measured (all)")
    parser.add_argument("--modules", type=int, default=32, help="weights of a folder (32, some gigabyte)")
    parser.add_argument("--shape", nargs=2, type=int, default=[N, K], help=f"of each of them ({N} {K})")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is measured (5)")
    args = parser.parse_args()
    if args.convert:
        _convert(*args.convert)
        return
    if args.first:
        _first()
        return
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        result = {
            "threads": torch.get_num_threads(),
            "modules": args.modules,
            "shape": args.shape,
            "repeats": args.repeats,
            "first_use": first_use(),
            "memory": in_memory(args.schemes),
            "folders": folders(Path(folder), args.schemes, args.modules, tuple(args.shape), args.repeats),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
