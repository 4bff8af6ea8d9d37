"""The demo: what it claims is what it measured, its two texts are apart, and it leaves what it is told to leave."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit import demo
from quantkit.checkpoint import Checkpoint
from quantkit.cli import show
from quantkit.cli.commands import quantkit
from quantkit.errors import CheckpointError


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    before = os.environ.get("HF_HUB_OFFLINE")
    yield
    os.environ.pop("HF_HUB_OFFLINE", None)  # which the demo sets, in the worker that runs it
    if before is not None:
        os.environ["HF_HUB_OFFLINE"] = before


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("demo") / "out"
    result = CliRunner().invoke(quantkit, ["demo", "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout), result.stderr


def test_the_texts_share_no_documentation_string() -> None:
    documents, text = demo.texts()
    assert len(documents) >= demo.SAMPLES
    assert not any(string in text for document in documents for string in document.split("\n\n") if len(string) > 300)


def test_the_demo_tells_the_story(made: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = made
    dense, rtn, gptq, packed, fp6 = found["rows"]
    assert [row["layout"] for row in found["rows"]] == ["-", *["compressed-tensors"] * 2, "marlin", "humming"]
    assert dense["perplexity"] < fp6["perplexity"] < gptq["perplexity"] < rtn["perplexity"]
    assert packed["perplexity"] == gptq["perplexity"]  # packing changes no value
    assert 4 < packed["bits_per_weight"] < 4.2 and 6 < fp6["bits_per_weight"] < 6.1
    assert rtn["change"] == rtn["perplexity"] / dense["perplexity"] - 1


def test_the_checkpoints_stay_where_they_were_asked_for(made: tuple[Path, dict[str, Any], str]) -> None:
    out, _, notes = made
    assert Checkpoint(out / demo.PACKED).modules() == Checkpoint(out / demo.SOURCE).modules()
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert "verify    int4-gptq-marlin" in notes


def test_the_table_has_a_line_for_each_row(made: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = made
    lines = show.demo(found).splitlines()
    assert len(lines) == 1 + len(found["rows"]) + 2
    assert lines[1].endswith(f"{found['rows'][0]['perplexity']:.3f}") and lines[2].endswith(" %")


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        demo.run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_packaged_model_names_its_training_data() -> None:
    card = (demo.MODEL / "README.md").read_text()
    for name in ("Wikipedia", "CC BY-SA", "Penn Treebank", "Python"):
        assert name in card
