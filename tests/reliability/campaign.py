"""What a family of attacks is, and how its cases are counted: a failed case is recorded, and the others still run."""

from __future__ import annotations

import importlib
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The sizes of a campaign: on every change, once a day, before a release.
COLUMNS = ("pr", "nightly", "release")
#: The modules of this package that hold families, in the order of their start: a long family at the end has one core.
MODULES = ("surroundings", "kills", "disk", "headers", "flips", "folders")
MODULES += ("values", "memory", "stopping", "repeats", "packing", "perplexity")
#: Failures whose text is kept; all are counted.
KEPT = 20


@dataclass
class Run:
    """One run of a family: its least number of cases, its random numbers, its scratch folder, and what it found.

    All families of a campaign have `shared`. `facts` are figures that the family measured. They go into the result.
    """

    column: str
    least: int
    seed: int
    folder: Path
    shared: Path
    cases: int = 0
    failures: int = 0
    failed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def random(self, *key: object) -> random.Random:
        """Return random numbers that depend on the seed and `key` alone, so that one case can be run again."""
        return random.Random(repr((self.seed, *key)))

    def draws(self, key: str) -> Iterator[tuple[int, random.Random]]:
        """Yield the number and the random numbers of each case that the family must run."""
        for number in range(self.least):
            yield number, self.random(key, number)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Count a case; an exception in the block is its failure, and does not leave the block."""
        self.cases += 1
        try:
            yield
        except Exception as error:
            self.fail(name, f"{type(error).__name__}: {error}", traceback.format_exc())

    def fail(self, name: str, what: str, details: str = "") -> None:
        """Record the failure of a case that was counted."""
        self.failures += 1
        if len(self.failed) < KEPT:
            self.failed.append(f"{name}: {what}\n{details[-4000:]}".strip())

    def passed(self, cases: int) -> None:
        """Count cases that passed without a block of their own, of families with a million of them."""
        self.cases += cases


@dataclass(frozen=True)
class Family:
    """A family of attacks: the least number of cases in each column, and the function that runs them.

    `counts` has a number for pr, nightly and release. 0 leaves the family out of that column.
    """

    id: str
    title: str
    counts: tuple[int, int, int]
    attack: Callable[[Run], None]

    def least(self, column: str) -> int:
        """Return the least number of cases in a column."""
        return self.counts[COLUMNS.index(column)]


def families() -> dict[str, Family]:
    """Import every module of families; id -> family."""
    found: dict[str, Family] = {}
    for name in MODULES:
        for family in importlib.import_module(f"tests.reliability.{name}").FAMILIES:
            assert family.id not in found, family.id
            found[family.id] = family
    return found


def run(family: Family, column: str, seed: int, folder: Path, shared: Path) -> dict[str, Any]:
    """Run one family in this process; returns its entry of reliability.json."""
    found = Run(column, family.least(column), seed, folder, shared)
    began = time.monotonic()
    try:
        family.attack(found)
    except Exception as error:  # the family itself is broken: nothing after it was tried
        found.fail(family.id, f"ended early: {type(error).__name__}: {error}", traceback.format_exc())
    return entry(family, found, time.monotonic() - began)


def alone(name: str, column: str, seed: int, shared: Path, result: Path, said: Path) -> None:
    """Run one family in a process that is its own: its entry goes into `result`, what it prints into `said`."""
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        found = run(families()[name], column, seed, Path(folder), shared)
    result.write_text(json.dumps(found))


def entry(family: Family, found: Run, seconds: float) -> dict[str, Any]:
    """Build a family's entry of reliability.json; too few cases are a failure."""
    if found.cases < found.least:
        found.fail(family.id, f"ran {found.cases} cases, {found.least} are due")
    return {
        "title": family.title,
        "cases": found.cases,
        "least": found.least,
        "failures": found.failures,
        "seconds": round(seconds, 1),
        "facts": found.facts,
        "failed": found.failed,
    }


def problems(result: Mapping[str, Any]) -> list[str]:
    """List the lines of reliability.json that make a campaign fail."""
    return [
        f"{name}: {entry['failures']} of {entry['cases']} cases failed: {(entry['failed'] or [''])[0].splitlines()[0]}"
        for name, entry in result["families"].items()
        if entry["failures"]
    ]
