"""Calibration sequences, drawn from the documents of one source or a mixture by a seeded generator.

Documents stay apart, each at its own length and unpadded (ALGORITHMS 2). The model then sees its calibration
text as it will see real prompts, and no padding leaks into a Hessian. A source that holds too little is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import FILE, CheckpointError, RecipeError, Setting, Words
from quantkit.io.hub import UNREACHABLE, HubUnreachable
from quantkit.text.conversations import Conversation, has_chat_template, render
from quantkit.text.sources import PACKAGED, Documents, kind_of, load_documents, name_of_text
from quantkit.text.tokenizer import token_ids

Lengths = Literal["own", "fixed"]
#: A weight after the last colon of a source. Nine digits: a sum of weights stays a number.
WEIGHT = re.compile(r"\d{1,9}(?:\.\d{1,9})?|\.\d{1,9}")


@dataclass(frozen=True)
class Calibration:
    """Hold calibration sequences, int64 `[t]` each, and the facts about them for report and journal.

    `notices` and `warnings` are lines about the data for the user; a warning names text that nobody asked for.
    """

    sequences: list[Tensor]
    facts: dict[str, Any]
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def draw_calibration(
    sources: str | Sequence[str],
    tokenizer: Callable[..., Any],
    *,
    samples: int,
    max_length: int,
    seed: int,
    lengths: Lengths = "own",
    text_column: str | None = None,
    split: str | None = None,
    may_replace: bool = False,
) -> Calibration:
    """Draw `samples` token sequences of a source, or of a mixture, by `seed` (ALGORITHMS 2).

    `own`: documents in shuffled order, each at its own length. A longer text is cut to a window of `max_length` tokens
    at a random offset, a longer conversation after its first `max_length` tokens; documents of fewer than 2 tokens are
    skipped. A text without blank lines is cut into windows if it must give more than one sample. `fixed`: all documents
    are concatenated and cut into windows of `max_length` tokens, of which `samples` are drawn.

    A mixture has `source:weight` strings (`find_shares`). Each source is drawn as if it were alone.

    `may_replace`: the packaged text stands in for a data set if the hub cannot be reached. It is drawn as any source,
    so it too is refused if it holds too few documents or tokens. CheckpointError if a source holds too little.
    """
    if samples < 1 or max_length < 2:
        raise RecipeError(f"{samples} samples of at most {max_length} tokens", "use at least 1 sample and 2 tokens")
    shares = find_shares([sources] if isinstance(sources, str) else sources)
    counts = _split_samples(samples, shares)
    _refuse_idle(shares, text_column, split)
    warnings: list[str] = []
    notices: list[str] = []
    every: list[Tensor] = []
    each: list[dict[str, Any]] = []
    plain: list[str] = []
    for source, share in shares.items():
        found = _load(source, text_column, split, warnings if may_replace else None)
        sequences, facts = _draw(found, tokenizer, counts[source], max_length, seed, lengths, notices)
        name = name_of_text(found.source)
        each.append({"source": name, "share": float(share), **facts, **_digest(sequences)})
        every += sequences
        if not found.conversations:
            plain.append(name)
    if len(plain) == len(each) and has_chat_template(tokenizer):
        notices.append(
            Words(
                f"the model has a chat template, and plain text calibrates it ({', '.join(plain)}): conversations "
                "like its use may calibrate it better: give records with messages,",
                Setting("calib", Words("FILE.jsonl")),
            )
        )
    facts = {
        "source": each[0]["source"] if len(each) == 1 else ", ".join(f"{f['source']}:{f['share']:.4g}" for f in each),
        "rule": "; ".join(dict.fromkeys(f["rule"] for f in each)),
        "lengths": lengths,
        "seed": seed,
        "max_length": max_length,
        **{key: sum(f[key] for f in each) for key in ("sequences", "tokens", "documents", "cut", "skipped")},
        **_digest(every),
        "sources": each,
    }
    return Calibration(every, facts, tuple(notices), tuple(warnings))


def _load(name: str, text_column: str | None, split: str | None, replaced: list[str] | None) -> Documents:
    """Load a source; if the hub is not reached, the packaged text instead, with a warning in `replaced` unless None."""
    try:
        return load_documents(name, text_column=text_column, split=split)
    except HubUnreachable:
        if replaced is None:
            raise
    found = load_documents(PACKAGED)
    replaced.append(
        Words(
            f"{name}: {UNREACHABLE}: the text that comes with quantkit calibrates instead ({len(found.texts)} "
            "pieces of Python's documentation); give text like the model's use with",
            Setting("calib", FILE),
        )
    )
    return found


def find_shares(sources: Iterable[str]) -> dict[str, Fraction]:
    """Return the share of each source, in order: its weight over the sum of all weights.

    A source may end in a colon and its weight, such as `a.jsonl:0.5`; without one its weight is 1. If a file of the
    whole name exists, its colon is no weight's. RecipeError for a weight of 0 and a source that is named twice.
    """
    weights: dict[str, Fraction] = {}
    for source in sources:
        name, colon, weight = source.rpartition(":")
        if not colon or Path(source).exists() or not WEIGHT.fullmatch(weight):
            name, weight = source, "1"
        if name in weights:
            raise RecipeError(f"{name} is named twice as calibration text", "name it once, with its weight")
        weights[name] = Fraction(weight)
        if not weights[name]:
            raise RecipeError("the weight is 0", "use a number above 0", "leave the source out", subject=source)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _split_samples(samples: int, shares: dict[str, Fraction]) -> dict[str, int]:
    """Divide the samples by share; those left over go to the largest remainders, the first source first."""
    counts = {name: int(samples * share) for name, share in shares.items()}
    left = samples - sum(counts.values())
    for name in sorted(shares, key=lambda name: counts[name] - samples * shares[name])[:left]:
        counts[name] += 1
    for name, count in counts.items():
        if not count:
            raise RecipeError(
                f"its share of {samples} samples is none",
                Words("use more", Setting("samples"), "or a larger weight"),
                subject=name,
            )
    return counts


def _refuse_idle(shares: Iterable[str], text_column: str | None, split: str | None) -> None:
    """Raise RecipeError for a column or a split that no source has a use for."""
    kinds = {kind_of(name) for name in shares} if text_column is not None or split is not None else set()
    if split is not None and "hub" not in kinds:
        raise RecipeError(
            "no source is a hub data set org/name, which has splits", "drop it", subject=Setting("split", split)
        )
    if text_column is not None and not kinds & {"hub", "records"}:
        raise RecipeError("no source has records with columns", "drop it", subject=Setting("text_column", text_column))


def _digest(sequences: Sequence[Tensor]) -> dict[str, str]:
    seen = hashlib.sha256()
    for sequence in sequences:
        seen.update(len(sequence).to_bytes(8, "little") + sequence.numpy().tobytes())
    return {"sha256": seen.hexdigest()}


def _draw(
    found: Documents,
    tokenizer: Callable[..., Any],
    samples: int,
    max_length: int,
    seed: int,
    lengths: Lengths,
    notices: list[str],
) -> tuple[list[Tensor], dict[str, Any]]:
    """Draw the samples of one source; return them and their facts, and add to `notices`."""
    generator = torch.Generator().manual_seed(seed)
    name, rule, draw = name_of_text(found.source), found.rule, _own if lengths == "own" else _fixed
    if found.undivided and samples > 1 and lengths == "own":
        rule, draw = f"no blank lines, windows of {max_length} tokens", _fixed
        notices.append(f"{name}: has no blank line between documents: windows of {max_length} tokens were cut")
    dropped = sum(text.dropped for text in found.texts if isinstance(text, Conversation))
    if dropped:
        notices.append(f"{name}: {dropped} parts of messages are no text (images, sounds) and were left out")
    sequences, facts = draw(found, tokenizer, samples, max_length, generator)
    tokens = sum(len(sequence) for sequence in sequences)
    return sequences, {"rule": rule, "sequences": len(sequences), "tokens": tokens, **facts}


def _tokens(tokenizer: Callable[..., Any], document: str | Conversation) -> Tensor:
    """Return the tokens of a document. A chat template writes the special tokens itself, BOS included."""
    if isinstance(document, Conversation):
        return token_ids(tokenizer, render(tokenizer, document), special=False)
    return token_ids(tokenizer, document, special=True)


def _own(
    found: Documents, tokenizer: Callable[..., Any], samples: int, max_length: int, generator: torch.Generator
) -> tuple[list[Tensor], dict[str, Any]]:
    sequences: list[Tensor] = []
    cut = skipped = 0
    for index in torch.randperm(len(found.texts), generator=generator).tolist():
        tokens = _tokens(tokenizer, found.texts[index])
        if len(tokens) < 2:
            skipped += 1
            continue
        if len(tokens) > max_length:
            last = 0 if found.conversations else len(tokens) - max_length  # a chat begins as its template begins
            offset = int(torch.randint(last + 1, (), generator=generator))
            tokens = tokens[offset : offset + max_length].clone()
            cut += 1
        sequences.append(tokens)
        if len(sequences) == samples:
            return sequences, {"documents": len(found.texts), "cut": cut, "skipped": skipped}
    raise CheckpointError(
        f"holds {len(sequences)} usable documents, {samples} were asked for ({found.rule})",
        Words("use", Setting("samples", len(sequences) or 1)),
        Words("a longer", Setting("calib"), "file"),
        subject=found.source,
    )


def _fixed(
    found: Documents, tokenizer: Callable[..., Any], samples: int, max_length: int, generator: torch.Generator
) -> tuple[list[Tensor], dict[str, Any]]:
    stream = torch.cat([_tokens(tokenizer, text) for text in found.texts])
    windows = len(stream) // max_length
    if windows < samples:
        raise CheckpointError(
            f"holds {len(stream)} tokens, {samples} windows of {max_length} need {samples * max_length}",
            Words("use", Setting("samples", windows)) if windows else Words("use a smaller", Setting("max_length")),
            Words("a longer", Setting("calib"), "file"),
            subject=found.source,
        )
    chosen = torch.randperm(windows, generator=generator)[:samples].tolist()
    sequences = [stream[i * max_length : (i + 1) * max_length].clone() for i in chosen]
    return sequences, {"documents": len(found.texts), "cut": 0, "skipped": 0}
