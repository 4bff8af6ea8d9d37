"""Regular expressions from a stranger's config end in time, in the meaning that `re` gives them."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError, RecipeError
from quantkit.layouts import LAYOUTS, quantkit_key, read_config, schemes as expressions
from quantkit.layouts.schemes import Schemes
from quantkit.recipes.recipe import from_mapping
from tests.command_line import call, refused
from tests.layouts.samples import write_folder

INT4, WIDE = Scheme.parse("int4:g128"), Scheme.parse("int4:g64")
NAMES = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(3) for part in "qkvo"]
#: Each takes `re` more than the age of the universe on the name.
ENDLESS = [r"(?:(\w|\w\.?|.)+)+[!#]", r"(?:.|\w|[a-z])*[A-Z]", r"(?:.|\w|[a-z])*(?:A|B)$"]
NAME = "model." + "layers.0.self_attn." * 12 + "q_proj"


@pytest.fixture
def gptq(tiny_llama: Path, tmp_path: Path) -> Path:
    write_folder(tiny_llama, tmp_path / "gptq", "gptq", Schemes(INT4, ignore=("lm_head",)))
    return tmp_path / "gptq"


def restate(folder: Path, dynamic: dict[str, Any]) -> Path:
    """State overrides in the public config of a GPTQ folder, and remove the `quantkit` key."""
    config = json.loads((folder / "config.json").read_text())
    stated = {key: value for key, value in config["quantization_config"].items() if key != "quantkit"}
    config["quantization_config"] = {**stated, "dynamic": dynamic}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_no_command_hangs_on_a_pattern_of_a_config(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS_IN_ALL", 0.2)  # without a limit this test has no end
    restate(gptq, {f"+:{pattern}": {} for pattern in ENDLESS})
    message = refused("inspect", gptq)
    assert "takes too long" in message and "write the names in full" in message


def test_patterns_that_are_each_quick_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS_IN_ALL", 0.05)
    patterns = expressions.Patterns(None, [(rf"(?:.|\w){{12}}.*[A-Z]{i}", i) for i in range(100)])
    with pytest.raises(CheckpointError, match="takes too long"):
        for i in range(1000):
            patterns.of(f"{NAME}.{i}")


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*b", r"(.*)\1+x", *ENDLESS])
def test_a_match_ends(pattern: str) -> None:
    try:
        assert expressions.matches(pattern, "a" * 200 + "!", 0.1) is (pattern == ENDLESS[0])
    except CheckpointError as error:
        assert "takes too long" in str(error)


def test_more_overrides_than_are_compiled_in_seconds_are_refused(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "MOST", 500)
    for count in (500, 501):
        restate(gptq, {rf"+:model\.layers\.{i}\.none.*": {"group_size": 64} for i in range(count)})
        text = call("inspect", gptq, code=int(count > 500)).output
    assert "501 patterns" in text and "names in full" in text


def test_names_in_full_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "MOST", 50)
    many = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(expressions.MOST + 1)]
    schemes = Schemes(INT4, tuple((re.escape(name), WIDE) for name in many))
    config = LAYOUTS["gptq"].write_config(schemes)
    for read in (
        read_config({**config, "quantkit": quantkit_key("gptq", schemes, "1", None)}, ""),
        read_config(config, ""),
    ):
        assert read[1].of(many[-1]) == WIDE and read[1].of("model.layers.0.mlp.experts.99999.up_proj") == INT4


def test_a_config_whose_patterns_exclude_each_other_stays_small() -> None:
    schemes = Schemes(INT4, tuple((rf".*layers\.{i}\..*", WIDE) for i in range(10_000)))
    with pytest.raises(LayoutError, match="names in full"):
        LAYOUTS["compressed-tensors"].write_config(schemes)


def test_lookahead_of_published_configs_is_read() -> None:
    config = LAYOUTS["compressed-tensors"].write_config(Schemes(INT4))
    groups = config["config_groups"]
    groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
    groups["group_1"]["targets"], groups["group_1"]["weights"]["group_size"] = [r"re:^(?!.*self_attn\.[qk]_proj).*"], 64
    schemes = read_config(config, "")[1]
    assert [schemes.of(name) == WIDE for name in NAMES] == ["q_proj" not in n and "k_proj" not in n for n in NAMES]


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"[[:alpha:]]+", r"(?:q_proj){e<=1}", r"q{x}", "a." * 5001, r"(", r"\p{L}", "(?R)", "*x", "["),
        *("a{99999999999999999999}", "x(?i)", r"\9", "(?P<n>a)(?P<n>b)"),
    ],
)
def test_what_engines_read_differently_is_refused(pattern: str) -> None:
    config = {**LAYOUTS["gptq"].write_config(Schemes(INT4)), "dynamic": {f"+:{pattern}": {}}}
    with pytest.raises(CheckpointError, match="no regular expression"):
        read_config(config, "somewhere")
    for mapping in ({"skip": [pattern]}, {"overrides": {pattern: "int4"}}):
        with pytest.raises(RecipeError, match="not a regular expression"):
            from_mapping(mapping)


PIECES = st.sampled_from(
    [
        *(*"aq_.*+?|()$^", r"\.", r"\d", r"\w", "[a-m]", "[^.]", "(?:", "(?!", "(?=", "(?i)"),
        *("{2}", "{,3}", "layers", "proj"),
    ]
)


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=8).map("".join), st.sampled_from([*NAMES, "", "a", "qqq", "A_.0"]))
def test_a_pattern_means_what_re_makes_of_it(pattern: str, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of Python 3.10, about what is an error since
            re.purge()  # a compiled pattern warns no more
            expected = re.compile(pattern).fullmatch(name) is not None
    except (re.error, DeprecationWarning):
        with pytest.raises(ValueError):
            expressions.compiled(pattern)
    else:
        assert expressions.matches(pattern, name) is expected


@settings(max_examples=50)
@given(st.lists(st.sampled_from([*map(re.escape, NAMES), r".*q_proj", r"model\.layers\.1\..*", r".*[kv]_proj"])))
def test_the_first_pattern_wins(patterns: list[str]) -> None:
    found = expressions.Patterns(None, [(pattern, i) for i, pattern in enumerate(patterns)])
    for name in NAMES:
        assert found.of(name) == next((i for i, p in enumerate(patterns) if re.fullmatch(p, name)), None)
