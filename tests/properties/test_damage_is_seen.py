"""A changed file is told by every command that reads it, whether its report is there or lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import quantkit
from quantkit.checkpoint.report import REPORT, SEAL, load, seal
from quantkit.errors import CheckpointError
from quantkit.io.safetensors_files import read_header
from tests.command_line import call, refused
from tests.folders import edit, flip

TENSOR = "model.norm.weight"


@pytest.fixture
def folder(int4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(int4, tmp_path / "int4"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("report", [True, False])
def test_a_flipped_bit_is_named_by_load_eval_generate_and_inspect(report: bool, folder: Path, text: Path) -> None:
    if not report:
        (folder / REPORT).unlink()
    flip(folder, TENSOR)
    window = ("--data", text, "--window", 32)
    for words in (("eval", "ppl", folder, *window), ("generate", folder, "The", "--max-new-tokens", 2)):
        assert TENSOR in (said := refused(*words)) and "--no-check" in said
        call(*words, "--no-check", "-q")
    with pytest.raises(CheckpointError, match=rf"{TENSOR}.*check=False"):
        quantkit.load(folder, device="cpu")
    quantkit.load(folder, device="cpu", check=False)
    assert TENSOR in call("inspect", folder, "--check", "-q", code=3).stdout


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_an_edited_text_is_refused_by_load_and_told_by_pack(name: str, folder: Path, tmp_path: Path) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    with pytest.raises(CheckpointError, match=name):
        quantkit.load(folder, device="cpu")
    notices = quantkit.pack(folder, tmp_path / "out", "gptq").notices
    assert any(line.startswith(f"{name}: its hash is not the one") for line in notices)


def test_exchanged_names_of_tensors_are_damage_too(folder: Path, text: Path) -> None:
    (folder / REPORT).unlink()
    first, second = (b"model.layers.0.self_attn.%s_proj.weight_packed" % letter for letter in (b"q", b"k"))
    (path,) = (path for path in folder.glob("*.safetensors") if first.decode() in read_header(path)[0])
    data = path.read_bytes()
    assert data.count(first) == data.count(second) == 1
    hidden = b"x" * len(first)
    path.write_bytes(data.replace(first, hidden).replace(second, first).replace(hidden, second))
    said = refused("eval", "ppl", folder, "--data", text)
    assert first.decode() in said and "digest" in said


def test_codes_that_nothing_is_known_of_are_not_called_verified(folder: Path) -> None:
    (folder / REPORT).unlink()
    assert "codes unchecked" not in call("verify", folder, "-q").stdout  # by the digests in the weight files
    edit(folder, lambda tensors: None)  # so that the file has no digests
    said = call("verify", folder, "-q", code=3).stdout
    assert "NOT verified, codes unchecked" in said and "--unsealed" in said
    assert "verified, codes unchecked" in call("verify", folder, "--unsealed", "-q").stdout
    assert "nothing can be checked" in refused("inspect", folder, "--check")


def test_another_checkpoint_is_compared_in_its_dense_tensors_too(folder: Path, int4: Path) -> None:
    (folder / REPORT).unlink()
    edit(folder, lambda tensors: tensors[TENSOR][3].add_(1))
    assert f"{TENSOR}: its bits differ from those in" in call("verify", folder, "--against", int4, "-q", code=3).stdout
    edit(folder, lambda tensors: tensors.update({TENSOR: tensors[TENSOR].bfloat16()}))
    assert f"{TENSOR}: is [" in call("verify", folder, "--against", int4, "-q", code=3).stdout


def test_an_edited_report_is_refused_and_one_without_a_seal_does_not_verify(folder: Path) -> None:
    report = load(folder)
    assert report[SEAL] == seal(report)
    report["layers"][0]["relative_error"] = 0.0
    (folder / REPORT).write_text(json.dumps(report))
    assert "was changed since it was written" in refused("report", folder)
    assert "was changed since it was written" in refused("verify", folder)
    (folder / REPORT).write_text(json.dumps({key: value for key, value in report.items() if key != SEAL}))
    assert "has no seal" in call("verify", folder, "-q", code=3).stdout
