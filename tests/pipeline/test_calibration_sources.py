"""Calibration data through whole runs: conversations, mixtures, and the packaged text where nothing else is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from quantkit.checkpoint import report
from quantkit.recipes.files import load
from quantkit.recipes.recipe import from_mapping
from tests.command_line import call, refused
from tests.folders import TEXT
from tests.tiny_models import CHAT_TEMPLATE

datasets = pytest.importorskip("datasets", reason="datasets is not installed here")

FEW = ("--samples", 4, "--max-length", 48)
QUICK = ("--set", "clip=none", "--set", "gptq.descent=0")


@pytest.fixture(scope="module")
def chat_model(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(small_llama, tmp_path_factory.mktemp("chat") / "model"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a.jsonl, of conversations, and b.txt."""
    folder = tmp_path_factory.mktemp("texts")
    talks = ([{"from": "human", "value": f"What is {i}?"}, {"from": "gpt", "value": "A number."}] for i in range(9))
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"id": 1, "conversations": talk}) for talk in talks))
    (folder / "b.txt").write_text(TEXT)
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(HfApi, "auth_check", refuse)


def test_report_and_card_state_each_source_of_a_mixture(
    chat_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts)
    out = tmp_path / "out"
    result = call("quantize", chat_model, "-o", out, "--calib", "a.jsonl:3", "--calib", "b.txt", *FEW, *QUICK)
    found, card = report.load(out), (out / "README.md").read_text()
    sources = found["calibration"]["sources"]
    assert [(s["source"], s["share"], s["sequences"]) for s in sources] == [("a.jsonl", 0.75, 3), ("b.txt", 0.25, 1)]
    for source in sources:
        name, sequences, tokens, digest = (source[key] for key in ("source", "sequences", "tokens", "sha256"))
        line = f"{name}: {sequences} sequences, {tokens} tokens, SHA-256 {digest[:16]}"
        assert line in card and line in result.stdout
    assert found["recipe"]["calibration"]["data"] == ["a.jsonl:3", "b.txt"]
    assert not any("has a chat template" in notice for notice in found["notices"])
    again = from_mapping(load(out / "quantkit_recipe.yaml"))
    assert again.sha256() == found["recipe_sha256"]


@pytest.mark.usefixtures("no_hub")
def test_without_calibration_data_the_packaged_text_is_used_loudly(small_llama: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    result = call("quantize", small_llama, "-o", out, "--recipe", "int4-gptq", *FEW, *QUICK)
    says = "the text that comes with quantkit is used: give text like the model's use with --calib FILE"
    found = report.load(out)
    assert says in result.stderr and says in found["notices"] and says in (out / "README.md").read_text()
    assert (found["calibration"]["source"], found["recipe"]["calibration"]["data"]) == ("packaged", "packaged")
    call("quantize", small_llama, "-o", again, "--recipe", out / "quantkit_recipe.yaml", "-q")
    same = ("quantkit_recipe.yaml", "model-00001-of-00001.safetensors")
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in same)


@pytest.mark.usefixtures("no_hub")
def test_without_a_hub_each_command_names_its_own_option(small_llama: Path, tmp_path: Path) -> None:
    says = "the hub cannot be reached and nothing is cached: give a .txt, .json, .jsonl, .csv, .parquet file with"
    for command in ("quantize", "prune"):
        error = refused(command, small_llama, "--calib", "c4", out=tmp_path / "out")
        assert error == f"Error: c4: {says} --calib FILE\n"
    assert refused("eval", "ppl", small_llama) == f"Error: wikitext2: {says} --data FILE\n"
