"""Shell completion of arguments: folders, files, data sets and pairs of layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations

import click
from click.shell_completion import CompletionItem

from quantkit.keys import Key
from quantkit.names import LAYOUTS
from quantkit.text.sources import NAMED


def pairs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the A-to-B of `convert`."""
    found = [f"{source}-to-{target}" for source, target in permutations(LAYOUTS, 2)]
    return [CompletionItem(pair) for pair in found if pair.startswith(incomplete)]


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
        near = [
            word
            for word in words
            if word.startswith(incomplete) and ("=" in incomplete or word.endswith("="))
        ]
        return [CompletionItem(word) for word in near]

    return complete


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a folder where a hub id is possible too."""
    return [CompletionItem(incomplete, type="dir")]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a file where a name is possible too."""
    return [CompletionItem(incomplete, type="file")]


def texts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a data set, or a file."""
    return [CompletionItem(name) for name in NAMED if name.startswith(incomplete)] + files(
        ctx, param, incomplete
    )
