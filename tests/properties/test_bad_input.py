"""Test that bad input is refused in one line with the right exit code and leaves no files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from quantkit import load
from quantkit.errors import CheckpointError
from tests import command_line
from tests.command_line import call, refused
from tests.folders import restate

copy = command_line.copy

READ_A_MODEL = ["quantize {bad} --method rtn -o {out}", "plan {bad}", "inspect {bad}", "eval ppl {bad} --data {text}"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", value) for value in (1_000_000, 10**18, 1e6)),
        *((key, 10**18) for key in ("num_attention_heads", "num_labels", "head_dim", "hidden_size")),
        *(("hidden_size", 10**9), ("vocab_size", 10**12), ("intermediate_size", 2**63 - 1)),
        ("vision_config", {"hidden_size": 10**9}),
        ("text_config", {"depths": [2, 2, 10**9]}),
    ],
)
def test_sizes_that_the_weights_cannot_have_are_refused_before_a_model_is_built(
    key: str, value: object, copy: Path, tmp_path: Path, calib: Path
) -> None:
    restate(copy / "config.json", **{key: value})
    for args in READ_A_MODEL[1:3]:
        message = refused(*args.format(bad=copy, out=tmp_path / "out", text=calib).split())
        assert "the weight files hold" in message and "config.json" in message


OPENED = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "spiece.model"]
OPENED += ["special_tokens_map.json", "adapter_config.json", "quantkit_report.json"]
OPENED += ["additional_chat_templates/x.jinja"]


@pytest.mark.parametrize("name", OPENED)
def test_no_command_opens_a_link_out_of_the_folder(name: str, copy: Path, tmp_path: Path, calib: Path) -> None:
    link, secret = copy / name, tmp_path / "secret"
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        link.rename(secret)
    else:
        secret.write_text("{}")
    link.symlink_to(secret)
    for args in (*READ_A_MODEL, "generate {bad} hello", "load"):
        if args == "load":
            with pytest.raises(CheckpointError, match="is a link out of the model's folder"):
                load(copy)
        else:
            message = refused(*args.format(bad=copy, out=tmp_path / "out", text=calib).split())
            assert name in message and "is a link out of the model's folder" in message
    link.unlink()
    os.mkfifo(link)  # whoever opens it waits for ever
    assert f"{name!r} is no regular file" in refused("generate", copy, "hello")


def test_a_folder_of_templates_elsewhere_is_not_opened(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.jinja").write_text("theirs")
    (copy / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    assert "'additional_chat_templates' is a link out" in refused("generate", copy, "hello")


@pytest.mark.parametrize("name", ["quantkit_report.json", "verify.json"])
def test_report_opens_no_link_out_of_the_folder(name: str, int4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(int4, tmp_path / "folder")
    (tmp_path / "theirs.json").write_text((folder / "quantkit_report.json").read_text())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "theirs.json")
    assert "is a link out of" in refused("report", folder, "--html", tmp_path / "page.html")


def test_a_hub_cache_whose_files_are_links_is_read_and_its_outputs_have_none(
    tiny_llama: Path, tmp_path: Path, calib: Path
) -> None:
    snapshot, blobs = tmp_path / "models--a--m" / "snapshots" / "12ab", tmp_path / "models--a--m" / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(tiny_llama.iterdir())):
        shutil.copy(path, blobs / f"{number:040}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040}")
    (blobs / "ff").write_text("{{ messages }}")
    (snapshot / "additional_chat_templates" / "x.jinja").symlink_to("../../../blobs/ff")
    call("generate", snapshot, "hello", "--max-new-tokens", 2)
    (tmp_path / "link").symlink_to(snapshot)
    call("eval", "ppl", tmp_path / "link", "--data", calib, "--window", 32)
    call("quantize", tmp_path / "link", "--method", "rtn", "--group-size", 32, "-o", tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
