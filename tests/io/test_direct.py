"""Reading and writing past the page cache: the bytes and hashes of whole files, whatever the parts, order and disk."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from io import FileIO
from itertools import pairwise
from pathlib import Path
from threading import Event, current_thread
from typing import BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.io import direct, files, inlet, room
from quantkit.io.direct import BLOCK, PAGE, PIECE
from quantkit.io.hashing import hash_of
from quantkit.io.inlet import WINDOW
from quantkit.io.safetensors_header import dump_json, read_header
from quantkit.io.safetensors_writer import RESERVED, TensorFile
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline.quantize import pack
from quantkit.reporting.report import load
from tests.faults import faults

SIZE = 8 * PIECE + 12345
EDGES = [0, 1, BLOCK - 1, BLOCK, PIECE - 1, PIECE, PIECE + 1, 6 * PIECE, SIZE - PIECE, SIZE - 1, SIZE]


@pytest.fixture(scope="module")
def data() -> bytes:
    return (
        torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    )


@pytest.fixture(scope="module")
def file(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "x"
    path.write_bytes(data)
    return path


@pytest.fixture(params=["as it is", "through the cache", "larger blocks", "little at once"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that is passed to, one whose file system does not do that, one that refuses what we send.

    And one that gives less than is asked for, as a network may.
    """
    real = os.preadv
    if request.param in ("through the cache", "little at once"):
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if request.param == "little at once":
        monkeypatch.setattr(os, "preadv", lambda fd, into, start: real(fd, [into[0][:250]], start))
        monkeypatch.setattr(direct, "PIECE", 1000)
        monkeypatch.setattr(direct, "BLOCK", 100)
        monkeypatch.setattr(inlet, "WINDOW", 300)
    elif request.param == "larger blocks":

        def preadv(fd: int, into: list[memoryview], start: int) -> int:
            if hasattr(os, "O_DIRECT") and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "invalid argument")
            return real(fd, into, start)

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(direct, "PIECE", 1000)  # which no disk writes
        monkeypatch.setattr(direct, "BLOCK", 100)
        monkeypatch.setattr(inlet, "WINDOW", 300)
        monkeypatch.setattr(direct, "PAGE", 100)
    yield


def taken(file: Path, data: bytes, parts: list[tuple[int, int]]) -> None:
    with inlet.opened({"x": file, "same": file}, {}) as reading:
        for start, size in parts:
            assert reading.read("x", start, size).numpy().tobytes() == data[start : start + size]
        assert reading.hashes() == dict.fromkeys(("x", "same"), hash_of(data))


@pytest.mark.parametrize(
    "edges",
    [EDGES, [*reversed(EDGES)], EDGES[::2], [EDGES[3], EDGES[9]], [], [0, SIZE], [SIZE // 2, SIZE, 0, SIZE]],
    ids=["in order", "backwards", "large", "a middle", "nothing", "at once", "an end first"],
)
def test_parts_are_what_the_file_holds_and_its_hash_that_of_all(edges: list[int], file: Path, data: bytes) -> None:
    taken(file, data, [(min(a, b), abs(b - a)) for a, b in pairwise(edges)])


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(EDGES), st.integers(-70000, 70000), st.integers(0, 3 * PIECE)), max_size=12))
def test_any_parts_in_any_order(file: Path, data: bytes, parts: list[tuple[int, int, int]]) -> None:
    starts = [(min(max(0, edge + off), SIZE), size) for edge, off, size in parts]
    taken(file, data, [(start, min(size, SIZE - start)) for start, size in starts])


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("behind", [0, 1], ids=["from a page on", "from its second byte on"])
@pytest.mark.parametrize("size", [0, 1, 999, 54321])
def test_every_disk_gives_the_same_bytes(size: int, behind: int, tmp_path: Path, data: bytes) -> None:
    some = data[:size]
    with direct.outlet() as outlet, files.create(tmp_path / "x") as made:
        written = direct.Written(made, tmp_path / "x", outlet)
        for start in range(0, size, 777):
            part = torch.frombuffer(bytearray(some[start : start + 777]), dtype=torch.uint8)
            written.write(room.empty([room.LARGE], torch.uint8)[behind:][: len(part)].copy_(part))
        assert written.finish() == hash_of(some)
    taken(tmp_path / "x", some, [(i * size // 5, (i + 1) * size // 5 - i * size // 5) for i in range(5)])


def filled(path: Path, outlet: direct.Outlet, parts: list[torch.Tensor]) -> str:
    """Write `parts` to a new file, each made useless as soon as it is the caller's again; return its hash."""
    with files.create(path) as made:
        written, before = direct.Written(made, path, outlet), torch.empty(0)
        for part in parts:
            written.write(part)
            before.zero_()
            before = part
        return written.finish()


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 6 * PIECE, SIZE])
def test_whole_pieces_and_a_rest_are_written(size: int, tmp_path: Path, data: bytes) -> None:
    with direct.outlet() as outlet:
        for name in "xy":  # the same memory again
            ends = range(3_000_000, size + 3_000_000, 3_000_000)
            parts = [bytearray(data[end - 3_000_000 : min(size, end)]) for end in ends]
            tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
            assert filled(tmp_path / name, outlet, tensors) == hash_of(data[:size])
            assert (tmp_path / name).read_bytes() == data[:size]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 3, PAGE - 1, PAGE, 7 * PAGE, BLOCK, PIECE - PAGE, PIECE, 2 * PIECE + PAGE + 5]),
            st.sampled_from([0, 0, 0, 1, PAGE]),
        ),
        max_size=12,
    )
)
def test_what_lies_where_the_disk_takes_it_and_what_does_not(
    tmp_path: Path, data: bytes, parts: list[tuple[int, int]]
) -> None:
    """Sizes, and how far behind the beginning of a page the tensor lies."""
    tensors, start = [], 0
    for size, behind in parts:
        size = min(size, SIZE - start)
        memory = room.empty([PIECE + behind + size], torch.uint8)
        assert memory.data_ptr() % PAGE == 0
        given = torch.frombuffer(bytearray(data[start : start + size]) or bytearray(1), dtype=torch.uint8)
        tensors.append(memory[behind:][:size].copy_(given[:size]))
        start += size
    with direct.outlet() as outlet:
        assert filled(tmp_path / "x", outlet, tensors) == hash_of(data[:start])
    assert (tmp_path / "x").read_bytes() == data[:start]


def test_a_tensor_of_whole_pages_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = direct.append

    def append(file: BinaryIO, some: memoryview, path: Path) -> None:
        taken.append(np.frombuffer(some, np.uint8).ctypes.data)
        real(file, some, path)

    monkeypatch.setattr(direct, "append", append)
    first, weight = torch.ones(7 * PAGE, dtype=torch.uint8), room.empty([2 * PIECE], torch.uint8).fill_(2)
    with direct.outlet() as outlet:
        filled(tmp_path / "x", outlet, [first, weight])
        assert taken == [outlet.memories[0].ctypes.data, weight.data_ptr()]


def test_a_full_disk_is_told_by_the_next_piece_or_at_the_end(tmp_path: Path, data: bytes) -> None:
    for pieces in (1, 2, 9):
        writes = 0

        def full(operation: str, path: Path) -> None:
            nonlocal writes
            writes += operation == "write"
            if writes == 1:
                raise OSError(errno.ENOSPC, "no space left on device")

        with faults(full), direct.outlet() as outlet, files.create(tmp_path / "x") as made:
            written = direct.Written(made, tmp_path / "x", outlet)
            with pytest.raises(CheckpointError, match="x: no space left"):
                for _ in range(pieces):
                    written.write(torch.zeros(PIECE, dtype=torch.uint8))
                written.finish()


def watched(monkeypatch: pytest.MonkeyPatch, seen: Callable[[Path, int], None]) -> None:
    """Call `seen` with path and offset before each request to a disk."""
    real = direct.read_at

    def read_at(opened: FileIO, start: int, into: memoryview, path: Path) -> int:
        seen(path, start)
        return real(opened, start, into, path)

    monkeypatch.setattr(direct, "read_at", read_at)


def test_small_parts_side_by_side_far_behind_are_read_once_and_again_after_an_error(
    file: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def seen(path: Path, start: int) -> None:
        asked.append(start)
        if asked.count(second) == 1 and start == second:
            raise CheckpointError("the disk fails")

    watched(monkeypatch, seen)
    first, second = 3 * PIECE, 3 * PIECE + WINDOW
    with inlet.opened({"x": file}, {}) as reading:
        for start in (first + 16, first, first + WINDOW - 16):
            assert reading.read("x", start, 16).numpy().tobytes() == data[start : start + 16]
        with pytest.raises(CheckpointError, match="the disk fails"):
            reading.read("x", second, 16)
        for start in (second + 16, first + 32, second):
            assert reading.read("x", start, 16).numpy().tobytes() == data[start : start + 16]
        assert [start for start in asked if start >= first] == [first, second, second]
        assert reading.hashes() == {"x": hash_of(data)}


def test_files_whose_tensors_lie_by_dtype_are_read_once_but_for_the_small_ones(
    file: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public library sorts tensors by dtype: shapes of all weights, then the codes of all, then all scales."""
    asked: list[int] = []
    watched(monkeypatch, lambda path, start: asked.append(start))
    shapes, codes, scales = 0, BLOCK + 7, 7 * PIECE
    with inlet.opened({"x": file}, {}) as reading:
        for i in range(100):
            size = (scales - codes) // 100
            for start, some in ((shapes + 16 * i, 16), (codes + i * size, size), (scales + 9000 * i, 9000)):
                assert reading.read("x", start, some).numpy().tobytes() == data[start : start + some]
        assert reading.hashes() == {"x": hash_of(data)}
    pieces, windows = [start for start in asked if start % PIECE == 0], [start for start in asked if start % PIECE]
    assert sorted(set(pieces)) == list(range(0, SIZE, PIECE))
    assert len(asked) <= len(range(0, SIZE, PIECE)) + 3 and len(windows) <= 1


def test_what_a_slow_disk_still_brings_of_one_file_does_not_get_into_another(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a piece that is no longer wanted must not be given to the next before the disk is done with it."""
    size = 3 * PIECE
    for name, start in (("a", 0), ("b", size)):
        (tmp_path / name).write_bytes(data[start : start + size])
    other_is_there, late_is_there = Event(), Event()
    real = direct.read_at

    def read_at(opened: FileIO, start: int, into: memoryview, path: Path) -> int:
        late = path.name == "a" and start == 2 * PIECE
        if late:
            other_is_there.wait(0.5)
        got = real(opened, start, into, path)
        if late:
            late_is_there.set()
        elif current_thread().name.startswith("quantkit") and path.name == "b":  # read before it is asked for
            other_is_there.set()
            late_is_there.wait(1)
        return got

    monkeypatch.setattr(direct, "read_at", read_at)
    with inlet.opened({name: tmp_path / name for name in "ab"}, {}) as reading:
        assert reading.read("a", 0, PIECE + 1).numpy().tobytes() == data[: PIECE + 1]  # and now the rest is on its way
        for start in range(0, size, PIECE // 4):
            assert reading.read("b", start, PIECE // 4).numpy().tobytes() == data[size + start :][: PIECE // 4]
        assert reading.hashes() == {"a": hash_of(data[:size]), "b": hash_of(data[size : 2 * size])}


def test_the_next_file_is_read_before_it_is_asked_for(file: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    watched(monkeypatch, lambda path, start: asked.append(path.name))
    other = file.with_name("y")
    other.write_bytes(data[: 3 * PIECE])
    with inlet.opened({"x": file, "y": other}, {}) as reading:
        for start in range(0, SIZE, PIECE):
            reading.read("x", start, min(PIECE, SIZE - start))
        before = asked.count("y")
        assert reading.read("y", 100, PIECE).numpy().tobytes() == data[100 : 100 + PIECE]
        assert reading.hashes() == {"x": hash_of(data), "y": hash_of(data[: 3 * PIECE])}
    assert before >= 1 and asked.count("y") == 3 and asked.count("x") == 9


@pytest.mark.parametrize("left", [0, 5, PIECE, PIECE + 5])
def test_a_file_that_is_cut_off_is_an_error_not_zeros(
    left: int, tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with inlet.opened({"x": path}, {}) as reading:
        os.truncate(path, left)
        for start in (0, left):
            with pytest.raises(CheckpointError, match="x: changed while it was in use"):
                reading.read("x", start, SIZE - start)
        with pytest.raises(CheckpointError, match="changed while it was in use"):
            reading.hashes()
    monkeypatch.setattr(inlet, "stamp", lambda found: ())  # a file system that tells nothing of it
    path.write_bytes(data)
    with inlet.opened({"x": path}, {}) as reading:
        os.truncate(path, left)
        for start in (SIZE - 100, 0):
            with pytest.raises(CheckpointError, match=r"x: ends .* bytes too early"):
                reading.read("x", start, SIZE - start)
        with pytest.raises(CheckpointError, match=r"x: ends .* bytes too early"):
            reading.hashes()


def folder(path: Path, scheme: Scheme, shift: int = 0) -> Path:
    """Write two weights whose packed codes are read in several requests; `shift` bytes off what dtypes ask for."""
    path.mkdir()
    layout, schemes = LAYOUTS["compressed-tensors"], Schemes(scheme)
    file = TensorFile(path / "model.safetensors")
    for i in range(2):
        codes = torch.randint(0, 16, (2048, 9216), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        q = QuantizedTensor(scheme, codes, torch.full((2048, 72), 0.5, dtype=torch.float16))
        for name, tensor in layout.pack(q).items():
            file.add(f"model.layers.{i}.up_proj.{name}", tensor)
    file.close()
    whole = (path / "model.safetensors").read_bytes()
    header = whole[8:RESERVED] + b" " * shift
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + whole[RESERVED:])
    public = layout.write_config(schemes)
    (path / "config.json").write_bytes(dump_json({"dtype": "float16", "quantization_config": public}))
    return path


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_tensors_that_lie_where_no_integer_may_are_converted_like_others(shift: int, tmp_path: Path) -> None:
    scheme = Scheme.parse("int4:g128")
    source = folder(tmp_path / "source", scheme, shift)
    pack(source, tmp_path / "out", "marlin")
    src, out = Checkpoint(source), Checkpoint(tmp_path / "out")
    info = read_header(src.files()[0])[0]["model.layers.1.up_proj.weight_packed"]
    assert info.start % 8 == shift % 8 and info.end - info.start > 2 * PIECE
    for module in src.modules():
        assert out.quantized(module).equal(src.quantized(module))
    report = load(tmp_path / "out")
    assert report["source"]["files"] == src.hashes()
    assert report["files"]["model-00001.safetensors"] == out.hashes()["model-00001.safetensors"]
