"""A dense model and the packed one made from it begin, restrict and end texts by the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.inference.load import load_for_evaluation
from quantkit.models.weights import load_dense_model
from tests.tiny_models import write_model


def _texts(folder: Path, **stated: Any) -> list[Any]:
    """Quantize a model whose generation_config.json states something; return how both models write texts."""
    (folder / "generation_config.json").unlink()
    if stated:
        (folder / "generation_config.json").write_text(json.dumps(stated))
    quantkit.quantize(folder, folder.parent / "packed", method="rtn", group_size=64)
    models = [
        load_for_evaluation(Checkpoint(path), device="cpu", trust_remote_code=False)
        for path in (folder, folder.parent / "packed")
    ]
    return [model.generation_config for model in models]


def test_dense_and_packed_models_restrict_texts_alike(tmp_path: Path) -> None:
    stated = {"suppress_tokens": [3, 4], "repetition_penalty": 1.5, "pad_token_id": 5}
    dense, packed = _texts(write_model("qwen2", tmp_path / "model"), **stated)
    assert dense.to_dict() == packed.to_dict() and {**dense.to_dict(), **stated} == dense.to_dict()
    assert dense.eos_token_id == 256  # config.json has what the file leaves out


def test_an_encoder_decoder_begins_and_ends_alike_without_a_file(tmp_path: Path) -> None:
    path = write_model("encoder-bart", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "forced_eos_token_id": 7, "decoder_start_token_id": 9}))
    dense, packed = _texts(path)
    assert dense.to_dict() == packed.to_dict()
    assert (dense.forced_eos_token_id, dense.decoder_start_token_id, dense.eos_token_id) == (7, 9, 256)


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "</s>"}', "[1]"])
def test_a_generation_config_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    (path / "generation_config.json").write_text(content)
    for load in (load_dense_model, lambda src: quantkit.load(src.path, device="cpu")):
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            load(Checkpoint(path))
