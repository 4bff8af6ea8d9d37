"""Damaged safetensors files are refused in one line, quickly and in bounded memory (H1, H2)."""

from __future__ import annotations

import json
import math
import random
import re
import resource
import time
from pathlib import Path
from typing import Any

import safetensors
import torch
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from safetensors.torch import save

import quantkit
from quantkit.checkpoint.provenance import checked
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.io.safetensors_files import DTYPE_NAMES, DTYPES, TensorInfo, parse_header, read_header
from tests.io.headers import FIELDS, JSON
from tests.reliability import samples
from tests.reliability.campaign import Family, Run
from tests.reliability.flips import changed, weights

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
#: Texts of JSON that replace a value.
ODD = (
    *(
        '""',
        '"F32"',
        '"f32"',
        '"F31"',
        '"I4"',
        "null",
        "true",
        "-1",
        "0",
        "1.0",
        "1e2",
        "1e999",
        "-0",
        "NaN",
        "Infinity",
    ),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "1" * 400, "[]", "[[]]", "{}", '["2","3"]'),
    *(
        "[2,3]",
        "[3,2]",
        "[6]",
        "[6,1]",
        "[-2,-3]",
        "[0]",
        "[2.0,3]",
        "[true,6]",
        "[1,1,1,1,1,1,1,1,6]",
        "[4294967296,4294967296]",
    ),
    *("[0,24]", "[24,0]", "[0,25]", "[0,23]", "[1,25]", "[24,32]", "[0,24,24]", "[-8,16]", "[18446744073709551615,7]"),
    *('{"a":{"b":1}}', "[" * 70 + "]" * 70, "[" * 3000 + "]" * 3000, '"\\ud800"', '"\\u0000"', "\ufeff", "//", "'x'"),
)
#: Names that replace that of a tensor.
NAMES = (
    "",
    "a.weight",
    "b.bias",
    "__metadata__",
    "x" * 513,
    "\u0000",
    "\n",
    "A.weight",
    "a\u0301",
    "\u00e1",
    "../x",
    "\u202e",
)


def entries(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """List a header's entries as pairs of texts, which a mutant may repeat, drop and reorder."""
    data = save(tensors, metadata={"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    return [[json.dumps(name), json.dumps(held)] for name, held in json.loads(data[8 : 8 + length]).items()]


def text(found: list[list[str]]) -> bytes:
    return ("{" + ",".join(f"{name}:{value}" for name, value in found) + "}").encode("utf-8", "surrogatepass")


def grammatical(rng: random.Random, found: list[list[str]]) -> bytes:
    """Change offsets, dtypes, shapes, names, repetitions, depth or alphabet of a header, once to three times."""
    found = [list(entry) for entry in found]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(found))
        what = rng.randrange(8)
        if what == 0:
            found[at][0] = json.dumps(rng.choice(NAMES), ensure_ascii=rng.random() < 0.5)
        elif what == 1:
            found[at][1] = rng.choice(ODD)
        elif what == 2:
            found.insert(rng.randrange(len(found)), list(found[at]))
        elif what == 3 and len(found) > 1:
            del found[at]
        elif what == 4:
            rng.shuffle(found)
        else:  # one value inside an entry
            parts = re.split(r"(:)", found[at][1])
            places = [i for i in range(2, len(parts), 2)]
            if places:
                i = rng.choice(places)
                ends = re.search(r"(,\"[a-z_]+\"|\})?$", parts[i])
                parts[i] = rng.choice(ODD) + (ends[0] if ends else "")
                found[at][1] = "".join(parts)
    return text(found) + b" " * rng.choice((0, 0, 1, 8))


def bytewise(rng: random.Random, header: bytes) -> bytes:
    """Change, insert, delete or repeat bytes of a header."""
    data = bytearray(header)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, what = rng.randrange(len(data)), rng.randrange(5)
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at] = rng.choice(b'"{}[]:,0123456789-eE.\\ntfu \x00\xff')
        elif what == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif what == 3:
            data[at:at] = data[at : at + rng.randrange(1, 20)]
        else:
            data[at:at] = rng.choice((b"0", b"00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b"9" * 30, b"{" * 80))
        if not data:
            data = bytearray(b" ")
    return bytes(data)


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
    if {name: _ours(info, data, first) for name, info in ours.items()} != {
        name: _theirs(held) for name, held in theirs
    }:
        return "was read in another way than safetensors reads it", True
    return None, True


def _ours(info: TensorInfo, data: bytes, first: int) -> tuple[str, list[int], bytes]:
    return DTYPE_NAMES[info.dtype], list(info.shape), data[info.start - first : info.end - first]


def _theirs(held: Any) -> tuple[str, list[int], bytes]:
    return held["dtype"], held["shape"], bytes(held["data"])


def attack_headers(found: Run) -> None:
    whole = save(TENSORS, metadata={"format": "pt"})
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    parts = entries(TENSORS)
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
        count(f"bit {i}", header[: i // 8] + bytes([header[i // 8] ^ 1 << i % 8]) + header[i // 8 + 1 :])
    path = found.folder / NAME
    for i in range(64 + found.least // 100):  # lengths, through a file
        rng = found.random("H1 length", i)
        stated = (
            length ^ 1 << i if i < 64 else rng.choice((rng.randrange(2**8), rng.randrange(2**24), rng.getrandbits(64)))
        )
        path.write_bytes(stated.to_bytes(8, "little") + whole[8:])
        with found.case(f"length {stated}"):
            try:
                read_header(path)
            except CheckpointError as error:
                assert path.name in str(error) and "\n" not in str(error)
            else:
                assert stated == length
    rng = found.random("H1")
    while found.cases < found.least:
        mutant = grammatical(rng, parts) if rng.random() < 0.5 else bytewise(rng, header)
        count(found.cases, mutant)
    with found.case("memory"):
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        found.facts = {"accepted_as_safetensors_reads_them": accepted, "memory_grown": grown}
        assert grown <= MEMORY
    with found.case("headers that hypothesis draws"):  # which takes memory of its own
        drawn(found)


def following(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """Return the header of tensors (name -> dtype and shape) that follow each other, and the bytes of their data."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header, end


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
    source = samples.model(found.folder / "source", blocks=1)
    made = found.folder / "int4"
    quantkit.quantize(source, made, method="rtn", group_size=128)
    (made / "quantkit_report.json").unlink()  # the digests in the weight files are left
    targets = [(folder, path) for folder in (source, made) for path in weights(folder)]
    steps = found.least // 4
    for folder, path in targets:
        data = path.read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        borders = sorted({info.start for info in read_header(path)[0].values()} | {first, 8, 7, 0, len(data) - 1})
        cuts = {*borders, *(len(data) * i // steps for i in range(steps))} - {len(data)}
        for size in sorted(cuts):
            with found.case(f"{path.name} cut at {size}"), changed(path, data[:size]):
                _refused(folder, path)
        for more in (b"\0", b"\0" * 4096, found.random(path.name).randbytes(1), data):
            with found.case(f"{path.name} longer by {len(more)}"), changed(path, data + more):
                _refused(folder, path)
        if folder == source:
            continue
        for i in range(steps):  # the header is whole, and the digests tell
            size = first + (len(data) - first) * i // steps
            with found.case(f"{path.name} zeros from {size}"), changed(path, data[:size] + bytes(len(data) - size)):
                _refused(folder, path)
            with found.case(f"{path.name} with a hole from {size}"), changed(path, data):
                with path.open("r+b") as file:
                    file.truncate(size)
                    file.truncate(len(data))
                _refused(folder, path)
    for folder, path in targets:
        with found.case(f"{path.name} through commands"), changed(path, path.read_bytes()[:-1]):
            for words in (
                ("inspect", folder),
                ("plan", folder),
                ("eval", "ppl", folder, "--data", samples.text(found.folder / "t.txt")),
            ):
                ended = samples.quantkit(found.folder, *words, "-q", code=1)
                samples.one_line(ended)
                assert path.name in ended.stderr


def _refused(folder: Path, path: Path) -> None:
    try:
        with checked(Checkpoint(folder)):
            pass
    except CheckpointError as error:
        assert path.name in str(error) and "\n" not in str(error), str(error)
    else:
        raise AssertionError("passed")


FAMILIES = [
    Family("H1", "mutants of a safetensors header, in process", (20_000, 10**6, 10**7), attack_headers),
    Family("H2", "weight files cut, extended, zeroed or with holes", (300, 3_000, 3_000), attack_files),
]
