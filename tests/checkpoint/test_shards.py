"""Small weight files are joined, never into too large ones, and never over damage."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import shards
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter, Item
from quantkit.errors import CheckpointError
from quantkit.io.safetensors_files import damaged_tensors, read_header
from tests.checkpoint.samples import dense_folder, keys_that_differ


def test_every_division_is_in_order_and_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST_BYTES", 4)
    for sizes in itertools.chain.from_iterable(itertools.product((0, 1, 3, 5, 9), repeat=n) for n in range(6)):
        found = shards.groups(sizes, most=8)
        assert [i for group in found for i in group] == list(range(len(sizes)))
        totals = [sum(sizes[i] for i in group) for group in found]
        assert all(total <= 8 or len(group) == 1 for total, group in zip(totals, found, strict=True))
        small = [i for i, total in enumerate(totals) if total < 4]
        assert all(totals[i] + totals[i + 1] > 8 for i in small[:-1] if i + 1 < len(totals))
        assert shards.groups(totals, most=8) == [range(i, i + 1) for i in range(len(totals))]


def filled(folder: Path, count: int) -> CheckpointWriter:
    folder.mkdir()
    writer = CheckpointWriter(folder, Checkpoint(dense_folder(folder.parent / "m")), None)
    writer.identify({}, keys_that_differ)
    for i in range(count):
        writer.add(Item(f"model.layers.{i}.weight", torch.full([8], float(i))))
        writer.add(Item(f"model.layers.{i}.bias", torch.full([3], float(i), dtype=torch.float16)))
        writer.commit({"block": i})
    return writer


def test_files_are_joined_in_order_and_named_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST_BYTES", 2 * (32 + 6))
    writer = filled(tmp_path / "out", 5)
    writer.arrange()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == names == list(writer.hashes())
    held = [sorted(read_header(tmp_path / "out" / name)[0]) for name in names]
    assert held == [
        [f"model.layers.{i}.{kind}" for i in blocks for kind in ("bias", "weight")] for blocks in ((0, 1), (2, 3, 4))
    ]
    assert all(damaged_tensors(tmp_path / "out" / name) == [] for name in names)
    assert CheckpointWriter(tmp_path / "out", writer.like, None).hashes() == writer.hashes()


def test_a_tensor_that_changed_on_the_disk_is_not_sealed_by_a_join(tmp_path: Path) -> None:
    writer = filled(tmp_path / "out", 3)
    path = tmp_path / "out" / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors: changed since it was written"):
        writer.arrange()
    assert path.exists() and list(writer.hashes()) == [f"model-{i:05}.safetensors" for i in (1, 2, 3)]
