"""Shards as they are written: every reader must open them, whatever the dtypes, sizes and number of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.errors import CheckpointError
from quantkit.io import direct
from quantkit.io.direct import PAGE
from quantkit.io.hashing import hash_of
from quantkit.io.safetensors_header import DTYPES, read_header
from quantkit.io.safetensors_writer import HEADER, LAST, RESERVED, Contents, TensorFile


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_written_for_the_library(tmp_path: Path, name: str) -> None:
    file = TensorFile(tmp_path / "x")
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
    file = TensorFile(tmp_path / "x")
    for name, tensor in tensors.items():
        file.add(name, tensor)
    assert file.close() == hash_of((tmp_path / "x").read_bytes())
    loaded = load_file(tmp_path / "x")
    infos, metadata = read_header(tmp_path / "x")
    assert metadata == {"format": "pt"} and loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert infos[name].start % tensor.dtype.itemsize == 0


def test_small_tensors_do_not_push_large_ones_off_the_places_a_disk_takes(tmp_path: Path) -> None:
    file, large = TensorFile(tmp_path / "x"), torch.zeros(30 * PAGE, dtype=torch.uint8)
    sizes = {"shape": 2, "norm": 896, "scales": 2 * PAGE // 8, "gate": RESERVED // 8 + 1}
    for name, size in sizes.items():
        file.add(name, torch.full((size,), size))
        file.add(f"{name} behind", large)
    file.close()
    start = {name: info.start for name, info in read_header(tmp_path / "x")[0].items()}
    assert [start[f"{name} behind"] % PAGE for name in sizes] == [0, 0, 0, 8]
    assert start["scales"] < start["scales behind"] < start["gate behind"] < start["norm"] == start["shape"] + 16
    assert all(torch.equal(load_file(tmp_path / "x")[name], torch.full((n,), n)) for name, n in sizes.items())


def test_a_waiting_tensor_is_not_changed_from_outside(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x")
    tensor = torch.zeros(3, dtype=torch.uint8)
    file.add("a", tensor)
    tensor.fill_(9)
    file.close()
    assert load_file(tmp_path / "x")["a"].sum() == 0


def test_a_header_that_is_full_refuses_before_it_breaks(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x")
    number = 0
    while file.contents.fits(name := f"model.layers.{number}.ü" + "x" * 400, 8):
        file.add(name, torch.zeros(2, dtype=torch.float32))
        number += 1
    with pytest.raises(CheckpointError, match="no room"):
        file.add(name, torch.zeros(2))
    file.close()
    assert number > 80 and len(load_file(tmp_path / "x")) == number


def test_unwritable_tensors_are_refused(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x")
    file.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="already has"):
        file.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="complex64"):
        file.add("b", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError):
        TensorFile(tmp_path / "missing" / "x")


@pytest.mark.parametrize("names", [["a", "odd", "b"], ["a", "b"], ["b", "a", "odd"], ["a", "odd", "b", "c"], []])
def test_a_plan_that_comes_true_or_not_gives_the_same_file_and_hash(tmp_path: Path, names: list[str]) -> None:
    """A wrong plan costs a second reading, never a wrong header or the hash of another file."""
    tensors = {"a": torch.arange(5e5), "odd": torch.arange(3, dtype=torch.int8), "b": torch.ones(4, 4)}
    planned = Contents()
    for name in names:
        tensor = tensors.get(name, tensors["a"])
        planned.add(name, tensor.dtype, tuple(tensor.shape))
    hashes = set()
    with direct.outlet() as outlet:
        for file in (TensorFile(tmp_path / "x"), TensorFile(tmp_path / "y", planned, outlet)):
            for name, tensor in tensors.items():
                file.add(name, tensor)
            hashes |= {file.close(), hash_of(file.path.read_bytes())}
    assert len(hashes) == 1
    assert load_file(tmp_path / "y").keys() == tensors.keys()


def planned_of(tensors: dict[str, torch.Tensor], most: int = HEADER) -> Contents:
    planned = Contents(most)
    for name, tensor in tensors.items():
        assert planned.fits(name, tensor.nbytes)
        planned.add(name, tensor.dtype, tuple(tensor.shape))
    return planned


def test_thousands_of_tensors_are_one_file_where_they_are_known_before(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": torch.full((9,), i) for i in range(3000)}
    with direct.outlet() as outlet:
        file = TensorFile(tmp_path / "x", planned_of(tensors), outlet)
        for name, tensor in tensors.items():
            file.add(name, tensor)
        digest = file.close()
    data = (tmp_path / "x").read_bytes()
    assert digest == hash_of(data)
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % RESERVED == 0 and RESERVED < header < HEADER  # so a disk takes what comes behind it
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_what_does_not_fit_the_header_that_was_planned_is_refused(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.norm.weight": torch.zeros(2) for i in range(1000)}
    with direct.outlet() as outlet:
        file = TensorFile(tmp_path / "x", planned_of(dict(list(tensors.items())[:10])), outlet)
        for name, tensor in tensors.items():
            file.add(name, tensor)
        with pytest.raises(CheckpointError, match="x: holds other tensors than were planned"):
            file.close()


def test_small_tensors_that_wait_for_the_end_of_a_file_do_not_fill_the_memory() -> None:
    contents, small, large = Contents(HEADER), torch.zeros(60_000, dtype=torch.uint8), torch.zeros(2 * RESERVED)
    number = 0
    while contents.fits(name := f"t{number}", small.nbytes):
        contents.add(name, small.dtype, tuple(small.shape))
        number += 1
    assert LAST - small.nbytes < number * small.nbytes <= LAST
    assert contents.fits("large", large.nbytes)  # this one goes to the disk at once
    assert Contents().fits("odd", LAST + 1)  # a file holds at least one tensor, whatever its size
