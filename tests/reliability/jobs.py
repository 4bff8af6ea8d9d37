"""Command lines that families disturb, what each gives when nobody does, and hooks that disturb them."""

from __future__ import annotations

import fcntl
import itertools
import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration import budget
from quantkit.io import files
from quantkit.io.staging import JOURNAL
from tests.reliability import samples
from tests.reliability.campaign import Run
from tests.reliability.forks import Ended, command, run

Work = Callable[[], int | None]
#: Called before each operation on the disk, with its name and its path.
Hook = Callable[[str, Path], None]


@dataclass(frozen=True)
class Job:
    """A command without its output folder, and what an undisturbed run writes, into `reference`, and takes.

    `operations` are those on the disk, `commits` the lines of its journal, `events` those of Python's audit.
    """

    name: str
    words: tuple[object, ...]
    reference: Path
    files: dict[str, str]
    report: object
    operations: int
    commits: int
    events: int
    seconds: float

    def line(self, out: Path, *options: object) -> tuple[object, ...]:
        return (*self.words, "-o", out, *options)

    @property
    def resumes(self) -> bool:
        return self.words[0] != "pack"


class Jobs(dict[str, Job]):
    """The jobs of a model of some blocks; each runs once for all families, when one of them first asks for it."""

    def __init__(self, found: Run, blocks: int = 2) -> None:
        self.folder = folder = found.shared / f"{blocks} blocks"
        self.source, self.text = folder / "source", folder / "calib.txt"
        text = ("--calib", self.text, *samples.SHORT)
        rounding, packed = ("quantize", self.source, "--method", "rtn", "-q"), folder / "packed"
        self.lines: dict[str, tuple[object, ...]] = {
            "calibrated": ("quantize", self.source, *text),
            "fp6": ("quantize", self.source, "--format", "fp6", *text),
            "pruned": ("prune", self.source, "--calib", self.text, *samples.FEW),
            "rounded": rounding,
            "mapped": ("quantize", self.source, "--act-budget", "1KB", *text),
            "pack": ("pack", packed, "--layout", "marlin", "-q"),
        }
        folder.mkdir(exist_ok=True)
        with self.alone():
            if not packed.exists():
                samples.model(self.source, blocks)
                samples.text(self.text)
                samples.quantkit(folder, *rounding, "-o", packed)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other family make a job in the block."""
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def __missing__(self, name: str) -> Job:
        known = self.folder / f"{name}.pickle"
        with self.alone():
            if not known.exists():
                known.write_bytes(pickle.dumps(self.undisturbed(name)))
        self[name] = pickle.loads(known.read_bytes())
        return self[name]

    def undisturbed(self, name: str) -> Job:
        """Run a job, and note what it writes and how many operations, commits and events it takes."""
        words, out, counted = self.lines[name], self.folder / f"{name}-reference", self.folder / "counted.json"
        seen = [0, 0, 0]

        def work() -> int | None:
            def operation(what: str, path: Path) -> None:
                seen[0] += 1
                seen[1] += is_commit(what, path)

            def event(what: str, values: tuple[Any, ...]) -> None:
                seen[2] += 1

            budget.BESIDE["cpu"] = False  # the family that asks may have drawn another
            sys.addaudithook(event)
            try:
                return hooked(command(*words, "-o", out), operation)()
            finally:
                files.FAULT = None
                counted.write_text(json.dumps(seen))

        ended = run(work, self.folder)
        assert ended.code == 0, ended.stderr
        stated = samples.digests(out), samples.report(out), *json.loads(counted.read_text())
        return Job(name, words, out, *stated, ended.seconds)


def is_commit(what: str, path: Path) -> bool:
    """Return whether an operation begins a line of the journal."""
    return what == "open" and path.name == JOURNAL


def hooked(work: Work, hook: Hook) -> Work:
    """Return work with a hook before each operation on the disk."""

    def watched() -> int | None:
        files.FAULT = hook
        return work()

    return watched


def at_operation(number: int, act: Callable[[], object], work: Work) -> Work:
    """Return work that acts just before its operation `number` on the disk."""
    seen = itertools.count(1)  # its numbers differ in all threads

    def hook(operation: str, path: Path) -> None:
        if next(seen) == number:
            act()

    return hooked(work, hook)


def same(job: Job, out: Path) -> None:
    """Ask for the bytes of an undisturbed run, and for nothing beside them; then remove them."""
    assert samples.digests(out) == job.files, "other files or bytes"
    assert [path.name for path in out.parent.glob(f"{out.name}*")] == [out.name], "something is left beside the output"
    shutil.rmtree(out)


def continued(job: Job, out: Path, scratch: Path) -> None:
    """Continue a run in the way that it offered, and ask for the bytes of an undisturbed one."""
    assert not out.exists(), "an output folder is there"
    left = list(out.parent.glob(f"{out.name}.partial-*"))
    options = ("--resume" if job.resumes else "--overwrite",) if left else ()
    samples.quantkit(scratch, *job.line(out, *options))
    same(job, out)


def judged(
    job: Job, ended: Ended, out: Path, scratch: Path, *says: str, code: int = 1, completes: bool | None = None
) -> bool:
    """Judge a disturbed run: it completed with the usual bytes, or ended with `code` in a line with all patterns.

    `completes` says which of both is due (None: either). If only what follows the last rename failed, the output is
    whole. Returns True if the run is to be continued.
    """
    assert completes is None or completes == (ended.code == 0), f"exit {ended.code}: {ended.stderr}"
    if ended.code:
        assert ended.code == code, f"exit {ended.code}: {ended.stderr}"
        if code > 0:
            samples.one_line(ended)
            assert all(re.search(pattern, ended.stderr) for pattern in says), f"not {says}: {ended.stderr}"
        if not out.exists():
            assert job.resumes or not list(out.parent.glob(f"{out.name}*")), (
                "a command that cannot resume left something"
            )
            return True
    same(job, out)
    return False


def survives(job: Job, ended: Ended, out: Path, scratch: Path, *says: str, **due: Any) -> None:
    """Judge a disturbed run, and continue it."""
    if judged(job, ended, out, scratch, *says, **due):
        continued(job, out, scratch)


@contextmanager
def case(found: Run, name: str, out: Path) -> Iterator[None]:
    """Count a case, and leave nothing of it."""
    with found.case(name):
        yield
    for path in out.parent.glob(f"{out.name}*"):
        shutil.rmtree(path, ignore_errors=True)


def chosen(found: Run, everything: list[Any], fewer: int, key: str) -> list[Any]:
    """Return all cases, or in the column for every change a sample of them."""
    return everything if found.column != "pr" else found.random(key).sample(everything, fewer)
