"""The command line: parse, call one function, print. Results go to stdout, progress and warnings to
stderr.

`main` sets the environment and the signal handlers before it imports anything heavy. So an
interruption during the imports has its exit code, and libraries read the settings at their first
import. Begin with `commands`.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from quantkit.cli.process import (
    catch_signals,
    end_if_signalled,
    exits,
    ignore_signals,
    limit_grace,
    show_unraisable,
    silence_others,
)
from quantkit.errors import is_out_of_memory

#: Variables that libraries read at their import or first use. A value set by the user is not
#: changed.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS repeats its results only with a fixed workspace
    # Threads that spin while they wait keep the cores from those that work; on a busy machine runs
    # take several times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",  # an unreachable hub ends in one line of quantkit's own
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on `args`, by default the arguments of the process, and end the process
    with the exit code.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a file name need not be text in the user's locale
    silence_others()
    sys.unraisablehook = show_unraisable
    catch_signals()
    limit_grace()
    atexit.register(ignore_signals)
    # Else the interpreter's end looks for garbage among all objects, which takes up to a second.
    atexit.register(gc.freeze)
    try:
        with exits():
            _run(args)
    except SystemExit as left:
        end_if_signalled(left.code)
        if is_out_of_memory(left):
            # Libraries that clean up at the end would fail as well, each with a traceback.
            sys.unraisablehook = lambda _: None
        raise


def _run(args: Sequence[str] | None) -> NoReturn:
    from quantkit.cli.commands import quantkit

    try:
        code = quantkit(args=args, prog_name="quantkit", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort as error:  # click turns a signal outside of a command into this
        raise (error.__cause__ or error) from None
    sys.exit(code)
