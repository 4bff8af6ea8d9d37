"""GPTQ folders of other tools: planes of bits, and columns in groups of any order, value by value or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.inference.load import load
from quantkit.layouts.schemes import Schemes
from tests.checkpoint.low_bit import folder_of
from tests.command_line import call, refused
from tests.golden import golden
from tests.layouts.samples import write_folder

STATED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
FILE = golden("gptq")
ORDERED = [case for case, info in FILE.cases.items() if info["desc_act"]]
DOWN = "model.layers.1.mlp.down_proj"


def parts(case: str, version: str) -> dict[str, Tensor]:
    """Name the published tensors of a golden case as a folder has them."""
    names = {"qweight": "qweight", "qzeros": f"qzeros_{version}", "scales": "scales", "g_idx": "g_idx"}
    found = {name: FILE(case, stored) for name, stored in names.items()}
    return {f"x.{name}": tensor for name, tensor in found.items() if tensor is not None}


def published(case: str, rows: slice) -> Tensor:
    """Compute rows of a weight entry by entry: scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])."""
    codes, scales, zeros, order = (FILE(case, name) for name in ("codes", "scales", "zeros", "g_idx"))
    assert codes is not None and scales is not None and zeros is not None and order is not None
    weight = torch.empty(codes.shape[1], codes.shape[0], dtype=torch.float16)[rows]
    for at, n in enumerate(range(codes.shape[1])[rows]):
        for k in range(codes.shape[0]):
            group = int(order[k])
            weight[at, k] = float(scales[group, n]) * (int(codes[k, n]) - int(zeros[group, n]))
    return weight


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("case", ORDERED)
def test_columns_in_groups_of_any_order_have_the_values_of_the_published_packer(
    case: str, version: str, tmp_path: Path
) -> None:
    label = {"v1": "gptq", "v2": "gptq_v2"}[version]
    stated = {**STATED, "sym": FILE.cases[case]["sym"], "checkpoint_format": label}
    src = Checkpoint(
        folder_of(tmp_path / "m", parts(case, version), {"dtype": "float16", "quantization_config": stated})
    )
    assert src.names() == ["x.weight"] and src.layout is None and "act-order" in str(src.low_bit)
    assert torch.equal(src.get("x.weight", slice(5, 8)), published(case, slice(5, 8)))
    assert torch.equal(src.get("x.weight")[5:8], src.get("x.weight", slice(5, 8)))


@pytest.mark.parametrize("case", [case for case, info in FILE.cases.items() if not info["desc_act"]])
def test_four_bits_in_planes_are_the_words_and_zero_points_of_v2(case: str, tmp_path: Path) -> None:
    info = FILE.cases[case]
    stated = {**STATED, "group_size": info["group_size"], "sym": info["sym"], "checkpoint_format": "gptq_p"}
    src = Checkpoint(folder_of(tmp_path / "m", parts(case, "v2"), {"dtype": "float16", "quantization_config": stated}))
    q, codes, zeros = src.quantized("x"), FILE(case, "codes"), FILE(case, "zeros")
    assert codes is not None and torch.equal(q.codes, codes.t())
    assert zeros is not None and (q.zeros is None or torch.equal(q.zeros, zeros.t()))


def ordered(source: Path, out: Path, change: Any = None) -> Path:
    """Write a folder as another tool does, whose columns are in groups of a random order."""
    write_folder(source, out, "gptq", Schemes(Scheme.parse("int4:g32"), ignore=("lm_head",)), key=False)
    tensors, draws = load_file(out / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith(".g_idx"):
            tensors[name] = tensor[torch.randperm(len(tensor), generator=draws)].contiguous()
    if change is not None:
        change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_a_folder_with_act_order_is_a_source_and_no_command_takes_its_columns_as_sorted(
    small_llama: Path, tmp_path: Path
) -> None:
    folder = ordered(small_llama, tmp_path / "a")
    assert json.loads(call("inspect", folder, "--json").stdout)["dequantized_from"] == "gptq (act-order)"
    for command in (("pack", folder, "--layout", "compressed-tensors"), ("convert", "gptq-to-marlin", folder)):
        assert "holds gptq (act-order) weights, a source: use quantkit quantize" in refused(
            *command, out=tmp_path / "x"
        )
    assert "is gptq (act-order)" in refused("verify", folder)
    with pytest.raises(CheckpointError, match="holds gptq \\(act-order\\) weights, a source"):
        load(folder, device="cpu")
    src = Checkpoint(folder)
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file({name: src.get(name) for name in src.names()}, dense / "model.safetensors", {"format": "pt"})
    for path in small_llama.iterdir():
        if path.suffix == ".json":
            (dense / path.name).write_bytes(path.read_bytes())
    for name, source in (("of-packed", folder), ("of-dense", dense)):
        call("quantize", source, "--method", "rtn", "--format", "int8", "-o", tmp_path / name, "-q")
    one, other = (Checkpoint(tmp_path / name) for name in ("of-packed", "of-dense"))
    assert set(one.names()) == set(other.names())
    assert all(torch.equal(one.get(name), other.get(name)) for name in one.names())


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors[f"{DOWN}.g_idx"].fill_(0),
        lambda tensors: tensors[f"{DOWN}.g_idx"].fill_(-1),
        lambda tensors: tensors[f"{DOWN}.g_idx"].mul_(9),
    ],
)
def test_groups_of_other_sizes_than_the_config_says_are_refused_by_name(
    change: Any, small_llama: Path, tmp_path: Path
) -> None:
    src = Checkpoint(ordered(small_llama, tmp_path / "a", change))
    with pytest.raises(CheckpointError, match=rf"{DOWN}: g_idx does not name each group") as refusal:
        src.get(f"{DOWN}.weight")
    assert "\n" not in str(refusal.value)
