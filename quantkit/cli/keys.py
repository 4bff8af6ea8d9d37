"""The options of the command line that keys of recipes and options of runs become."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click

from quantkit.cli import completers
from quantkit.cli.options import CALIBRATION, Bytes, GroupSize, JsonObject, Override, choice
from quantkit.cli.parsing import Function, combined, section
from quantkit.errors import Option
from quantkit.keys import OPTIONS, Key, keys_of
from quantkit.recipes.options import FitOptions, RunOptions

#: Further arguments of click for a key, by keyword.
_MORE: dict[str, dict[str, Any]] = {
    "group_size": {"type": GroupSize()},
    "override": {
        "type": Override(),
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
        "shell_complete": completers.texts,
        "help": (
            f"Calibration text: {CALIBRATION} [packaged]; repeatable, the weights are relative."
        ),
    },
    "template_args": {
        "type": JsonObject("enable_thinking=false"),
        "multiple": True,
        "callback": lambda context, option, values: dict(ChainMap(*reversed(values))) or None,
        "metavar": "JSON|KEY=VALUE",
        "help": "Arguments of the chat template, like enable_thinking=false; repeatable.",
    },
    "skip_bad_records": {"metavar": "N"},
    "act_budget": {"type": Bytes()},
    "min_share": {"metavar": "X"},
    "target_size": {"type": Bytes()},
    "allowed": {"metavar": "NAMES"},
}


def recipe_options(
    keys: Sequence[Key], like: str = "gptq.damp=0.02"
) -> Callable[[Function], Function]:
    """Make the options of the keys that have one, and `--set` for all others."""
    setting = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=completers.settings(keys),
        help=f"Any key of a recipe, like {like}; --help-all lists them; repeatable.",
    )
    return combined(
        *(_option(key) for key in keys if key.level in OPTIONS), section("Basic", setting)
    )


def run_options() -> Callable[[Function], Function]:
    """Make the options of a run."""
    return combined(*(_option(key, default=key.default) for key in keys_of(RunOptions)))


def fit_options(*without: str) -> Callable[[Function], Function]:
    """Make the options of a target size. In a command with its own options, only `--help-all` lists
    them.
    """
    keys = [
        replace(key, level="all") if without else key
        for key in keys_of(FitOptions)
        if key.keyword not in without
    ]
    return combined(*(_option(key, default=key.default) for key in keys))


def _option(key: Key, default: Any = None) -> Callable[[Function], Function]:
    """Make the option of a key."""
    flag = f"--{key.keyword.replace('_', '-')}"
    settings: dict[str, Any] = {"help": key.help_text, "default": default}
    if key.is_switch and default is None:
        flag = f"{flag}/{Option(key.keyword, False)}"
    elif key.is_switch:
        settings |= {"is_flag": True, "help": f"{key.help}."}
    elif key.values:
        settings["type"] = choice(key.values)
    elif key.number is not None:
        settings["type"] = key.number
    settings |= _MORE.get(key.keyword, {})
    flags = [flag, *settings.pop("also", [])]
    return section(key.section, click.option(*flags, key.keyword, **settings), level=key.level)
