"""Recipes: round trips, defaults of each format, and errors that name every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.core.formats import FORMATS, INT4
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import RecipeError
from quantkit.keys import keys_of
from quantkit.recipes.files import from_pairs, load, load_named_or_scheme, merge
from quantkit.recipes.recipe import Recipe, from_mapping, matches, pruning_from_mapping


def read(text: str, folder: Path) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return from_mapping(load(path))


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_through_yaml_gives_an_equal_recipe(name: str, tmp_path: Path) -> None:
    recipe = from_mapping({"scheme": {"format": name}})
    again = read(recipe.to_yaml(), tmp_path)
    assert again == recipe
    assert again.sha256() == recipe.sha256()


def test_round_trip_of_every_key_away_from_its_default(tmp_path: Path) -> None:
    mapping = {
        "scheme": {"format": "int4", "group_size": "channel", "symmetric": False},
        "method": "gptq",
        "clip": "none",
        "metric": "diag",
        "signed": False,  # True is refused with an asymmetric scheme
        "gptq": {
            "damp": 1e-05,
            "damp_kind": "mean",
            "block": 64,
            "act_order": "off",
            "on_unsolvable": "rtn",
            "refit": True,
            "descent": 2,
            "first_token": 0.5,
        },
        "tune": 3,
        "true_sequential": False,
        "calibration": {
            "data": "t: #'é.txt",
            "samples": 3,
            "max_length": 77,
            "seed": 2**40,
            "lengths": "fixed",
            "moe": "all",
            "text_column": "body",
            "split": "validation",
        },
        "layout": "gptq-v2",
        "pad": True,
        "skip": [],
        "overrides": {"yes": "int4:g64", "1e3": "int4:channel:asym", "null": "fp6"},
    }
    recipe = from_mapping(mapping)
    assert recipe.to_mapping() == {**mapping, "overrides": {**mapping["overrides"], "null": "fp6:channel"}}  # type: ignore[dict-item]
    assert read(recipe.to_yaml(), tmp_path) == recipe


def test_overrides_keep_their_order_since_the_first_match_wins(tmp_path: Path) -> None:
    text = "overrides: {z_proj: 'int4:g64', '.*_proj': 'int4:g32', a_proj: 'fp6'}"
    recipe = read(text, tmp_path)
    assert [pattern for pattern, _ in recipe.overrides] == ["z_proj", ".*_proj", "a_proj"]
    assert read(recipe.to_yaml(), tmp_path).overrides == recipe.overrides
    assert recipe.scheme_of("model.layers.0.a_proj") == Scheme(INT4, 32)


def test_defaults_of_each_format() -> None:
    int4, fp6, fp5 = (from_mapping({"scheme": {"format": name}}) for name in ("int4", "fp6", "fp5"))
    assert from_mapping({}) == int4
    assert (int4.scheme, int4.method, int4.clip, int4.metric) == (Scheme(INT4, 128), "gptq", "search", "block")
    assert int4.layout == "compressed-tensors"
    assert int4.calibrated
    e2m3, e2m2 = (from_mapping({"scheme": {"format": name}}) for name in ("fp6-e2m3", "fp5-e2m2"))
    for recipe in (fp6, fp5, e2m3, e2m2):
        assert (recipe.scheme.group_size, recipe.method, recipe.clip) == (None, "gptq", "search")
        assert recipe.layout == ("humming" if recipe in (fp6, fp5) else "compressed-tensors")
        assert recipe.calibrated and not recipe.gptq.descent and not recipe.signed
    for recipe in (int4, fp6, fp5):
        assert (recipe.gptq.clip, recipe.gptq.metric) == (recipe.clip, recipe.metric)
        assert recipe.skip == ("lm_head",)


def test_2_4_weights_are_damped_less_unless_a_recipe_says_how() -> None:
    sparse: dict[str, Any] = {"scheme": {"sparsity": "2:4"}}
    assert from_mapping(sparse).gptq.damp == pruning_from_mapping({}).gptq.damp == 0.3
    assert from_mapping(sparse | {"gptq": {"damp": 1.0}}).gptq.damp == 1.0
    for kind in ("own", "mean"):  # a whole mean diagonal makes GPTQ rounding
        unit: dict[str, Any] = {"gptq": {"damp_kind": kind}}
        assert from_mapping(unit).gptq.damp == pruning_from_mapping(unit).gptq.damp == 0.01
    assert pruning_from_mapping({"gptq": {"damp": 1.0}}).gptq.damp == 1.0


def test_a_recipe_without_descent_has_no_refit_unless_it_asks() -> None:
    """Recipes from before the refit was usual, and the published ones, stay what they were."""
    assert not from_mapping({"gptq": {"descent": 0}}).gptq.refit
    assert from_mapping({"gptq": {"descent": 0, "refit": True}}).gptq.refit
    for published in ("int4-published", "marlin-paper"):
        assert not from_mapping(load_named_or_scheme(published)).gptq.refit


def test_a_search_without_calibration_uses_mse() -> None:
    rtn = from_mapping({"method": "rtn"})
    assert (rtn.clip, rtn.metric, rtn.calibrated) == ("search", "mse", False)
    assert from_mapping({"method": "rtn", "metric": "diag"}).calibrated
    fp6 = from_mapping({"scheme": {"format": "fp6"}, "method": "rtn"})
    assert (fp6.clip, fp6.calibrated) == ("none", False)


@pytest.mark.parametrize(("method", "rule"), [("gptq", "sparsegpt"), ("rtn", "magnitude")])
def test_the_masks_of_a_sparse_scheme_go_by_its_method(method: str, rule: str) -> None:
    assert from_mapping({"method": method, "scheme": {"format": "int4", "sparsity": "2:4"}}).prune == rule
    assert from_mapping({"method": method}).prune is None


@pytest.mark.parametrize("named", ["int9:g64:gptq", "int4:g64:gptk", "int4-bets"])
def test_a_scheme_with_an_unknown_half_is_no_recipe(named: str) -> None:
    assert from_mapping(load_named_or_scheme("int4:g64:gptq")) == from_mapping({"scheme": {"group_size": 64}})
    with pytest.raises(RecipeError, match=f"unknown recipe '{named}'"):
        load_named_or_scheme(named)


def test_an_unquoted_off_is_off_and_not_false() -> None:
    assert from_mapping({"gptq": {"act_order": False}}).gptq.act_order == "off"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sheme: {format: int4}", "sheme"),
        ("scheme: {fromat: int4}", "fromat"),
        ("gptq: {dampening: 0.1}", "dampening"),
        ("gptq: {clip: none}", "clip"),
        ("calibration: {samples: 8, sample: 9}", "sample"),
        ("1: x", "1"),
        ("group_size: 64", "group_size' in the recipe: write it in scheme"),
        ("gptq.damp: 0.1", "gptq.damp' in the recipe: write it in gptq"),
        ("scheme: {samples: 8}", "samples' in scheme: write it in calibration"),
    ],
)
def test_an_unknown_key_is_named(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"unknown key '{named}"):
        read(text, tmp_path)


def test_a_number_needs_no_point(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-2 for a text, and JSON has no .5."""
    assert read("gptq: {damp: 1e-2}", tmp_path).gptq.damp == 0.01
    for typed in ("1e-2", ".01", "0.01"):
        assert from_pairs([f"gptq.damp={typed}"], keys_of(Recipe)) == {"gptq": {"damp": 0.01}}


@pytest.mark.parametrize(
    "text",
    [
        "scheme: {format: int7}",
        "scheme: {group_size: '128'}",
        "scheme: {group_size: 0}",
        "scheme: {symmetric: 'false'}",
        "scheme: {format: fp6, symmetric: false}",
        "scheme: int4",
        "scheme: 0",
        "method: rnt",
        "gptq: {damp: 0}",
        "gptq: {damp: 1.5}",
        "gptq: {damp: .nan}",
        "gptq: {block: 128.0}",
        "gptq: {act_order: true}",
        "gptq: 5",
        "calibration: {samples: 0}",
        "calibration: {seed: 99999999999999999999999}",
        "calibration: {data: 7}",
        "layout: marlin3",
        "layout: null",
        "skip: lm_head",
        "skip: [1]",
        "overrides: [k_proj]",
        "overrides: {k_proj: 4}",
        "overrides: {k_proj: int4:g}",
        "overrides: {k_proj: int4:g²}",
        "overrides: {k_proj: int4:64}",
        "overrides: {k_proj: int4:g0}",
        "overrides: {k_proj: int9}",
        "overrides: {k_proj: fp6:asym}",
        "overrides: {k_proj: ''}",
        "overrides: {7: int4}",
    ],
)
def test_a_wrong_value_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        read(text, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "method: gptq\nmethod: rtn\n",
        "scheme: {format: int4, format: fp6}",
        "scheme: {format: int4}\nscheme: {format: fp6}\n",
        "overrides:\n  k_proj: int4\n  k_proj: fp6\n",
        "gptq: &a {damp: 0.5}\ncalibration:\n  <<: *a\n  seed: 1\n  seed: 2\n",
    ],
)
def test_a_repeated_key_is_refused_instead_of_the_last_one_winning(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="repeated"):
        read(text, tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_recipe_of_another_editor_is_read_the_same(encoding: str, tmp_path: Path) -> None:
    (path := tmp_path / "recipe.yaml").write_bytes("# für\r\nmethod: rtn\r\nskip: [é]\r\n".encode(encoding))
    assert load(path) == {"method": "rtn", "skip": ["é"]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"- a\n- b\n",
        b"just text",
        b"method: [gptq",
        b"method: gptq\n\tclip: none",
        b"\xff\xfe\x00",
        b"\x00",
        b"--- {}\n--- {}\n",
        b"seed: 2020-99-99",
        b"a: !!int x",
        b"a: !!bool x",
        b"a: !!timestamp x",
        b"a: !!python/object/apply:os.system ['true']",
        b"? [a, b]\n: c",
        b"a: *missing",
        b"[" * 2000,
    ],
)
def test_an_unreadable_recipe_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(data)
    with pytest.raises(RecipeError) as error:
        from_mapping(load(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match="cannot read"):
            load(path)


def test_flags_win_over_the_file_and_absent_flags_change_nothing() -> None:
    base = {"scheme": {"format": "int4", "group_size": 64}, "method": "rtn", "skip": ["a"]}
    flags: dict[str, Any] = {"scheme": {"group_size": "channel", "symmetric": None}, "method": None, "gptq": {}}
    merged = merge(base, flags)
    assert merged == {"scheme": {"format": "int4", "group_size": "channel"}, "method": "rtn", "skip": ["a"]}
    assert base["scheme"] == {"format": "int4", "group_size": 64}
    assert from_mapping(merged).scheme == Scheme(INT4)


def test_a_flag_over_a_malformed_section_is_refused() -> None:
    with pytest.raises(RecipeError, match="scheme"):
        merge({"scheme": "int4"}, {"scheme": {"group_size": 64}})


def test_patterns_match_a_whole_name_or_its_end_after_a_dot_only() -> None:
    module = "model.layers.10.self_attn.k_proj"
    for pattern in ("k_proj", "self_attn.k_proj", r".*\.1\d\..*", ".*", "k_proj|v_proj", module):
        assert matches(pattern, module), pattern
    for pattern in ("proj", "k_pro", "layers.1", "attn.k_proj", "", "model.layers.1.self_attn.k_proj"):
        assert not matches(pattern, module), pattern


def test_skip_wins_over_overrides() -> None:
    recipe = from_mapping({"skip": ["k_proj"], "overrides": {".*": "int4:g32"}})
    assert recipe.scheme_of("a.k_proj") is None
    assert recipe.scheme_of("a.q_proj") == Scheme(INT4, 32)
    assert recipe.scheme_of("lm_head") == Scheme(INT4, 32)
