"""The watch over engines: which page it writes, and when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engines import watch

PAGE = "before\n\n<!-- make engines -->\nold\n<!-- end -->\nbehind\n"


@pytest.mark.parametrize(("ran", "wrong", "code"), [(9, [], 0), (9, ["loads"], 1), (0, [], 1)])
def test_a_failed_check_and_none_at_all_end_with_1(
    ran: int, wrong: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, _, file, start in watch.ENGINES.values():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f'{start} [\n    "awq",\n    "gptq_marlin",\n]\nOTHER = [\n    "humming",\n]\n')
    facts = {"version": "9.9", "requires_dist": ["torch==2.14.0", "torchaudio==2", 'transformers>=5; extra == "x"']}
    monkeypatch.setattr(watch, "newest", lambda *options: {options[-1]: {"metadata": facts}})
    monkeypatch.setattr(watch, "environment", lambda: tmp_path)
    monkeypatch.setattr(watch, "fetched", lambda name, package: tmp_path)
    monkeypatch.setattr(watch, "failures", lambda name, place, home: (ran, wrong))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert watch.main(page) == code
    text = page.read_text()
    said = f"| {ran - len(wrong)} of {ran} pass{'; not loads' if wrong else ''} |\n"
    assert text.count(f"| torch==2.14.0, transformers>=5 | gptq_marlin, awq {said}") == 2
    assert "| vLLM 9.9 |" in text and "| SGLang 9.9 |" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nbehind\n")
