"""One change to a stored weight, of any form, at any of its tensors: one line that names the place, or the same values.

Damage of headers, indexes and JSON is in `test_reader.py` and tests/io.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.layouts import LAYOUTS
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.checkpoint.low_bit import BLOCK, FINE, SOUND, folder_of, of_one, random_weight, to_fp8, to_mxfp4, write_fp8
from tests.checkpoint.samples import Q, packed_folder

Tensors = dict[str, Tensor]
X = "model.layers.0.self_attn.q_proj.weight"


def write_low_bit(folder: Path, form: str) -> Path:
    """Write a folder with one weight `x` `[64, 64]` in a form of few bits."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    if form == "fp8":
        codes, scales = to_fp8(weight, BLOCK, BLOCK)
        tensors, stated = {"x.weight": codes, "x.weight_scale_inv": scales}, FINE
    elif form == "mxfp4 experts":
        blocks, scales = to_mxfp4(weight[None])
        tensors, stated = {"x_blocks": blocks, "x_scales": scales}, {"quant_method": "mxfp4"}
    else:
        return of_one(folder, *SOUND[form], random_weight(*SOUND[form], 64, 64, torch.bfloat16)).path
    return folder_of(folder, tensors, {"model_type": "llama", "dtype": "bfloat16", "quantization_config": stated})


def values(folder: Path) -> Tensors:
    """Read every tensor of a folder, decoded."""
    src = Checkpoint(folder, dequantize=True)
    return {name: src.dense(name) for name in src.logical()}


def not_a_number(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1).view(torch.uint8)[: tensor.itemsize] = 0xFF
    return tensor


#: Kind of damage -> the tensor that takes the place of another; None: nothing does.
EDITS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "gone": lambda tensor: None,
    "longer": lambda tensor: torch.cat([torch.atleast_1d(tensor)] * 2),
    "shorter": lambda tensor: torch.atleast_1d(tensor)[..., :-1].clone(),
    "flat": lambda tensor: tensor.flatten().clone(),
    "one column": lambda tensor: torch.atleast_1d(tensor)[..., :1].clone(),
    "another dtype": lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.to(torch.int8),
    "bytes": lambda tensor: torch.atleast_1d(tensor).view(torch.uint8),
    "not a number": not_a_number,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("form", [*LAYOUTS, "fp8", "mxfp4 experts", *SOUND])
def test_a_damaged_tensor_is_named_or_changes_nothing(form: str, edit: str, tmp_path: Path) -> None:
    packed = form in LAYOUTS and form not in SOUND
    folder = packed_folder(tmp_path / "m", form)[0] if packed else write_low_bit(tmp_path / "m", form)
    expected, tensors = values(folder), load_file(folder / "model.safetensors")
    parts = [name for name in tensors if name.startswith(Q if packed else "x") and not name.endswith(".bias")]
    refused = 0
    for part in parts:
        if edit == "not a number" and (part.endswith("weight") or not re.search(r"scale|\.s$", part)):
            continue  # codes and zero points have no such value
        changed = EDITS[edit](tensors[part])
        broken = {name: tensor for name, tensor in tensors.items() if name != part}
        save_file(broken | ({} if changed is None else {part: changed}), folder / "model.safetensors")
        try:
            found = values(folder)
        except QuantkitError as error:
            refused += 1
            assert (Q if packed else "x") in str(error) and "\n" not in str(error), part
        else:
            assert found.keys() == expected.keys(), part
            if edit in ("shorter", "one column"):  # where nothing here states the width, the model does
                found = {name: tensor for name, tensor in found.items() if tensor.shape == expected[name].shape}
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), part
    assert refused > 0 or edit in ("flat", "one column", "bytes") or form == "int8"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_part_without_its_weight_is_refused(name: str, tmp_path: Path) -> None:
    folder, q = packed_folder(tmp_path / "m", name)
    tensors = load_file(folder / "model.safetensors")
    for suffix in LAYOUTS[name].pack(q).keys() - {LAYOUTS[name].MARKER, "weight"}:
        save_file({**tensors, f"other.{suffix}": tensors[f"{Q}.{suffix}"].clone()}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"other.{suffix}"):
            Checkpoint(folder)


def test_contradictions_between_config_and_tensors_are_refused(tmp_path: Path) -> None:
    folder, q = packed_folder(tmp_path / "m", "marlin")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"{Q}.weight": q.dequantize()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        Checkpoint(folder)
    head = {f"lm_head.{suffix}": tensors[f"{Q}.{suffix}"].clone() for suffix in ("B", "s")}
    save_file({**tensors, **head}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head is packed"):
        Checkpoint(folder)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    assert "no tensor is packed" in Checkpoint(folder).notices[0]


#: Case -> form, tensors that are added or replaced, and what the error says.
WRONG: dict[str, tuple[str, Tensors, str]] = {
    "a group too many": ("int4", {"weight_g_idx": torch.full((64,), 2).int()}, "names a group that is not one of 2"),
    "groups of too few columns": ("int4", {"weight_g_idx": torch.zeros(63).int()}, "its weight needs [64]"),
    "codes twice": ("int4", {"weight": torch.ones(64, 64)}, "x.weight is there twice, also as x.weight_packed"),
    "a global scale of 0": ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "x.weight_global_scale is 0.0"),
    "a scale of infinity": ("fp8", {"weight_scale_inv": torch.full((2, 2), torch.inf)}, "first at [0, 0]"),
    "a float weight with a scale": ("fp8", {"weight": torch.ones(64, 64)}, "the FP8 weight that it scales is not"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_cannot_be_are_named(case: str, tmp_path: Path) -> None:
    form, changes, words = WRONG[case]
    folder = write_low_bit(tmp_path / "m", form)
    tensors = load_file(folder / "model.safetensors") | {f"x.{end}": tensor for end, tensor in changes.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(QuantkitError, match=re.escape(words)):
        values(folder)


@pytest.mark.parametrize("edit", ["no scale", "a NaN code"])
def test_a_damaged_source_is_one_line_and_leaves_no_output(edit: str, llama: Path, tmp_path: Path) -> None:
    low, _ = write_fp8(llama, tmp_path)
    tensors = load_file(low / "model.safetensors")
    if edit == "no scale":
        del tensors[f"{X}_scale_inv"]
    else:
        tensors[X].view(torch.uint8)[3, 5:6].fill_(127)
    save_file(tensors, low / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantkitError) as caught:
        quantize(
            low,
            tmp_path / "out",
            from_mapping({"method": "rtn", "scheme": {"group_size": 32}}),
            run=RunOptions(min_share=0),
        )
    assert X.removesuffix(".weight") in str(caught.value) and "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.parametrize("size", [[128, 0], 128])
def test_blocks_of_no_size_are_refused(size: object, llama: Path, tmp_path: Path) -> None:
    low, _ = write_fp8(llama, tmp_path)
    config = json.loads((low / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = size
    (low / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(f"'weight_block_size' is '{size}'")):
        Checkpoint(low)
