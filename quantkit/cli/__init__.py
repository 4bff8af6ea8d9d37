"""The command line: parse, call one function, print. Results go to stdout, progress and warnings to stderr.

`main` is the whole front door: it prepares the process before anything heavy is imported, so that an interruption has
its exit code and the arithmetic is set to repeat exactly from the first import on. The commands are in `commands`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence

import click

from quantkit.cli.exits import catch_signals, exits, ignore_signals

#: Read by libraries when they are imported or first used; what the user has set stands.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS repeats its results only with a fixed workspace
    # Threads that spin while they wait take the cores from those that work: with it the demo took 32 s on two busy
    # cores instead of 128 s, and 18 s on idle ones instead of 14 s.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",  # a hub that cannot be reached ends in one line of ours
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on `args` (default: the process's) and leave with its exit code."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name need not be text in the user's locale
    catch_signals()
    atexit.register(ignore_signals)
    with exits():
        from quantkit.cli.commands import quantkit

        try:
            code = quantkit(args=args, prog_name="quantkit", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except click.Abort as error:  # what click makes of a signal before a command begins, or behind it
            raise (error.__cause__ or error) from None
        sys.exit(code)
