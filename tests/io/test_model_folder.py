"""Names and links of strangers lead nowhere but into the model's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError
from quantkit.io.model_folder import inside, require_code

OUTSIDE = ["../x", "a/../../x", "a/../x", "/etc/passwd", "//host/x", "C:\\x", "~", "", ".", "..", "x/", "a\0b", "a\nb"]
OUTSIDE += ["./x", "a//x", "a" * 4097, "x\u202e", "caf\u00e9", "X.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, 1, None, ["x"], {"x": 1}, True])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    for path in (tmp_path / "x", folder / "x", folder / "a" / "x", folder / "cafe\u0301", folder / "x.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(CheckpointError) as caught:
        inside(folder, name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_links_may_only_lead_inside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "x").write_bytes(b"x")
    (tmp_path / "x").write_bytes(b"x")
    for name, target in {"in": "x", "chain": "in", "hop": "../model/in"}.items():
        (folder / name).symlink_to(target)
        assert inside(folder, name) == folder / "x"
    os.link(tmp_path / "x", folder / "hard")
    assert inside(folder, "hard") == folder / "hard"
    (tmp_path / "models-2").mkdir()
    (tmp_path / "models-2" / "x").write_bytes(b"x")
    for name, target in {"out": "../x", "far": "out", "loop": "loop", "gone": "y", "alike": "../models-2/x"}.items():
        (folder / name).symlink_to(target)
        with pytest.raises(CheckpointError):
            inside(folder, name)
    (folder / "zero").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        inside(folder, "zero")


def test_a_hub_snapshot_may_link_to_its_own_blobs_only(tmp_path: Path) -> None:
    mine, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    snapshot = mine / "snapshots" / "1234"
    for repository in (mine, other):
        (repository / "blobs").mkdir(parents=True)
        (repository / "blobs" / "ff").write_bytes(b"x")
    snapshot.mkdir(parents=True)
    (snapshot / "mine").symlink_to("../../blobs/ff")
    (snapshot / "other").symlink_to(other / "blobs" / "ff")
    assert inside(snapshot, "mine") == mine / "blobs" / "ff"
    with pytest.raises(CheckpointError, match="link out"):
        inside(snapshot, "other")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "processor_config.json"])
def test_code_that_a_trusted_tokenizer_names_is_there(file: str, tmp_path: Path) -> None:
    for named in (["a.Slow", None], "a.Slow", [None, "org/x--b.Fast"]):
        (tmp_path / file).write_text(json.dumps({"auto_map": {"AutoTokenizer": named}, "model_max_length": 10**30}))
        (tmp_path / "a.py").unlink(missing_ok=True)
        if "a.Slow" in named:
            with pytest.raises(CheckpointError, match=rf"{file} names code in a\.py, which is missing"):
                require_code(tmp_path)
            (tmp_path / "a.py").write_text("")
        require_code(tmp_path)
