"""Text sources: documents of every kind of file, and refusals that name the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.errors import CheckpointError
from quantkit.models.text_sources import load_documents, load_evaluation_text

WIKI = " \n = One = \n \n Text of one , x = 5 . \n \n = = Part = = \n \n More . \n \n = Two = \n \n Text of two . \n"


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_wikitext_articles_are_whole_and_complete(tmp_path: Path) -> None:
    found = load_documents(write(tmp_path / "wiki.txt", WIKI))
    assert [text.split("\n")[0].strip() for text in found.texts] == ["= One =", "= Two ="]
    assert "".join(found.texts) == WIKI.removeprefix(" \n")
    assert "heading" in found.rule


def test_a_formula_is_not_a_heading(tmp_path: Path) -> None:
    text = WIKI.replace("Text of one , x = 5 . \n", "where \n = 7 / 2 ) is ( J = \n and so on \n")
    assert len(load_documents(write(tmp_path / "wiki.txt", text)).texts) == 2


@pytest.mark.parametrize(("part", "articles"), [("train", 600), ("valid", 60), ("test", 60)])
def test_wikitext2_has_its_official_number_of_articles(shared: Path, part: str, articles: int) -> None:
    assert len(load_documents(str(shared / "data" / "wikitext2" / f"{part}.txt")).texts) == articles


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    assert load_documents(write(tmp_path / "a.txt", "one\nline\n\n \t\n\n  two\r\n\r\nthree\n")).texts == [
        "one\nline",
        "  two",
        "three\n",
    ]
    found = load_documents(write(tmp_path / "b.txt", "one\ntwo\n"))
    assert (found.texts, found.rule) == (["one\ntwo\n"], "the whole text is one document")


def test_records_of_jsonl_and_parquet_are_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ["first\n\nstill first", "second", "ünï – 三"]
    lines = "\n".join(json.dumps({"text": t, "id": i}) for i, t in enumerate(texts))
    jsonl = write(tmp_path / "a.jsonl", lines + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for source in (jsonl, str(tmp_path / "a.parquet")):
        assert load_documents(source).texts == texts
        assert load_evaluation_text(source)[0] == "\n\n".join(texts)


def test_an_evaluation_text_is_unchanged(tmp_path: Path) -> None:
    raw = " \n = One = \r\n\n  tail  "
    assert load_evaluation_text(write(tmp_path / "raw.txt", raw))[0] == raw


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "no text"),
        ("a.txt", b" \n\n\t\n", "no text"),
        ("a.txt", b"abc\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "record 2 has no string called text"),
        ("a.jsonl", b'["text"]\n', "record 1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 is not JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"}", "line 1 is not JSON"),
        ("a.jsonl", b"", "no text"),
        ("a.parquet", b"PAR1 not at all", "no parquet file"),
        ("a.csv", b"text\nx\n", "unknown kind"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    source = write(tmp_path / name, content)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_documents(source)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused_with_the_names_of_data_sets() -> None:
    with pytest.raises(CheckpointError, match="wikitext2, ptb, c4"):
        load_documents("wikitext3")


def test_a_data_set_that_cannot_be_downloaded_gives_a_one_line_error(tmp_path: Path) -> None:
    code = "from quantkit.models.text_sources import load_documents; load_documents('wikitext2')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("quantkit.errors.CheckpointError: wikitext2: the data set Salesforce/wikitext cannot be")
    assert "--calib FILE" in last
