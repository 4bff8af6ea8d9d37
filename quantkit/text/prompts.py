"""The tokens of a prompt, and the text of the tokens that continue it: the same for `generate` and
for evaluations.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, Option, RecipeError, Words
from quantkit.text.conversations import ChatTemplate, Conversation, has_chat_template
from quantkit.text.tokenizer import affixes, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens of a prompt that decide how the tokens after them are written.
CONTEXT = 64


def continued(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that puts nothing behind a text. Some end a text by EOS, and no decoder
    continues such a prompt.
    """
    front, end = affixes(tokenizer)
    if not end or getattr(tokenizer, "backend_tokenizer", None) is None:
        return tokenizer
    from tokenizers.processors import TemplateProcessing

    changed: Any = copy.deepcopy(tokenizer)
    names = changed.convert_ids_to_tokens(front)
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*names, "$A"], special_tokens=[*zip(names, front, strict=True)]
    )
    found: PreTrainedTokenizerBase = changed
    return found


def prompt_tokens(tokenizer: Any, prompt: str) -> Tensor:
    """Tokenize a prompt to int64 `[t]`, which is the BOS token if there is no other.

    BOS that the prompt spells is not repeated. RecipeError for a prompt without tokens.
    """
    ids = token_ids(tokenizer, prompt, special=bool(prompt))
    front = torch.tensor(affixes(tokenizer)[0], dtype=torch.int64)
    if len(front) and torch.equal(ids[len(front) : 2 * len(front)], front):
        ids = ids[len(front) :]
    if len(ids):
        return ids
    if tokenizer.bos_token_id is None:
        raise RecipeError(
            "the prompt has no tokens, and the tokenizer no BOS token to begin with",
            "give a prompt",
        )
    return torch.tensor([tokenizer.bos_token_id])


def message_tokens(tokenizer: PreTrainedTokenizerBase, message: str) -> Tensor:
    """Tokenize a message of a user, and the template's beginning of an answer, to int64 `[t]`."""
    instead = Words("use quantkit generate without", Option("chat", True))
    if not has_chat_template(tokenizer):
        raise RecipeError("the model has no chat template", instead, subject=tokenizer.name_or_path)
    talk = Conversation(({"role": "user", "content": message},), "the message")
    try:
        text = ChatTemplate(tokenizer, {"add_generation_prompt": True}).write(talk)
    except CheckpointError as error:
        raise RecipeError(error.rule, instead, subject=error.subject) from error
    return token_ids(tokenizer, text, special=False)


def continuation(
    tokenizer: Any, before: Sequence[int], new: Sequence[int], ends: Collection[int] = ()
) -> str:
    """Return the text that `new` tokens add to the text of the tokens `before`, to the letter.

    A decoder of sentencepiece drops the space in front of a text, so that new tokens alone lack it.
    Tokens from the first of `ends` on, and special tokens, are no text.
    """

    def text(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    head = [*before[-CONTEXT:]]
    start, whole = text(head), text([*head, *takewhile(lambda token: token not in ends, new)])
    same = takewhile(lambda pair: pair[0] == pair[1], zip(start, whole, strict=False))
    return whole[sum(1 for _ in same) :]


def ends_of(generation_config: Any, tokenizer: Any) -> list[int]:
    """List the tokens that end a text: those that a model's generation config states, and the
    tokenizer's EOS, as engines do.
    """
    stated = generation_config.eos_token_id
    ends = {*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id}
    return sorted(ends - {None})
