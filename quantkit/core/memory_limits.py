"""The memory that this process may use in all: free memory, and the limits of its cgroup and of the
shell.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from quantkit.errors import QuantkitError

#: Where cgroup v2 and v1 keep the limit of a group, and its use.
CGROUP_FILES = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
#: A limit from here on is none: cgroup v1 writes the largest number of pages.
UNLIMITED = 2**60
#: Address space that importing torch takes, for each byte of its libraries (measured: 1.2 and 1.37,
#: by the processor), and all else that a run imports (measured: 160 MiB). With less an import may
#: fail, or wait forever.
TORCH, OTHERS = 1.45, 220 * 2**20
#: The same for private writable memory (measured: 166 and 173 MiB), for which OpenBLAS would wait
#: forever.
TORCH_DATA, OTHERS_DATA = 160 * 2**20, 165 * 2**20


@dataclass(frozen=True)
class Limit:
    """Hold the bytes that this process may use, those in use included, the cause of the limit, and
    how to raise it.
    """

    bytes: int
    cause: str
    remedy: str


def memory_limits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Limit]:
    """List every limit that is set on this system."""
    size, resident, data = _own_pages(proc)
    found = [*_cgroup_limits(proc, cgroups, resident)]
    if (free := free_memory(proc, swap=True)) is not None:
        found.append(Limit(free + resident, "the memory that is free here", "free some memory"))
    used = {"v": size, "d": data}
    for letter, limit in _shell_limits().items() if size else ():
        free = limit - used[letter] + resident
        found.append(Limit(free, f"ulimit -{letter}", f"raise ulimit -{letter}"))
    return found


def free_memory(proc: Path = Path("/proc"), *, swap: bool = False) -> int | None:
    """Return the available bytes of RAM, with `swap` of both RAM and swap; None if the system does
    not report them.
    """
    try:
        with open(proc / "meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        names = ("MemAvailable", "SwapFree") if swap else ("MemAvailable",)
        return sum(int(lines[name].split()[0]) * 1024 for name in names)
    except (OSError, KeyError, ValueError):
        return None


def unused_memory(*, swap: bool = False) -> float:
    """Return the bytes that this process may still take under every limit, with `swap` in swap too;
    infinity where no limit is known.
    """
    _, resident, _ = _own_pages(Path("/proc"))
    found = [limit.bytes - resident for limit in memory_limits()]
    free = None if swap else free_memory()
    return min(found if free is None else [*found, free], default=float("inf"))


def release_heap() -> None:
    """Return free memory of the C heap to the system, where glibc has it: else the next stage's
    peak is on top.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's garbage collector while libraries are imported or a model without weights is
    built: it would look through all their objects again and again, and find no garbage.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


def require_memory_for_imports(*, computes: bool) -> None:
    """Raise QuantkitError if ulimit -v or -d is too small to import torch or, for a command that
    `computes`, all libraries.

    Otherwise the libraries would abort the process, or fail with an unclear error.
    """
    found = _shell_limits()
    if "torch" in sys.modules or not found:
        return
    (size, _, data), torch = _own_pages(Path("/proc")), find_spec("torch")
    if not size or torch is None or torch.origin is None:
        return
    libraries = sum(
        path.stat().st_size for path in (Path(torch.origin).parent / "lib").glob("*.so*")
    )
    needed = {
        "v": size + int(TORCH * libraries) + computes * OTHERS,
        "d": data + TORCH_DATA + computes * OTHERS_DATA,
    }
    for letter, limit in found.items():
        if limit < needed[letter]:
            raise QuantkitError(
                f"ulimit -{letter} allows {limit // 1024} KiB, and the libraries of this command "
                f"take about {needed[letter] // 1024}",
                f"raise ulimit -{letter}",
            )


def _shell_limits() -> dict[str, int]:
    """Read the bytes that `ulimit -v` and `-d` allow, where they are set; Windows has neither."""
    with suppress(ImportError):
        import resource

        kinds = {"v": resource.RLIMIT_AS, "d": resource.RLIMIT_DATA}
        limits = {letter: resource.getrlimit(kind)[0] for letter, kind in kinds.items()}
        return {name: each for name, each in limits.items() if each != resource.RLIM_INFINITY}
    return {}


def _own_pages(proc: Path) -> tuple[int, int, int]:
    """Read the bytes of this process's address space, resident memory and private writable memory;
    zeros where the system does not report them.
    """
    try:
        pages = [int(word) for word in (proc / "self/statm").read_text().split()]
        page = os.sysconf("SC_PAGE_SIZE")
        return page * pages[0], page * pages[1], page * pages[5]
    except (OSError, ValueError, IndexError):
        return 0, 0, 0


def _cgroup_limits(proc: Path, cgroups: Path, resident: int) -> Iterator[Limit]:
    """Yield the limits of this process's control group and of its parent groups."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for controller, limit_file, used_file in CGROUP_FILES:
        for path in [path for _, names, path in lines if controller in names.split(",")]:
            # In a container the path is one of the host's; the group itself then is the root.
            inside = PurePosixPath(path.lstrip("/"))
            for folder in (inside, *inside.parents):
                group = cgroups / controller / folder
                limit, used = _number(group / limit_file), _number(group / used_file)
                if limit is not None and used is not None and limit < UNLIMITED:
                    free = limit - used + _reclaimable(group) + resident
                    yield Limit(
                        free, "the memory limit of this container or service", "raise that limit"
                    )


def _number(path: Path) -> int | None:
    """Read a number from a file; None without the file, or for the word `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files, which the system drops before it refuses memory."""
    try:
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
