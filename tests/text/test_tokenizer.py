"""Tokenizers that cannot be read: the file, or the package that is missing, is named before anything is published."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.errors import CheckpointError
from quantkit.planning.survey import plan
from quantkit.recipes.recipe import from_mapping
from quantkit.text import tokenizer
from quantkit.text.tokenizer import has_corrected_pattern, load_tokenizer
from tests.tiny_models import write_model


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer.json", lambda path: path.write_bytes(path.read_bytes()[:-40])),
        ("tokenizer.json", lambda path: path.write_text("{}")),
        ("tokenizer_config.json", lambda path: path.write_text("[]")),
    ],
)
def test_rounding_publishes_no_tokenizer_that_nobody_can_read(
    tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    folder = write_model("llama", tmp_path / "m")
    damage(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: no file of a tokenizer .*download it again"):
        quantkit.quantize(folder, tmp_path / "out", method="rtn", group_size=64)
    assert not (tmp_path / "out").exists()


def test_a_length_that_is_no_number_ends_in_a_line(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "m") / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "long"}))
    with pytest.raises(CheckpointError, match="has no tokenizer that transformers can read"):
        load_tokenizer(tmp_path / "m")


def test_a_text_has_the_same_tokens_each_time_also_where_training_left_out_merges(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merges = [("a" * n, "a" * n) for n in (1, 2, 4, 8)]
    vocabulary = {"a" * n: at for at, n in enumerate((1, 2, 4, 8, 16))}
    made = Tokenizer(models.BPE(vocabulary, merges, dropout=0.5))
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    assert all(found("a" * 16).input_ids == [4] for _ in range(20))


def test_a_pattern_that_was_published_wrong_and_corrected_since_is_noted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = write_model("mistral", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "4.50.0"}))
    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(100_001)}, unk_token="w0"))
    for is_split, splits in ((True, pre_tokenizers.Whitespace()), (False, None)):
        made.pre_tokenizer = splits
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
        found = plan(folder, from_mapping({"method": "rtn"})).verdict.remarks
        assert any("fix_mistral_regex" in str(line) for line in found) == is_split
    stated = json.loads((path := folder / "tokenizer_config.json").read_text())
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    path.write_text(json.dumps({**stated, "fix_mistral_regex": True}))
    assert not has_corrected_pattern(load_tokenizer(folder), folder)


OPEN = "{% for m in messages %}{{ m.content }}"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_byte_order_mark_is_named_and_no_reason_to_download_again(tmp_path: Path, name: str, encoding: str) -> None:
    folder, packed = write_model("llama", tmp_path / "m"), tmp_path / "packed"
    (folder / "chat_template.jinja").write_text(OPEN + "{% endfor %}")
    quantkit.quantize(folder, packed, method="rtn", group_size=64, clip="none", layout="gptq")
    for path in (folder / name, packed / name):
        path.write_text(path.read_text(), encoding=encoding)
    for write in (
        lambda: quantkit.quantize(folder, tmp_path / "out", method="rtn", group_size=64),
        lambda: quantkit.pack(packed, tmp_path / "out", "compressed-tensors"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: begins with a byte order mark.*: save it as UTF-8 without"):
            write()
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("chat_template.jinja", OPEN, "its chat template does not parse"),
        ("tokenizer_config.json", json.dumps({"chat_template": OPEN}), "its chat template does not parse"),
        ("preprocessor_config.json", "{", "no file of a tokenizer or processor"),
        ("generation_config.json", "{", "not the JSON it should be"),
        ("generation_config.json", '{"cache_implementation": "none such"}', "cannot be read"),
    ],
)
def test_what_readers_open_by_name_and_cannot_parse_is_neither_planned_nor_published_nor_packed(
    tmp_path: Path, name: str, text: str, rule: str
) -> None:
    folder, packed = write_model("llama", tmp_path / "m"), tmp_path / "packed"
    quantkit.quantize(folder, packed, method="rtn", group_size=64, clip="none", layout="gptq")
    for path in (folder, packed):
        (path / name).write_text(text)
    assert rule in str(quantkit.plan(folder, method="rtn", group_size=64).refusal)
    for write in (
        lambda: quantkit.quantize(folder, tmp_path / "out", method="rtn", group_size=64),
        lambda: quantkit.pack(packed, tmp_path / "out", "compressed-tensors"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: {rule}"):
            write()
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "package"), [("tokenizer.model", "sentencepiece"), ("tekken.json", "mistral_common")])
def test_a_package_that_a_tokenizer_needs_is_named(
    tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    folder = write_model("llama", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / name).write_text("[]")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(CheckpointError, match=f"needs the Python package {package}.*pip install {package}$"):
        load_tokenizer(folder)


def test_a_folder_whose_name_is_no_text_has_a_readable_tokenizer(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "m").rename(tmp_path / os.fsdecode(b"\xe6\x9d"))
    tokenizer.require_readable_tokenizer(folder)
