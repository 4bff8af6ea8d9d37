"""Signals end a run in order, and two runs do not share an output (S1, S2)."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from quantkit.io import files
from tests.reliability import samples
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import command, run, start, wait, warm

#: Seconds from a signal to the end of the process, without those in which it waits for a core.
PATIENCE = 5.0
#: What a run is sent, and the exit code with which it then ends.
SIGNALS = {"INT": (signal.SIGINT, 130), "TERM": (signal.SIGTERM, 75), "HUP": (signal.SIGHUP, 75)}
Work = Callable[[], int | None]


def at_operation(number: int, act: Callable[[], None], work: Work) -> Work:
    """Return work that acts just before its operation `number` on the disk."""

    def watched() -> int | None:
        seen = itertools.count(1)  # its numbers differ in all threads

        def hook(operation: str, path: Path) -> None:
            if next(seen) == number:
                act()

        files.FAULT = hook
        return work()

    return watched


def operations(folder: Path, arguments: tuple[object, ...]) -> int:
    """Count the operations on the disk of a command that runs to its end."""
    counter = folder / "operations"
    work = command(*arguments)

    def counted() -> int | None:
        def hook(operation: str, path: Path) -> None:
            with counter.open("a") as file:
                file.write("x")

        files.FAULT = hook
        return work()

    ended = run(counted, folder)
    assert ended.code == 0, ended.stderr
    return counter.stat().st_size


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
    folder = found.folder
    source, words = samples.model(folder / "source"), samples.text(folder / "calib.txt")
    warm("quantize", source, "--method", "rtn", "-o", folder / "int4", "-q")
    lines = {
        "quantize": lambda out: samples.calibrated(source, words, out),
        "rtn": lambda out: ("quantize", source, "--format", "fp6", "--method", "rtn", "-o", out, "-q"),
        "prune": lambda out: ("prune", source, "--method", "magnitude", "-o", out, "-q"),
        "pack": lambda out: ("pack", folder / "int4", "--layout", "gptq", "-o", out, "-q"),
    }
    whole, count = {}, {}
    for name, line in lines.items():
        warm(*line(folder / f"warm-{name}"))
        count[name] = operations(folder, line(folder / name))
        (folder / "operations").unlink()
        whole[name] = samples.digests(folder / name)
    for i in range(found.least):
        rng = found.random("S1", i)
        name = rng.choice(("quantize", "quantize", "rtn", "prune", "pack"))
        how = rng.choice((*SIGNALS, "twice", "pipe", "eval"))
        out = folder / f"out{i}"
        with found.case(f"case {i}: {name}, {how}"):
            if how == "pipe":
                ended = run(to_nobody(command(*lines[name](out))), folder)
                assert ended.code in (0, 75), f"exit {ended.code}: {ended.stderr}"
                assert "Traceback" not in ended.stderr and samples.digests(out) == whole[name], ended.stderr
            elif how == "eval":
                interrupted_evaluation(folder, source, words, rng)
            else:
                interrupted(folder, lines[name](out), how, 1 + rng.randrange(count[name] - 1))
                # Behind the last rename the output is there, and whole.
                assert not out.exists() or samples.digests(out) == whole[name]
                finish(folder, lines[name](out), out)
                assert samples.digests(out) == whole[name]
                assert not list(folder.glob(f"{out.name}.*"))


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


def finish(folder: Path, line: tuple[object, ...], out: Path) -> None:
    """Continue an interrupted run in the way that it offered."""
    left = list(folder.glob(f"{out.name}.partial-*"))
    samples.quantkit(folder, *line, *(["--resume"] if left and line[0] in ("quantize", "prune") else ["--overwrite"]))


def attack_with_two_runs(found: Run) -> None:
    folder = found.folder
    source, words = samples.model(folder / "source"), samples.text(folder / "calib.txt")
    warm("quantize", source, "--method", "rtn", "-o", folder / "int4", "-q")
    warm(*samples.calibrated(source, words, folder / "warm"))
    line = samples.calibrated(source, words, folder / "whole")
    last = operations(folder, line)
    whole = samples.digests(folder / "whole")
    (folder / "other").symlink_to(folder)
    for i in range(found.least):
        rng = found.random("S2", i)
        out, go, held = folder / f"out{i}", folder / f"go{i}", folder / f"held{i}"
        other = rng.choice((out, folder / "other" / out.name, folder / "." / "int4" / ".." / out.name))
        second: tuple[object, ...] = samples.calibrated(source, words, other)
        if rng.random() < 0.5:
            second = ("pack", folder / "int4", "--layout", "gptq", "-o", other, "-q")
        second += rng.choice(((), ("--overwrite",)))
        dies = rng.random() < 0.4

        def hold(go: Path = go, held: Path = held, dies: bool = dies) -> None:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            held.touch()
            while not go.exists():
                time.sleep(0.005)

        with found.case(f"case {i}: {second[0]}, {'the first died' if dies else 'the first is at work'}"):
            first = samples.calibrated(source, words, out)
            pid = start(at_operation(4 + rng.randrange(last - 8), hold, command(*first)), folder, "first")
            if dies:
                wait(pid, folder, "first")
                finish(folder, first, out)
            else:
                try:
                    appears(held)
                    ended = samples.quantkit(folder, *second, code=1)
                    samples.one_line(ended)
                    assert str(pid) in ended.stderr and "is being written" in ended.stderr, ended.stderr
                    assert ended.seconds < PATIENCE, f"{ended.seconds:.1f} seconds"
                finally:
                    go.touch()
                    assert wait(pid, folder, "first").code == 0
            assert samples.digests(out) == whole


FAMILIES = [
    Family(
        "S1", "signals, a closed stdout and a second Ctrl-C, then the same bytes", (10, 100, 100), attack_with_signals
    ),
    Family("S2", "a second run on the same output, and the lock of a dead one", (5, 50, 50), attack_with_two_runs),
]
