"""Prompts have the tokens that a model continues, and new tokens become the text behind the prompt, to the letter."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.byte_tokenizer import byte_tokenizer
from quantkit.errors import RecipeError
from quantkit.text.tokenizer import affixes, continuation, continued, prompt_tokens

WORDS = ["<s>", "</s>", "<turn>", "▁the", "▁cat", "▁", "s", "▁.", "▁n", "'", "t", *(f"<0x{i:02X}>" for i in range(256))]


def sentencepiece(ending: bool = False) -> Any:
    """Make a tokenizer of words with a space in front, and of bytes, as sentencepiece models are; it adds BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram([(word, -1.0 if len(word) > 2 else -9.0) for word in WORDS], 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ending else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (["▁cat", "s"], " cats"),  # alone they are "cats"
        (["s", "▁the"], "s the"),
        (["▁.", "▁n", "'", "t"], " . n't"),  # no clean-up of spaces: " ." stays
        ([*(f"<0x{byte:02X}>" for byte in "é".encode()), "▁cat"], "é cat"),
        (["<0xC3>"], "\N{REPLACEMENT CHARACTER}"),  # cut inside a character
        (["▁cat", "<turn>", "▁the"], " cat"),  # an end of text that is no special token
        (["▁cat", "</s>"], " cat"),
        ([], ""),
    ],
)
def test_new_tokens_continue_the_prompt_to_the_letter(new: list[str], text: str) -> None:
    assert continuation(sentencepiece(), ids("<s>", "▁the"), ids(*new), ends=ids("<turn>", "</s>")) == text


def test_a_text_of_its_own_has_no_space_in_front() -> None:
    assert continuation(sentencepiece(), [], ids("<s>", "▁the", "▁cat")) == "the cat"


def test_a_prompt_that_is_continued_has_no_end_of_text() -> None:
    ending = sentencepiece(ending=True)
    assert affixes(ending) == (ids("<s>"), ids("</s>"))
    assert prompt_tokens(ending, "the cat").tolist() == ids("<s>", "▁the", "▁cat", "</s>")  # of an encoder
    front = continued(ending)
    assert prompt_tokens(front, "the cat").tolist() == ids("<s>", "▁the", "▁cat")
    assert front(["the", "the cat"])["input_ids"] == [ids("<s>", "▁the"), ids("<s>", "▁the", "▁cat")]
    assert affixes(ending)[1] and continued(front) is front


def test_bos_that_the_prompt_spells_is_not_repeated() -> None:
    assert prompt_tokens(sentencepiece(), "<s>the")[:2].tolist() != ids("<s>", "<s>")
    assert prompt_tokens(sentencepiece(), "").tolist() == ids("<s>")
    plain = byte_tokenizer()
    assert affixes(plain) == ([], []) and prompt_tokens(plain, "").tolist() == [256]
    plain.bos_token = None
    with pytest.raises(RecipeError, match="no BOS token"):
        prompt_tokens(plain, "")
