"""Text for calibration and evaluation, from a named data set or a .txt, .jsonl or .parquet file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, reason

#: A top-level WikiText heading: ` = Title = ` between blank lines (formulas look alike but stand inside paragraphs);
#: deeper headings have more equals signs.
HEADING = re.compile(r"(?:\A|^ *\n)( = [^=\s](?:[^\n]*[^=\s])? = ?\n)(?= *$)", re.MULTILINE)
BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")
SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class _Named:
    """Describe a data set: its hub repository, text column, splits, and how evaluation joins its rows.

    The joins are those of the published perplexities (ALGORITHMS 15). `rows` and
    `test_rows` bound the download.
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
    # This repository has a loading script; its parquet branch holds the same rows as plain files.
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
    """Hold the documents of a source, in its order, and the rule that separated them."""

    texts: list[str]
    source: str
    rule: str


def load_documents(source: str) -> Documents:
    """Return the documents of a data set (`wikitext2`, `ptb`, `c4`: the training split) or of a file.

    A .jsonl file has one document per line (key `text`), a .parquet file one per row (column `text`). Plain text is
    split at WikiText's ` = Title = ` lines if it has any, else at blank lines. CheckpointError for a source that is
    missing, empty, unreadable or cannot be fetched.
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


def load_evaluation_text(source: str) -> tuple[str, str]:
    """Return the text for an evaluation and one line that describes it.

    Data sets give their test split, rows joined as in the published figures (`c4`: the first 1100 documents of its
    first validation file). A .txt file is used unchanged; records of .jsonl and .parquet files are joined by blank
    lines. CheckpointError as for `load_documents`.
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


def _split(text: str) -> tuple[list[str], str]:
    """Return the documents of plain text and the rule that separated them."""
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
    """Return the content of a UTF-8 file, line ends unchanged."""
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
                json.dumps(row, ensure_ascii=False).encode()  # tokenizers refuse lone surrogates
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
