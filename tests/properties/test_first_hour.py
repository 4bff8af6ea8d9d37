"""Run the commands of docs/first_hour.md that need little time, and compare their outputs with the page."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
import pytest
import torch

from tests.properties.pages import agree, shell

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/first_hour.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/first_hour.py"))


def outputs() -> dict[str, list[str]]:
    """Return the output lines of each command of the page."""
    blocks = [block for block in PAGE.split("```") if block.startswith("console\n$ ")]
    found = {}
    for text in "\n".join(blocks).split("\n$ ")[1:]:
        command, *lines = text.rstrip("\n").splitlines()
        found[command] = [line for line in lines if line.strip() and line != "console"]
    return found


def test_the_page_is_short_and_has_every_command_of_the_script(script: dict[str, Any]) -> None:
    assert len(PAGE.splitlines()) <= 150
    steps = [*(step for _, group in script["FIRST"] for step in group), *script["MISTAKES"], *script["ONLINE"]]
    assert list(outputs()) == [step.command for step in steps]


def test_the_part_without_a_network_prints_what_the_page_shows(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    if torch.cuda.is_available():
        pytest.skip("the page shows a machine without a GPU")
    script["prepare"](tmp_path)
    monkeypatch.chdir(tmp_path)
    page = outputs()
    steps = [*(step for _, group in script["FIRST"] for step in group), *script["MISTAKES"]]
    with patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        for step in (step for step in steps if step.tested):
            lines = script["shown"](step, shell(step.command).replace(str(tmp_path), "/home/you/quantkit"))
            assert agree(lines, page[step.command]), f"{step.command}\n" + "\n".join(lines)
