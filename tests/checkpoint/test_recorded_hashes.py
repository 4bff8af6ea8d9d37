"""Sources whose files' hashes are stated beside them: damage is found, and nothing is converted further."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from quantkit.checkpoint.origin import SUMS, recorded_hashes, source_hashes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, load
from quantkit.errors import CheckpointError
from quantkit.evaluation.verify import verify
from quantkit.io.files import hash_of_file
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping
from tests.folders import flip, sha256
from tests.reporting.samples import write_report

RTN = from_mapping({"method": "rtn", "clip": "none"})


def snapshot(model: Path, tmp_path: Path) -> Path:
    """Return a copy of a model as the hub's cache keeps it: large files named by their SHA-256, small ones not."""
    home = tmp_path / "models--a--m"
    folder = home / "snapshots" / "12ab"
    folder.mkdir(parents=True)
    (home / "blobs").mkdir()
    for path in model.iterdir():
        blob = home / "blobs" / (sha256(path) if path.suffix == ".safetensors" else f"{path.name:0>40}")
        shutil.copyfile(path, blob)
        (folder / path.name).symlink_to(blob)
    return folder


def listed(model: Path, tmp_path: Path) -> Path:
    """Return a copy of a model with what `sha256sum *` prints of it, and lines of other things."""
    folder = Path(shutil.copytree(model, tmp_path / "listed"))
    lines = [f"{sha256(path)}  {path.name}" for path in folder.iterdir()]
    (folder / SUMS).write_text("\n".join(["# of today", *lines, "0" * 63 + "  config.json", ""]))
    return folder


def reported(model: Path, tmp_path: Path) -> Path:
    quantize(model, tmp_path / "reported", RTN)
    return tmp_path / "reported"


@pytest.mark.parametrize("way", [snapshot, listed], ids=lambda way: way.__name__)
def test_damage_stops_a_run_or_a_conversion_and_a_whole_file_is_reported_by_its_stated_hash(
    way: Callable[[Path, Path], Path], small_llama: Path, int4: Path, tmp_path: Path
) -> None:
    if way is snapshot:
        folder, work = way(small_llama, tmp_path), partial(quantize, recipe=RTN)
    else:
        folder, work = way(int4, tmp_path), partial(pack, layout="marlin")
        (folder / REPORT).unlink()
    files = work(folder, tmp_path / "whole")["source"]["files"]
    shards = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert {path.name: files[path.name] for path in shards} == {path.name: sha256(path) for path in shards}
    data = bytearray(shards[0].read_bytes())
    data[-1] ^= 1
    shards[0].resolve().write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{shards[0].name}: its hash is not the one"):
        work(folder, tmp_path / "out")
    assert not any(tmp_path.glob("out*"))


def test_a_report_comes_before_a_list_and_what_neither_states_is_hashed_all_the_same(
    small_llama: Path, tmp_path: Path
) -> None:
    folder = reported(small_llama, tmp_path)
    (folder / SUMS).write_text(f"{'0' * 64} *./model-00001-of-00001.safetensors\n{'A' * 64}  other.safetensors\n")
    src = Checkpoint(folder)
    known = recorded_hashes(src)
    assert known["model-00001-of-00001.safetensors"].by == f"{REPORT} lists" and "other.safetensors" not in known
    assert source_hashes(src)[0] == {name: hash_of_file(path) for name, path in src.sources().items()}
    (folder / REPORT).unlink()
    with pytest.raises(CheckpointError, match=rf"{SUMS} lists, .*: restore it, or mend {SUMS}"):
        source_hashes(src)
    (folder / SUMS).write_bytes(b"\xff\n\n" + b"0" * 64)
    assert recorded_hashes(src) == {}


def test_a_list_that_leads_elsewhere_is_not_read(small_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_llama, tmp_path / "m"))
    (tmp_path / "theirs").write_text("")
    (folder / SUMS).symlink_to(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="link out of the model's folder"):
        recorded_hashes(Checkpoint(folder))


@pytest.fixture
def older(tiny_llama: Path, tmp_path: Path) -> Path:
    """A quantized folder as it was written when reports listed SHA-256."""
    quantize(tiny_llama, tmp_path / "older", from_mapping({"method": "rtn", "clip": "none"}))
    path = tmp_path / "older" / REPORT
    report = json.loads(path.read_text())
    report["files"] = {name: sha256(path.parent / name) for name in report["files"]}
    write_report(path.parent, report)
    return path.parent


def test_a_source_with_an_older_report_is_held_against_it(older: Path, tmp_path: Path) -> None:
    report = pack(older, tmp_path / "out", "marlin")
    assert report["source"]["files"] == {name: sha256(path) for name, path in Checkpoint(older).sources().items()}
    assert all(digest.startswith("blake3:") for digest in report["files"].values())
    assert verify(older).ok and verify(tmp_path / "out").ok
    shard = flip(older, "model.norm.weight")
    with pytest.raises(CheckpointError, match=f"{shard.name}: its hash is not the one.*: restore it$"):
        pack(older, tmp_path / "again", "marlin")
    assert not (tmp_path / "again").exists()
    with pytest.raises(CheckpointError) as without:  # so the first error may not offer to remove the report
        (older / REPORT).rename(tmp_path / REPORT)
        pack(older, tmp_path / "again", "marlin")
    assert "does not have the digest that the file states" in str(without.value)
    (tmp_path / REPORT).rename(older / REPORT)
    found = verify(older)
    assert [line for line in found.failures if line.startswith(f"{shard.name}: its hash is not the one")]


def test_a_hash_of_another_kind_with_the_same_digits_is_no_match(older: Path) -> None:
    report = load(older)
    report["files"] = {name: f"blake3:{digest}" for name, digest in report["files"].items()}
    write_report(older, report)
    assert len(verify(older).failures) == len(report["files"])
