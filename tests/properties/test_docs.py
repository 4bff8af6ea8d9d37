"""Hold the pages to the code: commands, make targets, recipe keys, cited sections and links exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from quantkit.cli.commands import quantkit
from quantkit.recipes.files import shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
RECIPES = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: What ends the arguments of a command in a shell.
ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "(", ")"}


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each line of a page's fenced blocks. Continued lines are joined, comments dropped."""
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
        starts = [i for i, word in enumerate(words) if re.fullmatch(r"(.*/)?quantkit", word) and runs(words[:i])]
        for start in starts:
            rest = words[start + 1 :]
            end = next((i for i, word in enumerate(rest) if word in ENDS), len(rest))
            yield rest[:end]


def runs(before: list[str]) -> bool:
    """Return True if a shell runs the word behind these: settings, `python -m`, or the end of a command."""
    settings = [word for word in before if not re.fullmatch(r"\w+=.*", word)]
    return not settings or settings[-1] in ENDS or settings[-1] == "-m" or settings[0] in ("time", "nohup")


def parse(args: list[str]) -> tuple[str, dict[str, object]]:
    """Return the name and the parameters of a command line. Raises click's error if quantkit has no such command."""
    command: click.Command = quantkit
    while isinstance(command, click.Group) and args and not args[0].startswith("-"):
        if args[0] not in command.commands:
            raise click.UsageError(f"no such command: {args[0]}")
        command, args = command.commands[args[0]], args[1:]
    above = click.Context(quantkit, info_name="quantkit", **quantkit.context_settings)
    context = command.make_context(command.name, list(args), parent=above)
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


def test_the_recipe_page_names_every_shipped_recipe() -> None:
    shown = re.findall(r"^\| `([a-z0-9-]+)` \|", RECIPES.partition("## Shipped")[2], re.MULTILINE)
    assert sorted(shown) == sorted(shipped_recipes())


def test_readme_fits_a_page() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 145
    assert max(map(len, lines)) <= 140


def test_sections_cited_by_the_code_exist() -> None:
    sections = {page.stem.upper(): numbered_sections(page) for page in PAGES}
    pages = "|".join(sections)
    citations = re.compile(rf"\b({pages}|PRODUCT|(?i:{pages})\.md)((?:(?:,| and| to)?(?: section)? \d+(?:\.\d+)?)+)")
    files = [path for folder in ("quantkit", "kernels", "configs", "benchmarks") for path in (ROOT / folder).rglob("*")]
    for path in (path for path in files if path.suffix in (".py", ".cu", ".cuh", ".yaml")):
        for page, cited in citations.findall(path.read_text(encoding="utf-8")):
            missing = set(re.findall(r"\d+(?:\.\d+)?", cited)) - sections.get(page.upper().removesuffix(".MD"), set())
            assert not missing, f"{path} cites {page}{cited}"


def numbered_sections(page: Path) -> set[str]:
    """Return the numbers of a page's headings, and of the list items below them (`1.2` is item 2 of section 1)."""
    found, section = set(), ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"#+ (\d+(?:\.\d+)?)", line):
            section = heading[1]
            found.add(section)
        elif item := re.match(r"(\d+)\. ", line):
            found.add(f"{section}.{item[1]}")
    return found


def test_every_make_target_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "test", "check"} <= targets
    for page in PAGES:
        for words in shell_lines(page):
            if words[:1] == ["make"]:
                assert {word for word in words[1:2] if "=" not in word} <= targets, f"{page.name}: {' '.join(words)}"


def test_make_targets_name_tests_that_are_there() -> None:
    printed = subprocess.run(["make", "-n", "amx", "fast"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = re.findall(r"\btests/[\w/.]+", printed)
    assert len(named) > 10 and [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Zensical, which builds the site, needs Python 3.11")
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="Zensical builds the site: pip install zensical")
    subprocess.run([sys.executable, ROOT / "docs/site_source.py", tmp_path / "build/pages"], check=True)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages, site = tmp_path / "build/pages", tmp_path / "build/site"
    assert len([*site.rglob("*.html")]) == len([*pages.rglob("*.md")]) + 1  # and the page of unknown addresses
    assert "Round to nearest" in (site / "search.json").read_text(encoding="utf-8")


def test_modules_that_pages_cite_exist() -> None:
    roots = ["", "quantkit", "quantkit/calibration", "tests", "tests/properties", "benchmarks", "benchmarks/study"]
    for page in [*PAGES, ROOT / "tests/README.md"]:
        for cited in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|cu|cuh|sh))`", page.read_text(encoding="utf-8")):
            assert any((ROOT / root / cited).exists() for root in roots), f"{page.name} cites {cited}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_messages_of_the_troubleshooting_page_are_real() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "quantkit").rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", source)  # a message that goes on in the next line
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(shown) > 30
    for message in shown:
        # The source holds subject, rule, ways out and options apart.
        for part in re.split(r"…|: |, (?:or )?|--[a-z-]+", message):
            assert part.strip() in source, message
