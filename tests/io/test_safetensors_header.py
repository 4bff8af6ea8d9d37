"""Headers, indexes and JSON from strangers: nothing but a CheckpointError, no hang, no allocation before the check."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import CheckpointError
from quantkit.io.json_files import check_config, decode_floats, drop_auto_map, dump_json, load_json
from quantkit.io.model_folder import inside
from quantkit.io.safetensors_files import read_header

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float16).view(3, 4),
    "b": torch.tensor(7, dtype=torch.int64),
    "c.bias": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def test_the_header_agrees_with_the_library(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x", {"format": "pt"})
    tensors, metadata = read_header(tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    assert metadata == {"format": "pt"} and tensors.keys() == TENSORS.keys()
    for name, info in tensors.items():
        assert (info.dtype, info.shape) == (TENSORS[name].dtype, tuple(TENSORS[name].shape))
        assert raw[info.start : info.end] == TENSORS[name].numpy().tobytes()


BAD_HEADERS = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length past the end": file_of({"a": entry()}, b"1234", length=10**6),
    "length past the limit": file_of({"a": entry()}, b"1234", length=2**62),
    "length negative": struct.pack("<q", -1) + b"{}",
    "length zero": file_of(b"", b"1234"),
    "a list": file_of([]),
    "a pickle": b"\x80\x04\x95" + bytes(100),
    "NUL padded": file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}\0\0\0', b"1234"),
    "unknown dtype": file_of({"a": entry("F4")}, b"1234"),
    "dtype no text": file_of({"a": entry(["U8"])}, b"1234"),
    "shape no list": file_of({"a": entry(shape=4)}, b"1234"),
    "shape negative": file_of({"a": entry(shape=[-4])}, b"1234"),
    "shape twice negative": file_of({"a": entry(shape=[-2, -2])}, b"1234"),
    "shape fractional": file_of({"a": entry(shape=[4.0])}, b"1234"),
    "shape boolean": file_of({"a": entry(shape=[True, 4])}, b"1234"),
    "shape overflows": file_of({"a": entry(shape=[2**32, 2**32, 4])}, b"1234"),
    "rank 9": file_of({"a": entry(shape=[1] * 8 + [4])}, b"1234"),
    "size is not the range": file_of({"a": entry(shape=[3])}, b"1234"),
    "range backwards": file_of({"a": entry(offsets=[4, 0])}, b"1234"),
    "range negative": file_of({"a": entry(offsets=[-4, 0])}, b"1234"),
    "range of three": file_of({"a": entry(offsets=[0, 4, 4])}, b"1234"),
    "range past the end": file_of({"a": entry(shape=[8], offsets=[0, 8])}, b"1234"),
    "data after the last": file_of({"a": entry()}, b"12345"),
    "no data": file_of({"a": entry()}),
    "gap": file_of({"a": entry(), "b": entry(offsets=[5, 9])}, b"123456789"),
    "overlap": file_of({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456"),
    "same range twice": file_of({"a": entry(), "b": entry()}, b"1234"),
    "starts late": file_of({"a": entry(offsets=[4, 8])}, b"12345678"),
    "key missing": file_of({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "key too many": file_of({"a": {**entry(), "strides": [1]}}, b"1234"),
    "tensor is null": file_of({"a": None}, b"1234"),
    "tensor twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "name empty": file_of({"": entry()}, b"1234"),
    "name long": file_of({"a" * 513: entry()}, b"1234"),
    "name with newline": file_of({"a\nb": entry()}, b"1234"),
    "name with escape": file_of({"a\x1b[2J": entry()}, b"1234"),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "a": entry()}, b"1234"),
    "metadata a list": file_of({"__metadata__": [], "a": entry()}, b"1234"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused(tmp_path: Path, case: str) -> None:
    started = time.process_time()
    refused(tmp_path / "x.safetensors", BAD_HEADERS[case])
    assert time.process_time() - started < 1


def test_a_huge_length_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    os.truncate(tmp_path / "x", 2**40)
    with (tmp_path / "x").open("r+b") as file:
        file.write(struct.pack("<Q", 2**39) + b"{")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="limit"):
        read_header(tmp_path / "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_hundred_thousand_duplicate_keys_do_not_hang(tmp_path: Path) -> None:
    text = b"{" + b",".join(b'"k%d":1' % (i % 99_999) for i in range(100_000)) + b"}"
    started = time.process_time()
    refused(tmp_path / "x", file_of(text))
    assert time.process_time() - started < 2


def test_truncation_and_extension_are_always_found(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    for cut in range(len(good)):
        refused(tmp_path / "x", good[:cut])
    refused(tmp_path / "x", good + b"\0")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "missing"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        read_header(path)


# ------------------------------------------------------------------------------------------------ JSON files

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
    for family in ("abacus", None, ["llama"]):
        config = {"model_type": family, "auto_map": asks}
        assert drop_auto_map(config) == []
        with pytest.raises(CheckpointError, match="auto_map"):
            check_config(config, Path("config.json"))
    config = {"model_type": "llama", "text_config": {"auto_map": asks}}
    assert drop_auto_map(config) == []
    with pytest.raises(CheckpointError, match="auto_map"):
        check_config(config, Path("config.json"))


def test_harmless_config_keys_pass() -> None:
    check_config({"_attn_implementation_autoset": True, "attn_implementation": None, "attn": "x"}, Path("config.json"))


# ------------------------------------------------------------------------------------------------ paths

OUTSIDE = ["../x", "a/../../x", "a/../x", "/etc/passwd", "//host/x", "C:\\x", "~", "", ".", "..", "x/", "a\0b", "a\nb"]
OUTSIDE += ["./x", "a//x", "a" * 4097, "x\u202e", "caf\u00e9", "X.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, 1, None, ["x"], {"x": 1}, True])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    for path in (tmp_path / "x", folder / "x", folder / "a" / "x", folder / "cafe\u0301", folder / "x.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(CheckpointError) as caught:
        inside(folder, name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_links_may_only_lead_inside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "x").write_bytes(b"x")
    (tmp_path / "x").write_bytes(b"x")
    for name, target in {"in": "x", "chain": "in", "hop": "../model/in"}.items():
        (folder / name).symlink_to(target)
        assert inside(folder, name) == folder / "x"
    os.link(tmp_path / "x", folder / "hard")
    assert inside(folder, "hard") == folder / "hard"
    (tmp_path / "models-2").mkdir()
    (tmp_path / "models-2" / "x").write_bytes(b"x")
    for name, target in {"out": "../x", "far": "out", "loop": "loop", "gone": "y", "alike": "../models-2/x"}.items():
        (folder / name).symlink_to(target)
        with pytest.raises(CheckpointError):
            inside(folder, name)
    (folder / "zero").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        inside(folder, "zero")


def test_a_hub_snapshot_may_link_to_its_own_blobs_only(tmp_path: Path) -> None:
    mine, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    snapshot = mine / "snapshots" / "1234"
    for repository in (mine, other):
        (repository / "blobs").mkdir(parents=True)
        (repository / "blobs" / "ff").write_bytes(b"x")
    snapshot.mkdir(parents=True)
    (snapshot / "mine").symlink_to("../../blobs/ff")
    (snapshot / "other").symlink_to(other / "blobs" / "ff")
    assert inside(snapshot, "mine") == mine / "blobs" / "ff"
    with pytest.raises(CheckpointError, match="link out"):
        inside(snapshot, "other")
