"""Tests guard the documents: every command shown is one that quantkit has, and every one it has is shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from quantkit.api import shipped_recipes
from quantkit.cli.commands import quantkit
from tests.command_line import commands

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: What ends the arguments of a command in a shell.
ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "(", ")"}


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of every line of a page's fenced blocks; continued lines are joined, comments dropped."""
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            try:
                yield list(lexer)
            except ValueError:  # an unbalanced quote: this block is no shell
                continue


def invocations(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `quantkit ...` or `python -m quantkit ...` shown on a page."""
    for words in shell_lines(page):
        starts = [i for i, word in enumerate(words) if Path(word).name == "quantkit" and runs(words[:i])]
        for start in starts:
            rest = words[start + 1 :]
            end = next((i for i, word in enumerate(rest) if word in ENDS), len(rest))
            yield rest[:end]


def runs(before: list[str]) -> bool:
    """Return whether the word behind these is run by a shell (variables may be set, Python may run the module)."""
    settings = [word for word in before if not re.fullmatch(r"\w+=.*", word)]
    return not settings or settings[-1] in ENDS or settings[-1] == "-m" or settings[0] in ("time", "nohup")


def parse(args: list[str]) -> tuple[str, dict[str, object]]:
    """Return the name and the parameters of a command line; click's own error if quantkit has no such command."""
    command: click.Command = quantkit
    while isinstance(command, click.Group) and args and not args[0].startswith("-"):
        if args[0] not in command.commands:
            raise click.UsageError(f"no such command: {args[0]}")
        command, args = command.commands[args[0]], args[1:]
    context = command.make_context(command.name, list(args))
    return str(command.name), context.params


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_exists_with_its_options(page: Path) -> None:
    for args in invocations(page):
        try:
            path, params = parse(args)
        except click.exceptions.Exit:
            continue  # --help, --version
        except click.ClickException as error:
            pytest.fail(f"{page.name}: quantkit {shlex.join(args)}: {error.format_message()}")
        recipe = params.get("recipe")
        if recipe is not None:
            known = str(recipe) in shipped_recipes() or (ROOT / str(recipe)).is_file() or "/" not in str(recipe)
            assert known, f"{page.name}: {path} shows the recipe {recipe}, which does not exist"


def test_the_readme_shows_every_command() -> None:
    shown = set()
    for args in invocations(README):
        words = [word for word in args if not word.startswith("-")]
        shown |= {tuple(words[:1]), tuple(words[:2])}
    text = README.read_text(encoding="utf-8")
    for path, command in commands(quantkit):
        if not isinstance(command, click.Group):
            assert path in shown or f"`{' '.join(path)}`" in text or f"quantkit {' '.join(path)}" in text, path


def test_the_readme_names_every_shipped_recipe() -> None:
    text = README.read_text(encoding="utf-8")
    assert [name for name in shipped_recipes() if name not in text] == []


def test_every_make_target_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "test", "check"} <= targets
    for page in PAGES:
        for words in shell_lines(page):
            if words[:1] == ["make"]:
                assert {word for word in words[1:2] if "=" not in word} <= targets, f"{page.name}: {' '.join(words)}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "line",
    ["quantize m -o out --nonsense", "sparsify m -o out", "eval tasks m", "quantize m -o out --layout exl3", "verify"],
)
def test_what_does_not_exist_is_found(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh\nCUDA_VISIBLE_DEVICES=0 quantkit \\\n  {line} | head  # a comment\n```\n")
    (args,) = invocations(page)
    with pytest.raises(click.ClickException):
        parse(args)
