"""Calibration text: nothing cut short, mixed up or drawn differently without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.calibration_data import draw_calibration
from quantkit.models.text_sources import load_documents, load_evaluation_text
from tests.tiny_models import byte_tokenizer

WIKI = " \n = One = \n \n Text of one , x = 5 . \n \n = = Part = = \n \n More . \n \n = Two = \n \n Text of two . \n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def paragraphs(folder: Path, lengths: list[int]) -> str:
    """A file of documents of so many bytes, each of a letter of its own."""
    return write(folder / "text.txt", "\n\n".join(chr(97 + i % 26) * n for i, n in enumerate(lengths)))


def test_wikitext_articles_are_whole_and_complete(tmp_path: Path) -> None:
    found = load_documents(write(tmp_path / "wiki.txt", WIKI))
    assert [text.split("\n")[0].strip() for text in found.texts] == ["= One =", "= Two ="]
    assert "".join(found.texts) == WIKI.removeprefix(" \n")
    assert "heading" in found.rule


def test_a_formula_is_no_heading(tmp_path: Path) -> None:
    text = WIKI.replace("Text of one , x = 5 . \n", "where \n = 7 / 2 ) is ( J = \n and so on \n")
    assert len(load_documents(write(tmp_path / "wiki.txt", text)).texts) == 2


@pytest.mark.parametrize(("part", "articles"), [("train", 600), ("valid", 60), ("test", 60)])
def test_wikitext2_has_its_official_number_of_articles(shared: Path, part: str, articles: int) -> None:
    assert len(load_documents(str(shared / "data" / "wikitext2" / f"{part}.txt")).texts) == articles


def test_blank_lines_separate_and_a_text_without_them_is_one(tmp_path: Path) -> None:
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


def test_an_evaluation_text_is_not_touched(tmp_path: Path) -> None:
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
def test_a_bad_file_is_refused_by_name(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    source = write(tmp_path / name, content)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_documents(source)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_told_from_a_data_set() -> None:
    with pytest.raises(CheckpointError, match="wikitext2, ptb, c4"):
        load_documents("wikitext3")


def test_own_lengths_are_neither_padded_nor_joined(tmp_path: Path, tokenizer: Any) -> None:
    lengths = [5, 1, 40, 200, 7, 90]
    source = paragraphs(tmp_path, lengths)
    found = draw_calibration(source, tokenizer, samples=5, max_length=64, seed=3)
    assert sorted(len(s) for s in found.sequences) == [5, 7, 40, 64, 64]
    assert all(len(set(s.tolist())) == 1 for s in found.sequences)  # one letter: one document
    facts = found.facts
    assert (facts["sequences"], facts["tokens"], facts["cut"], facts["documents"]) == (5, 180, 2, 6)
    assert facts["skipped"] <= 1  # the one-token document, if it was met before the fifth usable one


def test_the_seed_decides_documents_and_windows(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.txt", "\n\n".join(f"{i:04}" * (i + 1) for i in range(50)))

    def draw(seed: int) -> str:
        return str(draw_calibration(source, tokenizer, samples=8, max_length=32, seed=seed).facts["sha256"])

    torch.manual_seed(1)
    first = draw(0)
    torch.manual_seed(2)
    assert draw(0) == first != draw(1)


def test_a_window_can_lie_anywhere_in_a_document(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.txt", "".join(chr(97 + i % 26) for i in range(20)))
    starts = {
        int(draw_calibration(source, tokenizer, samples=1, max_length=18, seed=s).sequences[0][0]) for s in range(40)
    }
    assert len(starts) == 3  # offsets 0, 1 and 2, the last one included


def test_fixed_windows_are_exact_and_never_overlap(tmp_path: Path, tokenizer: Any) -> None:
    source = paragraphs(tmp_path, [10, 30, 25, 60])
    found = draw_calibration(source, tokenizer, samples=7, max_length=16, seed=0, lengths="fixed")
    assert [len(s) for s in found.sequences] == [16] * 7
    stream = "".join(tokenizer.decode(s) for s in found.sequences)
    assert sum(stream.count(letter) for letter in "abcd") == 112
    assert stream.count("a") <= 10 and stream.count("d") <= 60


@pytest.mark.parametrize("lengths", ["own", "fixed"])
def test_too_little_text_is_refused_with_both_numbers(lengths: Any, tmp_path: Path, tokenizer: Any) -> None:
    source = paragraphs(tmp_path, [30, 1, 30])
    with pytest.raises(CheckpointError, match=r"(?s)holds (2|61) .*(9|288).*--samples (2|1),"):
        draw_calibration(source, tokenizer, samples=9, max_length=32, seed=0, lengths=lengths)


def test_senseless_numbers_are_usage_errors(tmp_path: Path, tokenizer: Any) -> None:
    source = paragraphs(tmp_path, [30])
    for samples, max_length in ((0, 32), (1, 1)):
        with pytest.raises(RecipeError):
            draw_calibration(source, tokenizer, samples=samples, max_length=max_length, seed=0)


def test_a_data_set_that_cannot_be_fetched_is_one_line(tmp_path: Path) -> None:
    code = "from quantkit.models.text_sources import load_documents; load_documents('wikitext2')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("quantkit.errors.CheckpointError: wikitext2: the data set Salesforce/wikitext cannot be")
    assert "--calib FILE" in last
