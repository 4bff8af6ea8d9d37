"""Calibration sequences, drawn from the documents of one source or a mixture by a seeded generator.

Documents stay separate, each at its own length and unpadded (ALGORITHMS 2). The model then sees its
calibration text as it will see real prompts, and no padding leaks into a Hessian. A source that
holds too little is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import FILE, CheckpointError, RecipeError, Setting, Words
from quantkit.keys import at_home
from quantkit.text.conversations import (
    NOW,
    BrokenRecord,
    ChatTemplate,
    Conversation,
    has_chat_template,
    names_unread,
    present_date,
)
from quantkit.text.sources import (
    PACKAGED,
    Documents,
    held_out_documents,
    kind_of,
    load_documents,
    name_of_text,
)
from quantkit.text.tokenizer import token_ids

Lengths = Literal["own", "fixed"]
#: A weight after the last colon of a source. Nine digits: a sum of weights stays a number.
WEIGHT = re.compile(r"\d{1,9}(?:\.\d{1,9})?|\.\d{1,9}")
#: The most names of keys that a notice lists.
MOST_NAMES = 8
#: Each source holds out a 128th of the calibration tokens within these limits, from its first
#: documents behind the samples.
HELD_OUT_PART, LEAST_HELD_OUT, MOST_HELD_OUT, SPARE = 128, 64, 1024, 16


@dataclass(frozen=True)
class Calibration:
    """Hold calibration sequences, int64 `[t]` each, and the facts about them for report and
    journal.

    `notices` are lines about the data for the user. `more` are sequences that do not calibrate;
    `held_out` has those, by source, on which a run measures its linears. `characters` are those of
    the longest source, which is in memory while it is drawn.
    """

    sequences: list[Tensor]
    facts: dict[str, Any]
    notices: tuple[str, ...] = ()
    more: Sequence[Tensor] = ()
    characters: int = 0
    held_out: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def every(self) -> list[Tensor]:
        """All sequences that run, the held-out ones last."""
        return [*self.sequences, *chain.from_iterable(self.held_out.values())]


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
    template_args: Mapping[str, Any] | None = None,
    skip_bad_records: int = 0,
    more: int = 0,
    date: str | None = None,
    most_tokens: float = inf,
) -> Calibration:
    """Draw `samples` token sequences of a source, or of a mixture, by `seed` (ALGORITHMS 2).

    `lengths` are "own", documents in shuffled order, or "fixed", windows of `max_length` tokens
    from the joined documents. A mixture has `source:weight` strings (`find_shares`).
    No further sequence is drawn once there are `most_tokens`, of which each source has its share.
    `template_args` are arguments of the chat template for every conversation. Records without text
    are skipped, and at most `skip_bad_records` broken records of each source. After the samples, up
    to `more` sequences are drawn from the remaining documents. Chat templates that write the
    present date write `date`, in ISO form, by default that of the call. CheckpointError if a source
    holds too little.
    """
    if samples < 1 or max_length < 2:
        raise RecipeError(
            f"{samples} samples of at most {max_length} tokens",
            "use at least 1 sample and 2 tokens",
        )
    shares = find_shares(map(at_home, [sources] if isinstance(sources, str) else sources))
    counts = _split_samples(samples, shares)
    _refuse_idle(shares, text_column, split)
    notices: list[str] = []
    every: list[Tensor] = []
    further: list[Tensor] = []
    spare: dict[str, Sequence[Tensor]] = {}
    each: list[dict[str, Any]] = []
    plain: list[str] = []
    characters = 0
    template = ChatTemplate(tokenizer, template_args or {}, date or present_date())
    for source, share in shares.items():
        name = name_of_text(source)
        found = load_documents(
            source, text_column=text_column, split=split, skip_bad_records=skip_bad_records
        )
        characters = max(characters, found.characters)
        others = ceil(more * share)
        draw = _Draw(
            found,
            copy(template),
            share,
            counts[source],
            max_length,
            most_tokens * share,
            max(others, SPARE),
        )
        drawn, facts = _drawn(draw, seed, lengths, notices)
        sequences, spare[name] = drawn[: facts["sequences"]], drawn[facts["sequences"] :]
        further += spare[name][:others]
        notices += [f"{name}: {line}" for line in _remarks(draw)]
        plain += [] if found.conversations else [name]
        template.is_dated |= draw.template.is_dated
        each.append({"source": name, "share": float(share), **facts, **_digest(sequences)})
        every += sequences
    if plain == [PACKAGED] and len(each) == 1:
        notices.append(
            Words(
                "the text that comes with quantkit is used: give text like the model's use with",
                Setting("calib", FILE),
            )
        )
    elif len(plain) == len(each) and has_chat_template(tokenizer):
        notices.append(
            Words(
                "the model has a chat template, and plain text calibrates it "
                f"({', '.join(plain)}): conversations "
                "like its use may calibrate it better: give records with messages,",
                Setting("calib", Words("FILE.jsonl")),
            )
        )
    if template_args and len(plain) == len(each):
        notices.append(
            Words(Setting("template_args"), "changes nothing: no source has conversations")
        )
    if template.is_dated:
        notices.append(
            Words(
                f"the model's chat template writes the date, {template.date[:10]} in this run: "
                "another day calibrates on another text, unless you use",
                Setting("template_args", f"{NOW}={template.date[:10]}"),
            )
        )
    spare.pop(PACKAGED, None)
    spare |= {
        f"{PACKAGED} {kind}": [token_ids(tokenizer, text, special=True)[:max_length]]
        for kind, text in held_out_documents().items()
    }
    held_out = _held_out(spare, sum(map(len, every)) // HELD_OUT_PART)
    facts = {
        "source": each[0]["source"]
        if len(each) == 1
        else ", ".join(f"{f['source']}:{f['share']:.4g}" for f in each),
        "rule": "; ".join(dict.fromkeys(f["rule"] for f in each)),
        "lengths": lengths,
        "seed": seed,
        "max_length": max_length,
        **{
            key: sum(f[key] for f in each)
            for key in ("sequences", "tokens", "documents", "cut", "skipped")
        },
        **_digest(every),
        "sources": each,
        "held_out": {source: sum(map(len, found)) for source, found in held_out.items()},
        **({"date": template.date} if template.is_dated else {}),
    }
    return Calibration(every, facts, tuple(notices), further, characters, held_out)


def _held_out(spare: Mapping[str, Sequence[Tensor]], tokens: int) -> dict[str, list[Tensor]]:
    """Take the first `tokens` of each source's spare sequences, within limits."""
    found: dict[str, list[Tensor]] = {}
    for source, sequences in spare.items() if tokens >= LEAST_HELD_OUT else ():
        left, taken = min(tokens, MOST_HELD_OUT), list[Tensor]()
        for sequence in sequences:
            taken.append(sequence[:left].clone())
            left -= len(taken[-1])
            if left < 2:
                break
        if sum(map(len, taken)) >= LEAST_HELD_OUT:
            found[source] = taken
    return found


def find_shares(sources: Iterable[str]) -> dict[str, Fraction]:
    """Return the share of each source, in order: its weight over the sum of all weights.

    A source may end in a colon and its weight, such as `a.jsonl:0.5`; without one its weight is 1.
    If a file of the whole name exists, its colon is no weight's. RecipeError for a weight of 0 and
    a source that is named twice.
    """
    weights: dict[str, Fraction] = {}
    for source in sources:
        name, colon, weight = source.rpartition(":")
        if not colon or Path(source).exists() or not WEIGHT.fullmatch(weight):
            name, weight = source, "1"
        if name in weights:
            raise RecipeError(
                f"{name} is named twice as calibration text", "name it once, with its weight"
            )
        weights[name] = Fraction(weight)
        if not weights[name]:
            raise RecipeError(
                "the weight is 0", "use a number above 0", "leave the source out", subject=source
            )
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _split_samples(samples: int, shares: dict[str, Fraction]) -> dict[str, int]:
    """Divide the samples by share; those left over go to the largest remainders, the first source
    first.
    """
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
    kinds = (
        {kind_of(name) for name in shares}
        if text_column is not None or split is not None
        else set()
    )
    if split is not None and "hub" not in kinds:
        raise RecipeError(
            "no source is a hub data set org/name, which has splits",
            "drop it",
            subject=Setting("split", split),
        )
    if text_column is not None and not kinds & {"hub", "records"}:
        raise RecipeError(
            "no source has records with columns",
            "drop it",
            subject=Setting("text_column", text_column),
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"


def _digest(sequences: Sequence[Tensor]) -> dict[str, str]:
    seen = hashlib.sha256()
    for sequence in sequences:
        seen.update(len(sequence).to_bytes(8, "little") + sequence.numpy().tobytes())
    return {"sha256": seen.hexdigest()}


@dataclass(frozen=True)
class _Draw:
    """Documents of one source that are tokenized, conversations by the chat template, and how much
    is drawn of them: at most `samples` sequences, fewer if they have `tokens` together, and up to
    `more` behind them.

    `share` is the part of all samples that the source has in a mixture.
    """

    found: Documents
    template: ChatTemplate
    share: Fraction
    samples: int
    max_length: int
    tokens: float
    more: int

    def fewer(self, held: int) -> Words:
        """Advise the most `--samples` of the whole mixture for which this source suffices."""
        return Words("use", Setting("samples", int(held / self.share)))

    def tokenized(self, order: Iterable[int]) -> Iterator[Tensor]:
        """Yield the tokens of documents, without conversations that the template refuses, if some
        may be broken.
        """
        for index in order:
            document = self.found.texts[index]
            try:
                text, special = self.template.text_of(document)
            except BrokenRecord as error:
                self.found.left_out.skip(error)
                continue
            yield token_ids(self.template.tokenizer, text, special=special)


def _remarks(draw: _Draw) -> Iterator[str]:
    """Note the parts of a source that the drawn text lacks."""
    left_out, template = draw.found.left_out, draw.template
    talks = [text for text in draw.found.texts if isinstance(text, Conversation)]
    if left_out:
        yield f"{len(left_out)} records were left out: {left_out.why}"
    if left_out.broken:
        yield f"the first broken record: {left_out.broken[0]}"
    if unread := draw.found.unread:
        yield f"files of another kind than most are not read, {len(unread)} in all: {unread[0]}"
    if dropped := Counter(kind for talk in talks for kind in talk.dropped):
        kinds = ", ".join(f"{count} {kind}" for kind, count in dropped.items())
        yield f"{dropped.total()} parts of messages are no text and were left out: {kinds}"
    if pair := draw.found.pair:
        asked, made = " and ".join(pair[:-1]), "make conversations"
        if not has_chat_template(template.tokenizer):
            made = "are joined by a blank line, as the model has no chat template"
        yield f"questions in {asked} and answers in {pair[-1]} {made}"
    if merged := template.merged:
        yield (
            f"the model's chat template refuses system messages: those of {merged} conversations "
            "went into the user's first turn"
        )
    if unread := names_unread(template.tokenizer, talks, template.arguments) if talks else ():
        yield f"the model's chat template does not read {_listed(unread)}"
    if unread := tuple(dict.fromkeys(key for talk in talks for key in talk.unread)):
        yield f"keys of records that are not given to the chat template: {_listed(unread)}"


def _drawn(
    draw: _Draw, seed: int, lengths: Lengths, notices: list[str]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Draw from one source. Returns all sequences and the facts of the samples; adds to
    `notices`.
    """
    generator, found, max_length = torch.Generator().manual_seed(seed), draw.found, draw.max_length
    rule, cut = found.rule, _own if lengths == "own" else _fixed
    if found.undivided and draw.samples > len(found.texts) and lengths == "own":
        rule, cut = f"no blank lines, windows of {max_length} tokens", _fixed
        notices.append(
            f"{name_of_text(found.source)}: has no blank line between documents: windows of "
            f"{max_length} tokens were cut"
        )
    sequences, facts = cut(draw, generator)
    count = facts["sequences"]
    total = sum(map(len, sequences[:count]))
    left_out = {"left_out": len(found.left_out)} if found.left_out else {}
    return sequences, {"rule": rule, "sequences": count, "tokens": total, **facts, **left_out}


def _own(draw: _Draw, generator: torch.Generator) -> tuple[list[Tensor], dict[str, Any]]:
    found, max_length = draw.found, draw.max_length
    sequences: list[Tensor] = []
    facts: dict[str, Any] = {}
    cut = skipped = total = 0
    for each in draw.tokenized(torch.randperm(len(found.texts), generator=generator).tolist()):
        if len(each) < 2:
            skipped += 1
            continue
        if len(each) > max_length:
            last = (
                0 if found.conversations else len(each) - max_length
            )  # a chat begins as its template begins
            offset = int(torch.randint(last + 1, (), generator=generator))
            each = each[offset : offset + max_length].clone()
            cut += 1
        sequences.append(each)
        total += len(each)
        if not facts and (len(sequences) == draw.samples or total >= draw.tokens):
            facts = {"documents": len(found.texts), "cut": cut, "skipped": skipped}
            facts["sequences"] = len(sequences)
        if facts and len(sequences) == facts["sequences"] + draw.more:
            break
    if facts:
        return sequences, facts
    left_out = (
        f"; {len(found.left_out)} records left out: {found.left_out.why}" if found.left_out else ""
    )
    fewer = Words(draw.fewer(len(sequences)), ", or") if sequences else "use"
    raise CheckpointError(
        f"holds {len(sequences)} usable documents, {draw.samples} were asked for "
        f"({found.rule}{left_out})",
        Words(fewer, "a longer", Setting("calib"), "file"),
        subject=found.source,
    )


def _fixed(draw: _Draw, generator: torch.Generator) -> tuple[list[Tensor], dict[str, Any]]:
    found, max_length = draw.found, draw.max_length
    samples = int(min(draw.samples, ceil(min(draw.tokens, 2**63) / max_length)))
    tokens = draw.tokenized(range(len(found.texts)))
    stream = torch.cat([torch.empty(0, dtype=torch.int64), *tokens])
    windows = len(stream) // max_length
    if windows < samples:
        short = len(stream) // samples
        ways = [draw.fewer(windows)] if windows else []
        if not windows and short > 1:
            ways = [Words("use", Setting("max_length", short))]
        raise CheckpointError(
            f"holds {len(stream)} tokens, {samples} windows of {max_length} need "
            f"{samples * max_length}",
            *ways,
            Words("a longer" if ways else "use a longer", Setting("calib"), "file"),
            subject=found.source,
        )
    chosen = torch.randperm(windows, generator=generator)[: samples + draw.more].tolist()
    sequences = [stream[i * max_length : (i + 1) * max_length].clone() for i in chosen]
    facts = {"documents": len(found.texts), "cut": 0, "skipped": 0, "sequences": samples}
    return sequences, facts
