"""Calibration sequences: lengths, windows and seeds, and too little text is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.calibration_data import draw_calibration
from tests.tiny_models import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def paragraphs(folder: Path, lengths: list[int]) -> str:
    """Write a file of documents with these lengths in bytes, each of one letter."""
    return write(folder / "text.txt", "\n\n".join(chr(97 + i % 26) * n for i, n in enumerate(lengths)))


def test_own_lengths_are_neither_padded_nor_joined(tmp_path: Path, tokenizer: Any) -> None:
    lengths = [5, 1, 40, 200, 7, 90]
    source = paragraphs(tmp_path, lengths)
    found = draw_calibration(source, tokenizer, samples=5, max_length=64, seed=3)
    assert sorted(len(s) for s in found.sequences) == [5, 7, 40, 64, 64]
    assert all(len(set(s.tolist())) == 1 for s in found.sequences)  # one letter: one document
    facts = found.facts
    assert (facts["sequences"], facts["tokens"], facts["cut"], facts["documents"]) == (5, 180, 2, 6)
    assert facts["skipped"] <= 1  # the one-token document, if it was drawn before the fifth usable one


def test_the_seed_determines_documents_and_windows(tmp_path: Path, tokenizer: Any) -> None:
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


def test_invalid_numbers_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    source = paragraphs(tmp_path, [30])
    for samples, max_length in ((0, 32), (1, 1)):
        with pytest.raises(RecipeError):
            draw_calibration(source, tokenizer, samples=samples, max_length=max_length, seed=0)
