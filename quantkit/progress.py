"""Bars, notes and warnings for a waiting user, all on stderr, so that stdout holds only results.

And requests to end a command between two items of a loop, and the seconds of each phase.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import Words, in_python

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
#: Seconds before a bar or its lines appear.
DELAY = 2


class Stop:
    """Hold a request to end, which a signal handler makes and a loop meets between two of its
    items.

    Inside a loop an exception at any instruction could leave a lock taken that other threads wait
    for. `loops` counts those that run, one inside the other.
    """

    def __init__(self) -> None:
        self._reason: BaseException | None = None
        self.loops = 0

    def request(self, reason: BaseException) -> None:
        """Raise `reason` at the next item of the loop that runs, or at once if there is none."""
        self._reason = reason
        if not self.loops:
            raise reason

    def check(self) -> None:
        """Raise the requested exception, if there is one."""
        if self._reason is not None:
            raise self._reason

    def clear(self) -> None:
        """Forget a request."""
        self._reason = None

    def between(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield `items`, and ask for a request between them."""
        with self.loop():
            for item in items:
                self.check()
                yield item

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Defer requests inside the context, until the caller polls them with `check`, or to its
        end.
        """
        self.loops += 1
        try:
            yield
        finally:
            self.loops -= 1
        self.check()


class Progress:
    """Bars with an ETA (on a terminal, from the third second on), notes and warnings.

    `quiet` silences bars and notes; warnings always appear. `verbose` lets details through. Loops
    over a bar end where `stop` asks for it.
    """

    def __init__(
        self, quiet: bool = False, verbose: bool = False, stop: Stop | None = None
    ) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.noted: set[str] = set()
        self._stop = stop or Stop()

    def bar(self, work: Collection[Any] | int, label: str, each: str = "") -> Any:
        """Return a bar: an iterator over `work`, or for a number of steps an object with
        `update(n)` and `close()`.

        Without a terminal there is a line for each item, if items are named by `each`, such as
        "block".
        """
        from tqdm import tqdm

        total = work if isinstance(work, int) else len(work)
        items = None if isinstance(work, int) else self.watched(work, label)
        if items is not None and each and not (self.quiet or sys.stderr.isatty()):
            items = _lines(items, label, total, each)
        bar = tqdm(
            items,
            total=total,
            desc=label,
            file=sys.stderr,
            disable=self.quiet or not sys.stderr.isatty(),
            delay=DELAY,
            leave=False,
            ncols=_columns(),
            nrows=20,  # else tqdm asks the terminal, and draws nothing where that has no size
        )
        bar.dynamic_ncols = lambda _: (_columns(), 20)  # a terminal may be resized
        return bar if items is None else self._stop.between(bar)

    def watched(self, work: Collection[_T], label: str) -> Iterable[_T]:
        """Yield the items of a bar, for classes that follow them."""
        return work

    def loop(self) -> AbstractContextManager[None]:
        """Let a signal wait for `check`, or for the end of the block, while other threads work."""
        return self._stop.loop()

    def check(self) -> None:
        """End the current loop if a signal requested it. Call this within long items of a bar."""
        self._stop.check()

    def detail(self, text: str) -> None:
        """Print details (-v)."""
        if self.verbose and not self.quiet:
            _say(text)

    def note(self, *texts: str) -> None:
        """Print each note once, unless the user asked for quiet (-q): a source may open twice."""
        new = {str(text): text for text in texts if str(text) not in self.noted}
        for text in new.values() if not self.quiet else ():
            _say(text)
            self.noted.add(str(text))

    def warn(self, text: str) -> None:
        """Say what a user must know, always."""
        _say(Words("Warning:", text))


#: Prints warnings alone.
QUIET = Progress(quiet=True)


class Recorder(Progress):
    """Progress that prints nothing and records its warnings, for another rank to print."""

    def __init__(self, like: Progress) -> None:
        super().__init__(quiet=True, stop=like._stop)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Record a warning."""
        self.warnings.append(text)

    def take(self) -> list[str]:
        """Return the warnings since the last call."""
        taken, self.warnings = self.warnings, []
        return taken


@dataclass(frozen=True)
class Event:
    """A step of a run: `done` of `total` items of the phase `label` are finished."""

    label: str
    done: int
    total: int


#: The caller's function, called at each step. An exception that it raises ends the run between two
#: items.
Listener = Callable[[Event], object]


class Reporter(Progress):
    """Progress of a Python caller: `listener` is called at each step, and only warnings are
    printed.
    """

    def __init__(self, listener: Listener | None) -> None:
        super().__init__(quiet=True)
        self._listener = listener

    def watched(self, work: Collection[_T], label: str) -> Iterator[_T]:
        """Yield the items, and tell the listener of each."""
        tell = self._listener or (lambda event: None)
        tell(Event(label, 0, len(work)))
        for done, item in enumerate(work, 1):
            yield item
            del item  # its memory is free while the next one is made
            tell(Event(label, done, len(work)))

    def warn(self, text: str) -> None:
        """Say what a user must know, always."""
        super().warn(in_python(text))


def reporter(progress: Progress | Listener | None) -> Progress:
    """Return the caller's progress, or wrap its function in one."""
    return progress if isinstance(progress, Progress) else Reporter(progress)


@dataclass
class Clock:
    """Seconds spent in each phase of work on a device; an inner phase pauses the outer one.

    Only the end of an outermost phase waits for a GPU. Between phases it records events.
    """

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    #: The phases that began since the seconds were added up, each with its mark; None for no phase.
    _begun: list[tuple[str | None, Any]] = field(default_factory=lambda: [(None, None)])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer, _ = self._begun[-1]
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def around(self, name: str, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, and count the time spent waiting for them as a phase."""
        waiting = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(waiting)
                except StopIteration:
                    return
            yield item
            del item  # its memory is free while the next one is made

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call and start from zero."""
        taken, self.seconds = self.seconds, {}
        return taken

    def _switch(self, name: str | None) -> None:
        self._begun.append((name, self._mark()))
        if name is None or self.device.type != "cuda":
            self._add_up()

    def _mark(self) -> Any:
        """Return the time, or on a GPU an event in the stream that is current."""
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _add_up(self) -> None:
        """Add the times between marks to the seconds; wait for the last one."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self._begun[-1][1].synchronize()
        for (name, start), (_, end) in pairwise(self._begun):
            if name is not None:
                seconds = start.elapsed_time(end) / 1000 if on_gpu else end - start
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        del self._begun[:-1]


def _columns() -> int:
    """Count the columns that a bar may fill. The last is left free, because some terminals wrap
    after it.
    """
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return max(1, (columns or shutil.get_terminal_size().columns) - 1)


def _lines(work: Iterable[_T], label: str, total: int, each: str) -> Iterator[_T]:
    """Yield the items, and say after each one, from the third second on, how long it took and how
    much is left.
    """
    begun = before = time.perf_counter()
    for done, item in enumerate(work, 1):
        yield item
        del item  # its memory is free while the next one is made
        now = time.perf_counter()
        left = (
            f", about {_rough((now - begun) / done * (total - done))} left" if done < total else ""
        )
        if now - begun > DELAY:
            _say(f"{label}: {each} {done}/{total}, {now - before:.1f} s{left}")
        before = now


def _rough(seconds: float) -> str:
    unit, size = ("s", 1) if seconds < 100 else ("min", 60) if seconds < 6000 else ("h", 3600)
    return f"{seconds / size:.0f} {unit}"


def _say(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(Words(text), file=sys.stderr)  # goes above a bar that is being drawn
