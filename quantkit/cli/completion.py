"""The command completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from quantkit.cli import show
from quantkit.cli.exits import emit
from quantkit.cli.options import choice, command
from quantkit.progress import Progress

SHELLS = ("bash", "zsh", "fish")
#: The variable through which the script asks for completions; click derives the same name.
VARIABLE = "_QUANTKIT_COMPLETE"


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
