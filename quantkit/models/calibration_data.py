"""Text in, token sequences out: what calibrates a model and what it is judged on.

A source is a data set's name or a .txt, .jsonl or .parquet file. Calibration keeps documents apart and at their own
length, unpadded (ALGORITHMS 2): the model sees its calibration text as it will see real prompts, and no padding can
leak into a Hessian. Everything is drawn from one seeded generator; a source that holds too little is refused, never
silently cut short. The tokenizer is passed in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError, reason

#: A top-level WikiText heading: ` = Title = ` between blank lines (formulas look alike but stand inside paragraphs);
#: deeper headings have more equals signs.
HEADING = re.compile(r"(?:\A|^ *\n)( = [^=\s](?:[^\n]*[^=\s])? = ?\n)(?= *$)", re.MULTILINE)
BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")
SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class _Named:
    """A data set by name: where it lies, its text column, and how its rows are joined to the text of an evaluation.

    The joins are those of the published perplexities (ALGORITHMS 15). `rows` bounds how much of it is fetched.
    """

    repository: str
    column: str
    train: dict[str, Any]
    test: dict[str, Any]
    join: str
    lines: bool
    rows: int | None = None
    test_rows: int | None = None


NAMED = {
    "wikitext2": _Named(
        "Salesforce/wikitext",
        "text",
        train={"name": "wikitext-2-raw-v1", "split": "train"},
        test={"name": "wikitext-2-raw-v1", "split": "test"},
        join="\n\n",
        lines=True,
    ),
    # This repository still holds a loading script; its parquet branch holds the same rows as plain files.
    "ptb": _Named(
        "ptb-text-only/ptb_text_only",
        "sentence",
        train={"revision": "refs/convert/parquet", "split": "train"},
        test={"revision": "refs/convert/parquet", "split": "test"},
        join=" ",
        lines=True,
    ),
    "c4": _Named(
        "allenai/c4",
        "text",
        train={"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}, "split": "train", "streaming": True},
        test={
            "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
            "split": "validation",
            "streaming": True,
        },
        join=" ",
        lines=False,
        rows=16384,
        test_rows=1100,
    ),
}


@dataclass(frozen=True)
class Documents:
    """The documents of a source, in its order, and the rule that told them apart."""

    texts: list[str]
    source: str
    rule: str


@dataclass(frozen=True)
class Calibration:
    """Calibration sequences, int64 `[t]` each, and the facts that the report and the journal record of them."""

    sequences: list[Tensor]
    facts: dict[str, Any]


def documents(source: str) -> Documents:
    """Return the documents of a data set (`wikitext2`, `ptb`, `c4`: the training split) or of a file.

    A .jsonl file has one document a line (key `text`), a .parquet file one a row (column `text`). Plain text is told
    apart by WikiText's ` = Title = ` lines if it has any, else by blank lines, else it is one document. CheckpointError
    for a source that is missing, empty, unreadable or cannot be fetched.
    """
    if source in NAMED:
        named = NAMED[source]
        rows = _fetch(source, named, named.train, named.rows)
        lines = "".join(row.rstrip("\n") + "\n" for row in rows)
        texts, rule = _split(lines) if named.lines else (rows, "one document a row")
    else:
        path = _file(source)
        if path.suffix.lower() == ".txt":
            texts, rule = _split(_read(path))
        else:
            texts, rule = _records(path), f"one document a {'line' if path.suffix.lower() == '.jsonl' else 'row'}"
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise CheckpointError(f"{source}: holds no text: give another file with --calib")
    return Documents(texts, source, rule)


def calibration(
    source: str,
    tokenizer: Callable[..., Any],
    *,
    samples: int,
    max_length: int,
    seed: int,
    lengths: Literal["own", "fixed"] = "own",
) -> Calibration:
    """Return `samples` token sequences of a source, drawn by `seed` (ALGORITHMS 2).

    `own`: documents in shuffled order, each at its own length, a longer one cut to a window of `max_length` tokens at a
    drawn offset, those of fewer than 2 tokens skipped. `fixed`: all documents behind one another, cut into consecutive
    windows of exactly `max_length` tokens, of which `samples` different ones are drawn. CheckpointError when the source
    holds fewer than asked.
    """
    if samples < 1 or max_length < 2:
        raise RecipeError(f"{samples} samples of at most {max_length} tokens: use at least 1 sample and 2 tokens")
    found = documents(source)
    generator = torch.Generator().manual_seed(seed)
    draw = _own if lengths == "own" else _fixed
    sequences, facts = draw(found, tokenizer, samples, max_length, generator)
    seen = hashlib.sha256()
    for sequence in sequences:
        seen.update(len(sequence).to_bytes(8, "little") + sequence.numpy().tobytes())
    return Calibration(
        sequences,
        {
            "source": source,
            "rule": found.rule,
            "lengths": lengths,
            "seed": seed,
            "max_length": max_length,
            "sequences": len(sequences),
            "tokens": sum(len(s) for s in sequences),
            **facts,
            "sha256": seen.hexdigest(),
        },
    )


def evaluation_text(source: str) -> tuple[str, str]:
    """Return the text that a model is judged on and one line saying what it is.

    Data sets give their test split (`c4`: the first 1100 documents of its first validation file), rows joined as in the
    published figures; a .txt file is taken as it is; records of .jsonl and .parquet files are joined by blank lines.
    """
    if source in NAMED:
        named = NAMED[source]
        rows = _fetch(source, named, named.test, named.test_rows)
        text = named.join.join(rows)
        what = f"{source} ({named.repository}, {named.test['split']}, {len(rows)} rows joined by {named.join!r})"
    else:
        path = _file(source)
        if path.suffix.lower() == ".txt":
            text, what = _read(path), f"{path.name} (as it is)"
        else:
            rows = _records(path)
            text, what = "\n\n".join(rows), f"{path.name} ({len(rows)} records joined by '\\n\\n')"
    if not text.strip():
        raise CheckpointError(f"{source}: holds no text: give another file with --data")
    return text, what


def token_ids(tokenizer: Callable[..., Any], text: str, *, special: bool) -> Tensor:
    """Return the tokens of a text, int64 `[t]`, with or without the special tokens that the tokenizer adds."""
    return torch.tensor(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=torch.int64)


def check_tokens(largest: int, known: int) -> None:
    """Raise CheckpointError if a text has a token past the `known` rows of the model's embeddings."""
    if largest >= known:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, the model knows {known}: they do not belong together, "
            "use the tokenizer files of this model"
        )


def _own(
    found: Documents, tokenizer: Callable[..., Any], samples: int, max_length: int, generator: torch.Generator
) -> tuple[list[Tensor], dict[str, Any]]:
    sequences: list[Tensor] = []
    cut = skipped = 0
    for index in torch.randperm(len(found.texts), generator=generator).tolist():
        tokens = token_ids(tokenizer, found.texts[index], special=True)
        if len(tokens) < 2:
            skipped += 1
            continue
        if len(tokens) > max_length:
            offset = int(torch.randint(len(tokens) - max_length + 1, (), generator=generator))
            tokens = tokens[offset : offset + max_length].clone()
            cut += 1
        sequences.append(tokens)
        if len(sequences) == samples:
            return sequences, {"documents": len(found.texts), "cut": cut, "skipped": skipped}
    raise CheckpointError(
        f"{found.source}: holds {len(sequences)} usable documents, {samples} were asked for ({found.rule}): "
        f"use --samples {len(sequences) or 1}, a longer --calib file, or --lengths fixed"
    )


def _fixed(
    found: Documents, tokenizer: Callable[..., Any], samples: int, max_length: int, generator: torch.Generator
) -> tuple[list[Tensor], dict[str, Any]]:
    stream = torch.cat([token_ids(tokenizer, text, special=True) for text in found.texts])
    windows = len(stream) // max_length
    if windows < samples:
        raise CheckpointError(
            f"{found.source}: holds {len(stream)} tokens, {samples} windows of {max_length} need "
            f"{samples * max_length}: use --samples {windows or 1}, a smaller --max-length, or a longer --calib file"
        )
    chosen = torch.randperm(windows, generator=generator)[:samples].tolist()
    sequences = [stream[i * max_length : (i + 1) * max_length].clone() for i in chosen]
    return sequences, {"documents": len(found.texts), "cut": 0, "skipped": 0}


def _split(text: str) -> tuple[list[str], str]:
    """Return the documents of plain text and the rule that told them apart."""
    starts = [match.start(1) for match in HEADING.finditer(text)]
    if starts:
        borders = [0, *starts, len(text)]
        return [text[a:b] for a, b in pairwise(borders)], "one document per WikiText heading"
    parts = [part for part in BLANK_LINES.split(text) if part.strip()]
    return (parts, "one document between blank lines") if len(parts) > 1 else ([text], "the whole text is one document")


def _file(source: str) -> Path:
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"{source}: no such text: use {', '.join(NAMED)} or a {', '.join(SUFFIXES)} file")
    if path.suffix.lower() not in SUFFIXES:
        raise CheckpointError(f"{source}: unknown kind of text file: rename or convert it to {', '.join(SUFFIXES)}")
    return path


def _read(path: Path) -> str:
    """Return a text file as it is: UTF-8, line ends untouched."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): check the file") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text (byte {error.start}): convert it first") from error


def _records(path: Path) -> list[str]:
    """Return the texts of a .jsonl or .parquet file; CheckpointError names the first record that has none."""
    texts: list[str] = []
    rows = _json_rows(path) if path.suffix.lower() == ".jsonl" else _parquet_rows(path)
    for number, row in rows:
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise CheckpointError(f"{path}: record {number} has no string called text: rename the key or column")
        texts.append(text)
    return texts


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is no text that a tokenizer takes
            except (ValueError, RecursionError) as error:
                why = reason(error)
                raise CheckpointError(f"{path}: line {number} is not JSON ({why}): repair the file") from error
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import datasets

    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from enumerate(rows, start=1)
    except Exception as error:  # the reader raises whatever its backend raises
        raise CheckpointError(f"{path}: is no parquet file that can be read ({reason(error)}): check it") from error


def _fetch(source: str, named: _Named, options: dict[str, Any], limit: int | None) -> list[str]:
    import datasets

    try:
        rows = datasets.load_dataset(named.repository, **options)
        return [str(row[named.column]) for row in islice(rows, limit)]
    except Exception as error:  # offline, gone, moved, out of disk: the hub client has no common base class
        raise CheckpointError(
            f"{source}: the data set {named.repository} cannot be loaded ({reason(error)}): "
            f"give a {', '.join(SUFFIXES)} file instead (--calib FILE, eval --data FILE)"
        ) from error
