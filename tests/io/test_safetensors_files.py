"""Safetensors files: of a stranger nothing but a CheckpointError, no hang, no allocation before the check; and files
that every reader opens, whatever the dtypes, sizes and number of tensors."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError
from quantkit.io.files import hash_of
from quantkit.io.safetensors_files import DTYPES, RESERVED, SafetensorsWriter, header_bytes, read_header

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float16).view(3, 4),
    "b": torch.tensor(7, dtype=torch.int64),
    "c.bias": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def test_the_header_agrees_with_the_library(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x", {"format": "pt"})
    tensors, metadata = read_header(tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    assert metadata == {"format": "pt"} and tensors.keys() == TENSORS.keys()
    for name, info in tensors.items():
        assert (info.dtype, info.shape) == (TENSORS[name].dtype, tuple(TENSORS[name].shape))
        assert raw[info.start : info.end] == TENSORS[name].numpy().tobytes()


BAD_HEADERS = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length past the end": file_of({"a": entry()}, b"1234", length=10**6),
    "length past the limit": file_of({"a": entry()}, b"1234", length=2**62),
    "length negative": struct.pack("<q", -1) + b"{}",
    "length zero": file_of(b"", b"1234"),
    "a list": file_of([]),
    "a pickle": b"\x80\x04\x95" + bytes(100),
    "NUL padded": file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}\0\0\0', b"1234"),
    "unknown dtype": file_of({"a": entry("F4")}, b"1234"),
    "dtype no text": file_of({"a": entry(["U8"])}, b"1234"),
    "shape no list": file_of({"a": entry(shape=4)}, b"1234"),
    "shape negative": file_of({"a": entry(shape=[-4])}, b"1234"),
    "shape twice negative": file_of({"a": entry(shape=[-2, -2])}, b"1234"),
    "shape fractional": file_of({"a": entry(shape=[4.0])}, b"1234"),
    "shape boolean": file_of({"a": entry(shape=[True, 4])}, b"1234"),
    "shape overflows": file_of({"a": entry(shape=[2**32, 2**32, 4])}, b"1234"),
    "rank 9": file_of({"a": entry(shape=[1] * 8 + [4])}, b"1234"),
    "size is not the range": file_of({"a": entry(shape=[3])}, b"1234"),
    "range backwards": file_of({"a": entry(offsets=[4, 0])}, b"1234"),
    "range negative": file_of({"a": entry(offsets=[-4, 0])}, b"1234"),
    "range from minus zero": file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}', b"1234"),
    "range of three": file_of({"a": entry(offsets=[0, 4, 4])}, b"1234"),
    "range past the end": file_of({"a": entry(shape=[8], offsets=[0, 8])}, b"1234"),
    "data after the last": file_of({"a": entry()}, b"12345"),
    "no data": file_of({"a": entry()}),
    "gap": file_of({"a": entry(), "b": entry(offsets=[5, 9])}, b"123456789"),
    "overlap": file_of({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456"),
    "same range twice": file_of({"a": entry(), "b": entry()}, b"1234"),
    "starts late": file_of({"a": entry(offsets=[4, 8])}, b"12345678"),
    "key missing": file_of({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "key too many": file_of({"a": {**entry(), "strides": [1]}}, b"1234"),
    "tensor is null": file_of({"a": None}, b"1234"),
    "tensor twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "name empty": file_of({"": entry()}, b"1234"),
    "name long": file_of({"a" * 513: entry()}, b"1234"),
    "name with newline": file_of({"a\nb": entry()}, b"1234"),
    "name with escape": file_of({"a\x1b[2J": entry()}, b"1234"),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "a": entry()}, b"1234"),
    "metadata a list": file_of({"__metadata__": [], "a": entry()}, b"1234"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused(tmp_path: Path, case: str) -> None:
    started = time.process_time()
    refused(tmp_path / "x.safetensors", BAD_HEADERS[case])
    assert time.process_time() - started < 1


def test_a_huge_length_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    os.truncate(tmp_path / "x", 2**40)
    with (tmp_path / "x").open("r+b") as file:
        file.write(struct.pack("<Q", 2**39) + b"{")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="limit"):
        read_header(tmp_path / "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_hundred_thousand_duplicate_keys_do_not_hang(tmp_path: Path) -> None:
    text = b"{" + b",".join(b'"k%d":1' % (i % 99_999) for i in range(100_000)) + b"}"
    started = time.process_time()
    refused(tmp_path / "x", file_of(text))
    assert time.process_time() - started < 2


def test_truncation_and_extension_are_always_found(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    for cut in range(len(good)):
        refused(tmp_path / "x", good[:cut])
    refused(tmp_path / "x", good + b"\0")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "missing"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        read_header(path)


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_written_for_the_library(tmp_path: Path, name: str) -> None:
    file = SafetensorsWriter(tmp_path / "x")
    tensor = torch.arange(6).to(DTYPES[name]).view(2, 3)
    file.add("t", tensor)
    file.close()
    assert torch.equal(load_file(tmp_path / "x")["t"].view(torch.uint8), tensor.view(torch.uint8))
    assert read_header(tmp_path / "x")[0]["t"].dtype == DTYPES[name]


def test_odd_sizes_stay_aligned_for_every_reader(tmp_path: Path) -> None:
    tensors = {
        "bytes3": torch.arange(3, dtype=torch.uint8),
        "half1": torch.ones(1, dtype=torch.float16),
        "float5": torch.arange(5.0),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "even": torch.arange(8, dtype=torch.bfloat16).view(2, 4).t(),
        "none": torch.empty(0, 7, dtype=torch.int32),
    }
    file = SafetensorsWriter(tmp_path / "x")
    for name, tensor in tensors.items():
        file.add(name, tensor)
    assert file.close() == hash_of((tmp_path / "x").read_bytes())
    loaded = load_file(tmp_path / "x")
    infos, metadata = read_header(tmp_path / "x")
    assert metadata["format"] == "pt" and loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert infos[name].start % tensor.dtype.itemsize == 0


def test_a_waiting_tensor_is_not_changed_from_outside(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "x")
    tensor = torch.zeros(3, dtype=torch.uint8)
    file.add("a", tensor)
    tensor.fill_(9)
    file.close()
    assert load_file(tmp_path / "x")["a"].sum() == 0


def test_a_header_that_is_full_refuses_before_it_breaks(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "x")
    number = 0
    while file.size.fits(name := f"model.layers.{number}.ü" + "x" * 400):
        file.add(name, torch.zeros(2, dtype=torch.float32))
        number += 1
    with pytest.raises(CheckpointError, match="no space"):
        file.add(name, torch.zeros(2))
    file.close()
    assert number > 80 and len(load_file(tmp_path / "x")) == number


def test_unwritable_tensors_are_refused(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "x")
    file.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="already has"):
        file.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="complex64"):
        file.add("b", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError):
        SafetensorsWriter(tmp_path / "missing" / "x")


def test_thousands_of_tensors_are_one_file_where_their_names_are_known(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": torch.full((9,), i) for i in range(3000)}
    file = SafetensorsWriter(tmp_path / "x", header_bytes(tensors))
    for name, tensor in tensors.items():
        file.add(name, tensor)
    digest = file.close()
    data = (tmp_path / "x").read_bytes()
    assert digest == hash_of(data)
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % RESERVED == 0 and RESERVED < header == header_bytes(tensors)
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_tensors_lie_in_the_order_of_coming_but_for_odd_ones(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "x")
    for name, size in {"a": 8, "odd": 3, "b": 16, "c": 80_000}.items():
        file.add(name, torch.zeros(size, dtype=torch.uint8))
    file.close()
    assert list(read_header(tmp_path / "x")[0]) == ["a", "b", "c", "odd"]


def test_a_stopped_writer_goes_on_behind_what_it_flushed_unless_that_has_changed(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(size, dtype=torch.uint8) for name, size in {"a": 8, "odd": 3, "b": 16, "c": 5}.items()
    }

    def stopped_after(count: int, path: Path) -> list[Any]:
        file = SafetensorsWriter(path)
        rows: list[Any] = []
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            file.add(name, tensor)
            rows += file.flush() if number <= count else []
        return list(json.loads(json.dumps(rows)))

    def finished(file: SafetensorsWriter, count: int) -> bytes:
        for name in list(tensors)[count:]:
            file.add(name, tensors[name])
        file.close()
        return file.path.read_bytes()

    whole = finished(SafetensorsWriter(tmp_path / "whole"), 0)
    for count in range(1, 5):
        again = SafetensorsWriter(path := tmp_path / f"{count}", flushed=stopped_after(count, path))
        loaded = load_file(path)  # before it goes on
        assert loaded.keys() == set(list(tensors)[:count])
        assert all(torch.equal(loaded[name], tensors[name]) for name in loaded)
        assert finished(again, count) == whole
    rows = stopped_after(3, path)
    with path.open("r+b") as held:
        held.seek(RESERVED + 9)
        held.write(b"\xff")
    with pytest.raises(CheckpointError, match="changed since it was written"):
        SafetensorsWriter(path, flushed=rows)
