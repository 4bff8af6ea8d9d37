"""AWQ in the GEMM packing: published words, symmetric zero points, and configs in every published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import LAYOUTS, quantkit_key, read_config
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.schemes import Schemes
from tests.golden import both_ways, golden, scheme_of
from tests.layouts.samples import record

AWQ, QUICK = LAYOUTS["awq"], LAYOUTS["quick"]
ASYM = Scheme.parse("int4:g128:asym")
GEMM = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
OLDER = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
HEAD = ("lm_head",)


def test_words_and_zero_points_equal_the_published_ones() -> None:
    file = golden("awq")
    groups = []
    for case, info in file.cases.items():
        scheme = scheme_of({**info, "sym": False})
        q = QuantizedTensor(scheme, *(file(case, name).t().contiguous() for name in ("codes", "scales", "zeros")))
        both_ways("awq", q, {name: file(case, name) for name in ("qweight", "qzeros", "scales")})
        groups.append(scheme.group_size)
    assert {None, 32, 128} == set(groups)


def test_zero_points_in_the_file_and_as_vllm_repacks_them() -> None:
    run_time = Arrangement("N h:4 o:2 x:8", "G", "G N x o h")  # docs/layouts.md 3.6
    file = golden("marlin_vllm")
    for case, info in file.cases.items():
        scheme = scheme_of({**info, "sym": False})
        q = QuantizedTensor(scheme, *(file(case, name).t().contiguous() for name in ("codes", "scales", "zeros")))
        stored = {name: file(case, f"awq_{name}") for name in ("qweight", "qzeros")}
        both_ways("awq", q, {**stored, "scales": file(case, "scales")})
        words = file(case, "marlin_zp")
        assert torch.equal(run_time.pack(q.zeros, 4).view(words.shape), words)


def test_worked_example_of_the_documentation() -> None:
    n, k = torch.arange(256).view(-1, 1), torch.arange(128).view(1, -1)
    codes = ((k + 3 * (k // 8) + 5 * n + 7 * (n // 8)) % 16).to(torch.uint8)
    packed = AWQ.pack(QuantizedTensor(Scheme.parse("int4:g128"), codes, torch.ones(256, 1, dtype=torch.float16)))
    words = [
        f"{word & 0xFFFFFFFF:08x}" for word in [*packed["qweight"][0, :4].tolist(), packed["qweight"][1, 0].item()]
    ]
    assert words == ["39f5e4a0", "28e4d39f", "17d3c28e", "06c2b17d", "4a06f5b1"]


@pytest.mark.parametrize("layout", ["awq", "quick"])
def test_symmetric_zero_points_are_8_and_others_are_refused(layout: str) -> None:
    q = record(Scheme.parse("int4:g64"), 128, 128)
    packed = LAYOUTS[layout].pack(q)
    assert bool((packed["qzeros"] == 0x88888888 - 2**32).all())
    asymmetric = LAYOUTS[layout].unpack(packed, Scheme.parse("int4:g64:asym"))
    assert torch.equal(asymmetric.dequantize(), q.dequantize()) and bool((asymmetric.zeros == 8).all())
    asymmetric.zeros[77, 1] = 7
    with pytest.raises(LayoutError, match="row 77, group 1 is 7, not 8"):
        LAYOUTS[layout].unpack(LAYOUTS[layout].pack(asymmetric), q.scheme)


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "int4:g128:asym"),
        ({"version": "GEMM"}, "int4:g128:asym"),
        ({"version": None}, "int4:g128:asym"),
        ({"version": None, "format": "gemm"}, "int4:g128:asym"),
        ({"group_size": -1}, "int4:channel:asym"),
        ({"zero_point": False}, "int4:g128"),
        ({"w_bit": 4, "q_group_size": 64}, "int4:g64:asym"),
    ],
)
def test_published_configs_are_read_in_every_form(changes: dict[str, Any], label: str) -> None:
    layout, schemes = read_config({**GEMM, **changes}, "config.json")
    assert layout is AWQ and schemes == Schemes(Scheme.parse(label), ignore=HEAD)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        *[({"version": name}, name) for name in ("gemv", "GEMV_fast", "exllama", "marlin")],
        ({"version": None, "format": "llm-awq"}, "llm-awq"),
        ({"backend": "llm-awq"}, "llm-awq"),
        ({"version": 3}, "'version' must be"),
        ({"bits": 8}, "8 bits"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": None}, "'group_size' must be int"),
        ({"zero_point": "yes"}, "'zero_point' must be bool"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"version": "quick", "group_size": -1}, "one scale per row"),
        ({"version": "quick", "group_size": 16}, "multiple of 32"),
    ],
)
def test_other_versions_and_malformed_entries_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_config({**GEMM, **changes}, "config.json")
    assert word.lower() in str(refusal.value).lower() and "\n" not in str(refusal.value)


def test_awq_and_quick_do_not_read_each_others_configs() -> None:
    for version, owner, other in (
        ("gemm", AWQ, QUICK),
        ("GEMM", AWQ, QUICK),
        ("quick", QUICK, AWQ),
        ("Quick", QUICK, AWQ),
    ):
        config = {**GEMM, "version": version}
        assert read_config(config, "config.json")[0] is owner and other.read_config(config) is None
    for module, version in ((AWQ, "quick"), (QUICK, "gemm"), (AWQ, "gemv"), (AWQ, None)):
        schemes = Schemes(ASYM, ignore=HEAD)
        config = module.write_config(schemes) | {"quantkit": quantkit_key(module.NAME, schemes, "1", None)}
        assert read_config(config, "config.json")[0] is module
        with pytest.raises(CheckpointError, match=r"'version' is .* contradict"):
            read_config({**config, "version": version}, "config.json")


def test_dense_linears_are_written_as_substrings() -> None:
    assert AWQ.write_config(Schemes(ASYM, ignore=HEAD)) == {**GEMM, "modules_to_not_convert": None}
    assert AWQ.write_config(Schemes(ASYM)) == {**GEMM, "modules_to_not_convert": None, "lm_head": True}
    ignore = ("lm_head", "model.layers.3.mlp.up_proj", r"re:.*vision\.tower.*", "re:.*[kv]_proj", "re:.*")
    config = AWQ.write_config(Schemes(ASYM, ignore=ignore))
    assert config["modules_to_not_convert"] == ["model.layers.3.mlp.up_proj", "vision.tower"]
    read = AWQ.read_config(config)
    assert read is not None and read.ignore == (
        "lm_head", r"re:.*model\.layers\.3\.mlp\.up_proj.*", r"re:.*vision\.tower.*"
    )  # fmt: skip
    assert AWQ.write_config(read)["modules_to_not_convert"] == config["modules_to_not_convert"]
    for dense in (["lm_head"], [], None):
        assert AWQ.read_config({**GEMM, "modules_to_not_convert": dense}) == Schemes(ASYM, ignore=HEAD)
    assert AWQ.read_config({**GEMM, "lm_head": True}) == Schemes(ASYM)


@pytest.mark.parametrize("version", ["GEMM", "QUICK"])
def test_a_folder_with_only_the_older_side_file_is_read(tmp_path: Path, version: str) -> None:
    layout = LAYOUTS["quick" if version == "QUICK" else "awq"]
    q = record(ASYM, 128, 256)
    save_file({f"a.q_proj.{name}": tensor for name, tensor in layout.pack(q).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    side = tmp_path / "quant_config.json"
    side.write_text(json.dumps({**OLDER, "version": version}))
    source = Checkpoint(tmp_path)
    assert source.layout is layout and source.quantized("a.q_proj").equal(q)
    side.write_text(json.dumps({**OLDER, "version": "GEMV"}))
    with pytest.raises(CheckpointError, match=r"quant_config\.json: .*gemv"):
        Checkpoint(tmp_path)
    side.write_text(json.dumps({"bits": 6, "group_size": 512}))  # how to quantize while loading (docs/layouts.md 7.6)
    assert Checkpoint(tmp_path).layout is None
