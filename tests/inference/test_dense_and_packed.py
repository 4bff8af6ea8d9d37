"""A dense model and the packed one made from it begin, restrict and end texts by the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.inference.generate import generate
from quantkit.inference.load import load_for_evaluation
from quantkit.io.model_folder import has_chat_template
from quantkit.models.weights import load_dense_model
from quantkit.text.tokenizer import load_tokenizer
from tests.folders import restate
from tests.tiny_models import write_model


def _texts(folder: Path, **stated: Any) -> list[Any]:
    """Quantize a model whose generation_config.json states something; return how both models write texts."""
    (folder / "generation_config.json").unlink()
    if stated:
        (folder / "generation_config.json").write_text(json.dumps(stated))
    quantkit.quantize(folder, folder.parent / "packed", method="rtn", group_size=64)
    models = [load_for_evaluation(Checkpoint(path), device="cpu") for path in (folder, folder.parent / "packed")]
    return [model.generation_config for model in models]


def test_dense_and_packed_models_restrict_texts_alike(tmp_path: Path) -> None:
    stated = {"suppress_tokens": [3, 4], "repetition_penalty": 1.5, "pad_token_id": 5}
    dense, packed = _texts(write_model("qwen2", tmp_path / "model"), **stated)
    assert dense.to_dict() == packed.to_dict() and {**dense.to_dict(), **stated} == dense.to_dict()
    assert dense.eos_token_id == 256  # config.json has what the file leaves out


def test_an_encoder_decoder_begins_and_ends_alike_without_a_file(tmp_path: Path) -> None:
    path = write_model("encoder-bart", tmp_path / "model")
    restate(path / "config.json", forced_eos_token_id=7, decoder_start_token_id=9)
    dense, packed = _texts(path)
    assert dense.to_dict() == packed.to_dict()
    assert (dense.forced_eos_token_id, dense.decoder_start_token_id, dense.eos_token_id) == (7, 9, 256)


def test_no_search_or_cache_of_the_file_changes_or_stops_a_text(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    expected = generate(path, "abc", max_new_tokens=6, device="cpu")
    search: dict[str, Any] = {"num_beams": 4, "do_sample": True, "num_return_sequences": 3, "force_words_ids": [[5]]}
    search |= {"dola_layers": "high", "cache_implementation": "quantized", "token_healing": True}
    search |= {"max_time": 1e-9, "max_length": 2, "watermarking_config": {"bias": 9.0}}
    dense, packed = _texts(path, eos_token_id=256, **search)
    assert dense.to_dict() == packed.to_dict()
    found = generate(path, "abc", max_new_tokens=6, device="cpu")
    assert (found.text, found.tokens) == (expected.text, expected.tokens)


def test_strings_that_end_texts_end_them_dense_and_packed(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    whole = generate(path, "abc", max_new_tokens=8, device="cpu")
    _texts(path, stop_strings=[whole.text[0]])
    for folder in (path, tmp_path / "packed"):
        found = generate(folder, "abc", max_new_tokens=8, device="cpu")
        assert found.tokens < whole.tokens and found.text.startswith(whole.text[0]), folder


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "</s>"}', "[1]"])
def test_a_generation_config_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    (path / "generation_config.json").write_text(content)
    for load in (load_dense_model, lambda src: quantkit.load(src.path, device="cpu")):
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            load(Checkpoint(path))


def test_a_text_ends_at_the_tokens_of_the_file_and_of_the_tokenizer_and_does_not_show_them(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    words, file = load_tokenizer(path), path / "generation_config.json"
    letters = words("abcdefghijklm", add_special_tokens=False)["input_ids"]
    stated = {"suppress_tokens": sorted({*range(257)} - {*letters}), "return_dict_in_generate": True}
    file.write_text(json.dumps(stated))
    whole = generate(path, "abc", max_new_tokens=8, device="cpu").text
    before = whole[: whole.index(whole[-1])]
    file.write_text(json.dumps(stated | {"eos_token_id": words(whole[-1])["input_ids"]}))
    quantkit.quantize(path, tmp_path / "packed", method="rtn", group_size=64, format="int8")
    for folder in (path, tmp_path / "packed"):
        pieces: list[str] = []
        found = generate(folder, "abc", max_new_tokens=8, device="cpu", listener=pieces.append)
        assert found.text == "".join(pieces) == before and found.tokens == len(before) + 1
    restate(path / "tokenizer_config.json", eos_token=whole[-1])
    file.write_text(json.dumps(stated))
    assert generate(path, "abc", max_new_tokens=8, device="cpu").text == before


def test_the_template_of_a_processor_is_the_models(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}!"}))
    quantkit.quantize(path, tmp_path / "packed", method="rtn", group_size=64)
    one, other = (
        generate(folder, "a", chat=True, max_new_tokens=1, device="cpu") for folder in (path, tmp_path / "packed")
    )
    assert one.text == other.text and has_chat_template(tmp_path / "packed")
