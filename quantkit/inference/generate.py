"""Text that a checkpoint writes after a prompt, streamed in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, NumericError, Option, RecipeError, Words, reason
from quantkit.inference.load import load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.keys import built
from quantkit.models.meta_model import (
    config_of,
    positions_of,
    require_continuing,
    require_text,
)
from quantkit.progress import QUIET, Progress
from quantkit.recipes.options import LoadOptions, WriteOptions
from quantkit.text.conversations import has_chat_template
from quantkit.text.tokenizer import (
    check_tokens,
    continuation,
    continued,
    ends_of,
    load_tokenizer,
    message_tokens,
    prompt_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Listener = Callable[[str], None]
#: Stands at the end of a text whose last character is not complete.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
#: cuDNN's kernel is left out: after some 128 tokens it sums over the keys of a single query in no
#: fixed order.
_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Generated:
    """The `text` that follows `prompt`: `tokens` new tokens in `seconds`, the compilation of
    kernels included.

    `weights` says how the model's weights were multiplied.
    """

    prompt: str
    text: str
    tokens: int
    seconds: float
    weights: str


def sampling(asked: WriteOptions) -> dict[str, Any]:
    """Choose the keywords of transformers' `generate`: the likeliest token, or a draw if
    `temperature` or `top_p` is given. Nothing is left to the model's own configuration.

    RecipeError for a value out of range, and for a seed without a draw.
    """
    heat, seed = asked.temperature, asked.seed
    if heat is not None and not heat < float("inf"):
        raise RecipeError(f"temperature is {heat}", "use 0 for the likeliest token, or about 0.7")
    if seed is not None and not 0 <= seed < 2**63:
        raise RecipeError(f"seed is {seed}", "use a number from 0 to 2^63 - 1")
    draws = heat != 0 and (heat is not None or asked.top_p is not None)
    if not draws and (seed is not None or asked.top_p is not None):
        raise RecipeError(
            "the likeliest token is no draw",
            Words("add", Option("temperature", 0.7)),
            Words("drop", Option("seed"), "and", Option("top_p")),
        )
    drawn = {"temperature": heat or 1.0, "top_p": asked.top_p or 1.0, "top_k": 0}
    return {"do_sample": draws, "num_beams": 1, **(drawn if draws else dict.fromkeys(drawn))}


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    progress: Progress | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> Generated:
    """Continue a prompt with at most `max_new_tokens` tokens; `listener` gets the text in pieces as
    it is made. The `options` are the fields of `WriteOptions` and `LoadOptions`.

    With `chat` the prompt is a message, which the model answers through its chat template. An
    encoder-decoder reads the prompt and writes a text of its own, in front of which `listener` gets
    a line end. The likeliest token is taken each time, unless `temperature` or `top_p` asks for a
    draw from `seed`. The last piece comes when the text is complete, and may be empty. `check` is
    as for `load`. RecipeError for an empty prompt without a BOS token, `chat` without a template,
    or a model with too few positions.
    """
    (asked, load), _ = built(options, WriteOptions, LoadOptions)
    chosen = sampling(asked)
    src = Checkpoint(
        resolve(str(checkpoint), load.revision, load.trust_remote_code), load.trust_remote_code
    )
    config = config_of(src)
    require_text(src, config)
    require_continuing(src, config)
    tokenizer = load_tokenizer(src.path, src.trusted)
    tokenizer = tokenizer if config.is_encoder_decoder else continued(tokenizer)
    ids = (message_tokens if asked.chat else prompt_tokens)(tokenizer, prompt)
    if not asked.chat and has_chat_template(tokenizer):
        (progress or QUIET).note(
            Words("the model has a chat template: add", Option("chat", True), "for an answer")
        )
    model = load_for_evaluation(src, progress=progress, **vars(load))
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(asked.seed or 0)
        return _write(model, tokenizer, prompt, ids, asked.max_new_tokens, chosen, listener)


@contextmanager
def writing() -> Iterator[None]:
    """Let a model write text without gradients, in attention kernels that repeat their results on a
    GPU.
    """
    with torch.inference_mode(), sdpa_kernel(_REPEATABLE):
        yield


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    ids: Tensor,
    max_new_tokens: int,
    chosen: Mapping[str, Any],
    listener: Listener | None,
) -> Generated:
    read, written = positions_of(model.config)
    has_encoder = bool(model.config.is_encoder_decoder)  # the prompt has positions of its own
    limit = written if has_encoder or written is None else written - len(ids)
    is_long = read is not None and len(ids) > read
    if is_long or (limit is not None and max_new_tokens > limit):
        each = (
            f"{read} positions in the encoder and {written} in the decoder"
            if has_encoder
            else f"{read} positions"
        )
        raise RecipeError(
            f"{len(ids)} tokens of the prompt and {max_new_tokens} new ones are more than the "
            f"model's {each}",
            "use a shorter prompt"
            if is_long or not limit
            else Words("use", Option("max_new_tokens", limit), "or less"),
        )
    embeddings: Any = model.get_input_embeddings()
    check_tokens(int(ids.max()), embeddings.weight.shape[0])
    batch: Any = ids[None].to(model.device)
    # The decoder of an encoder-decoder begins with a token of its own.
    before, begun = ([], 1) if has_encoder else (ids.tolist(), len(ids))
    ends = ends_of(model.generation_config, tokenizer)

    def text(tokens: Sequence[int]) -> str:
        return continuation(tokenizer, before, tokens[begun:], ends)

    def require_numbers(_: Tensor, logits: Tensor) -> Tensor:
        if logits.isnan().any():
            raise NumericError("the model gives NaN: its weights or its config.json are damaged")
        return logits

    streamer = None if listener is None else _streamer(text, listener)
    if has_encoder and listener is not None:
        listener("\n")
    start = time.perf_counter()
    with writing():
        try:
            output: Any = model.generate(  # type: ignore[operator]
                batch,
                attention_mask=torch.ones_like(batch),
                streamer=streamer,
                tokenizer=tokenizer,
                logits_processor=[require_numbers],
                use_cache=True,
                max_new_tokens=max_new_tokens,
                eos_token_id=ends or None,
                return_dict_in_generate=False,
                **chosen,
            )
        # Restrictions of the model are checked only here, and not all of them.
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"no text can be written as its generation_config.json says ({reason(error)})",
                "mend it",
                subject=tokenizer.name_or_path,
            ) from error
    seconds = time.perf_counter() - start
    made = output[0].tolist()
    return Generated(prompt, text(made), len(made) - begun, seconds, describe_weights(model))


def _streamer(text: Callable[[Sequence[int]], str], listener: Listener) -> Any:
    """Make a streamer that hands on each piece of text as soon as later tokens cannot change it.

    transformers' own waits for the end of a word, and forgets at each new line which tokens came
    before.
    """
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.shown = ""

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()
            found = text(self.tokens)
            is_whole = found.startswith(self.shown) and not found.endswith(INCOMPLETE)
            if is_whole and found != self.shown:
                listener(found[len(self.shown) :])
                self.shown = found

        def end(self) -> None:
            listener(text(self.tokens)[len(self.shown) :])

    return Streamer()
