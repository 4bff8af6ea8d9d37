"""`--calib self` through whole runs: mixtures, resumption to the same bytes, plans, memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quantkit import api
from quantkit.errors import CheckpointError, RecipeError
from quantkit.io.staging import WRITTEN
from quantkit.pipeline.quantize import quantize
from quantkit.planning import survey as job
from quantkit.planning.survey import plan
from quantkit.recipes.recipe import from_mapping
from tests.faults import Killed, faults
from tests.folders import hashes
from tests.tiny_models import CHAT_TEMPLATE, write_model

OWN: dict[str, Any] = {"calibration": {"data": "self", "samples": 4, "max_length": 40}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model("llama", tmp_path_factory.mktemp("self") / "model", hidden_size=128, intermediate_size=128)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("the model writes a text")


def kill(what: str, path: Path) -> None:
    if what == "open" and path.name == "model-00002.safetensors":  # the first block is committed
        raise Killed


def weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in hashes(folder).items() if name.endswith(".safetensors")}


def test_a_resumed_run_reads_the_text_that_the_model_wrote(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(model, tmp_path / "whole", from_mapping(OWN))
    with faults(kill), pytest.raises(Killed):
        quantize(model, tmp_path / "out", from_mapping(OWN))
    (partial,) = tmp_path.glob("out.partial-*")
    assert (partial / WRITTEN).exists()
    other = from_mapping({"calibration": {**OWN["calibration"], "seed": 1}})
    monkeypatch.setattr(job, "draw_text", forbidden)
    with pytest.raises(CheckpointError, match="seed was 0 and is now 1"):
        quantize(model, tmp_path / "out", other, resume=True)
    assert plan(model, from_mapping(OWN), out=tmp_path / "out", resume=True).refusal is None
    report = quantize(model, tmp_path / "out", from_mapping(OWN), resume=True)
    assert report["calibration"] == whole["calibration"]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert not (tmp_path / "out" / WRITTEN).exists()


def test_a_damaged_text_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    with faults(kill), pytest.raises(Killed):
        quantize(model, tmp_path / "out", from_mapping(OWN))
    (text,) = tmp_path.glob(f"out.partial-*/{WRITTEN}")
    for damage, says in (("{", "not the JSON"), ('{"facts": 1, "sequences": [["a"]]}', "no text that a model wrote")):
        text.write_text(damage)
        with pytest.raises(CheckpointError, match=says):
            quantize(model, tmp_path / "out", from_mapping(OWN), resume=True)


def test_the_report_says_who_wrote_the_text(model: Path, tmp_path: Path) -> None:
    found = quantize(model, tmp_path / "out", from_mapping(OWN))
    facts = found["calibration"]
    (source,) = facts["sources"]
    assert (facts["source"], facts["seed"], facts["sequences"]) == ("self", 0, 4)
    assert (source["temperature"], source["conversations"], len(source["sha256"])) == (1.0, 2, 64)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "written by the model at temperature 1: 2 conversations, 2 plain texts" in card
    assert not any("plain text calibrates it" in notice for notice in found["notices"])


def test_it_is_a_source_of_mixtures_as_any_other(model: Path, tmp_path: Path) -> None:
    calib = ("self:0.5", "packaged:0.5")
    sources = api.prune(model, tmp_path / "out", calib=calib, samples=4, max_length=40)["calibration"]["sources"]
    assert [(each["source"], each["share"], each["sequences"]) for each in sources] == [
        ("packaged", 0.5, 2),
        ("self", 0.5, 2),
    ]


def test_a_plan_writes_no_text_but_counts_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "draw_text", forbidden)
    found = plan(model, from_mapping(OWN))
    assert found.refusal is None and found.calibration["tokens"] == 160 and "sha256" not in found.calibration
    assert any("writes its calibration text" in notice for notice in found.notices)
    longer = plan(model, from_mapping({"calibration": {"data": "self", "samples": 4}}))
    assert longer.calibration["tokens"] == 4 * 512  # the model's positions


def test_a_gpu_that_cannot_hold_the_model_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    found = plan(model, from_mapping(OWN), gpu_memory=500_000).refusal
    assert found is not None
    assert "the whole model, which writes its calibration text, takes" in str(found)
    assert "use another --calib FILE" in str(found)
    other = plan(model, from_mapping({"calibration": {"data": "packaged", "samples": 4, "max_length": 40}}))
    assert other.needs.memory.others == () and found.exit_code == 1


def test_what_has_no_effect_or_no_template_is_refused(model: Path, tmp_path: Path) -> None:
    fixed = {"calibration": {**OWN["calibration"], "lengths": "fixed"}}
    with pytest.raises(RecipeError, match="text that the model writes has its own lengths: drop it"):
        quantize(model, tmp_path / "out", from_mapping(fixed))
    wrong = Path(shutil.copytree(model, tmp_path / "wrong"))
    (wrong / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    found = plan(wrong, from_mapping(OWN)).refusal
    assert found is not None and "use another --calib FILE" in str(found)
