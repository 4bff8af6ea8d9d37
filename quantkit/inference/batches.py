"""Texts that a model writes after many prompts, several prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.errors import Option, RecipeError, Words
from quantkit.inference.generate import Sampling, writing
from quantkit.models.meta_model import positions_of
from quantkit.text.tokenizer import check_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The likeliest token each time.
GREEDY = Sampling()
#: Entries of a generation config without which an encoder-decoder cannot begin, or not in the right
#: language.
STARTS = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id")


@dataclass(frozen=True)
class BatchWriter:
    """Write at most `max_new_tokens` tokens after each prompt of a batch, up to the first of the
    texts in `stops`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stops: tuple[str, ...] = ()

    def write(self, prompts: Sequence[Tensor]) -> list[str]:
        """Return the text that follows each prompt, int64 `[t]`, or that an encoder-decoder writes
        after reading it.

        Shorter prompts are padded on the left, those of an encoder on the right, where they change
        no position. The draws depend on the seed of `sampling` and on the batch. Other batches may
        round logits otherwise.
        """
        from transformers import GenerationConfig, StoppingCriteriaList

        longest, ends = max(map(len, prompts)), self._ends()
        padding: int = next(
            (token for token in (self.tokenizer.pad_token_id, *ends) if token is not None), 0
        )
        apart = bool(self.model.config.is_encoder_decoder)
        sides = [
            (0, longest - len(prompt)) if apart else (longest - len(prompt), 0)
            for prompt in prompts
        ]
        ids = torch.stack(
            [pad(prompt, side, value=padding) for prompt, side in zip(prompts, sides, strict=True)]
        )
        mask = torch.stack(
            [
                pad(torch.ones_like(prompt), side)
                for prompt, side in zip(prompts, sides, strict=True)
            ]
        )
        begin = (
            1 if apart else longest
        )  # the decoder of an encoder-decoder begins with a token of its own
        embeddings: Any = self.model.get_input_embeddings()
        check_tokens(int(ids.max()), embeddings.get_parameter("weight").shape[0])
        model, own = self.model, self.model.generation_config
        model.generation_config = GenerationConfig()  # the model's own would change the draw
        config = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            use_cache=True,
            eos_token_id=ends or None,
            pad_token_id=padding,
            **{key: getattr(own, key, None) for key in (STARTS if apart else ())},
            **self.sampling.options(),
        )
        try:
            with writing(), self.sampling.seeded():
                output: Any = model.generate(  # type: ignore[operator]
                    ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    generation_config=config,
                    stopping_criteria=StoppingCriteriaList(
                        [lambda tokens, _: self._stopped(tokens, begin)]
                    ),
                )
        finally:
            model.generation_config = own
        return [self._text(row[begin:].tolist(), ends) for row in output]

    def _ends(self) -> list[int]:
        """List the tokens that end a text: those of the model's generation config, and the
        tokenizer's.
        """
        stated: Any = getattr(self.model.generation_config, "eos_token_id", None)
        ends = [*(stated if isinstance(stated, list) else [stated]), self.tokenizer.eos_token_id]
        return list(dict.fromkeys(token for token in ends if token is not None))

    def _stopped(self, tokens: Tensor, begin: int) -> Tensor:
        # A token has a byte at least, so a stop that has just been written is within so many of the
        # last tokens.
        last = max((len(stop.encode()) + 1 for stop in self.stops), default=1)
        tails = [self.tokenizer.decode(row) for row in tokens[:, begin:][:, -last:].tolist()]
        found = [any(stop in tail for stop in self.stops) for tail in tails]
        return torch.tensor(found, device=tokens.device)

    def _text(self, tokens: list[int], ends: list[int]) -> str:
        """Decode new tokens up to one that ends a text, and cut the text at the first stop."""
        first = next((number for number, token in enumerate(tokens) if token in ends), len(tokens))
        text = str(self.tokenizer.decode(tokens[:first], skip_special_tokens=True))
        return text[
            : min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))
        ]


def room_for_prompt(config: Any, max_new_tokens: int) -> int | None:
    """Return the most tokens of a prompt that leaves room for the new ones, None without a limit.

    The prompt of an encoder-decoder has positions of its own. RecipeError if the model has no room
    for a prompt.
    """
    most_read, positions = positions_of(config)
    if positions is not None and positions <= max_new_tokens:
        raise RecipeError(
            f"the model has {positions} positions, and the prompt needs some",
            Words("use fewer", Option("max_new_tokens"), f"than {positions}"),
        )
    return (
        most_read if positions is None or config.is_encoder_decoder else positions - max_new_tokens
    )
