"""The group `quantkit` with its commands, and the command completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from quantkit.cli import demo, doctor, evaluate, inspect, quantize, show
from quantkit.cli.options import command, group
from quantkit.cli.parsing import Choice
from quantkit.cli.process import emit
from quantkit.progress import Progress
from quantkit.recipes import schema  # noqa: F401  # with it messages know the keys of --set
from quantkit.version import __version__

#: The shells that can complete, and the variable through which their script asks; click derives the
#: same name.
SHELLS, VARIABLE = ("bash", "zsh", "fish"), "_QUANTKIT_COMPLETE"
#: The commands, in the order of the help.
COMMANDS = (
    quantize.quantize,
    quantize.prune,
    quantize.plan,
    quantize.pack,
    quantize.convert,
    inspect.verify,
    inspect.inspect,
    inspect.report,
    evaluate.evaluate,
    evaluate.compare,
    evaluate.generate,
    demo.demo,
    doctor.doctor,
)


@group(
    None,
    "quantkit quantize ./Llama-3.2-1B -o ./Llama-3.2-1B-int4 --calib wikitext2",
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
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
    quantkit,
    computes=False,
)
@click.argument("shell", type=Choice(SHELLS))
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
