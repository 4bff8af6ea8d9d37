"""ROUGE of the summaries that a model writes (Lin 2004): the overlap of words with a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quantkit.errors import CheckpointError, Option, RecipeError, Words
from quantkit.evaluation.divergence import interval
from quantkit.evaluation.finished import Finished, Get
from quantkit.evaluation.opened import Opened, open_writer, require_package
from quantkit.inference.batches import BatchWriter, room_for_prompt
from quantkit.inference.swap_linears import describe_weights
from quantkit.io.hashing import hash_of_file
from quantkit.progress import Listener, Progress, reporter
from quantkit.text.records import records_with
from quantkit.text.tokenizer import token_ids

#: GPT-2's prompt for summaries (Radford et al. 2019), and where a summary ends.
PROMPT, END = "{document}\n\nTL;DR:", "\n\n"
PLACE = "{document}"
KINDS = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class Rouge:
    """Mean F-measures over the records, from 0 to 1, each with its 95 % interval by bootstrap over
    records.

    Words are stemmed by Porter's rules. An interval is None for fewer than two records. Of
    `records`, `truncated` had documents that were cut at their end to fit into the model; `empty`
    summaries have no word.
    """

    rouge1: float
    rouge1_low: float | None
    rouge1_high: float | None
    rouge2: float
    rouge2_low: float | None
    rouge2_high: float | None
    rougeL: float
    rougeL_low: float | None
    rougeL_high: float | None
    records: int
    truncated: int
    empty: int
    prompt: str
    max_new_tokens: int
    batch_size: int
    data: str
    weights: str = ""


def eval_rouge(
    checkpoint: str | Path,
    *,
    data: str | Path,
    prompt: str | None = None,
    limit: int | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    journal: str | Path | None = None,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | Listener | None = None,
) -> Rouge:
    """Let a checkpoint summarize documents, and compare the summaries with references by ROUGE-1, 2
    and L.

    `data` is a file of records with `document` and `summary`, of which the first `limit` are read.
    The likeliest tokens follow `prompt`, in which `{document}` stands for the document, up to a
    blank line, the model's end of text or `max_new_tokens`. The prompt is the document and
    `TL;DR:`, or for an encoder-decoder the document alone. A document that does not fit is cut at
    its end, and counted. `journal` is a file that keeps finished summaries, from which the same
    call continues. Needs `quantkit[rouge]`. Raises a QuantkitError, before any weight is read, for
    records, a prompt or a model that cannot be evaluated.

    Example:

    ```python
    import quantkit

    found = quantkit.eval_rouge("model-int4", data="summaries.jsonl", limit=2, max_new_tokens=8)
    print(found.rouge1, found.rouge2, found.rougeL)
    ```
    """
    progress = reporter(progress)
    exam = SummaryExam(
        data, prompt=prompt, limit=limit, max_new_tokens=max_new_tokens, batch_size=batch_size
    )
    opened = open_writer(checkpoint, revision, trust_remote_code)
    exam.require(opened)
    finished = Finished(journal, {"model": opened.digest(), **exam.run, "device": device})
    return exam.scores(
        opened.load(device, trust_remote_code, check, progress), opened, finished.get, progress
    )


class SummaryExam:
    """Documents with their summaries, and how a model is asked for its own; QuantkitError for what
    cannot be asked.

    `run` has everything that the summaries depend on, besides the model.
    """

    def __init__(
        self,
        data: str | Path,
        *,
        prompt: str | None = None,
        limit: int | None = None,
        max_new_tokens: int = 128,
        batch_size: int = 8,
    ) -> None:
        require_package("rouge_score", "rouge-score", "rouge")
        if prompt is not None and PLACE not in prompt:
            raise RecipeError(
                f"{prompt!r} has no {PLACE}",
                "write where the document goes",
                subject=Option("prompt"),
            )
        self._data = Path(data)
        shape = {"document": str, "summary": str}
        self._records = [
            _scorable(*record) for record in islice(records_with(self._data, shape), limit)
        ]
        self._about: dict[str, Any] = {
            "prompt": prompt,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
        }
        self.run = {"data": hash_of_file(self._data), "records": len(self._records), **self._about}

    def require(self, opened: Opened) -> None:
        """Raise RecipeError for a model in which the prompt leaves no room for a document."""
        self._prompts(opened)

    def scores(self, model: Any, opened: Opened, get: Get, progress: Progress) -> Rouge:
        """Let a model summarize the documents, and score it; `get` keeps finished summaries."""
        prompts, size = self._prompts(opened), self._about["batch_size"]
        writer = BatchWriter(model, opened.tokenizer, self._about["max_new_tokens"], stops=(END,))
        texts: list[str] = []
        starts = range(0, len(prompts), size)
        for start in progress.bar(starts, "summaries", len(starts), each="batch"):
            batch = [ids for ids, _ in prompts[start : start + size]]
            texts += get(f"{start} to {start + len(batch)}", partial(writer.write, batch))
        found: Any = score([row["summary"] for row in self._records], texts)
        return Rouge(
            **found,
            **{**self._about, "prompt": self._prompt(opened)},
            records=len(prompts),
            truncated=sum(is_cut for _, is_cut in prompts),
            empty=sum(not text.strip() for text in texts),
            data=self._data.name,
            weights=describe_weights(model),
        )

    def _prompt(self, opened: Opened) -> str:
        usual = PLACE if opened.config.is_encoder_decoder else PROMPT
        return str(self._about["prompt"] or usual)

    def _prompts(self, opened: Opened) -> list[tuple[Tensor, bool]]:
        room, prompt = (
            room_for_prompt(opened.config, self._about["max_new_tokens"]),
            self._prompt(opened),
        )
        return [_fitted(opened.tokenizer, prompt, row["document"], room) for row in self._records]


def score(references: Sequence[str], texts: Sequence[str]) -> dict[str, float | None]:
    """Return the mean F-measures of texts, and their intervals, by the fields of `Rouge`."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(KINDS, use_stemmer=True)
    found = [
        scorer.score(reference, text) for reference, text in zip(references, texts, strict=True)
    ]
    scores: dict[str, float | None] = {}
    for kind in KINDS:
        values = np.array([each[kind].fmeasure for each in found])
        low, high = interval(values) or (None, None)
        scores |= {kind: float(values.mean()), f"{kind}_low": low, f"{kind}_high": high}
    return scores


def _scorable(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a record; CheckpointError if its summary is mostly in letters that `rouge-score`
    passes over.
    """
    letters = [letter for letter in row["summary"] if letter.isalnum()]
    if 2 * sum(map(str.isascii, letters)) <= len(letters):
        raise CheckpointError(
            "summary has few words that ROUGE counts, which are of a to z and digits",
            "remove the record",
            "judge other scripts by eval kld",
            subject=where,
        )
    return row


def _fitted(tokenizer: Any, prompt: str, document: str, room: int | None) -> tuple[Tensor, bool]:
    """Tokenize a prompt with its document, which is cut at its end to fit into `room` tokens; say
    if it was.
    """
    ids, is_cut = token_ids(tokenizer, prompt.replace(PLACE, document), special=True), False
    while room is not None and len(ids) > room:
        words = token_ids(tokenizer, document, special=False)
        kept = len(words) - (len(ids) - room)
        if kept <= 0:
            raise RecipeError(
                Words(Option("prompt"), f"leaves no room for a document in {room} tokens"),
                Words("use fewer", Option("max_new_tokens")),
                "a shorter one",
            )
        document, is_cut = str(tokenizer.decode(words[:kept], skip_special_tokens=True)), True
        ids = token_ids(tokenizer, prompt.replace(PLACE, document), special=True)
    return ids, is_cut
