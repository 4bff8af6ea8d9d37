"""Signals end a run in order, and two runs do not share an output (S1, S2)."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.reliability import samples
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import command, run, start, wait
from tests.reliability.jobs import Jobs, Work, at_operation, continued, same

#: Seconds from a signal to the end of the process, without those in which it waits for a core.
PATIENCE = 5.0
#: What a run is sent, and the exit code with which it then ends.
SIGNALS = {"INT": (signal.SIGINT, 130), "TERM": (signal.SIGTERM, 75), "HUP": (signal.SIGHUP, 75)}


def sent(stamp: Path, *numbers: int) -> Callable[[], None]:
    """Return the act of sending this process signals, and noting when."""

    def act() -> None:
        stamp.write_text(f"{time.monotonic()}")
        for number in numbers:
            os.kill(os.getpid(), number)

    return act


def to_nobody(work: Work) -> Work:
    """Return work whose stdout is a pipe that nobody reads."""

    def closed() -> int | None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)  # the one at hand may be that of a file, which it seeks in
        return work()

    return closed


def attack_with_signals(found: Run) -> None:
    folder, known = found.folder, Jobs(found)
    for i, rng in found.draws("S1"):
        job = known[rng.choice(("calibrated", "calibrated", "rounded", "pruned", "pack"))]
        how, out = rng.choice((*SIGNALS, "twice", "pipe", "eval")), folder / f"out{i}"
        with found.case(f"case {i}: {job.name}, {how}"):
            if how == "eval":
                interrupted_evaluation(folder, known.source, known.text, rng)
                continue
            if how == "pipe":
                ended = run(to_nobody(command(*job.line(out))), folder)
                assert ended.code in (0, 75) and out.exists(), f"exit {ended.code}: {ended.stderr}"
                assert "Traceback" not in ended.stderr, ended.stderr
            else:
                interrupted(folder, job.line(out), how, 1 + rng.randrange(job.operations - 1))
            if out.exists():  # behind the last rename it is whole
                same(job, out)
            else:
                continued(job, out, folder)


def interrupted(folder: Path, line: tuple[object, ...], how: str, at: int) -> None:
    number, code = SIGNALS["INT" if how == "twice" else how]
    stamp = folder / "stamp"
    numbers = (number, number) if how == "twice" else (number,)
    ended = run(at_operation(at, sent(stamp, *numbers), command(*line)), folder)
    assert ended.code == code, f"exit {ended.code}: {ended.stderr}"
    assert "Traceback" not in ended.stderr, ended.stderr
    assert time.monotonic() - float(stamp.read_text()) - ended.queued < PATIENCE
    assert how == "twice" or len(ended.stderr.strip().splitlines()) == 1, ended.stderr


def interrupted_evaluation(folder: Path, source: Path, words: Path, rng: random.Random) -> None:
    begun = folder / "begun"
    begun.unlink(missing_ok=True)

    def work() -> int | None:
        begun.touch()
        return command("eval", "ppl", source, "--data", words, "--window", 64, "-q")()

    pid = start(work, folder)
    appears(begun)  # on a busy machine a fork may take long to begin
    time.sleep(rng.uniform(0.0, 0.3))
    name = rng.choice(list(SIGNALS))
    sent_at = time.monotonic()
    os.kill(pid, SIGNALS[name][0])
    ended = wait(pid, folder)
    # The handlers are set a moment after the start, and the command may be done before the signal.
    assert ended.code in (SIGNALS[name][1], -SIGNALS[name][0], 0), f"exit {ended.code}: {ended.stderr}"
    assert "Traceback" not in ended.stderr and time.monotonic() - sent_at - ended.queued < PATIENCE


def appears(path: Path) -> None:
    """Wait until a fork has made a file, at most a minute."""
    began = time.monotonic()
    while not path.exists() and time.monotonic() - began < 60:
        time.sleep(0.002)


def attack_with_two_runs(found: Run) -> None:
    folder, known = found.folder, Jobs(found)
    job = known["calibrated"]
    (folder / "other").symlink_to(folder)
    (folder / "below").mkdir()
    for i, rng in found.draws("S2"):
        out, go, held = folder / f"out{i}", folder / f"go{i}", folder / f"held{i}"
        other = rng.choice((out, folder / "other" / out.name, folder / "." / "below" / ".." / out.name))
        second = (known["pack"] if rng.random() < 0.5 else job).line(other) + rng.choice(((), ("--overwrite",)))
        dies = rng.random() < 0.4

        def hold(go: Path = go, held: Path = held, dies: bool = dies) -> None:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            held.touch()
            while not go.exists():
                time.sleep(0.005)

        with found.case(f"case {i}: {second[0]}, {'the first died' if dies else 'the first is at work'}"):
            at = 4 + rng.randrange(job.operations - 8)
            pid = start(at_operation(at, hold, command(*job.line(out))), folder, "first")
            if dies:
                wait(pid, folder, "first")
                continued(job, out, folder)
                continue
            try:
                appears(held)
                ended = samples.quantkit(folder, *second, code=1)
                samples.one_line(ended)
                assert str(pid) in ended.stderr and "is being written" in ended.stderr, ended.stderr
                assert ended.seconds < PATIENCE, f"{ended.seconds:.1f} seconds"
            finally:
                go.touch()
                assert wait(pid, folder, "first").code == 0
            same(job, out)


FAMILIES = [
    Family(
        "S1", "signals, a closed stdout and a second Ctrl-C, then the same bytes", (10, 100, 100), attack_with_signals
    ),
    Family("S2", "a second run on the same output, and the lock of a dead one", (5, 50, 50), attack_with_two_runs),
]
