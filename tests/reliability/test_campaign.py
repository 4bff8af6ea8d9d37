"""The campaign cannot pass by running less than it must."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.reliability.campaign import COLUMNS, Family, Run, families, problems, run
from tests.reliability.page import table

#: The dearest families on each change, by the seconds of a case at night: there they run 40 % of what was specified.
DEAR = {"D1", "E1", "K2", "R3"}
#: Families of other campaigns: `make gpu` runs those that need a GPU.
ELSEWHERE = {"R2"}


def outcome(tmp_path: Path, least: int, *passed: bool) -> list[str]:
    def attack(found: Run) -> None:
        for i, ok in enumerate(passed):
            with found.case(f"case {i}"):
                assert ok

    family = Family("X1", "a family", (least, 0, 0), attack)
    return problems({"families": {"X1": run(family, "pr", 0, tmp_path)}})


def test_too_few_cases_fail(tmp_path: Path) -> None:
    assert not outcome(tmp_path, 2, True, True)
    assert "ran 2 cases, 3 are due" in outcome(tmp_path, 3, True, True)[0]


def test_a_failed_case_fails_the_campaign_and_the_others_still_run(tmp_path: Path) -> None:
    assert "1 of 3 cases failed: case 1" in outcome(tmp_path, 3, True, False, True)[0]


def test_a_family_that_breaks_off_fails(tmp_path: Path) -> None:
    def attack(found: Run) -> None:
        raise OSError("broken")

    family = Family("X1", "a family", (0, 0, 0), attack)
    assert "ended early" in problems({"families": {"X1": run(family, "pr", 0, tmp_path)}})[0]


def test_the_cases_of_each_family_are_those_of_the_specification(shared: Path) -> None:
    rows = re.findall(r"^\| ([A-Z]\d) \|(.*)\|$", (shared / "spec/RELIABILITY.md").read_text(), re.MULTILINE)
    assert len(rows) > 25
    known = families()
    assert {name for name, _ in rows} - ELSEWHERE == known.keys()
    for name, row in rows:
        if name in ELSEWHERE:
            continue
        for column, cell in zip(COLUMNS, row.split("|")[-5:-2], strict=True):
            stated = re.match(r" *([\d.]+) ?([kM]?)", cell)
            due = float(stated[1]) * {"": 1, "k": 1e3, "M": 1e6}[stated[2]] if stated else 1 if "all" in cell else 0
            due *= 0.4 if name in DEAR and column == "pr" else 1
            assert known[name].least(column) >= due, (name, column)


def test_the_page_states_what_ran_at_night() -> None:
    root = Path(__file__).resolve().parents[2]
    result = json.loads((root / "benchmarks/reliability.json").read_text())
    assert result["column"] == "nightly" and not problems(result)
    assert result["families"].keys() == {name for name, family in families().items() if family.least("nightly")}
    assert table(result) in (root / "docs/reliability.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(families()))
def test_every_family_says_what_it_shows(name: str) -> None:
    assert re.fullmatch(r"[A-Z]\d", name) and families()[name].title[0].islower()
