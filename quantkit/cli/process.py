"""The process of a command: signals, exit codes with one line for every error that a user can meet,
and the other processes that torchrun or `accelerate launch` has started.

An exception that is not listed here is a bug and shows its traceback.
"""

from __future__ import annotations

import _thread
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from functools import partial
from glob import escape
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn, cast

import click

from quantkit.core.memory_limits import unused_memory
from quantkit.errors import QuantkitError, is_out_of_memory, reason
from quantkit.progress import Progress, Stop

FAILED, UNVERIFIED, MISSED, STOPPED, INTERRUPTED = 1, 3, 4, 75, 130
#: Signal that ends a command -> exit code.
SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: STOPPED}
if hasattr(signal, "SIGHUP"):  # not on Windows
    SIGNALS[signal.SIGHUP] = STOPPED
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
#: Seconds that a command has to end in order after a signal.
GRACE = 2.0
#: Memory of a thread: its stack, and what Python makes for it.
THREAD_BYTES = 2**24
#: The command that runs, and its last words.
_CONTEXTS: list[click.Context] = []
_LAST_WORDS: list[str] = []


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


def limit_grace() -> None:
    """End the process `GRACE` seconds after a signal, even within a long operation, where Python
    runs no handler.

    The disk holds a resumable state at any moment.
    """
    _LAST_WORDS.clear()
    # Windows before Python 3.12 has no such pipe, and a thread needs memory to begin.
    if not hasattr(os, "set_blocking") or unused_memory(swap=True) < THREAD_BYTES:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a signal to a child is none to this process
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    with suppress(RuntimeError):  # `Thread.start` would wait forever for one that cannot begin
        _thread.start_new_thread(_end_after_grace, (read,))


def show_unraisable(found: Any) -> None:
    """Show an exception that a finalizer lost, unless a signal raised it: that ends the command
    between two items of a loop, or after its grace.
    """
    if not isinstance(found.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(found)


def _end_after_grace(read: int) -> None:
    code = None
    while code is None:
        code = {int(number): code for number, code in SIGNALS.items()}.get(os.read(read, 1)[0])
    time.sleep(GRACE)
    if not _LAST_WORDS:
        _say_last(code)
    os._exit(code)


def end_if_signalled(code: Any) -> None:
    """End the process without the interpreter's own end, which takes seconds, if the last words
    after a signal are said.
    """
    if _LAST_WORDS:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
        if STOP.loops and sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\nstopping within seconds; once more to stop at once\n")
        STOP.request(reason)

    return handle


@contextmanager
def exits() -> Iterator[None]:
    """Leave with the right exit code and one line on stderr for every error that is no bug."""
    _CONTEXTS[:] = filter(None, [click.get_current_context(silent=True)])
    try:
        yield
    except QuantkitError as error:
        leave(error.exit_code, "Error: " + error.typed.replace("\n", "\n       "))
    except KeyboardInterrupt as error:
        leave(_say_last(STOPPED if isinstance(error, Stopped) else INTERRUPTED))
    except BrokenPipeError:
        leave(STOPPED)
    except SystemExit as error:
        # exit() itself is frozen, and in no file from Python 3.11 on
        own = re.compile("<|.*_sitebuiltins")
        at = [f for f in traceback.extract_tb(error.__traceback__) if not own.match(f.filename)][-1]
        if at.filename == __file__ or not click.get_current_context(silent=True):
            raise  # the end of a command, by quantkit
        leave(
            FAILED,
            f"Error: {at.filename}, line {at.lineno}, ended the program ({reason(error)}): mend "
            "this code, of the model or of a package",
        )
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


class _Apart:
    """Stand for stdout while a command runs: what the code of a model prints is no result, and goes
    to stderr.
    """

    def __init__(self, results: Any) -> None:
        self.results = results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.results, name)

    def write(self, text: str) -> int:
        return sys.stderr.write(text) if sys.stderr else len(text)


def results_alone() -> AbstractContextManager[Any]:
    """Let only `emit` and `stream` write to stdout, which may be closed."""
    return redirect_stdout(cast("IO[str]", sys.stdout and _Apart(sys.stdout)))


def emit(text: str) -> None:
    """Print a result; a reader that has closed the pipe has seen enough."""
    try:
        click.echo(text, getattr(sys.stdout, "results", None))
    except BrokenPipeError:
        _discard(sys.stdout.fileno())


def stream(piece: str) -> None:
    """Print a part of a result at once; if the reader has closed the pipe, the command is done."""
    try:
        click.echo(piece, getattr(sys.stdout, "results", None), nl=False)
    except BrokenPipeError:
        _discard(sys.stdout.fileno())
        sys.exit(0)


def _discard(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _say_last(code: int) -> int:
    """Say on stderr that a signal ended the command, and how to continue; return the exit code."""
    _LAST_WORDS.append(f"{'Stopped' if code == STOPPED else 'Interrupted'}: {_what_remains()}")
    with suppress(BrokenPipeError):
        click.echo(_LAST_WORDS[-1], err=True)
    return code


def _what_remains() -> str:
    params = _CONTEXTS[-1].params if _CONTEXTS else {}
    out, journal = params.get("out"), params.get("journal")
    if out and "resume" in params:
        from quantkit.io.staging import is_resumable

        if is_resumable(Path(out)):
            return "the finished part is kept, the same command with --resume continues"
    elif out and [*Path(out).absolute().parent.glob(f"{escape(Path(out).name)}.partial-*")]:
        return "something is left beside the output, the same command with --overwrite discards it"
    if out and "recipes" in params:
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


#: Environment variables that a launcher sets in each process. A cluster may set some of it for
#: other programs.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started() -> int:
    """Return the number of processes that a launcher has started."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in VARIABLES) else 1


def silence_others() -> None:
    """Let only the first of several processes print, except for tracebacks of bugs."""
    if started() == 1 or os.environ["RANK"] == "0":
        return

    def show(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        traceback.print_exception(kind, error, at, file=sys.__stderr__)

    sys.excepthook = show
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def joined() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Join the process group of a launcher; all processes end at one time, after the first one has
    printed.

    Yields a context manager in which an error of one process is raised by all processes.
    """
    if started() == 1:
        yield nullcontext
        return
    from torch import distributed

    from quantkit.core.ranks import ranks

    try:
        distributed.init_process_group("gloo")
        here = ranks()
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with exits():
            raise QuantkitError(
                f"the processes do not reach each other through {where} ({reason(error)}): start "
                "all of them again"
            ) from error
    try:
        yield partial(here.together, Progress(quiet=True, stop=STOP))
    finally:
        ignore_signals()
        here.leave()
        if not here.lost:
            distributed.destroy_process_group()
