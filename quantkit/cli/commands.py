"""The group `quantkit`: the name of each command, and where it is imported from on use; and the
command completion.
"""

from __future__ import annotations

from typing import Any, cast

import click
from click.shell_completion import get_completion_class

from quantkit.cli import show
from quantkit.cli.options import choice, command, group
from quantkit.cli.parsing import Commands
from quantkit.cli.process import emit
from quantkit.progress import Progress
from quantkit.recipes import schema  # noqa: F401  # with it messages know the keys of --set
from quantkit.version import __version__

#: The shells that can complete, and the variable through which their script asks; click derives the
#: same name.
SHELLS, VARIABLE = ("bash", "zsh", "fish"), "_QUANTKIT_COMPLETE"
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}

#: Command -> the module and the variable that hold it.
PLACES = {
    "quantize": "quantkit.cli.quantize:quantize",
    "prune": "quantkit.cli.quantize:prune",
    "plan": "quantkit.cli.quantize:plan",
    "pack": "quantkit.cli.quantize:pack",
    "convert": "quantkit.cli.quantize:convert",
    "verify": "quantkit.cli.inspect:verify",
    "inspect": "quantkit.cli.inspect:inspect",
    "report": "quantkit.cli.inspect:report",
    "eval": "quantkit.cli.evaluate:evaluate",
    "compare": "quantkit.cli.evaluate:compare",
    "generate": "quantkit.cli.evaluate:generate",
    "demo": "quantkit.cli.demo:demo",
    "doctor": "quantkit.cli.doctor:doctor",
    "completion": "quantkit.cli.commands:completion",
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


@command(
    "completion",
    "quantkit completion fish > ~/.config/fish/completions/quantkit.fish",
    computes=False,
)
@click.argument("shell", type=choice(SHELLS))
def completion(shell: str, as_json: bool, progress: Progress) -> None:
    """Print the script that lets SHELL complete.

    In ~/.bashrc write: eval "$(quantkit completion bash)". In ~/.zshrc the same with zsh. The
    example is for fish."""
    made = get_completion_class(shell)
    assert made is not None
    script = made(
        click.get_current_context().find_root().command, {}, "quantkit", VARIABLE
    ).source()
    emit(show.as_json({"shell": shell, "script": script}) if as_json else script)
