"""The campaign cannot pass by running less than it must."""

from __future__ import annotations

import json
from pathlib import Path

from tests.reliability.campaign import Family, Run, families, problems, run
from tests.reliability.page import table

ROOT = Path(__file__).resolve().parents[2]


def outcome(tmp_path: Path, least: int, *passed: bool) -> list[str]:
    def attack(found: Run) -> None:
        for i, ok in enumerate(passed):
            with found.case(f"case {i}"):
                assert ok

    family = Family("X1", "a family", (least, 0, 0), attack)
    return problems({"families": {"X1": run(family, "pr", 0, tmp_path, tmp_path)}})


def test_too_few_cases_fail(tmp_path: Path) -> None:
    assert not outcome(tmp_path, 2, True, True)
    assert "ran 2 cases, 3 are due" in outcome(tmp_path, 3, True, True)[0]


def test_a_failed_case_fails_the_campaign_and_the_others_still_run(tmp_path: Path) -> None:
    assert "1 of 3 cases failed: case 1" in outcome(tmp_path, 3, True, False, True)[0]


def test_a_family_that_breaks_off_fails(tmp_path: Path) -> None:
    def attack(found: Run) -> None:
        raise OSError("broken")

    family = Family("X1", "a family", (0, 0, 0), attack)
    assert "ended early" in problems({"families": {"X1": run(family, "pr", 0, tmp_path, tmp_path)}})[0]


def test_the_page_states_the_least_cases_and_what_ran_at_night() -> None:
    result = json.loads((ROOT / "benchmarks/reliability.json").read_text())
    assert result["column"] == "nightly" and not problems(result)
    assert result["families"].keys() == families().keys()
    assert all(family.least("nightly") <= result["families"][name]["cases"] for name, family in families().items())
    assert table(result) in (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
