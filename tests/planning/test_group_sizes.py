"""A group size that nobody stated fits the model; one that was stated is kept, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.planning.survey import with_group_size
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.command_line import RTN, call, refused
from tests.promises.model import write_model

BLOCK = "model.layers.0."


def sized(widths: dict[str, int], **asked: Any) -> tuple[Recipe, list[str]]:
    linears = {BLOCK + name: (256, k) for name, k in widths.items()}
    return with_group_size(from_mapping(asked), linears, dict(zip(linears, linears, strict=True)), {})


@pytest.mark.parametrize(
    ("widths", "size"), [((128, 640), 128), ((576, 1536), 64), ((576, 96, 128), 32), ((64, 2048), 64)]
)
def test_the_default_is_the_widest_size_that_fits_all(widths: tuple[int, ...], size: int) -> None:
    recipe, notices = sized({f"mlp.{i}_proj": k for i, k in enumerate(widths)})
    assert recipe.schemes == [from_mapping({"scheme": {"group_size": size}}).scheme]
    assert len(notices) == (size != 128)
    assert size == 128 or (
        f"--group-size {size} is the widest" in notices[0] and f"the {widths[0]} inputs" in notices[0]
    )


def test_a_width_that_no_size_divides_does_not_shrink_the_groups_of_others() -> None:
    recipe, notices = sized({"mlp.up_proj": 128, "mlp.down_proj": 200})
    assert recipe.scheme_of(f"{BLOCK}mlp.up_proj").label == "int4:g128"
    assert recipe.scheme_of(f"{BLOCK}mlp.down_proj").label == "int4:channel"
    assert notices == [
        f"one scale a row for 1 linear: neither 128 nor 64 nor 32 divides the 200 inputs of {BLOCK}mlp.down_proj"
    ]


def test_linears_that_are_skipped_or_overridden_have_no_say() -> None:
    widths = {"mlp.up_proj": 128, "mlp.down_proj": 64, "mlp.gate_proj": 96}
    recipe, notices = sized(widths, skip=["down_proj"], overrides={"gate_proj": "int4:channel"})
    assert recipe.scheme_of(f"{BLOCK}mlp.up_proj").label == "int4:g128" and notices == []


@pytest.mark.parametrize(
    "asked",
    [
        {"scheme": {"group_size": 128}},
        {"scheme": {"format": "fp6"}},
        {"pad": True},  # fills rows up to whole groups
        {"layout": "marlin"},  # no size helps there
    ],
)
def test_a_size_that_was_stated_or_cannot_help_is_kept(asked: dict[str, Any]) -> None:
    recipe, notices = sized({"mlp.up_proj": 576}, **asked)
    assert (recipe.scheme, recipe.overrides, notices) == (from_mapping(asked).scheme, (), [])


def test_a_model_of_odd_widths_is_quantized_by_default_and_its_recipe_makes_it_again(tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd", hidden_size=96, intermediate_size=208)
    planned = call("plan", model, *RTN).stdout
    assert "int4:g32" in planned and "7 quantized" in planned
    made = call("quantize", model, "-o", tmp_path / "out", *RTN)
    assert "int4:g32" in made.stdout and "--group-size 32 is the widest of 128, 64 and 32 that fits" in made.stderr
    src = Checkpoint(tmp_path / "out")
    assert src.scheme(f"{BLOCK}mlp.down_proj").label == "int4:channel"
    again = tmp_path / "again"
    call("quantize", model, "-o", again, "--recipe", tmp_path / "out" / "quantkit_recipe.yaml")
    for path in again.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    # Another layout or scheme has groups of its own, so a rewritten folder does not explain those of its source.
    assert "is the widest" in call("report", tmp_path / "out").stdout
    call("pack", tmp_path / "out", "--layout", "humming", "--pad", "-o", tmp_path / "packed")
    assert "is the widest" not in call("report", tmp_path / "packed").stdout


def test_a_model_of_which_no_linear_has_the_default_scheme_is_not_called_by_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd", hidden_size=200, intermediate_size=136)
    assert "int4:g128" not in call("plan", model, *RTN).stdout
    made = call("quantize", model, "-o", tmp_path / "out", *RTN)
    assert "7 linears, int4:channel" in made.stdout and "int4:g128" not in made.stdout
    assert "int4:g128" not in (tmp_path / "out" / "README.md").read_text()
    mixed = call("plan", model, *RTN, "--override", ".*mlp.*=int6:channel")
    assert "int4:channel (4) + int6:channel (3)" in mixed.stdout


def test_a_plan_that_will_not_be_is_not_printed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd", hidden_size=96)
    for recipe in (("--recipe", "int4-rtn"), ("--group-size", 128, *RTN)):
        assert "--group-size 32" in refused("plan", model, *recipe)
        assert json.loads(call("plan", model, *recipe, "--json", code=1).stdout)["misfits"]


def test_a_recipe_object_of_the_defaults_states_no_size(tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd", hidden_size=96)
    assert quantkit.plan(model, recipe=from_mapping({"method": "rtn"})).scheme == "int4:g32"
    stated = from_mapping({"method": "rtn", "scheme": {"group_size": 128}})
    assert "group_size=32" in str(quantkit.plan(model, recipe=stated).refusal)
