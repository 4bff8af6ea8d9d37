"""Records: read the rows of JSON and parquet files and of data sets, and find the text or
conversation of each.

Records without text are left out and counted. A broken record is refused with its number, or
counted where some are allowed.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.errors import FILE, NAME, CheckpointError, Setting, Words, reason
from quantkit.text.conversations import (
    BrokenRecord,
    Conversation,
    Without,
    messages_in,
    read_conversation,
)

#: Keys that are tried without --text-column, in this order.
CONVERSATIONS = ("messages", "conversations")
#: Keys of questions and answers that become conversations, and of what belongs to a question.
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input")
ANSWERS = ("output", "completion", "response", "answer", "solution", "target")
ADDITIONS = ("input", "context")
RECORD = '{"text": "..."}'
#: Suffixes of compressed files.
COMPRESSED = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}
#: Characters between the columns of a .csv file; the most frequent one of its first line counts.
SEPARATORS = ",;\t|"
#: Ways out for a record without a text, and for one unlike the first of its source.
_COLUMN = Words("use", Setting("text_column", NAME), "or for question and answer NAME,NAME")
_APART = Words("give records of each kind in a file of their own with", Setting("calib", FILE))
#: The start of what a server sends in place of a file.
PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html)\b", re.IGNORECASE)
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass
class LeftOut:
    """Count skipped records of a source: records without text, and at most `allowed` broken
    records.
    """

    allowed: int = 0
    without: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def skip(self, error: BrokenRecord) -> None:
        """Count a broken record; raise its error if no more are allowed."""
        if len(self.broken) == self.allowed:
            raise error
        place = str(error.subject).rpartition(": ")[2]  # reports name no folder
        self.broken.append(f"{place}: {error.rule}")

    def __len__(self) -> int:
        return self.without.total() + len(self.broken)

    @property
    def why(self) -> str:
        """The reasons, with their numbers: `2 null, 1 broken`."""
        broken = [f"{len(self.broken)} broken"] if self.broken else []
        return ", ".join([*(f"{count} {why}" for why, count in self.without.items()), *broken])


def decoded(path: Path) -> str:
    """Return the content of a text file, UTF-8 or as its byte-order mark says, line
    ends unchanged.
    """
    data = read_bytes(path)
    try:
        text = data.decode(_encoding(data))
        if "\0" in text:  # UTF-16 without a mark, UTF-32, or no text at all
            raise UnicodeError("it has NUL characters")
        return text
    except UnicodeError as error:
        at = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise CheckpointError(
            f"is not UTF-8 text ({at})", "convert it first", subject=path
        ) from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed by its name; CheckpointError if it
    cannot be read.
    """
    try:
        data = path.read_bytes()
        _require_fetched(data, path)
        opener = COMPRESSED.get(path.suffix.lower())
        return data if opener is None else opener(data)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise CheckpointError(f"cannot be read ({why})", "check the file", subject=path) from error


def _require_fetched(start: bytes, path: Path) -> None:
    """Raise CheckpointError for a file that begins as one which stands for the data elsewhere."""
    from quantkit.io import files  # with torch, which help does not need

    files.require_no_pointer(start, path)
    if PAGE.match(start) and not path.suffix.lower().startswith(".htm"):
        raise CheckpointError(
            "is a page of HTML, such as a login or an error, under the name of a data file",
            "download the file again",
            subject=path,
        )


def suffix_of(path: str | Path) -> str:
    """Return the suffix that tells the kind of a file, without that of its compression."""
    path = Path(path)
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path.name).suffix.lower()


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file, each with its place in words. A line that is no JSON is a
    BrokenRecord.
    """
    if path.suffix.lower() == ".parquet":
        return _parquet_rows(path)
    if suffix_of(path) in (".csv", ".tsv"):
        return _csv_rows(path)
    data = read_bytes(path)
    if _encoding(data) == "utf-16":
        data = decoded(path).encode()
    first = data.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0].rstrip()
    whole = first.startswith(b"[") or first == b"{"  # one object on several lines
    return (
        _json_array(path) if whole else _json_lines(path, data)
    )  # whatever the name: files are called either way


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a file, each with its place in words.

    CheckpointError for a row that is no object of JSON, and for a file without records.
    """
    where = None
    for where, row in file_rows(path):
        _require_whole(row)
        if not isinstance(row, dict):
            raise CheckpointError("is no JSON object", "repair the record", subject=where)
        yield where, row
    if where is None:
        raise CheckpointError("has no records", "give another file", subject=path)


def table_rows(rows: Iterable[Any], source: object) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table, each with its place in words.

    A table has each key in every row, and null where a record lacks it, so nulls within a record
    are dropped.
    """
    for number, row in enumerate(rows, start=1):
        yield f"{source}: row {number}", {key: _without_nulls(value) for key, value in row.items()}


def documents(
    rows: Iterable[tuple[str, Any]], text_column: str | None, left_out: LeftOut
) -> tuple[list[str | Conversation], str, tuple[str, ...]]:
    """Return the document of each record, all under the same keys, their name in a rule, and the
    keys of questions and answers.

    Records that are left out are counted in `left_out`. BrokenRecord if too many are broken.
    """
    texts: list[str | Conversation] = []
    keys: tuple[str, ...] = (text_column or "text",)
    talk = False
    for where, row in rows:
        try:
            if isinstance(row, BrokenRecord):
                raise row
            if not texts:
                keys, talk = _keys_of(row, text_column, where)
            found = _pair(row, keys, where) if keys[1:] else _document(row, keys[0], talk, where)
        except BrokenRecord as error:
            left_out.skip(error)
            continue
        if isinstance(found, Without):
            left_out.without[found.value] += 1
        else:
            texts.append(found)
    what = "conversation" if talk else "document"
    named = "" if keys == ("text",) else f" ({', '.join(keys)})"
    return texts, f"{what}{named}", keys if keys[1:] else ()


def evaluated(where: str, row: Any) -> str:
    """Return the text of a record that evaluates; CheckpointError if it has none."""
    _require_whole(row)
    found = row if isinstance(row, dict) else {}
    text = found.get("text", "")
    if text is None:
        raise CheckpointError("text is null", "remove the record", subject=where)
    if "text" not in found or not isinstance(text, str):
        is_talk = any(isinstance(found.get(key), list) for key in CONVERSATIONS)
        way = "rename the key or column" if found and not is_talk else f"write it as {RECORD}"
        raise CheckpointError(f"has no string called text: {_keys(row)}", way, subject=where)
    return text


def _require_whole(row: Any) -> None:
    if isinstance(row, BrokenRecord):
        raise CheckpointError(row.rule, "repair the file", subject=row.subject)


def _keys_of(row: Any, text_column: str | None, where: str) -> tuple[tuple[str, ...], bool]:
    """Find the key of a record's text, or the keys of a question and its answer, which is the last
    one; and whether they make a conversation.
    """
    keys = (text_column,) if text_column else ("text", *CONVERSATIONS)
    present = [key for key in keys if key in row] if isinstance(row, dict) else []
    for key in present:
        value = row[key]
        talk = key in CONVERSATIONS or (key == text_column and _is_talk(value))
        if value not in (None, "", [], {}) and (talk or isinstance(value, str)):
            return (key,), talk
    if present or row in (None, {}):
        return (*present, *keys)[:1], False
    if isinstance(row, dict) and (pair := _pair_of(row, text_column)):
        return pair, True
    named = f"text called {text_column}" if text_column else f"text, {' or '.join(CONVERSATIONS)}"
    raise _without_key(named, row, where)


def _pair_of(row: dict[str, Any], text_column: str | None) -> tuple[str, ...]:
    """Find the keys of a question and its answer: those that `text_column` names with a comma, or
    usual ones; () without any.
    """
    if text_column:
        named = tuple(name.strip() for name in text_column.split(","))
        return named if len(named) > 1 and all(name in row for name in named) else ()
    usual = {str(key).strip().lower(): key for key in row}
    questions, answers, added = (
        [usual[key] for key in keys if key in usual] for keys in (QUESTIONS, ANSWERS, ADDITIONS)
    )
    if not questions or not answers:
        return ()
    return (questions[0], *(key for key in added if key != questions[0]), answers[0])


def _pair(row: Any, keys: tuple[str, ...], where: str) -> Conversation | Without:
    """Return a question and its answer, each text or messages, as a conversation."""
    if not row:
        return Without.NULL if row is None else Without.EMPTY
    *asked, answer = keys
    if not isinstance(row, dict) or asked[0] not in row or answer not in row:
        raise _without_key(f"{asked[0]} and {answer}", row, where, _APART)
    given = [row[key] for key in asked if row.get(key)]
    if not row[asked[0]] or not row[answer]:
        return Without.NULL if None in (row[asked[0]], row[answer]) else Without.EMPTY
    texts = all(isinstance(each, str) for each in (*given, row[answer]))
    if not texts and (len(given) > 1 or not _is_talk(row[answer]) or not _is_talk(given[0])):
        raise BrokenRecord(f"{' and '.join(keys)} are neither text nor messages", where)
    question = "\n\n".join(given) if texts else ""
    talk = (
        [{"role": "user", "content": question}, {"role": "assistant", "content": row[answer]}]
        if texts
        else [*messages_in(given[0]), *messages_in(row[answer])]
    )
    others = {key: value for key, value in row.items() if key not in keys}
    found = read_conversation(talk, " and ".join(keys), where, others)
    if texts and isinstance(found, Conversation):
        return replace(found, plain=f"{question}\n\n{row[answer]}")
    return found


def _is_talk(value: Any) -> bool:
    """Return True for a list, or a text or table that holds a list of messages."""
    found = messages_in(value)
    return isinstance(found, list) and (
        isinstance(value, list) or all(isinstance(each, dict) for each in found)
    )


def _document(row: Any, key: str, talk: bool, where: str) -> str | Conversation | Without:
    """Return the document of a record, or why it has none; BrokenRecord if it is none."""
    if row in (None, {}):
        return Without.NULL if row is None else Without.EMPTY
    if not isinstance(row, dict) or key not in row:
        raise _without_key(key, row, where, _APART)
    value = row[key]
    if talk:
        return read_conversation(value, key, where, row)
    if value is None or value in ("", [], {}):
        return Without.NULL if value is None else Without.EMPTY
    if not isinstance(value, str):
        raise BrokenRecord(f"{key} is no text", where)
    return value if value.strip() else Without.EMPTY


def _without_key(what: str, row: Any, where: str, way: str = _COLUMN) -> BrokenRecord:
    way = way if isinstance(row, dict) else f"write it as {RECORD}"
    for key, value in reversed(row.items()) if isinstance(row, dict) else ():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            way = (
                Words("use", Setting("text_column", key))
                if {"role", "from"} & value[0].keys()
                else f"if the records are those of {key}, write that list to a file of its own"
            )
    return BrokenRecord(f"has no {what}: {_keys(row)}", where, way)


def _keys(row: Any) -> str:
    if not isinstance(row, dict):
        return "it is no object with keys"
    return f"found the keys {', '.join(map(str, row))[:200]}" if row else "it has no keys"


def _encoding(data: bytes) -> str:
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")


def _json_array(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(decoded(path))
        json.dumps(rows, ensure_ascii=False).encode()  # tokenizers refuse lone surrogates
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"is not JSON ({reason(error)})",
            f"repair the file: one array, or a record {RECORD} a line",
            subject=path,
        ) from error
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield f"{path}: record {number}", row


def _json_lines(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}: line {number}"
            try:
                row = json.loads(
                    line.decode("utf-8-sig")
                )  # files that were joined have marks in between
                json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                row = BrokenRecord(f"is not JSON ({reason(error)})", where)
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            _require_fetched(file.read(1024), path)
        if not pyarrow.parquet.read_metadata(path).num_rows:  # which datasets cannot read
            return
        yield from table_rows(
            datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True),
            path,
        )
    except CheckpointError:
        raise
    except Exception as error:  # the reader raises whatever its backend raises
        raise CheckpointError(
            f"is no parquet file that can be read ({reason(error)})", "check it", subject=path
        ) from error


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, csv as arrow, string

    text = decoded(path)
    line = text.lstrip().partition("\n")[0]
    separator = max(SEPARATORS, key=line.count)
    names = next(csv.reader(io.StringIO(text), delimiter=separator), [])
    data = text.encode()
    try:
        table = arrow.read_csv(
            io.BytesIO(data),
            arrow.ReadOptions(block_size=min(len(data) + 1, 2**31 - 1)),
            arrow.ParseOptions(delimiter=separator, newlines_in_values=True),
            arrow.ConvertOptions(column_types=dict.fromkeys(names, string())),
        )
    except ArrowException as error:
        raise CheckpointError(
            f"is no table that can be read ({reason(error)})", "check the file", subject=path
        ) from error
    yield from table_rows(table.to_pylist(), path)


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null; a message keeps a null content."""
    if isinstance(value, dict):
        present = {
            key: each
            for key, each in value.items()
            if each is not None or key in ("content", "value")
        }
        return {key: _without_nulls(each) for key, each in present.items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
