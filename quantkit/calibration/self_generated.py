"""Calibration text that the unquantized model writes itself, drawn by a seed: conversations and
plain text.

A conversation begins with the chat template's text before the user's words. The model writes the
user's message too (Magpie, arXiv 2406.08464). Plain text begins with the tokenizer's first token
(LLM-QAT, arXiv 2305.17888). At each step every row of a batch gains a token: the template's next
token, or a drawn token.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantkit.calibration.budget import Sizes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import (
    FILE,
    CheckpointError,
    NumericError,
    Option,
    QuantkitError,
    Setting,
    Words,
)
from quantkit.inference.generate import write_rows
from quantkit.io import files
from quantkit.io.json_files import load_json
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.progress import Progress
from quantkit.recipes.options import Calib
from quantkit.text.conversations import ChatTemplate, Conversation, has_chat_template
from quantkit.text.sequences import Calibration
from quantkit.text.tokenizer import load_tokenizer, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The share of conversations where the model has a chat template; the other sequences are plain
#: text.
CONVERSATIONS = 0.5
TEMPERATURE = 1.0
#: The most tokens of a sequence. Each one is a step of the whole model.
LONGEST = 1024
#: The most tokens of a user's message and of an answer.
MESSAGES = (256, 512)
#: A text is a loop if at least this many tokens equal a token at most `PERIOD` places before.
LOOP, PERIOD = 64, 16
#: Rows of a batch for each spare row. Spare rows replace dropped texts. Rounds are repeated at most
#: so often.
SPARE, ROUNDS = 16, 4
#: Bytes of keys and values of a batch.
CACHE_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}
#: Bytes of a step for each row and each entry of the vocabulary: float32 copies of the logits.
LOGIT_BYTES = 32
#: The part of memory of the model that writes, as a plan names it.
AUTHOR = "whole model, to write text"
INSTEAD = Words("use another", Setting("calib", FILE))
Text = tuple[list[Tensor], dict[str, Any]]


class Turns(NamedTuple):
    """Hold the tokens that a chat template writes before the first message, after a user's, and
    after an answer.
    """

    opening: list[int]
    closings: tuple[list[int], list[int]]


class Row:
    """One sequence that is being written, without turns (None) a plain text."""

    def __init__(self, opening: Sequence[int], turns: Turns | None) -> None:
        self.tokens, self.ended, self.is_talk = list(opening[:1]), False, turns is not None
        self._due, self._turns, self._number, self._begin = (
            deque(opening[1:]),
            turns,
            0,
            len(opening),
        )

    @property
    def begins(self) -> bool:
        """Whether the next token begins a message or a text, which must not be empty."""
        return len(self.tokens) == self._begin

    def add(self, drawn: int, ends: frozenset[int]) -> int:
        """Add the template's next token, or the drawn one; return the token added."""
        if not self._due and drawn in ends:
            self._close()
        if self.ended:
            return drawn
        is_drawn = not self._due
        self.tokens.append(drawn if is_drawn else self._due.popleft())
        if is_drawn and self._turns is not None:
            closing = self._turns.closings[self._number % 2]
            if (
                self.tokens[self._begin :][-len(closing) :] == closing
            ):  # a template may close in ordinary words
                self._number, self._begin = self._number + 1, len(self.tokens)
            elif len(self.tokens) - self._begin >= MESSAGES[self._number % 2]:
                self._close()
        return self.tokens[-1]

    def _close(self) -> None:
        if self._turns is None:
            self.ended = True
            return
        self._due.extend(self._turns.closings[self._number % 2])
        self._number, self._begin = self._number + 1, len(self.tokens) + len(self._due)


class Alphabet(NamedTuple):
    """The tokens that may be drawn: `ends` close a message or a text, `ordinary` tokens
    are text.
    """

    ends: frozenset[int]
    ordinary: frozenset[int]


class Writer:
    """Draw the next token of each row from the model's distribution. A logits processor for
    `generate`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        alphabet: Alphabet,
        draws: torch.Generator,
        progress: Progress,
        bar: Any,
    ) -> None:
        self.rows, self._alphabet, self._draws = rows, alphabet, draws
        self._progress, self._bar = progress, bar
        self._masks: list[Tensor] = []

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Return logits `[rows, v]` of 0 for each row's next token, and of -inf for all others."""
        self._progress.check()
        self._bar.update(1)
        if not bool(scores.amax(-1).isfinite().all()):
            raise NumericError(
                "the model's logits are not finite, and it can draw no text from them", INSTEAD
            )
        place, count = scores.device, scores.shape[-1]
        if not self._masks:
            self._masks = [
                torch.tensor([token in part for token in range(count)], device=place)
                for part in self._alphabet
            ]
        ends, ordinary = self._masks
        inside = torch.tensor([[not row.begins] for row in self.rows], device=place)
        logits = scores.masked_fill(~(ordinary | (ends & inside)), -torch.inf).div_(TEMPERATURE)
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self._draws).flatten().tolist()
        added = [
            row.add(token, self._alphabet.ends) for row, token in zip(self.rows, drawn, strict=True)
        ]
        chosen = torch.tensor(added, device=place)[:, None] == torch.arange(count, device=place)
        return torch.where(chosen, 0.0, -torch.inf)

    def is_done(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        """Say for each row whether all rows have ended."""
        return torch.full(
            (len(self.rows),), all(row.ended for row in self.rows), device=tokens.device
        )


def require_generation(model: BlockRunner) -> None:
    """Raise CheckpointError for a model that cannot write text."""
    if not model.module.can_generate():
        raise CheckpointError(
            f"{type(model.module).__name__} cannot write text", INSTEAD, subject=model.src.path
        )


def expected_text(model: BlockRunner, calib: Calib, count: int) -> Text:
    """Return placeholder sequences of the longest length, and their facts. CheckpointError as
    `draw_text`.
    """
    require_generation(model)
    turns_of(load_tokenizer(model.src.path, model.src.trusted), calib.template_args)
    longest = min(calib.max_length, model.max_length, LONGEST)
    rule = f"written by the model in the run, at most {longest} tokens each"
    facts = {"rule": rule, "documents": count, "cut": 0, "skipped": 0, "temperature": TEMPERATURE}
    return [torch.zeros(longest, dtype=torch.int64)] * count, facts


def draw_text(
    model: BlockRunner,
    calib: Calib,
    count: int,
    progress: Progress,
) -> Text:
    """Let the unquantized model write `count` sequences, int64 `[t]`; return them and their facts.

    Equal seeds give equal tokens on one device. torch's own generators are left untouched. Loops
    are dropped and drawn again. CheckpointError for an unsuitable model or chat template,
    QuantkitError if nearly all texts are loops, NumericError for logits that are not finite.
    """
    require_generation(model)
    tokenizer, device = load_tokenizer(model.src.path, model.src.trusted), model.device
    turns, longest = (
        turns_of(tokenizer, calib.template_args),
        min(calib.max_length, model.max_length, LONGEST),
    )
    if turns is not None and len(turns.opening) >= longest:
        turns = None
    # That of the run presents some weights in another form.
    src = Checkpoint(model.src.path, model.src.trusted, dequantize=True)
    module = load_dense_model(src, device=str(device), dtype=model.dtype)
    alphabet, first = alphabet_of(tokenizer, module, turns), first_token(tokenizer, turns)
    ordinary = sorted(alphabet.ordinary)
    order, draws = (
        torch.Generator().manual_seed(calib.seed),
        torch.Generator(device).manual_seed(calib.seed),
    )
    talks = round(CONVERSATIONS * count) if turns else 0
    lacking, found, dropped = {True: talks, False: count - talks}, list[list[int]](), 0
    at_once = max(1, CACHE_BYTES[device.type] // (longest * token_bytes(module, len(model.blocks))))
    for _ in range(ROUNDS):
        rows = list[Row]()
        for talk in (
            talk for talk, lacks in lacking.items() for _ in range(lacks + lacks // SPARE)
        ):
            drawn = ordinary[int(torch.randint(len(ordinary), (), generator=order))]
            rows.append(
                Row(turns.opening, turns)
                if talk and turns
                else Row([drawn if first is None else first], None)
            )
        batches = [rows[i::parts] for parts in [-(-len(rows) // at_once)] for i in range(parts)]
        bar = progress.bar(len(batches) * (longest - 1), "write text")
        for batch in batches:
            writer = Writer(batch, alphabet, draws, progress, bar)
            begun = torch.tensor([row.tokens for row in batch], device=device)
            write_rows(module, begun, longest, writer, writer.is_done, INSTEAD)
        for row in (row for batch in batches for row in batch):
            if repeats(row.tokens):
                dropped += 1
            elif lacking[row.is_talk]:
                lacking[row.is_talk] -= 1
                found.append(row.tokens[:longest])
        bar.close()
        if not any(lacking.values()):
            break
    else:
        raise QuantkitError(
            f"the model repeats itself in {dropped} of {dropped + len(found)} texts", INSTEAD
        )
    del module
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else the run would find the memory taken
    sequences = [torch.tensor(found[i]) for i in torch.randperm(count, generator=order).tolist()]
    rule = (
        f"written by the model at temperature {TEMPERATURE:g}: {talks} conversations, "
        f"{count - talks} plain texts"
    )
    facts = {
        "rule": rule,
        "documents": count + dropped,
        "cut": sum(len(s) == longest for s in sequences),
    }
    return sequences, {
        **facts,
        "skipped": dropped,
        "temperature": TEMPERATURE,
        "conversations": talks,
    }


def text_bytes(sizes: Sizes) -> dict[str, int]:
    """Count the memory of a model that writes its calibration text, by part."""
    calib, width, device = sizes.recipe.calibration, sizes.width, sizes.device
    rows = calib.samples + calib.samples // SPARE
    row = 2 * width * len(sizes.blocks) * sizes.hidden * min(calib.max_length, LONGEST)
    return {
        AUTHOR: width * sum((*sizes.blocks.values(), *sizes.outside)),
        "keys and values": max(row, min(CACHE_BYTES[device], rows * row)),
        "logits": LOGIT_BYTES * rows * sizes.vocabulary,
    }


def save_text(path: Path, text: Calibration) -> None:
    """Save the last source of a calibration text, which the model wrote, for the run to be resumed
    with.
    """
    facts = text.facts["sources"][-1]
    tokens = [sequence.tolist() for sequence in text.sequences[-facts["sequences"] :]]
    files.write_atomic(path, json.dumps({"facts": facts, "sequences": tokens}).encode())


def load_text(path: Path) -> Text:
    """Load a file of `save_text`. CheckpointError for a damaged file."""
    saved = load_json(path)
    try:
        return [torch.tensor(tokens, dtype=torch.int64) for tokens in saved["sequences"]], dict(
            saved["facts"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "is no text that a model wrote",
            Words("begin anew with", Option("overwrite", True)),
            subject=path,
        ) from error


def turns_of(tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> Turns | None:
    """Find the tokens that a chat template writes around messages; None without one, or
    CheckpointError.
    """
    if not has_chat_template(tokenizer):
        return None
    marks = [f"quantkit{i}mark" for i in range(4)]
    roles = ("user", "assistant") * 2
    messages = tuple(
        {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
    )
    template = ChatTemplate(tokenizer, arguments or {})
    text = template.write(Conversation(messages, "a conversation for calibration"))
    found = re.split("|".join(marks), text)
    if re.findall("|".join(marks), text) != marks:
        raise CheckpointError(
            "the model's chat template does not write messages one after the other", INSTEAD
        )
    opening, user, answer = (
        token_ids(tokenizer, part, special=False).tolist() for part in found[:3]
    )
    return Turns(opening, (user, answer))


def first_token(tokenizer: Any, turns: Turns | None) -> int | None:
    """Return the token that begins a text, None if any token may. A token that only opens turns of
    a conversation does not count.
    """
    added: list[int] = token_ids(tokenizer, "", special=True).tolist()
    if added:
        return added[0]
    bos: int | None = tokenizer.bos_token_id
    return None if turns is not None and turns.opening[:1] == [bos] else bos


def alphabet_of(tokenizer: Any, module: PreTrainedModel, turns: Turns | None) -> Alphabet:
    """Return the tokens that may be drawn: all ordinary tokens, and those that end a text or a
    message.
    """
    eos = getattr(module.config.get_text_config(), "eos_token_id", None)
    special = set(tokenizer.all_special_ids) | {
        i for i, t in tokenizer.added_tokens_decoder.items() if t.special
    }
    closers = (
        {closing[0] for closing in turns.closings if closing and closing[0] in special}
        if turns
        else set()
    )
    table: Any = module.get_input_embeddings()
    known = range(min(len(tokenizer), len(table.get_parameter("weight"))))
    ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id, *closers} & set(
        known
    )
    return Alphabet(frozenset(ends), frozenset(known) - special - ends)


def token_bytes(module: PreTrainedModel, layers: int) -> int:
    """Compute the bytes of a token's keys and values. Where a config states no heads, they have the
    hidden state's width.
    """
    config: Any = module.config.get_text_config()
    stated = (getattr(config, name, None) for name in ("num_key_value_heads", "head_dim"))
    heads, width = (value if type(value) is int else 0 for value in stated)
    table: Any = module.get_input_embeddings()
    return (
        2
        * layers
        * (heads * width or table.get_parameter("weight").shape[1])
        * module.dtype.itemsize
    )


def repeats(tokens: Sequence[int]) -> bool:
    """Return True if some `LOOP` neighbours each equal the token that stands the same 1 to `PERIOD`
    places before.
    """
    row = torch.tensor(tokens)
    same = (row[period:] == row[:-period] for period in range(1, min(PERIOD, len(row) - LOOP) + 1))
    return any(bool(each.unfold(0, LOOP, 1).all(-1).any()) for each in same)
