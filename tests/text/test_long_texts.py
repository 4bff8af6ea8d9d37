"""Long texts are tokenized by parts: the tokens are those of the whole text, and memory does not grow with it."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.text import tokenizer as tokenizers
from quantkit.text.tokenizer import token_ids
from tests.command_line import ROOT

ENDS = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
SPECIAL = ["<unk>", "<s>", "</s>"]
#: Digits in groups of three from the right, as some pre-tokenizers do: a group depends on the end of its number.
FROM_THE_RIGHT = Regex(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|\s+(?!\S)|\s+|[^\s\p{N}]+")
KINDS: dict[str, tuple[type, Any, Any, type]] = {
    "words of bytes": (models.BPE, None, pre_tokenizers.ByteLevel(add_prefix_space=True), trainers.BpeTrainer),
    "no words": (
        models.BPE,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        trainers.BpeTrainer,
    ),
    "likeliest": (models.Unigram, normalizers.NFKC(), pre_tokenizers.Metaspace(), trainers.UnigramTrainer),
    "lower case": (
        models.WordPiece,
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        trainers.WordPieceTrainer,
    ),
    "from the right": (
        models.BPE,
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(FROM_THE_RIGHT, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        trainers.BpeTrainer,
    ),
}


@cache
def prose() -> str:
    return (ROOT / "docs" / "layouts.md").read_text()


@cache
def trained(kind: str) -> Any:
    model, normalizer, words, trainer = KINDS[kind]
    made = Tokenizer(model() if model is models.Unigram else model(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizer or made.normalizer, words or made.pre_tokenizer
    unknown = {"unk_token": "<unk>"} if model is models.Unigram else {}
    lines = [prose()[i : i + 60] for i in range(0, 30_000, 30)]
    made.train_from_iterator(lines, trainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False, **unknown))
    made.post_processor = ENDS
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def mixture(draw: random.Random) -> str:
    """Draw prose, numbers, runs of a letter and of blanks, special tokens and marks that combine with a letter."""

    def piece() -> str:
        count, at = draw.choice([1, 3, 10, 60, 60, 900]), draw.randrange(40_000)
        numbers, letters = ("".join(draw.choices(them, k=count)) for them in ("0123456789", "ACGT"))
        runs = ["a" * count, "ab" * count, " " * count, "\n" * count, "\t \r\n", numbers, letters]
        return draw.choice([*runs, prose()[at : at + 4 * count], "e\u0301ñ漢字😀" * (count // 3), "</s> "])

    return "".join(piece() for _ in range(60))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_parts_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(kind)
    for seed in range(4):
        draw = random.Random(seed)
        text = mixture(draw)
        monkeypatch.setattr(tokenizers, "LONG", draw.choice([521, 1031, 4099]))
        monkeypatch.setattr(tokenizers, "OVERLAP", draw.choice([128, 256]))
        for special in (False, True):
            whole = torch.tensor(tokenizer(text, add_special_tokens=special)["input_ids"])
            assert token_ids(tokenizer, text, special=special).equal(whole), (seed, special)
            most = draw.randint(1, len(whole))
            assert token_ids(tokenizer, text, special=special, at_most=most).equal(whole[:most])


def test_no_part_is_long_unless_a_word_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = trained("words of bytes"), list[int]()

    def counted(text: str, **options: Any) -> Any:
        seen.append(len(text))
        return tokenizer(text, **options)

    counted.is_fast = True  # type: ignore[attr-defined]
    monkeypatch.setattr(tokenizers, "LONG", 1031)
    text = prose()[:50_000]
    whole = token_ids(counted, text, special=False)
    assert max(seen) <= 1031 + 2 * tokenizers.OVERLAP and len(seen) > 40
    seen.clear()
    assert token_ids(counted, text, special=False, at_most=100).equal(whole[:100]) and sum(seen) < 10_000
    seen.clear()
    token_ids(counted, "x" * 50_000, special=False)  # one word: parts double, and none is tokenized again and again
    assert sum(seen) < 6 * 50_000
