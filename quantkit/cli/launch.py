"""Commands that torchrun or `accelerate launch` starts as several processes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType

from quantkit.cli.exits import STOP, exits, ignore_signals
from quantkit.errors import QuantkitError, RecipeError, reason
from quantkit.progress import Progress

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


def require_one(command: str) -> None:
    """Raise RecipeError if several processes were started for a command that needs one."""
    if started() > 1:
        raise RecipeError(
            f"{started()} processes were started, and quantkit {command} uses one: start it "
            "without torchrun or "
            "accelerate launch"
        )


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
