"""Shards as they are written: every reader must open them, whatever the dtypes, sizes and number of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.errors import CheckpointError
from quantkit.io.files import hash_of
from quantkit.io.safetensors_files import DTYPES, RESERVED, SafetensorsWriter, header_bytes, read_header


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
