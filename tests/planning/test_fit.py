"""The choice of schemes: least loss increase within the bytes, joined linears as one, pins, exact patterns."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import RecipeError
from quantkit.layouts import LAYOUTS
from quantkit.planning.fit import Group, Space, groups_of, patterns, recipe_of, schemes_of
from quantkit.recipes.recipe import Recipe, from_mapping, matches

CT = LAYOUTS["compressed-tensors"]
LAYERS = [f"model.layers.{layer}" for layer in (0, 1, 11)]
LINEARS = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
SHAPES = {f"{layer}.{linear}": (128, 128) for layer in LAYERS for linear in LINEARS}


def groups(recipe: Recipe, allowed: str = "int4,dense", shapes: Any = SHAPES) -> list[Group]:
    goals = {name: recipe.scheme_of(name) for name in shapes}
    schemes = schemes_of(allowed, recipe)
    return groups_of(shapes, goals, lambda name: 2 * 128 * 128, schemes, CT, recipe)


def rtn(**changes: Any) -> Recipe:
    return from_mapping({"method": "rtn", **changes})


@pytest.mark.parametrize("seed", range(6))
def test_the_programme_is_as_good_as_trying_everything(seed: int) -> None:
    draw = random.Random(seed)
    labels = ["a", "b", "c", "dense"]
    some = [
        Group(f"g{i}", (f"g{i}",), 100, {each: draw.randrange(1, 2000) for each in labels[: draw.randrange(1, 5)]})
        for i in range(6)
    ]
    increases = {(group.name, each): draw.random() for group in some for each in group.bytes}
    space, budget = Space("x", some), draw.randrange(2000, 9000)
    share = draw.choice([0.0, 0.2, 1.0])
    found = space.choose(lambda group, each: increases[group.name, each], budget, share * 600)
    every = [
        sum(increases[group.name, each] for group, each in zip(some, choice, strict=True))
        for choice in itertools.product(*(group.bytes for group in some))
        if sum(group.bytes[each] for group, each in zip(some, choice, strict=True)) <= budget
        and sum(100 for g, each in zip(some, choice, strict=True) if each == "dense") <= share * 600
    ]
    assert (found is None) == (not every)
    if found is not None:
        assert space.size(found) <= budget
        assert sum(increases[name, each] for name, each in found.items()) == pytest.approx(min(every), rel=2e-4)


def test_members_of_a_joined_linear_and_experts_never_get_two_schemes() -> None:
    expert = [f"model.layers.0.mlp.experts.{i}.{n}_proj" for i in range(3) for n in ("gate", "up", "down")]
    found = groups(rtn(), shapes={**SHAPES, **dict.fromkeys(expert, (128, 128))})
    members = {group.name: set(group.linears) for group in found}
    assert members["model.layers.0.mlp.experts"] == set(expert)
    assert members["model.layers.11.self_attn.qkv_proj"] == {f"model.layers.11.self_attn.{n}_proj" for n in "qkv"}
    assert sorted(name for each in members.values() for name in each) == sorted([*SHAPES, *expert])


def test_a_pin_of_one_member_holds_for_all_that_it_is_joined_with() -> None:
    found = {g.name: g for g in groups(rtn(overrides={"0.*q_proj": "int4:g32"}, skip=["11.*up_proj"]))}
    assert list(found["model.layers.0.self_attn.qkv_proj"].bytes) == ["int4:g32"]
    assert list(found["model.layers.11.mlp.gate_up_proj"].bytes) == ["dense"]
    assert len(found["model.layers.1.mlp.gate_up_proj"].bytes) > 2


def test_the_recipe_of_a_choice_gives_each_linear_what_was_chosen() -> None:
    recipe = rtn(overrides={r"1\.self_attn.o_proj": "int4:g32"})
    space = Space("compressed-tensors", groups(recipe))
    draw = random.Random(0)
    for _ in range(20):
        choice = {group.name: draw.choice(list(group.bytes)) for group in space.groups}
        made = recipe_of(recipe, space, choice)
        for group in space.groups:
            for name in group.linears:
                goal = made.scheme_of(name)
                assert (goal.label if isinstance(goal, Scheme) else "dense") == choice[group.name], name
        assert from_mapping(made.to_mapping()) == made


def test_keys_at_their_default_follow_the_new_schemes_and_stated_ones_stay() -> None:
    by_default, stated = from_mapping({}), from_mapping({"signed": False, "gptq": {"descent": 1}})
    space = Space("compressed-tensors", groups(by_default, "int4,fp6-e2m3"))
    floats = {group.name: "fp6-e2m3:channel" for group in space.groups}
    assert by_default.signed and not recipe_of(by_default, space, floats).signed
    integers = {group.name: "int4:g64" for group in space.groups}
    made = recipe_of(stated, space, integers)
    assert not made.signed and made.gptq.descent == 1
    assert recipe_of(by_default, space, integers).signed


def test_a_pattern_of_a_layer_matches_no_other_one() -> None:
    names = [f"{layer}.mlp.{name}_proj" for layer in LAYERS[:2] for name in ("gate", "up")]
    names += [f"model.layers.1.mlp.experts.{i}.down_proj" for i in (0, 7)]
    found = patterns(names)
    assert len(found) == 2
    for name in (*SHAPES, *names, "model.layers.11.mlp.experts.0.down_proj", "model.layers.1.mlp.down_proj"):
        assert any(matches(pattern, name) for pattern in found) == (name in names), name


def test_a_linear_that_no_text_reaches_is_not_given_the_fewest_bits() -> None:
    space = Space("x", groups(rtn()))
    first = dict.fromkeys([g.name for g in space.groups], "int4:g128")
    found = space.with_fixed([g.name for g in space.groups if "layers.1." in g.name], first).groups
    assert {tuple(g.bytes) for g in found if "layers.1." not in g.name} == {("int4:g128",)}
    assert all(len(g.bytes) > 1 and not g.is_fixed for g in found if "layers.1." in g.name)


def test_a_name_that_is_no_scheme_is_refused_and_a_stated_group_size_stays() -> None:
    with pytest.raises(RecipeError, match="unknown format 'int9'"):
        schemes_of("int4,int9", rtn())
    sizes = {scheme.group_size for scheme in schemes_of("int4", rtn(scheme={"group_size": 64})) if scheme}
    assert sizes == {64}
    assert schemes_of("int4:g32, dense", rtn()) == [Scheme.parse("int4:g32"), None]
