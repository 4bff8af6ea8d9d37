"""Zero the GPU code of shared libraries that one architecture never loads, so that they compress to a fraction.

    python prune.py --arch 90 LIBRARY...

nvcc keeps GPU code in the ELF section `.nv_fatbin` as containers: a header of 16 bytes (magic 0xBA55ED50, version,
header's size, payload's size) and entries, each with a header of its own (kind 1: PTX, 2: machine code; header's size,
payload's size, at byte 28 the architecture). Payloads of other architectures become zeros, in place. PTX stays where
its container has no machine code for the architecture. `__nv_relfatbin`, which only a linker of GPU code reads, is
emptied too. Offsets stay, so that the library is as valid as before; on another GPU it finds no kernel.
"""

from __future__ import annotations

import argparse
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC, HEADER = 0xBA55ED50, 16
PTX, MACHINE = 1, 2


def section(data: mmap.mmap, wanted: bytes) -> tuple[int, int]:
    """Find a section of a 64-bit ELF file: its offset and size, zeros if there is none."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("<IIQQQQ", data, table + size * number) for number in range(count)]
    for name, _, _, _, offset, length in sections:
        at = sections[names][4] + name
        if data[at : at + len(wanted) + 1] == wanted + b"\0":
            return offset, length
    return 0, 0


def entries(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Walk the entries of a container: kind, architecture, offset and size of the payload."""
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        yield kind, struct.unpack_from("<I", data, at + 28)[0], at + header, size
        at += header + size


def prune(path: Path, arch: int) -> tuple[int, int]:
    """Zero what an architecture does not need in a library; return the bytes of GPU code kept and zeroed."""
    kept = zeroed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at, size = section(data, b"__nv_relfatbin")
        data[at : at + size] = bytes(size)
        zeroed += size
        at, size = section(data, b".nv_fatbin")
        last = at + size
        while at + HEADER <= last:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:
                at += 8  # padding between the containers of two files
                continue
            held = list(entries(data, at + header, at + header + length))
            has_machine_code = any((kind, its) == (MACHINE, arch) for kind, its, _, _ in held)
            for kind, its, start, count in held:
                if its == arch if kind == MACHINE else its <= arch and not has_machine_code:
                    kept += count
                else:
                    zeroed += count
                    data[start : start + count] = bytes(count)
            at = (at + header + length + 7) // 8 * 8
    return kept, zeroed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    args = parser.parse_args()
    for path in args.libraries:
        kept, zeroed = prune(path, args.arch)
        print(f"{path.name}: {kept / 1e6:.1f} MB of GPU code kept, {zeroed / 1e6:.1f} MB zeroed")


if __name__ == "__main__":
    main()
