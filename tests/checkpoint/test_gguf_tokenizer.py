"""Tokenizers of GGUF files: text is split as the file says, or not read at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from quantkit.api import quantize
from quantkit.checkpoint.gguf_source import open_gguf
from quantkit.checkpoint.gguf_tokenizer import RULES
from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.text.tokenizer import load_tokenizer
from tests.gguf_files import tokenizer_keys, write_gguf
from tests.tiny_models import FAMILIES

TEXT = "It's 12345 (of) John's path/to\n\n\tif x1  == 'WE'LL': don't 10 2026 naïve\u0301 UPPERCase…\n" * 30
RTN: dict[str, Any] = {"format": "int4", "group_size": 64, "method": "rtn"}


def trained(*steps: Any) -> Tokenizer:
    """Train merges over bytes on `TEXT`, which the steps split."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def keys_of(tokenizer: Tokenizer, pre: str | None, tokens: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the keys of a file with this tokenizer, and `tokens` of these types at its end."""
    state = json.loads(tokenizer.to_str())["model"]
    words = [*sorted(state["vocab"], key=state["vocab"].get), *(tokens or {})]
    stated: dict[str, Any] = {f"tokenizer.ggml.{which}_token_id": 0 for which in ("bos", "eos", "padding")}
    types = [3] + [1] * (len(state["vocab"]) - 1) + [*(tokens or {}).values()]
    stated |= {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": types, "tokenizer.ggml.pre": pre}
    merges = [each if isinstance(each, str) else " ".join(each) for each in state["merges"]]
    return stated | {"tokenizer.ggml.merges": merges, "tokenizer.ggml.scores": None}


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any]) -> Path:
    size = len(stated.get("tokenizer.ggml.tokens", tokenizer_keys()["tokenizer.ggml.tokens"]))
    monkeypatch.setitem(FAMILIES["llama"][1], "vocab_size", size)
    return write_gguf("llama", folder, stated=stated)[0]


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


#: Name of a pre-tokenizer -> the steps of such models' own tokenizer.json.
STEPS: dict[str, list[Any]] = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "deepseek-coder": [
        *map(split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")),
        pre_tokenizers.Digits(individual_digits=True),
    ],
}


@pytest.mark.parametrize("pre", ["smollm", "deepseek-coder", "gpt-2"])
def test_text_is_split_by_the_rule_that_the_file_names(
    pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = (
        []
        if pre == "deepseek-coder"
        else [split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")]
    )
    tokenizer = trained(*STEPS[pre], *rule)
    src = Checkpoint(resolve(str(written(tmp_path, monkeypatch, keys_of(tokenizer, pre)))))
    found = load_tokenizer(src.path)
    assert found(TEXT, add_special_tokens=False)["input_ids"] == tokenizer.encode(TEXT).ids
    assert found.decode(found(TEXT, add_special_tokens=False)["input_ids"]) == TEXT


def test_all_rules_can_be_built_and_lose_no_character() -> None:
    for name, patterns in RULES.items():
        made = pre_tokenizers.Sequence([split(each) for each in patterns])
        assert "".join(word for word, _ in made.pre_tokenize_str(TEXT)) == TEXT, name


@pytest.mark.parametrize("pre", [None, "quux-bpe"])
def test_without_a_known_rule_no_text_is_read_and_an_output_has_no_tokenizer(
    pre: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, monkeypatch, keys_of(trained(), pre))
    words = "unknown tokenizer.ggml.pre" if pre else "lacks tokenizer.ggml.pre"
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(resolve(str(file)))
    made = quantize(file, tmp_path / "out", **RTN)
    assert any(words in line for line in made.notices)
    assert not [path.name for path in (tmp_path / "out").iterdir() if "tokenizer" in path.name]


def test_added_tokens_are_found_whole_also_beyond_the_alphabet_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = keys_of(trained(), "gpt-2", {"<｜User｜>": 3, "<think>": 4, "   ": 4})
    found = load_tokenizer(resolve(str(written(tmp_path, monkeypatch, stated))))
    first = len(stated["tokenizer.ggml.tokens"]) - 3
    ids = found("<｜User｜>ab<think>c   d", add_special_tokens=False)["input_ids"]
    assert {first, first + 1, first + 2} < set(ids) and found.decode(ids) == "<｜User｜>ab<think>c   d"
    assert found.decode(ids, skip_special_tokens=True) == "ab<think>c   d"


@pytest.mark.parametrize(
    ("pre", "flag", "starts"), [("llama-bpe", None, True), ("llama-bpe", 0, False), ("gpt-2", 1, True)]
)
def test_the_start_token_is_added_where_the_file_or_its_rule_says_so(
    pre: str, flag: int | None, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {**keys_of(trained(), pre), "tokenizer.ggml.add_bos_token": flag}
    found = load_tokenizer(resolve(str(written(tmp_path, monkeypatch, stated))))
    assert (found("ab")["input_ids"][0] == 0) == starts


def test_all_ends_of_a_turn_end_texts_and_suppressed_tokens_stay_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"tokenizer.ggml.eos_token_ids": [5, 6], "tokenizer.ggml.eot_token_id": 7}
    folder = resolve(str(written(tmp_path, monkeypatch, {**stated, "tokenizer.ggml.suppress_tokens": [9]})))
    found = json.loads((folder / "generation_config.json").read_text())
    assert found["eos_token_id"] == [256, 7, 5, 6] and found["suppress_tokens"] == [9]


def test_named_templates_are_kept_and_names_that_lead_elsewhere_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    file = written(tmp_path, monkeypatch, named)
    made = load_tokenizer(resolve(str(file)))
    assert made.get_chat_template("tool_use") == "tools"
    file = written(tmp_path, monkeypatch, {"tokenizer.chat_template.../../up": "x"})
    with pytest.raises(CheckpointError, match=r"states tokenizer\.chat_template\.\.\./\.\./up"):
        open_gguf(file)


@pytest.mark.parametrize("key", ["normalizer.lowercase", "add_sep_token", "quux"])
def test_keys_of_a_tokenizer_that_are_not_followed_are_refused_by_name(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=rf"states tokenizer\.ggml\.{key} 1"):
        resolve(str(written(tmp_path, monkeypatch, {f"tokenizer.ggml.{key}": 1})))


def test_token_ids_beyond_the_vocabulary_are_left_out_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"eos_token_id": 300, "eot_token_id": 7, "bos_token_id": "<s>", "padding_token_id": 2**32 - 1}
    file = written(tmp_path, monkeypatch, {f"tokenizer.ggml.{key}": token for key, token in stated.items()})
    folder = resolve(str(file))
    lines = [line for line in Checkpoint(folder).notices if "no token of the vocabulary" in line]
    assert [line.split()[0].removeprefix("tokenizer.ggml.") for line in lines] == ["bos_token_id", "eos_token_id"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 7
    assert load_tokenizer(folder).bos_token is None


@pytest.mark.parametrize("merges", [["q zz"], ["qz"]])
def test_a_vocabulary_that_no_program_can_read_is_refused_without_text_too(
    merges: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, monkeypatch, {"tokenizer.ggml.merges": merges, "tokenizer.ggml.pre": "gpt-2"})
    with pytest.raises(CheckpointError, match=r"model.gguf: transformers cannot make a tokenizer of it"):
        quantize(file, tmp_path / "out", **RTN)
    assert not [*tmp_path.glob("out*")]


def test_the_same_tokenizer_in_the_form_of_hugging_face_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(str(written(tmp_path, monkeypatch, {"tokenizer.huggingface.json": "{}"})))
    assert load_tokenizer(folder)("ab")["input_ids"]
