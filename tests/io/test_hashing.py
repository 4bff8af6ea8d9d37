"""Hashes of files: BLAKE3 as published, and checkpoints whose reports are older and list SHA-256."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, load
from quantkit.errors import CheckpointError
from quantkit.evaluation.verify import verify
from quantkit.io.files import PIECE, hash_of, hash_of_file
from quantkit.io.safetensors_files import read_header
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.folders import sha256
from tests.reporting.samples import write_report

#: Of the published test vectors: bytes 0, 1, ... 250, 0, 1, ... of so many bytes.
PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_hashes_are_those_that_others_compute(size: int, tmp_path: Path) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "x").write_bytes(data)
    assert hash_of(data) == hash_of_file(tmp_path / "x") == f"blake3:{PUBLISHED[size]}"


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1])
def test_pieces_are_hashed_as_the_whole_in_either_kind(size: int, tmp_path: Path) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "x").write_bytes(data)
    assert hash_of_file(tmp_path / "x") == hash_of_file(tmp_path / "x", hash_of(b"")) == hash_of(data)
    assert hash_of_file(tmp_path / "x", "0" * 64) == sha256(tmp_path / "x")


@pytest.mark.parametrize("like", [None, 5, [], "", "0" * 63, "0" * 65, "blake3:" + "0" * 64, "sha1:" + "0" * 40])
def test_only_a_sha256_asks_for_another(like: object, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert hash_of_file(tmp_path / "x", like) == f"blake3:{PUBLISHED[0]}"


@pytest.fixture
def older(tiny_llama: Path, tmp_path: Path) -> Path:
    """A quantized folder as it was written when reports listed SHA-256."""
    quantize(tiny_llama, tmp_path / "older", from_mapping({"method": "rtn", "clip": "none"}))
    path = tmp_path / "older" / REPORT
    report = json.loads(path.read_text())
    report["files"] = {name: sha256(path.parent / name) for name in report["files"]}
    write_report(path.parent, report)
    return path.parent


def damage(folder: Path, name: str) -> Path:
    """Flip a bit of a tensor; return its file."""
    shard = next(path for path in folder.glob("*.safetensors") if name in read_header(path)[0])
    data = bytearray(shard.read_bytes())
    data[read_header(shard)[0][name].start] ^= 1
    shard.write_bytes(data)
    return shard


def test_a_source_with_an_older_report_is_held_against_it(older: Path, tmp_path: Path) -> None:
    report = pack(older, tmp_path / "out", "marlin")
    assert report["source"]["files"] == {name: sha256(path) for name, path in Checkpoint(older).sources().items()}
    assert all(digest.startswith("blake3:") for digest in report["files"].values())
    assert verify(older).ok and verify(tmp_path / "out").ok
    shard = damage(older, "model.norm.weight")
    with pytest.raises(CheckpointError, match=f"{shard.name}: its hash is not the one"):
        pack(older, tmp_path / "again", "marlin")
    assert not (tmp_path / "again").exists()
    found = verify(older)
    assert [line for line in found.failures if line.startswith(f"{shard.name}: its hash is not the one")]


def test_a_hash_of_another_kind_with_the_same_digits_is_no_match(older: Path) -> None:
    report = load(older)
    report["files"] = {name: f"blake3:{digest}" for name, digest in report["files"].items()}
    write_report(older, report)
    assert len(verify(older).failures) == len(report["files"])


@pytest.mark.parametrize("kind", ["blake3", "sha256"])
def test_damage_of_a_dense_source_with_a_report_is_not_quantized_further(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    recipe = from_mapping({"method": "rtn", "clip": "none"})
    quantize(tiny_llama, tmp_path / "pruned", pruning_from_mapping({"method": "magnitude"}))
    if kind == "sha256":
        report = load(tmp_path / "pruned")
        report["files"] = {name: sha256(tmp_path / "pruned" / name) for name in report["files"]}
        write_report(tmp_path / "pruned", report)
    whole = quantize(tmp_path / "pruned", tmp_path / "whole", recipe)["source"]["files"]
    assert {digest.startswith("blake3:") for digest in whole.values()} == {kind == "blake3"}
    shutil.copytree(tmp_path / "pruned", tmp_path / "broken")
    shard = damage(tmp_path / "broken", "model.norm.weight")
    with pytest.raises(CheckpointError, match=f"{shard.name}: its hash is not the one .* restore it"):
        quantize(tmp_path / "broken", tmp_path / "out", recipe)
    assert not any(tmp_path.glob("out*"))
