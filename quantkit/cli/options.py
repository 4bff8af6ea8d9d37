"""The parts that commands share: their decorator, the options that dataclasses declare, the types
of values.

An option of a command is a field (`keys.key`). `declared` makes the options of a dataclass, and
hands the command an instance. An option that only the command line has is one of click's. Modules
of commands import torch, and whatever imports it, inside functions, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import permutations
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import click
from click.shell_completion import CompletionItem

from quantkit.cli.parsing import (
    EVERYTHING,
    Choice,
    Command,
    Function,
    Group,
    Range,
    combined,
    needed_unless,
    section,
)
from quantkit.cli.process import STOP, exits, joined, results_alone, started
from quantkit.core.memory_limits import require_memory_for_imports, uncollected
from quantkit.errors import Option, QuantkitError, RecipeError, named_by_key
from quantkit.keys import OPTIONS, Key, built, keys_of
from quantkit.names import LAYOUTS, Json
from quantkit.progress import Progress
from quantkit.text.sources import FILES, NAMED, PACKAGED

UNITS = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "KI": 1024,
    "MI": 1024**2,
    "GI": 1024**3,
    "TI": 1024**4,
}
CALIBRATION = (
    f"{', '.join(NAMED)}, a hub data set org/name[:config], {PACKAGED}, or {FILES}, of "
    "text or conversations"
)
PATH = click.Path(path_type=Path)
#: Complete a folder where a hub id is possible too, a file where a name is, and the A-to-B of
#: `convert`.
folders, files = click.Path(file_okay=False).shell_complete, click.Path().shell_complete
pairs = click.Choice([f"{a}-to-{b}" for a, b in permutations(LAYOUTS, 2)]).shell_complete


def number_of_bytes(value: Any) -> int:
    """Read a number of bytes, like 8GB or 512MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(value).upper())
    if found is None or found[2] not in UNITS:
        raise click.BadParameter(f"{value!r} is no number of bytes: write it like 8GB or 512MiB")
    return int(float(found[1]) * UNITS[found[2]])


def group_size(value: Any) -> int | str:
    """Read the columns of a scale, or `channel`."""
    if value != "channel" and not str(value).isdigit():
        raise click.BadParameter(f"{value!r} is no group size: use 128, 64, 32 or channel")
    return "channel" if value == "channel" else int(value)


def override(value: Any) -> tuple[str, str]:
    """Read a regular expression, and the scheme of the linears that it matches."""
    pattern, equals, scheme = str(value).rpartition("=")
    if not (pattern and equals and scheme):
        raise click.BadParameter(f"{value!r} is no override: write it like '.*down_proj=int4:g64'")
    return pattern, scheme


def numbers(value: Any) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    try:
        return value if isinstance(value, tuple) else tuple(map(int, str(value).split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers: write it like 0,1,2") from None


def json_object(value: Any, example: str) -> Json:
    """Read arguments by name, like the `example`: a JSON object, or one as KEY=VALUE, whose value
    is JSON or else a text.
    """
    key, equals, text = str(value).partition("=")
    if str(value).lstrip().startswith("{") or not key.isidentifier() or not equals:
        with suppress(ValueError):
            if isinstance(found := json.loads(value), dict):
                return found
        raise click.BadParameter(f"{value!r} is no JSON object: write it like {example}")
    words = {"True": True, "False": False, "None": None}  # a template would take False for true
    try:
        return {key: words[text] if text in words else json.loads(text)}
    except ValueError:
        return {key: text}


def engine_args(value: Any) -> Json:
    """Read arguments of an engine."""
    return json_object(value, "quantization=quantkit")


def template_args(value: Any) -> Json:
    """Read arguments of a chat template."""
    return json_object(value, "enable_thinking=false")


def settings(
    keys: Iterable[Key],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Make the completion of `--set KEY=VALUE`: the keys, and the values of keys that
    are choices.
    """
    words = [f"{key.name}={value}" for key in keys for value in ("", *key.values)]

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [
            CompletionItem(word)
            for word in words
            if word.startswith(incomplete) and ("=" in incomplete or word.endswith("="))
        ]

    return complete


def texts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a data set, or a file."""
    return [CompletionItem(name) for name in NAMED if name.startswith(incomplete)] + files(
        ctx, param, incomplete
    )


def _show_everything(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[EVERYTHING] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


#: Options whose value a key has in another form.
NOT_AS_KEYS = ("asym", "override")


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
            with joined() as together, named_by_key(lacking), exits(), results_alone(), together():
                if not shared and started() > 1:
                    raise RecipeError(
                        f"{started()} processes were started, and quantkit {name} uses one: start "
                        "it without torchrun or accelerate launch"
                    )
                _require_usable_process(computes)
                if computes:
                    _be_deterministic()
                function(progress=Progress(quiet=quiet, verbose=verbose, stop=STOP), **options)

        own = vars(run).pop("__click_params__", [])
        flags = {*NOT_AS_KEYS, *(option.name for option in own)}
        lacking = {each.keyword: each.name for each in keys if each.keyword not in flags}
        for option in (
            _help_all(hidden=not keys),
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
    made = click.group(name, cls=Group, epilog=_example(example), **settings)
    return lambda function: made(_help_all(hidden=True)(function))


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
    try:
        gettempdir()
    except FileNotFoundError as error:
        raise QuantkitError(
            "no folder for temporary files can be written, and torch needs one: set TMPDIR to one"
        ) from error
    if computes and sys.flags.optimize > 1:
        raise QuantkitError(
            "transformers needs docstrings, which -OO drops: use PYTHONOPTIMIZE=1, or unset it"
        )


@uncollected()
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


def text(
    name: str, metavar: str, help: str, complete: Any = None, **more: Any
) -> Callable[[Function], Function]:
    """Make an option that takes a text: the name of a file, a folder or something else."""
    return click.option(name, metavar=metavar, shell_complete=complete, help=help, **more)


def flag(name: str, help: str, *variable: str, **more: Any) -> Callable[[Function], Any]:
    """Make an option without a value."""
    return click.option(name, *variable, is_flag=True, help=help, **more)


#: Placeholder of a value in help -> its type and completion.
VALUES: dict[str, Json] = {
    "BYTES": {"type": number_of_bytes},
    "CHECKPOINT": {"shell_complete": folders},
    "DIR": {"shell_complete": folders},
    "FILE": {"shell_complete": files},
    "JSON": {"type": engine_args},
    "N,N": {"type": numbers},
    "NAME|FILE": {"shell_complete": texts},
    "RECIPE,RECIPE": {"shell_complete": files},
    "SOURCE,NAME=SOURCE": {"shell_complete": texts},
}
#: Further arguments of click for a key of a recipe, by keyword.
_MORE: dict[str, Json] = {
    "group_size": {"type": group_size, "metavar": "COLUMNS"},
    "override": {
        "type": override,
        "metavar": "REGEX=SCHEME",
        "multiple": True,
        "help": "A scheme for some: '.*down_proj=int4:g64'; repeatable.",
        "also": ["--pin"],
    },
    "skip": {
        "multiple": True,
        "metavar": "REGEX",
        "help": "Linears left dense, besides lm_head; repeatable.",
    },
    "calib": {
        "multiple": True,
        "metavar": "SOURCE[:WEIGHT]",
        "shell_complete": texts,
        "help": (
            f"Calibration text: {CALIBRATION} [packaged]; repeatable, the weights are relative."
        ),
    },
    "template_args": {
        "type": template_args,
        "multiple": True,
        "callback": lambda context, option, values: dict(ChainMap(*reversed(values))) or None,
        "metavar": "JSON|KEY=VALUE",
        "help": "Arguments of the chat template, like enable_thinking=false; repeatable.",
    },
    "skip_bad_records": {"metavar": "N"},
}


def declared(
    kinds: Mapping[str, type], without: Sequence[str] = (), **changes: Any
) -> Callable[[Function], Function]:
    """Make the options that dataclasses declare; the command gets an instance of each by its name.

    The command declares options `without` itself, or lacks them. `changes` are those of all keys.
    """
    keys = [key for kind in kinds.values() for key in keys_of(kind) if key.keyword not in without]
    made = [_option(replace(key, **changes)) for key in keys]

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(**given: Any) -> Any:
            instances, rest = built(given, *kinds.values())
            return function(**rest, **dict(zip(kinds, instances, strict=True)))

        return combined(*made)(call)

    return decorate


def recipe_options(keys: Sequence[Key]) -> Callable[[Function], Function]:
    """Make the options of the keys of a recipe that have one; if not given they change nothing."""
    return combined(*(_option(key, of_recipe=True) for key in keys if key.level in OPTIONS))


def setting(keys: Sequence[Key], like: str = "gptq.damp=0.02") -> Callable[[Function], Function]:
    """Make `--set`, for the keys of a recipe that have no option."""
    option = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=settings(keys),
        help=f"Any key of a recipe, like {like}; --help-all lists them; repeatable.",
    )
    return section("Basic", option)


def _option(key: Key, of_recipe: bool = False) -> Callable[[Function], Function]:
    """Make the option of a key. A recipe checks its own numbers, as it may come from a file."""
    name = key.keyword.replace("_", "-")
    default = None if of_recipe else key.default
    flags = [f"--{name}"]
    more: Json = {"help": key.help_text, "default": default}
    if default is ...:
        more = {"help": key.help_text, "required": True}
    if key.is_switch and key.negated and not of_recipe:
        flags = [f"--no-{name}"]
        more |= {"is_flag": True, "flag_value": False, "help": f"{key.help}."}
    elif key.is_switch and default is not False:
        flags = [f"--{name}/{Option(key.keyword, False)}"]
    elif key.is_switch:
        more |= {"is_flag": True, "help": f"{key.help}."}
    elif key.values:
        more["type"] = Choice(key.values)
    elif key.number is not None:
        more["type"] = key.number if of_recipe else _range(key)
    if key.metavar:
        more |= {"metavar": key.metavar, **VALUES.get(key.metavar, {})}
    if of_recipe:
        more |= _MORE.get(key.keyword, {})
    option = click.option(*flags, *more.pop("also", []), key.keyword, **more)
    return section(key.section, option, level=key.level) if key.section else option


def _range(key: Key) -> Any:
    """Make the type of a number within its bounds."""
    bounds: Any = key.bounds
    if bounds is None:
        return key.number
    if key.number is int:
        return click.IntRange(bounds.ge, bounds.le)
    is_open = bounds.gt is not None
    return Range(bounds.gt if is_open else bounds.ge, bounds.le, min_open=is_open)


model = click.argument("model", shell_complete=folders)
folder = click.argument("checkpoint", type=PATH)
checkpoint = click.argument("checkpoint", shell_complete=folders)

_help_all = partial(
    flag,
    "--help-all",
    "Show every option, and every key of --set, and stop.",
    is_eager=True,
    expose_value=False,
    callback=_show_everything,
)


def out(*, unless: Sequence[str] = (), required: bool = True) -> Callable[[Function], Function]:
    """Make the option for the folder that a command writes; the eager flags `unless` make it
    optional.
    """
    return click.option(
        "-o",
        "--out",
        type=PATH,
        required=required and not unless,
        callback=needed_unless(*unless) if unless else None,
        help="Folder to write; it must not exist yet.",
    )


layout = click.option("--layout", type=Choice(LAYOUTS), required=True, help="Layout to write.")
