"""The group `quantkit`: the name of each command, and where it is imported from on use."""

from __future__ import annotations

from typing import Any, cast

import click

from quantkit.cli.options import group
from quantkit.cli.parsing import Commands
from quantkit.recipes import schema  # noqa: F401  # with it messages know the keys of --set
from quantkit.version import __version__

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}

#: Command -> the module and the variable that hold it.
PLACES = {
    "quantize": "quantkit.cli.quantize:quantize",
    "prune": "quantkit.cli.quantize:prune",
    "plan": "quantkit.cli.quantize:plan",
    "pack": "quantkit.cli.convert:pack",
    "convert": "quantkit.cli.convert:convert",
    "verify": "quantkit.cli.inspect:verify",
    "inspect": "quantkit.cli.inspect:inspect",
    "report": "quantkit.cli.inspect:report",
    "eval": "quantkit.cli.evaluate:evaluate",
    "compare": "quantkit.cli.evaluate:compare",
    "generate": "quantkit.cli.generate:generate",
    "demo": "quantkit.cli.demo:demo",
    "doctor": "quantkit.cli.doctor:doctor",
    "completion": "quantkit.cli.completion:completion",
}


@group(
    None,
    "quantkit quantize ./Llama-3.2-1B -o ./Llama-3.2-1B-int4 --calib wikitext2",
    commands=cast(Any, Commands(PLACES)),
    context_settings=HELP,
)
@click.version_option(__version__, prog_name="quantkit")
def quantkit() -> None:
    """Low-bit checkpoints from Hugging Face causal LMs: quantize, pack, convert and prove.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 verification failed, 4 a quality threshold was
    missed, 75 stopped and can be resumed, 130 interrupted.
    """
