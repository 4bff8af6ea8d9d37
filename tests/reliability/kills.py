"""Runs that are killed at any moment continue to the same bytes, or left nothing (K1 to K4)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import quantkit
from quantkit.calibration import budget, loop
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.io.staging import JOURNAL, read_journal
from tests.faults import Killed, faults, killer
from tests.reliability import power, samples
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import Ended, command, run, start, wait
from tests.reliability.jobs import Job, Jobs, Work, at_operation, chosen, hooked, is_commit, same

#: Bytes of one commit of a streamed run, so that a small model has several.
COMMIT_BYTES = 300_000
#: Files that a run removes before it publishes.
WORK = ("lock", JOURNAL, "activations-")
NAMES = ("calibrated", "fp6", "pruned", "rounded", "mapped")


def jobs(found: Run) -> Jobs:
    """Write a model of four blocks, whose streamed runs commit several times."""
    loop.COMMIT_BYTES = COMMIT_BYTES
    return Jobs(found, 4)


def everything(out: Path) -> dict[str, str]:
    """Hash every file of an output but the report, and those with which only a run works."""
    return {name: digest for name, digest in samples.digests(out).items() if not name.startswith((".", *WORK))}


def partial_of(out: Path) -> Path | None:
    """Return the folder in which a run works, None if there is none."""
    found = list(out.parent.glob(f"{out.name}.partial-*"))
    assert len(found) < 2
    return found[0] if found else None


def one_of_three_states(job: Job, out: Path) -> int:
    """Ask for no output, or only a partial one that nobody opens, or a whole one; returns the journal's lines."""
    partial = partial_of(out)
    assert {path for path in out.parent.iterdir() if path.name.startswith(out.name)} <= {out, partial}
    if out.exists():
        assert partial is None, "an output and a partial one"
        assert samples.digests(out) == job.files and samples.report(out) == job.report
    if partial is None:
        return 0
    if (partial / "config.json").exists():
        assert everything(partial) == job.files, "config.json is there before the other files"
        assert samples.report(partial) == job.report
    else:
        for opened in (Checkpoint, quantkit.load):
            try:
                opened(partial)
            except QuantkitError:
                continue
            raise AssertionError(f"{opened.__name__} opens a partial folder")
    return len(read_journal(partial / JOURNAL))


def resumed(job: Job, out: Path, scratch: Path, kills: int = 1) -> None:
    """Continue a run killed `kills` times, and ask for the same bytes and nothing beside; the case's folder then goes.

    What was committed must not be computed again: the bytes of a run that began anew would be the same.
    """
    if not out.exists():
        partial, counted = partial_of(out), scratch / "commits"
        before = 0 if partial is None else len(read_journal(partial / JOURNAL))
        counted.write_text("")

        def count(what: str, path: Path) -> None:
            if is_commit(what, path):
                with counted.open("a") as file:
                    file.write("x")

        ended = run(hooked(command(*job.line(out, "--resume")), count), scratch)
        assert ended.code == 0 and "Traceback" not in ended.stderr, ended.stderr
        again = before + counted.stat().st_size - job.commits
        # The last line of each run may have no more than the times of what was left to do.
        assert again <= kills, f"{again} units of work were committed twice"
    assert samples.report(out) == job.report, "another report"
    same(job, out)
    out.parent.rmdir()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before(work: Work, operation: int) -> Work:
    """Return work that is killed before an operation on the disk; after all of them if there are no more."""

    def watched() -> int | None:
        with suppress(SystemExit):
            at_operation(operation, die, work)()
        die()
        return None

    return watched


def killed_at_event(work: Work, event: int) -> Work:
    """Return work that is killed at an event of Python's audit."""

    def watched() -> int | None:
        seen = itertools.count(1)  # its numbers differ in all threads
        sys.addaudithook(lambda what, values: die() if next(seen) == event else None)
        return work()

    return watched


def killed_after(work: Work, seconds: float, scratch: Path) -> Ended:
    """Run work and kill it after some seconds."""
    pid = start(work, scratch)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)  # it is not waited for yet, so the number is still its own
    return wait(pid, scratch)


@contextmanager
def killed(found: Run, key: str, job: Job, case: str) -> Iterator[Path]:
    """Count a case, and yield its output in a folder of its own.

    On a number drawn for the case depends whether runs write finished blocks beside the computing, as on a GPU.
    """
    budget.BESIDE["cpu"] = found.random(key, "beside", job.name, case).random() < 0.5
    out = found.folder / f"case{found.cases}" / "out"
    with found.case(f"{job.name}, {case}"):
        out.parent.mkdir()
        yield out


def attack_at_random_instants(found: Run) -> None:
    """Kill at a random time, or at a random event of Python's audit."""
    known = jobs(found)
    states = {"nothing": 0, "partial": 0, "complete": 0}
    for i, rng in found.draws("K1"):
        job, timed, share = known[rng.choice(("calibrated", *NAMES))], rng.random() < 0.5, rng.random()
        with killed(found, "K1", job, f"case {i}: {'time' if timed else 'event'} {share:.4f}") as out:
            code = 0
            while code != -signal.SIGKILL:  # a fast run may be over before its time
                shutil.rmtree(out, ignore_errors=True)
                work = command(*job.line(out))
                if timed:
                    ended = killed_after(work, share * job.seconds, found.folder)
                else:
                    ended = run(killed_at_event(work, 1 + int(share * job.events)), found.folder)
                code, share = ended.code, share * 0.8
                assert code in (0, -signal.SIGKILL), ended.stderr
            one_of_three_states(job, out)
            states["complete" if out.exists() else "partial" if partial_of(out) else "nothing"] += 1
            resumed(job, out, found.folder)
    found.facts["states"] = states


def attack_at_every_operation(found: Run) -> None:
    """Kill before each operation, and after the last: before an operation is after the one before it."""
    known = jobs(found)
    names = {"pr": NAMES, "nightly": NAMES[:1]}.get(found.column, NAMES[:3])
    found.facts["operations"] = {name: known[name].operations for name in names}
    instants = [(known[name], k) for name in names for k in range(1, known[name].operations + 2)]
    for job, k in chosen(found, instants, found.least, "K2"):
        with killed(found, "K2", job, f"operation {k} of {job.operations}") as out:
            ended = run(killed_before(command(*job.line(out)), k), found.folder)
            assert ended.code == -signal.SIGKILL, f"exit {ended.code}: {ended.stderr}"
            one_of_three_states(job, out)
            assert out.exists() or k <= job.operations, "the run is over, and no output is there"
            resumed(job, out, found.folder)


def attack_with_power_cuts(found: Run) -> None:
    """Cut the power at every operation of a run, and at those of a run that continues a killed one.

    Two instants may leave the same folder. Then it is continued once, and counts for both.
    """
    known = jobs(found)
    names = NAMES[:1] if found.column == "nightly" else NAMES
    kept: dict[str, str] = {}
    for name in names:
        job = known[name]
        rng = found.random("K3", name)
        # Near the end the output may be there, and then nothing is continued.
        firsts: list[int | None] = [None, *sorted(rng.sample(range(20, job.operations - 10), 3))]
        for first in firsts:
            for case, world, committed in power_cuts(found, job, first):
                with found.case(f"{name}, {case}"):
                    if world not in kept:
                        kept[world] = "the folder of an earlier case that failed"
                        out = found.folder / world / "out"
                        lines = one_of_three_states(job, out)
                        complete = out.exists() or (lines == 0 and is_complete(out))
                        # The first line names the run, and alone is no work: a run that continues it begins anew.
                        none_lost = complete or lines >= committed or committed == 1
                        assert none_lost, f"{committed - lines} lines of the journal are lost"
                        assert committed >= 0 or out.exists(), "the run was over, and its output is lost"
                        resumed(job, out, found.folder, 1 if first is None else 2)
                        kept[world] = ""
                    assert not kept[world], kept[world]
    found.facts["different folders"] = len(kept)


def is_complete(out: Path) -> bool:
    partial = partial_of(out)
    return partial is not None and (partial / "config.json").exists()


def power_cuts(found: Run, job: Job, first: int | None) -> Iterator[tuple[str, str, int]]:
    """Run a job, and write each folder that a power cut may leave; yields (case, folder, lines that must be there).

    With `first` the job is killed before that operation, and continued. -1 lines: the run is over.
    """
    folder = found.folder / f"{job.name}-{first}"
    folder.mkdir()
    root, noted = folder / "disk", folder / "noted.json"
    root.mkdir()

    def work() -> int | None:
        disk = power.Disk(root)
        cuts: list[tuple[str, str, int]] = []
        number = 0

        def note(over: bool = False) -> None:
            for how in power.CRASHES:
                rng = found.random("K3", job.name, first, number, how)
                world = disk.crashed(how, rng)
                name = power.digest(world) + ("-over" if over else f"-{disk.committed}")
                if not (found.folder / name).exists():
                    power.write(world, found.folder / name)
                after = "" if first is None else f"continued after operation {first}, "
                cuts.append((f"{after}operation {number}, {how}", name, -1 if over else disk.committed))

        def hook(operation: str, path: Path) -> None:
            nonlocal number
            disk.hook(operation, path)
            number += 1
            note()

        options: tuple[str, ...] = ()
        if first is not None:
            kill = killer(first)

            def before(operation: str, path: Path) -> None:
                disk.hook(operation, path)
                kill(operation, path)

            with faults(before):
                try:
                    command(*job.line(root / "out"))()
                except Killed:
                    options = ("--resume",)
            disk.settle()
        with faults(hook):
            try:
                command(*job.line(root / "out", *options))()
            except SystemExit as left:
                assert not left.code
        disk.settle()
        note(over=True)
        noted.write_text(json.dumps(cuts))
        return 0

    ended = run(work, found.folder)
    assert ended.code == 0, ended.stderr
    yield from json.loads(noted.read_text())
    shutil.rmtree(folder)


def attack_again_and_again(found: Run) -> None:
    """Kill a run and the runs that continue it; no commit is lost on the way."""
    known = jobs(found)
    kills = 0
    for i, rng in found.draws("K4"):
        job, lines = known[rng.choice(NAMES)], 0
        with killed(found, "K4", job, f"case {i}") as out:
            for attempt in range(3):
                work = command(*job.line(out, *(["--resume"] if attempt else [])))
                if rng.random() < 0.7:
                    # Operations are left for the second and the third kill.
                    at = 1 + rng.randrange(job.operations * (attempt + 1) // 4)
                    ended = run(killed_before(work, at), found.folder)
                else:
                    ended = killed_after(work, rng.uniform(0.2, 0.9) * job.seconds, found.folder)
                assert ended.code in (0, -signal.SIGKILL), ended.stderr
                kills += ended.code != 0
                now = one_of_three_states(job, out)
                if out.exists():
                    break
                # The first line alone commits nothing, and a run may begin anew.
                assert now >= lines or lines == 1 or is_complete(out), f"{lines - now} lines of the journal are lost"
                lines = max(lines, now)
            resumed(job, out, found.folder, attempt + 1)
    found.facts["kills"] = kills


FAMILIES = [
    Family(
        "K1", "runs killed at a random instant continue to the same bytes", (10, 200, 1000), attack_at_random_instants
    ),
    Family("K2", "runs killed before and after each operation on the disk", (16, 200, 500), attack_at_every_operation),
    Family("K3", "power cuts that lose, tear or reorder unsynced writes", (0, 600, 3000), attack_with_power_cuts),
    Family("K4", "second and third kills during the resume", (3, 50, 200), attack_again_and_again),
]
