"""Documents and their summaries, on which an encoder-decoder is judged: it reads the one and
predicts the other.

The decoder is given the summary up to each token (teacher forcing), so that its losses are
comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import FILE, CheckpointError, Option, RecipeError, Words
from quantkit.evaluation.windows import Windows, cut, require_finite
from quantkit.models.meta_model import config_of, positions_of, require_text
from quantkit.progress import Progress
from quantkit.text.records import records_with
from quantkit.text.sources import NAMED, load_evaluation_text
from quantkit.text.tokenizer import check_tokens, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: A text, or records with `document` and `summary`.
Material = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Pairs:
    """The tokens of documents and of their summaries, each int64 `[t]`; `text_tokens` counts all of
    them.
    """

    documents: Sequence[Tensor]
    summaries: Sequence[Tensor]
    text_tokens: int

    @property
    def stride(self) -> int:
        """Predictions that count of each pair, at most: all."""
        return max(map(len, self.summaries))

    @property
    def protocol(self) -> dict[str, Any]:
        """Facts that belong beside every figure."""
        count, longest = len(self.summaries), self.stride
        facts = {
            "windows": count,
            "window": longest,
            "stride": longest,
            "text_tokens": self.text_tokens,
        }
        return {**facts, "bos": False, "bos_rule": "the decoder's own start", "pairs": count}

    def each(self, progress: Progress | None, label: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the tokens of each summary."""
        yield from enumerate(
            (progress or Progress(quiet=True)).bar(self.summaries, label, len(self.summaries))
        )

    def logits(self, model: PreTrainedModel, number: int) -> Tensor:
        """Compute the logits `[t, v]` of each token of a summary after the document and the tokens
        before it.

        NumericError, naming the pair, for logits that are not finite.
        """
        document, summary = (
            tokens[number][None].to(model.device) for tokens in (self.documents, self.summaries)
        )
        with torch.inference_mode():
            shifted = getattr(
                model, "prepare_decoder_input_ids_from_labels", None
            )  # FSMT does not shift labels itself
            written = (
                {"labels": summary} if shifted is None else {"decoder_input_ids": shifted(summary)}
            )
            logits: Tensor = model(input_ids=document, **written, use_cache=False).logits[0]
        return require_finite(logits, f"pair {number}")

    def targets(self, number: int) -> Tensor:
        """Return the tokens that a pair predicts."""
        return self.summaries[number]


def load_material(
    src: Checkpoint, source: str, trust_remote_code: bool = False, option: str = "data"
) -> tuple[Material, str]:
    """Return the text on which a model is judged, or records for an encoder-decoder, and one line
    that describes it.

    `option` of the command takes the text. CheckpointError as `load_evaluation_text` and
    `records_with`, and for an encoder-decoder that reads no text.
    """
    config = config_of(src, trust_remote_code)
    if not config.is_encoder_decoder:
        return load_evaluation_text(source, option)
    require_text(src, config, trust_remote_code)
    if source in NAMED:
        raise CheckpointError(
            f"{config.model_type} is an encoder-decoder, which is judged on documents with "
            "summaries",
            Words("give records of both with", Option(option, FILE)),
            subject=src.path,
        )
    rows = [row for _, row in records_with(Path(source), {"document": str, "summary": str})]
    return rows, f"{Path(source).name} ({len(rows)} documents with summaries)"


def pieces_of(
    models: Sequence[PreTrainedModel],
    tokenizer: Callable[..., Any],
    material: Material,
    tokens: int | None = None,
    **windows: Any,
) -> Windows | Pairs:
    """Tokenize a text as `windows.cut`, or pairs with at most `tokens` tokens of summaries, but one
    pair at least.

    Documents and summaries are cut to the models' positions. RecipeError for `windows` options with
    pairs, and for a text that an encoder-decoder is to predict.
    """
    if isinstance(material, str):
        if any(model.config.is_encoder_decoder for model in models):
            raise RecipeError(
                "an encoder-decoder is judged on pairs of texts",
                "give records of document and summary",
            )
        return cut(models, tokenizer, material, tokens=tokens, **windows)
    for name, value in windows.items():
        if value is not None:
            raise RecipeError(
                Words(Option(name, value), "is about a running text, and pairs have none"),
                "leave it out",
            )
    limits = zip(*(positions_of(model.config) for model in models), strict=True)
    most_read, most_written = (
        min((limit for limit in side if limit is not None), default=None) for side in limits
    )
    documents, summaries, total, read = [], list[Tensor](), 0, 0
    for row in material:
        summary = token_ids(tokenizer, row["summary"], special=True, is_target=True)[:most_written]
        if tokens is not None and summaries and read + len(summary) > tokens:
            break
        documents.append(token_ids(tokenizer, row["document"], special=True)[:most_read])
        summaries.append(summary)
        read += len(summary)
        total += len(documents[-1]) + len(summary)
    largest = max(int(each.max()) for each in (*documents, *summaries) if len(each))
    for model in models:
        check_tokens(largest, model.get_input_embeddings().get_parameter("weight").shape[0])
    return Pairs(documents, summaries, total)
