"""How a command ends: its exit code, and one line for everything that a user can meet.

An exception that is not listed here is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import glob
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from quantkit.errors import QuantkitError, is_out_of_memory
from quantkit.interrupts import Stop

FAILED, UNVERIFIED, MISSED, STOPPED, INTERRUPTED = 1, 3, 4, 75, 130
#: Signal that ends a command -> exit code.
SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: STOPPED, signal.SIGHUP: STOPPED}
#: Errors of the machine, not of the program.
ENVIRONMENTAL = {
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EFBIG",
        "EACCES",
        "EPERM",
        "EROFS",
        "EMFILE",
        "ENFILE",
        "EIO",
    )
}
#: The handlers' request to the loops of the running command.
STOP = Stop()


class Interrupted(KeyboardInterrupt):
    """SIGINT: after a KeyboardInterrupt itself that went through `exec`, `python -m` ends with
    another code.
    """


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP: everything that cleans up after Ctrl-C cleans up after these."""


def catch_signals() -> None:
    """Let the first SIGINT, SIGTERM or SIGHUP end the command in order; a second one ends the
    process at once.
    """
    for number, code in SIGNALS.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _handler(code))


def ignore_signals() -> None:
    """Let the interpreter end in peace: the command is done, and its exit code says how."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handler(code: int) -> Callable[[int, FrameType | None], None]:
    reason = Interrupted() if code == INTERRUPTED else Stopped()

    def handle(number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:
            signal.signal(
                other, lambda *_: os._exit(code)
            )  # the disk holds a resumable state at any moment
        if STOP.is_in_loop() and sys.stderr.isatty():
            os.write(
                sys.stderr.fileno(), b"\nstopping after this step; once more to stop at once\n"
            )
        STOP.request(reason)

    return handle


@contextmanager
def exits() -> Iterator[None]:
    """Leave with the right exit code and one line on stderr for every error that is no bug."""
    try:
        yield
    except QuantkitError as error:
        leave(error.exit_code, "Error: " + error.typed.replace("\n", "\n       "))
    except Stopped:
        leave(STOPPED, f"Stopped: {_what_remains()}")
    except KeyboardInterrupt:
        leave(INTERRUPTED, f"Interrupted: {_what_remains()}")
    except BrokenPipeError:
        leave(STOPPED)
    except Exception as error:  # memory may end anywhere, and libraries may then raise anything
        if is_out_of_memory(error):
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            leave(FAILED, f"Error: not enough memory or threads ({why}): {_smaller(error)}")
        if not isinstance(error, OSError) or error.errno not in ENVIRONMENTAL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        leave(
            FAILED,
            f"Error: {where}{(error.strerror or 'failed').lower()}: check the path, its "
            "permissions and space",
        )
    finally:
        STOP.clear()


def leave(code: int, message: str | None = None) -> NoReturn:
    """End the command with `code`, after a message on stderr."""
    try:
        if message:
            click.echo(message, err=True)
    except BrokenPipeError:
        _discard(sys.stderr.fileno())
    sys.exit(code)


def emit(text: str) -> None:
    """Print a result; a reader that has closed the pipe has seen enough."""
    try:
        click.echo(text)
    except BrokenPipeError:
        _discard(sys.stdout.fileno())


def stream(piece: str) -> None:
    """Print a part of a result at once; if the reader has closed the pipe, the command is done."""
    try:
        click.echo(piece, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout.fileno())
        sys.exit(0)


def _discard(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _what_remains() -> str:
    context = click.get_current_context(silent=True)
    out = context.params.get("out") if context else None
    if context and out and glob.glob(f"{glob.escape(str(Path(out).absolute()))}.partial-*"):
        if "resume" in context.params:
            return "the finished part is kept, the same command with --resume continues"
        return "something is left beside the output, the same command with --overwrite discards it"
    journal = context.params.get("journal") if context else None
    if context and out and "recipes" in context.params:
        journal = next(Path(out).glob("rows/*"), None)
    if journal and Path(journal).exists():
        return "the finished part is kept, the same command continues"
    return "nothing was written, run the same command again"


def _smaller(error: BaseException) -> str:
    """Name an option of the command that needs less memory, and the limits that a shell sets."""
    context = click.get_current_context(silent=True)
    of_gpu = type(error).__name__ == "OutOfMemoryError"
    ways = {"device": "use --device cpu"} if of_gpu else {}
    ways |= {
        "batch_size": "use a smaller --batch-size",
        "samples": "use fewer --samples",
        "window": "use a smaller --window",
    }
    first = [way for name, way in ways.items() if context and name in context.params]
    return f"{[*first, 'free some memory'][0]}, or raise ulimit -v, -d and -u"
