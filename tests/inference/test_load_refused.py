"""Unusable folders and devices are refused in one line, before any weight is read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantkit
from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, KernelError, LayoutError, QuantkitError, RecipeError
from quantkit.inference import swap_linears
from quantkit.models.meta_model import skeleton
from quantkit.models.outline import Outline
from tests.folders import edit, restate
from tests.inference.samples import Folders


def _state(**entries: object) -> Callable[[Path], None]:
    return lambda path: restate(path / "config.json", **entries)


def _drop(name: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda tensors: tensors.pop(name))


def _drop_module(module: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda tensors: [tensors.pop(f"{module}.{suffix}") for suffix in ("B", "s")])


BAD = {
    "a packed tensor is missing": (_drop("model.layers.1.mlp.up_proj.s"), "model.layers.1.mlp.up_proj.s is missing"),
    "its marker is missing": (_drop("model.layers.1.mlp.up_proj.B"), "model.layers.1.mlp.up_proj.B is missing"),
    "a whole weight is missing": (_drop_module("model.layers.0.mlp.up_proj"), "layers.0.mlp.up_proj.weight is missing"),
    "a dense tensor is missing": (_drop("model.norm.weight"), "model.norm.weight is missing"),
    "an unexpected tensor": (
        lambda path: edit(path, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)})),
        "model.extra.weight is not part of the model",
    ),
    "another shape": (_state(intermediate_size=512), "[128, 256], config.json asks for [128, 512]"),
    "another depth": (_state(num_hidden_layers=1), "no linear of"),
    "an unknown model": (_state(model_type="lama"), "'lama' is unk"),
    "a config that makes no sense": (_state(hidden_act="no such"), "transformers cannot build the model"),
    "a part that its class lacks": (
        _state(text_config={"model_type": "llama"}),
        "config.json describes a text_config, and a llama has none: remove it, or mend model_type",
    ),
    "an empty part": (_state(decoder={}), "describes a decoder"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_unusable_folder_is_refused_in_one_line(case: str, broken: Path) -> None:
    spoil, says = BAD[case]
    spoil(broken)
    with pytest.raises(QuantkitError, match=re.escape(says)) as caught:
        quantkit.load(broken, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_scales_that_float16_does_not_hold_are_named_before_the_first_token(
    layout: str, folder: Folders, tmp_path: Path
) -> None:
    path = shutil.copytree(folder(layout, "int4:g32"), tmp_path / "wide")

    def widen(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("scale") or name.endswith("scales")]:
            tensors[name] = tensors[name].float() * (1.0001 if "layers.1.mlp.up_proj" in name else 1)

    edit(path, widen)
    with pytest.raises(LayoutError, match="scales are no float16 values") as caught:
        quantkit.load(path, device="cpu")
    assert str(caught.value).startswith("model.layers.1.mlp.up_proj: ")
    assert "by quantkit.pack with requantize_scales=True" in str(caught.value)
    quantkit.pack(path, tmp_path / "packed", "gptq-v2", requantize_scales=True)
    quantkit.load(tmp_path / "packed", device="cpu")


def test_an_fp8_value_that_is_none_of_the_format_is_named_before_the_first_token(
    folder: Folders, tmp_path: Path
) -> None:
    path = shutil.copytree(folder("compressed-tensors", "fp6:channel"), tmp_path / "damaged")
    name = "model.layers.1.mlp.up_proj"
    edit(path, lambda tensors: tensors[f"{name}.weight"][:1, :1].fill_(0.1171875) if f"{name}.weight" in tensors else 0)
    with pytest.raises(LayoutError, match=rf"^{re.escape(name)}: .*no fp6 value"):
        quantkit.load(path, device="cpu")


def test_an_absent_gpu_is_refused(folder: Folders) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(RecipeError, match='use device="cpu"'):
        quantkit.load(folder("marlin", "int4:g128"), device="cuda")
    swap_linears.require_kernels(torch.device("cpu"))


def test_an_old_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="needs CuPy, which is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        KernelError, match=r"on cuda:0: this GPU has compute capability 7\.5, .* --device cpu$"
    ) as caught:
        swap_linears.require_kernels(torch.device("cuda", 0))
    assert "\n" not in str(caught.value)


def test_an_error_says_how_much_memory_is_missing(folder: Folders) -> None:
    path = folder("marlin", "int4:g128")
    src = Checkpoint(path)
    model = skeleton(src, torch.float16)
    swap_linears.swap(Outline(src, model, as_matrices=False))
    gpu = torch.device("cuda", 0)
    needs = swap_linears.memory_needs(model, {state: 0 for state in model.state_dict()})
    stated = sum(src.nbytes(name) for name in src.names())
    assert needs == {gpu: stated}  # the packed size, not the decoded one
    assert swap_linears.memory_needs(model, {state: "disk" for state in model.state_dict()}) == {}
    swap_linears.require_memory(needs, lambda device: stated, path)
    with pytest.raises(CheckpointError, match=r"take .* on cuda:0, which has .* free, 100 B too little") as caught:
        swap_linears.require_memory(needs, lambda device: stated - 100, path)
    assert "\n" not in str(caught.value)


def test_a_dense_folder_that_transformers_would_read_as_another_model_is_refused(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}
    edit(families.write("llama", tmp_path / "m"), lambda tensors: tensors.update(bias))
    with pytest.raises(CheckpointError, match="is not part of the model"):
        quantkit.load(tmp_path / "m", device="cpu")
