"""JSON and configs of strangers: nothing but a CheckpointError, no hang, no allocation before the check."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError
from quantkit.io.json_files import check_config, decode_floats, drop_auto_map, dump_json, load_json

BAD_JSON = {
    "empty": b"",
    "a list": b"[1]",
    "two objects": b"{}{}",
    "comment": b"{} // x",
    "duplicate key": b'{"a": 1, "a": 2}',
    "duplicate key below": b'{"x": [{"a": 1, "a": 2}]}',
    "NaN": b'{"a": NaN}',
    "minus infinity": b'{"a": -Infinity}',
    "1e999": b'{"a": 1e999}',
    "-1e999": b'{"a": -1e999}',
    "more than 64 bits": b'{"a": 123456789012345678901}',
    "ten thousand digits": b'{"a": ' + b"1" * 10_000 + b"}",
    "half a pair": b'{"a": "\\ud800"}',
    "half a pair as key": b'{"b": [{"\\udfff": 1}]}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "not utf-8": b'{"a": "\xff"}',
    "control character": b'{"a": "\n"}',
    "deep": b'{"a":' * 10**5,
    "deep and closed": b'{"a":' * 100 + b"1" + b"}" * 100,
    "deep list": b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.json").write_bytes(BAD_JSON[case])
    with pytest.raises(CheckpointError) as caught:
        load_json(tmp_path / "x.json")
    assert "\n" not in str(caught.value) and "x.json" in str(caught.value)


def test_ordinary_json_is_read(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, None, True, "ü\U0001f600\n"], "b": {"c": {}}, "big": 2**63, "small": 1e-300}
    (tmp_path / "x.json").write_text(json.dumps(value))
    (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
    assert load_json(tmp_path / "link.json") == value


def test_infinity_and_nan_are_read_and_written_back_where_they_are_allowed(tmp_path: Path) -> None:
    text = (
        b'{\n  "a": Infinity,\n  "b": [\n    -Infinity,\n    NaN\n  ],\n  "c": {\n    "__float__": "Infinity"\n  }\n}\n'
    )
    (tmp_path / "x.json").write_bytes(text)
    value = load_json(tmp_path / "x.json", special_floats=True)
    assert dump_json(value, special_floats=True) == text
    inf = float("inf")
    assert decode_floats(value) == {"a": inf, "b": [-inf, value["b"][1]], "c": inf} and value["b"][1] != value["b"][1]
    with pytest.raises(ValueError):
        dump_json(value)
    (tmp_path / "x.json").write_bytes(b'{"a": 1e999}')  # no word for infinity, but a number that is too large
    with pytest.raises(CheckpointError, match="too large"):
        load_json(tmp_path / "x.json", special_floats=True)


@pytest.mark.parametrize(
    "value", [{"__float__": "1.5"}, {"__float__": 1}, {"__float__": "NaN", "a": 1}, {"__float__": ["NaN"]}]
)
def test_what_only_looks_like_a_tagged_number_stays(value: dict[str, Any]) -> None:
    assert decode_floats({"a": [value]}) == {"a": [value]}


def test_json_past_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"")
    os.truncate(tmp_path / "x.json", 100 * 2**20 + 1)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="limit"):
        load_json(tmp_path / "x.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(CheckpointError):
            load_json(tmp_path / name)


HOSTILE = {
    "auto_map": {"AutoModel": "x.y"},
    "trust_remote_code": True,
    "_attn_implementation": "evil/kernel",
    "_attn_implementation_internal": "evil/kernel",
    "attn_implementation": "evil/kernel",
    "_experts_implementation": {"": "evil/kernel"},
    "_experts_implementation_internal": "evil/kernel",
}


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("key", HOSTILE)
def test_config_keys_that_load_code_are_refused_at_any_depth(key: str, depth: int) -> None:
    config: Any = {key: HOSTILE[key]}
    for i in range(depth):
        config = {"text_config": config} if i % 2 else {"parts": [1, config]}
    with pytest.raises(CheckpointError, match=key):
        check_config(config, Path("config.json"))
    if key != "auto_map" and key != "trust_remote_code":
        with pytest.raises(CheckpointError, match=key):
            check_config(config, Path("config.json"), trust_remote_code=True)
    else:
        check_config(config, Path("config.json"), trust_remote_code=True)


def test_code_for_a_family_that_transformers_knows_is_left_out_and_other_code_is_refused() -> None:
    asks = {"AutoModelForCausalLM": "x.Y"}
    config: dict[str, Any] = {
        "model_type": "llama",
        "auto_map": asks,
        "text_config": {"model_type": "qwen2", "auto_map": asks},
    }
    assert len(drop_auto_map(config)) == 2
    assert config == {"model_type": "llama", "text_config": {"model_type": "qwen2"}}
    check_config(config, Path("config.json"))
    config = {"model_type": "llama", "auto_map": {**asks, "AutoConfig": "x.Z"}}
    assert drop_auto_map(config, True) == [] and config["auto_map"]
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "x.Z", "AutoModelForTokenClassification": "x.Y"}}
    assert len(drop_auto_map(config, True)) == 1 and "auto_map" not in config
    for family in ("abacus", None, ["llama"]):
        config = {"model_type": family, "auto_map": asks}
        assert drop_auto_map(config) == []
        with pytest.raises(CheckpointError, match="auto_map"):
            check_config(config, Path("config.json"))
    config = {"model_type": "llama", "text_config": {"auto_map": asks}}
    assert drop_auto_map(config) == []
    with pytest.raises(CheckpointError, match="auto_map"):
        check_config(config, Path("config.json"))


@pytest.mark.parametrize("depth", [0, 1])
def test_implementations_by_transformers_own_names_pass_and_others_do_not(depth: int) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def config(key: str, value: Any) -> dict[str, Any]:
        return {"vision_config": {key: value}} if depth else {key: value}

    functions = ((name, ALL_ATTENTION_FUNCTIONS[name].__module__) for name in ALL_ATTENTION_FUNCTIONS.valid_keys())
    # A program may have registered its own beside them.
    for name in ("eager", *(name for name, module in functions if module.startswith("transformers."))):
        check_config(config("_attn_implementation", name), Path("config.json"))
    for name in ALL_EXPERTS_FUNCTIONS.valid_keys():
        check_config(config("experts_implementation", name), Path("config.json"))
    check_config(config("attn_implementation", {"": "sdpa", "text_config": "eager"}), Path("config.json"))
    for value in ("kernels-community/flash-attn3", "my_attention", 7, ["sdpa"], {"text_config": "a/b"}, {"": {}}):
        with pytest.raises(CheckpointError, match="foreign code"):
            check_config(config("attn_implementation", value), Path("config.json"))


def test_harmless_config_keys_pass() -> None:
    check_config({"_attn_implementation_autoset": True, "attn_implementation": None, "attn": "x"}, Path("config.json"))
