"""The parts that commands share: their decorator, common arguments and options, the types of
values.

Choices come from `names` and the recipe's own types. An option that is not given is None and leaves
the recipe's value. Modules of commands import torch, and modules that import it, inside functions,
so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from quantkit.cli import completers
from quantkit.cli.exits import STOP, exits
from quantkit.cli.launch import joined, require_one
from quantkit.cli.parsing import (
    EVERYTHING,
    Choice,
    Command,
    Function,
    Group,
    combined,
    needed_unless,
)
from quantkit.core.memory_limits import require_memory_for_imports
from quantkit.errors import QuantkitError
from quantkit.keys import Key
from quantkit.names import LAYOUTS
from quantkit.progress import Progress
from quantkit.text.sources import NAMED, PACKAGED, SELF, SUFFIXES

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
BINARY_UNITS = {f"{unit}I": 1024**power for power, unit in enumerate(UNITS) if unit}
FILES = f"a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"
DATA = f"{', '.join(NAMED)}, or {FILES}"
CALIBRATION = (
    f"{', '.join(NAMED)}, a hub data set org/name[:config], {PACKAGED}, {SELF} (written by the "
    f"model), or {FILES}, of "
    "text or conversations"
)
PAD = "Fill weights up with zeros to shapes that the layout holds"
PATH = click.Path(path_type=Path)


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, like 8GB or 512MiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(value).upper())
        units = UNITS | BINARY_UNITS
        if found is None or found[2] not in units:
            self.fail(f"{value!r} is no number of bytes: write it like 8GB or 512MiB", param, ctx)
        return int(float(found[1]) * units[found[2]])


class GroupSize(click.ParamType):  # type: ignore[type-arg]
    """Columns per scale, or `channel`."""

    name = "columns"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value != "channel" and not str(value).isdigit():
            self.fail(f"{value!r} is no group size: use 128, 64, 32 or channel", param, ctx)
        return value if value == "channel" else int(value)


class Override(click.ParamType):  # type: ignore[type-arg]
    """A regular expression and the scheme of the linears that it matches."""

    name = "regex=scheme"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        pattern, equals, scheme = str(value).rpartition("=")
        if not (pattern and equals and scheme):
            self.fail(f"{value!r} is no override: write it like '.*down_proj=int4:g64'", param, ctx)
        return pattern, scheme


class JsonObject(click.ParamType):  # type: ignore[type-arg]
    """Arguments by name, like the `example`: a JSON object, or one as KEY=VALUE, whose value is
    JSON or else a text.
    """

    name = "json"

    def __init__(self, example: str) -> None:
        self._example = example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        key, equals, text = str(value).partition("=")
        if str(value).lstrip().startswith("{") or not key.isidentifier() or not equals:
            with suppress(ValueError):
                if isinstance(found := json.loads(value), dict):
                    return found
            self.fail(f"{value!r} is no JSON object: write it like {self._example}", param, ctx)
        words = {
            "True": True,
            "False": False,
            "None": None,
        }  # a template would take the text False for true
        try:
            return {key: words[text] if text in words else json.loads(text)}
        except ValueError:
            return {key: text}


def _show_everything(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[EVERYTHING] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def command(
    name: str,
    example: str,
    group: click.Group | None = None,
    computes: bool = True,
    shared: bool = False,
    keys: Sequence[Key] = (),
) -> Callable[[Function], Command]:
    """Make a function a command: its help ends with `example`, its errors end in one line and an
    exit code.

    The function is handed a `progress` and the flag `as_json`. A command that `computes` runs with
    torch set to be deterministic. One that is not `shared` by several processes refuses to be
    started as such. `keys` are those that its `--set` takes.
    """

    def decorate(function: Function) -> Command:
        @wraps(function)
        def run(quiet: bool, verbose: bool, **options: Any) -> None:
            with joined() as together, exits(), together():
                if not shared:
                    require_one(name)
                _require_usable_process(computes)
                if computes:
                    _be_deterministic()
                function(progress=Progress(quiet=quiet, verbose=verbose, stop=STOP), **options)

        own = vars(run).pop("__click_params__", [])
        for option in (
            *([_HELP_ALL] if keys else []),
            flag("-v", "Say more about what is done and found.", "--verbose"),
            flag("-q", "Print one line, and only warnings besides.", "--quiet"),
            flag("--json", "Print one JSON object instead of text.", "as_json"),
        ):
            run = option(run)
        vars(run)["__click_params__"] += (
            own  # click reverses this list: the command's own come first
        )
        made = click.command(name, cls=Command, epilog=_example(example), no_args_is_help=False)(
            run
        )
        made.keys = keys
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def group(name: str | None, example: str, **settings: Any) -> Callable[[Function], Group]:
    """Make a function a group of commands, whose help ends with `example`."""
    return click.group(name, cls=Group, epilog=_example(example), **settings)


def _example(line: str) -> str:
    return f"\b\nExample:\n  {line}"


def _require_usable_process(computes: bool) -> None:
    """Raise QuantkitError where libraries would abort the process or fail in ways that name no
    cause.
    """
    require_memory_for_imports(computes=computes)
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise QuantkitError(
            "the working folder was deleted, and torch needs one: cd to another folder"
        ) from error
    if computes and sys.flags.optimize > 1:
        raise QuantkitError(
            "transformers needs docstrings, which -OO drops: use PYTHONOPTIMIZE=1, or unset it"
        )


def _be_deterministic() -> None:
    """Make torch's settings deterministic where this costs nothing, so that equal runs give equal
    bytes (ALGORITHMS 13).
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # use_deterministic_algorithms is not used, because it imports the compiler, which takes longer
    # than a short command.
    torch.set_deterministic_debug_mode("warn")
    # A debugging aid that writes every new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choice(values: Iterable[str]) -> Choice:
    """Make an option's type that takes one of `values`."""
    return Choice(list(values))


def text(
    name: str, metavar: str, help: str, complete: Any = None, **more: Any
) -> Callable[[Function], Function]:
    """Make an option that takes a text: the name of a file, a folder or something else."""
    return click.option(name, metavar=metavar, shell_complete=complete, help=help, **more)


def count(
    name: str, help: str, default: int | None = None, least: int = 1
) -> Callable[[Function], Function]:
    """Make an option that takes a number from `least` on; its help ends with the default, if there
    is one.
    """
    shown = help if default is None else f"{help} [{default}]."
    return click.option(
        name, type=click.IntRange(min=least), default=default, metavar="N", help=shown
    )


def flag(name: str, help: str, *variable: str, **more: Any) -> Callable[[Function], Any]:
    """Make an option without a value."""
    return click.option(name, *variable, is_flag=True, help=help, **more)


model = click.argument("model", shell_complete=completers.folders)
checkpoint = click.argument("checkpoint", type=PATH)
device = click.option(
    "--device", default="auto", help="Where to compute: auto, cpu, cuda, cuda:1 ... [auto]."
)
overwrite = flag("--overwrite", "Replace OUT when the new folder is complete.")
skip = click.option(
    "--skip",
    multiple=True,
    metavar="REGEX",
    help="Linears left dense, besides lm_head; repeatable.",
)
source = combined(
    click.option("--revision", help="Branch, tag or commit of a hub model."),
    flag("--trust-remote-code", "Run Python code that comes with the model."),
)

_everything = "Show every option, and every key of --set, and stop."
_HELP_ALL = flag(
    "--help-all", _everything, is_eager=True, expose_value=False, callback=_show_everything
)
_unread = "Read files that differ from their recorded hashes."
no_check = flag("--no-check", _unread, "check", flag_value=False, default=True)


def out(*, unless: Sequence[str] = (), required: bool = True) -> Callable[[Function], Function]:
    """Make the option for the folder that a command writes; the eager flags `unless` make it
    optional.
    """
    callback = needed_unless(*unless) if unless else None
    help_text = "Folder to write; it must not exist yet."
    return click.option(
        "-o",
        "--out",
        type=PATH,
        required=required and not unless,
        callback=callback,
        help=help_text,
    )


layout = click.option("--layout", type=choice(LAYOUTS), required=True, help="Layout to write.")
