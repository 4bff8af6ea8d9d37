"""Damaged safetensors files are refused in one line, quickly and in bounded memory (H1, H2)."""

from __future__ import annotations

import json
import math
import resource
import time
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from safetensors.torch import save

import quantkit
from quantkit.errors import CheckpointError
from quantkit.io.safetensors_files import DTYPE_NAMES, DTYPES, parse_header, read_header
from tests.io.headers import FIELDS, JSON
from tests.reliability import samples
from tests.reliability.campaign import Family, Run
from tests.reliability.samples import changed, flipped, mutated, weights

NAME = Path("mutant.safetensors")
#: Of so many mutants, hypothesis draws one as a header of its own; it is slow, and shrinks what it finds.
DRAWN = 40
#: Seconds of one core that a header may take, and bytes that all may add to the memory of the process.
SLOW, MEMORY = 1.0, 64 * 2**20
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.bias": torch.arange(4, dtype=torch.float16),
    "c": torch.ones(3, dtype=torch.uint8),
}
#: Pieces that replace others: signs, names, values and lists.
ODD_WORDS = r"""
" { } [ ] : , 0 1 9 - e E . \ // 'x' é "" "F32" "f32" "F31" "I4" "a.weight" "b.bias" "__metadata__" "A.weight" "../x"
"á" "\ud800" "\u0000" "\n" null true -1 1.0 1e2 1e999 -0 NaN Infinity 9223372036854775807 9223372036854775808
18446744073709551616 [] [[]] ["2","3"] [2,3] [3,2] [6] [6,1] [-2,-3] [0] [2.0,3] [true,6] [1,1,1,1,1,1,1,1,6]
[4294967296,4294967296] [0,24] [24,0] [0,25] [0,23] [1,25] [24,32] [0,24,24] [-8,16] [18446744073709551615,7]
{"a":{"b":1}}
"""
#: A blank, NUL, bytes that are no UTF-8, a byte order mark; names with a change of direction, a line end, an accent.
ODD_BYTES = "20 00 ff eda080 c080 efbbbf 22e280ae22 220a22 2261cc8122"
ODD = [word.encode() for word in ODD_WORDS.split()] + [bytes.fromhex(code) for code in ODD_BYTES.split()]
ODD += [b'"%s"' % (b"x" * 513), b"1" * 400, b"{" * 80, b"[" * 70 + b"]" * 70, b"[" * 3000 + b"]" * 3000]


def judged(header: bytes, data: bytes) -> tuple[str | None, bool]:
    """Read a mutant; returns what is wrong with our reading, None if nothing is, and whether we accepted it.

    A reading is wrong if it is no error of one line and the safetensors library refuses the file, or reads other names,
    dtypes, shapes or bytes.
    """
    began = time.process_time()
    try:
        ours, _ = parse_header(header, len(data), NAME)
    except CheckpointError as error:
        said = str(error)
        if "\n" in said or NAME.name not in said or len(said) > 2000:
            return f"said {said!r}", False
        return ("was slow" if time.process_time() - began > SLOW else None), False
    except Exception as error:
        return f"raised {type(error).__name__}: {error}", False
    if time.process_time() - began > SLOW:
        return "was slow", True
    try:
        theirs = safetensors.deserialize(len(header).to_bytes(8, "little") + header + data)
    except Exception as error:
        return f"was accepted, and safetensors says {error}", True
    first = 8 + len(header)
    read = {
        name: (DTYPE_NAMES[info.dtype], list(info.shape), data[info.start - first : info.end - first])
        for name, info in ours.items()
    }
    if read != {name: (held["dtype"], held["shape"], bytes(held["data"])) for name, held in theirs}:
        return "was read in another way than safetensors reads it", True
    return None, True


def attack_headers(found: Run) -> None:
    whole = save(TENSORS, metadata={"format": "pt"})
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    assert judged(header, data) == (None, True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = 0

    def count(name: object, mutant: bytes) -> None:
        nonlocal accepted
        wrong, passed = judged(mutant, data)
        accepted += passed
        found.passed(1)
        if wrong:
            found.fail(f"mutant {name}", wrong, repr(mutant[:1000]))

    for i in range(8 * len(header)):
        count(f"bit {i}", flipped(header, i // 8, i % 8))
    path = found.folder / NAME
    for i in range(64 + found.least // 100):  # lengths, through a file
        rng = found.random("H1 length", i)
        stated = length ^ 1 << i if i < 64 else rng.getrandbits(rng.choice((8, 24, 64)))
        path.write_bytes(stated.to_bytes(8, "little") + whole[8:])
        with found.case(f"length {stated}"):
            if stated == length:
                read_header(path)
            else:
                samples.refused(lambda: read_header(path), path.name)
    rng = found.random("H1")
    while found.cases < found.least:
        count(found.cases, mutated(header, rng, ODD))
    with found.case("memory"):
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        found.facts = {"accepted_as_safetensors_reads_them": accepted, "memory_grown": grown}
        assert grown <= MEMORY
    with found.case("headers that hypothesis draws"):  # which takes memory of its own
        drawn(found)


def following(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """Return the header of tensors (name -> dtype and shape) that follow each other, and the bytes of their data."""
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors.values()]
    ends = list(accumulate(sizes, initial=0))
    stated = zip(tensors.items(), pairwise(ends), strict=True)
    return {n: {"dtype": d, "shape": s, "data_offsets": list(place)} for (n, (d, s)), place in stated}, ends[-1]


#: Right words in wrong places, and headers that most readers accept; with the bytes of their data.
HEADERS = st.tuples(
    st.dictionaries(st.text(max_size=5) | st.just("__metadata__"), FIELDS | JSON, max_size=4), st.integers(0, 40)
) | st.dictionaries(
    st.text(min_size=1, max_size=8), st.tuples(st.sampled_from([*DTYPES]), st.lists(st.integers(0, 3), max_size=9))
).map(following)


def drawn(found: Run) -> None:
    """Let hypothesis draw headers, and shrink one that is judged wrong."""

    @seed(found.seed)
    @settings(max_examples=found.least // DRAWN, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(HEADERS)
    def search(made: tuple[dict[str, Any], int]) -> None:
        found.passed(1)
        wrong, _ = judged(json.dumps(made[0]).encode(), bytes(made[1]))
        assert wrong is None, wrong

    search()


def attack_files(found: Run) -> None:
    source, made = samples.model(found.folder / "source", blocks=1), found.folder / "int4"
    quantkit.quantize(source, made, method="rtn", group_size=128)
    (made / "quantkit_report.json").unlink()  # the digests in the weight files are left

    def attempt(path: Path, what: str, data: bytes) -> None:
        with found.case(f"{path.name} {what}"), changed(path, data):
            samples.refused(partial(samples.opened, path.parent), path.name)

    steps = found.least // 4
    targets = [path for folder in (source, made) for path in weights(folder)]
    for path in targets:
        data = path.read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        borders = {info.start for info in read_header(path)[0].values()} | {first, 8, 7, 0, len(data) - 1}
        for size in sorted(borders.union(len(data) * i // steps for i in range(steps)) - {len(data)}):
            attempt(path, f"cut at {size}", data[:size])
        for more in (b"\0", b"\0" * 4096, found.random(path.name).randbytes(1), data):
            attempt(path, f"longer by {len(more)}", data + more)
        for i in range(steps if path.parent == made else 0):  # the header is whole, and the digests tell
            size = first + (len(data) - first) * i // steps
            attempt(path, f"zeros from {size}", data[:size] + bytes(len(data) - size))
    words = samples.text(found.folder / "text.txt")
    for path in targets:
        folder = path.parent
        with found.case(f"{path.name} through commands"), changed(path, path.read_bytes()[:-1]):
            for line in (("inspect", folder), ("plan", folder), ("eval", "ppl", folder, "--data", words)):
                samples.one_line(samples.quantkit(found.folder, *line, "-q", code=1), path.name)


FAMILIES = [
    Family("H1", "mutants of a safetensors header, in process", (20_000, 10**6, 10**7), attack_headers),
    Family("H2", "weight files cut, extended or zeroed", (300, 3_000, 3_000), attack_files),
]
