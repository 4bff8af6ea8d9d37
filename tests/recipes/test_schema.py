"""A new option is one field: added to a copy of the schema, it is in the file, command line, API, page and identity."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from quantkit import errors
from quantkit.api import placed
from quantkit.cli.options import command, setting
from quantkit.errors import RecipeError
from quantkit.keys import Count, key, keys_of
from quantkit.recipes.files import from_pairs
from quantkit.recipes.identity import difference
from quantkit.recipes.recipe import Recipe, from_mapping
from quantkit.recipes.schema import RecipeKeys

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Wider(Recipe):
    """The recipe with one field more."""

    novelty: Count = key("Rounds of something new", default=0, may_lack=True, when="Never.")


KEYS = keys_of(Wider)
RECIPE: Any = from_mapping({"novelty": 3}, Wider)


def test_the_file_has_it() -> None:
    assert RECIPE.novelty == 3 and RECIPE.to_mapping()["novelty"] == 3
    assert from_mapping(yaml.safe_load(RECIPE.to_yaml()), Wider) == RECIPE
    assert from_mapping({}, Wider).to_mapping() == from_mapping({}).to_mapping()
    with pytest.raises(RecipeError, match=r"^novelty is -1: use an integer from 0$"):
        from_mapping({"novelty": -1}, Wider)
    with pytest.raises(RecipeError, match="unknown key 'novelty'"):
        from_mapping({"novelty": 3})


def test_the_command_line_has_it() -> None:
    @command("make", "quantkit make", computes=False, shared=True, keys=KEYS)
    @setting(KEYS)
    def make(**given: Any) -> None:
        click.echo(from_pairs(given["settings"], KEYS))

    def call(line: str) -> str:
        return CliRunner().invoke(make, line.split()).output

    assert "novelty" not in call("--help")
    assert "novelty=N" in call("--help-all") and "Rounds of something new [0]." in call("--help-all")
    assert call("--set novelty=3") == "{'novelty': 3}\n"
    assert call("--novelty 3").endswith("--novelty is now --novelty VALUE.\n")  # as no message knows it as a key


def test_the_api_has_it() -> None:
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert "    novelty: int | None\n" in generate["typed_keywords"]("Keywords", "Some.", KEYS, " | None")
    assert placed({"novelty": 3, "damp": 0.5}, KEYS) == {"novelty": 3, "gptq": {"damp": 0.5}}
    row = generate["key_row"](KEYS[-1])
    assert row == ["`novelty`", "`0`", "Rounds of something new.", "Never."]


def test_the_identity_of_a_run_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors.KEYS, "novelty", "novelty")
    same = {"quantkit": "1", "torch": "2", "transformers": "5", "device": "cpu", "compute_dtype": "float32"}
    runs = [
        {**same, "recipe": recipe.to_mapping(), "recipe_sha256": recipe.sha256(), "calibration": None}
        for recipe in (RECIPE, from_mapping({}, Wider))
    ]
    found = difference(*runs, KEYS)
    assert found == "novelty was 3 and is now 0: use --set novelty=3, or --overwrite"


def test_no_two_keys_have_one_name_or_keyword() -> None:
    keys = keys_of(RecipeKeys)
    assert len({key.name for key in keys}) == len({key.keyword for key in keys}) == len(keys)
    assert all(key.help and key.when and not key.help.endswith(".") for key in keys)
