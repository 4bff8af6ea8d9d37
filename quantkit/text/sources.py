"""Text for calibration and evaluation: from data sets, from files of text or records, and from
quantkit itself.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, cast

from quantkit.errors import (
    FILE,
    NAME,
    CheckpointError,
    Option,
    Setting,
    Words,
    reason,
)
from quantkit.text.conversations import Conversation
from quantkit.text.records import (
    COMPRESSED,
    LeftOut,
    decoded,
    documents,
    evaluated,
    file_rows,
    suffix_of,
    table_rows,
)

#: A top-level WikiText heading: ` = Title = ` between blank lines (formulas look alike but stand
#: inside paragraphs); deeper headings have more equals signs.
HEADING = re.compile(r"(?:\A|^ *\n)( = [^=\s](?:[^\n]*[^=\s])? = ?\n)(?= *$)", re.MULTILINE)
BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".parquet")
KNOWN = (*SUFFIXES, ".tsv")
#: These files in words.
FILES = f"a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"
#: Suffixes of files that must be unpacked first.
ARCHIVES = (".zst", ".zip", ".tar", ".tgz", ".7z")
#: A data set on the hub, and one of its configurations.
ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
#: The most rows that are read of a hub data set, in its order; many are far too large to download.
HUB_ROWS = 16384
#: Files of a folder that `save_to_disk` of datasets wrote, with splits and without.
SAVED = ("dataset_dict.json", "state.json")
#: The name of the text that comes with quantkit; `calibration_text/README.md` states its origin and
#: licence.
PACKAGED = "packaged"
PACKAGED_FILE = Path(__file__).parents[1] / "calibration_text" / "text.jsonl.gz"

#: Names that papers have for the test texts of others.
AS_IN_PAPERS = {"ptb-new": "ptb", "c4-new": "c4"}

Kind = Literal["data set", "hub", "packaged", "plain text", "records"]


@dataclass(frozen=True)
class _Named:
    """Describe a data set: its hub repository, text column, splits, and how evaluation joins its
    rows.

    Texts are joined as for the published perplexities (ALGORITHMS 15). `rows` and `test_rows` bound
    the download.
    """

    repository: str
    column: str
    join: str
    lines: bool
    train: dict[str, Any]
    test: dict[str, Any]
    rows: int | None = None
    test_rows: int | None = None


_TRAIN, _TEST, _WIKITEXT = {"split": "train"}, {"split": "test"}, {"name": "wikitext-2-raw-v1"}
#: PTB's repository has a loading script; its parquet branch has the same rows as data files.
_PARQUET = {"revision": "refs/convert/parquet"}
NAMED = {
    "wikitext2": _Named(
        "Salesforce/wikitext", "text", "\n\n", True, _WIKITEXT | _TRAIN, _WIKITEXT | _TEST
    ),
    "ptb": _Named(
        "ptb-text-only/ptb_text_only", "sentence", " ", True, _PARQUET | _TRAIN, _PARQUET | _TEST
    ),
    "c4": _Named(
        "allenai/c4",
        "text",
        " ",
        False,
        {
            "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"},
            "split": "train",
            "streaming": True,
        },
        {
            "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
            "split": "validation",
            "streaming": True,
        },
        rows=16384,
        test_rows=1100,
    ),
}


@dataclass(frozen=True)
class Documents:
    """Hold the documents of a source, in its order, and the rule that separated them.

    `undivided`: the text has no blank line that would separate documents. `left_out` counts the
    records without a document. `pair` are the keys of questions, and of answers, the last one.
    `unread` are the names of files of a folder that are of another kind than most.
    """

    texts: list[str | Conversation]
    source: str
    rule: str
    undivided: bool = False
    left_out: LeftOut = field(default_factory=LeftOut)
    pair: tuple[str, ...] = ()
    unread: Sequence[str] = ()

    @property
    def conversations(self) -> bool:
        """Whether the documents are conversations; a source has one kind only."""
        return isinstance(self.texts[0], Conversation)

    @property
    def characters(self) -> int:
        """The characters of all documents."""
        talks = (each.messages for each in self.texts if isinstance(each, Conversation))
        of_talks = sum(len(message["content"]) for talk in talks for message in talk)
        return of_talks + sum(len(each) for each in self.texts if isinstance(each, str))


def name_of_text(source: str) -> str:
    """Name a calibration source for reports and recipes: a data set as it is, a file or folder by
    its last name.

    A weight (`a.jsonl:0.5`) stays.
    """
    head = source.partition(":")[0]
    on_hub = ON_HUB.fullmatch(head) and not any(Path(path).exists() for path in (head, source))
    return source if on_hub and suffix_of(head) not in KNOWN else Path(source).name


def kind_of(source: str) -> Kind:
    """Return the kind of a calibration source; CheckpointError if it is none."""
    if source in NAMED:
        return "data set"
    if source == PACKAGED:
        return "packaged"
    path = Path(source)
    if path.is_dir() or (
        not path.exists() and ON_HUB.fullmatch(source) and suffix_of(path) not in KNOWN
    ):
        return "hub"
    return "plain text" if suffix_of(_file(source, Setting("calib", FILE))) == ".txt" else "records"


def load_documents(
    source: str,
    *,
    text_column: str | None = None,
    split: str | None = None,
    skip_bad_records: int = 0,
) -> Documents:
    """Return the documents of a source: texts, or conversations for the model's chat template.

    A source is `wikitext2`, `ptb` or `c4` (the training split), `org/name` or `org/name:config` of
    the hub or the folder of a data set (`split`, else `train`), a file, or `packaged`. Records have
    a text or a list of messages under `text_column`, else under `text`, `messages` or
    `conversations`, or two texts, such as `instruction` and `output`. A folder of .txt files is
    divided as its files are. Records without text are skipped, and at most `skip_bad_records`
    broken records. CheckpointError for a source that is missing, empty, unreadable or broken.
    """
    kind, left_out = kind_of(source), LeftOut(skip_bad_records)
    texts: Sequence[str | Conversation]
    pair: tuple[str, ...] = ()
    plain, unread = _files_of(source, split, kind)
    if kind == "data set":
        named = NAMED[source]
        found = _fetch(source, named, named.train, named.rows, Setting("calib", FILE))
        lines = "".join(row.rstrip("\n") + "\n" for row in found)
        texts, rule = _split(lines) if named.lines else (found, "one document a row")
    elif kind == "packaged":
        texts = [
            json.loads(line)["text"]
            for line in gzip.decompress(PACKAGED_FILE.read_bytes()).splitlines()
        ]
        rule = "quantkit's own text: articles, small talk, documentation, code, other languages"
    elif plain:
        parts = [(*_split(text), ends) for text, ends in map(_plain, plain)]
        texts = [text for found, *_ in parts for text in found]
        rule = "; ".join(dict.fromkeys(f"{rule}{ends}" for _, rule, ends in parts))
        rule = rule if kind == "plain text" else f"{rule}; {len(plain)} files"
    else:
        is_file = kind == "records"
        rows, each = (file_rows(Path(source)), "record") if is_file else _hub_rows(source, split)
        texts, what, pair = documents(rows, text_column, left_out)
        rule = f"one {what} a {each}"
    undivided = 0 < len(texts) == len(plain)
    texts = [text for text in texts if isinstance(text, Conversation) or text.strip()]
    if not texts:
        why = f" ({len(left_out)} records: {left_out.why})" if left_out else ""
        raise CheckpointError(
            f"holds no text{why}", Words("give another file with", Setting("calib")), subject=source
        )
    return Documents(texts, source, rule, undivided, left_out, pair, unread)


def held_out_documents() -> dict[str, str]:
    """Return packaged text that never calibrates, a document of each kind."""
    text = PACKAGED_FILE.with_name("held_out.json").read_text("utf-8")
    return cast("dict[str, str]", json.loads(text))


def load_evaluation_text(source: str, option: str = "data") -> tuple[str, str]:
    """Return the text for an evaluation and one line that describes it.

    Data sets give their test split, rows joined as in the published figures (`c4`: the first 1100
    documents of its first validation file). A .txt file is used unchanged but for CRLF; the texts
    of records are joined by blank lines. `ptb-new` and `c4-new` are the names of papers for `ptb`
    and `c4`. CheckpointError as for `load_documents`; it names the `option` of the command that
    takes the text.
    """
    source = AS_IN_PAPERS.get(source, source)
    if source in NAMED:
        named = NAMED[source]
        rows = _fetch(source, named, named.test, named.test_rows, Option(option, FILE))
        text = named.join.join(rows)
        what = (
            f"{source} ({named.repository}, {named.test['split']}, {len(rows)} rows joined by "
            f"{named.join!r})"
        )
    else:
        path = _file(source, Option(option, FILE))
        if suffix_of(path) == ".txt":
            text, ends = _plain(path)
            what = f"{path.name} (as it is{ends})"
        else:
            rows = [evaluated(where, row) for where, row in file_rows(path)]
            text, what = "\n\n".join(rows), f"{path.name} ({len(rows)} records joined by '\\n\\n')"
    if not text.strip():
        raise CheckpointError(
            "holds no text", Words("give another file with", Option(option)), subject=source
        )
    return text, what


def _plain(path: Path) -> tuple[str, str]:
    """Return the text of a file with LF for CRLF, which few models were trained on, and words if
    there was any.
    """
    text = decoded(path)
    return text.replace("\r\n", "\n"), ", CRLF read as LF" if "\r\n" in text else ""


def _split(text: str) -> tuple[list[str], str]:
    """Return the documents of plain text and the rule that separated them."""
    starts = [match.start(1) for match in HEADING.finditer(text)]
    if starts:
        borders = [0, *starts, len(text)]
        return [text[a:b] for a, b in pairwise(borders)], "one document per WikiText heading"
    parts = [part for part in BLANK_LINES.split(text) if part.strip()]
    return (
        (parts, "one document between blank lines")
        if len(parts) > 1
        else ([text], "the whole text is one document")
    )


def _files_of(source: str, split: str | None, kind: Kind) -> tuple[list[Path], list[str]]:
    """List the .txt files of a source, if it has no others to read, and the names of the files of a
    folder that are not read, because most are of another kind.
    """
    if kind == "plain text":
        return [Path(source)], []
    if (
        kind != "hub"
        or not Path(source).is_dir()
        or any(Path(source, name).exists() for name in SAVED)
    ):
        return [], []
    import datasets

    try:
        builder = datasets.load_dataset_builder(source)
    except Exception:  # what is wrong is said where the rows are read
        return [], []
    named = builder.config.data_files or {}
    read = {Path(name).resolve() for names in named.values() for name in names}
    found = (path for path in sorted(Path(source).rglob("*")) if suffix_of(path) in KNOWN)
    unread = [path.name for path in found if read and path.resolve() not in read]
    texts = named.get(split or "train", ()) if builder.name == "text" else ()
    return sorted(map(Path, texts)), unread


def _file(source: str, option: Setting | Option) -> Path:
    path = Path(source)
    if path.is_dir():
        raise CheckpointError(
            "is a folder, and a text to judge by is one file",
            Words("give one of its files with", option),
            subject=source,
        )
    if not path.is_file():
        ways = [Words(f"give a {', '.join(SUFFIXES)} file with", option), f"use {', '.join(NAMED)}"]
        rule = "no such text"
        if isinstance(option, Setting) and suffix_of(path) not in KNOWN:
            ways.append("write a data set of the hub as org/name")
            if source == "self":
                rule, ways = (
                    "models no longer write their calibration text",
                    [f"use {PACKAGED}", *ways],
                )
        raise CheckpointError(rule, *ways, subject=source)
    if suffix_of(path) not in KNOWN or (
        path.suffix.lower() in COMPRESSED and suffix_of(path) == ".parquet"
    ):
        way = (
            "decompress it"
            if path.suffix.lower() in (*COMPRESSED, *ARCHIVES)
            else f"rename or convert it to {', '.join(SUFFIXES)}"
        )
        raise CheckpointError("unknown kind of text file", way, subject=source)
    return path


def _hub_rows(source: str, split: str | None) -> tuple[Iterator[tuple[str, Any]], str]:
    """Return the first rows of a split, and the words for them in a rule."""
    import datasets

    match = None if Path(source).is_dir() else ON_HUB.fullmatch(source)
    name, config = (match[1], match[2]) if match else (source, None)
    try:
        wanted = split or "train"
        is_saved = match is None and any((Path(source) / name).exists() for name in SAVED)
        splits = (
            datasets.load_from_disk(source)
            if is_saved
            else datasets.load_dataset(name, config, streaming=True)
        )
        if isinstance(splits, datasets.Dataset):  # saved without its splits
            splits = {wanted if split is None else str(splits.split): splits}
        rows = list(islice(splits[wanted], HUB_ROWS)) if wanted in splits else None
    except Exception as error:  # offline, gone, gated, damaged: no class in common
        raise _not_loaded(source, error, Setting("calib", FILE)) from error
    if rows is None:
        raise CheckpointError(
            f"has no split {wanted}, but {', '.join(splits)}",
            Words("use", Setting("split", NAME)),
            subject=source,
        )
    first = f", the first {HUB_ROWS}" if len(rows) == HUB_ROWS else ""
    return table_rows(rows, source), f"row of the split {wanted}{first}"


def _fetch(
    source: str, named: _Named, options: dict[str, Any], limit: int | None, option: str
) -> list[str]:
    import datasets

    try:
        rows = datasets.load_dataset(named.repository, **options)
        return [str(row[named.column]) for row in islice(rows, limit)]
    except Exception as error:  # offline, gone, moved, out of disk: no class in common
        raise _not_loaded(source, error, option) from error


def _not_loaded(source: str, error: Exception, option: str) -> CheckpointError:
    """Return the error of a data set that cannot be loaded; `option` is where this command takes a
    file.
    """
    from quantkit.io import hub  # it imports torch, and commands take names from this module

    way = Words(f"give a {', '.join(SUFFIXES)} file with", option)
    name = f" (the data set {NAMED[source].repository})" if source in NAMED else ""
    repository = NAMED[source].repository if source in NAMED else source.partition(":")[0]
    if not Path(source).exists() and (found := hub.reasons_of_data(error, repository)):
        return CheckpointError(*found, way, subject=source)
    return CheckpointError(
        f"cannot be loaded ({reason(error)})",
        "check the name, written org/name or org/name:config",
        way,
        subject=f"{source}{name}",
    )
