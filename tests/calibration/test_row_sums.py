"""Sums of rows that a kernel of vLLM holds in float16: what is measured, and who is warned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.calibration.stages.row_sums import LEAST
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import ROW_SUM
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.engines.readers import sums_in_float16
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping
from quantkit.reporting.summary import summary
from tests.calibration.runs import quantized, sequences
from tests.folders import TEXT
from tests.tiny_models import write_model

#: The row and the input channel of a linear where a model has its outlier.
LAST, ROW, CHANNEL = "model.layers.0.mlp.down_proj", 3, 5


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose `down_proj` have huge inputs, and a `k_proj` a huge bias, which no scale multiplies."""
    folder = write_model("qwen2", tmp_path_factory.mktemp("outlier") / "model", torch.float32)
    src = Checkpoint(folder)
    tensors = {name: src.get(name) for name in src.names()}
    for name, tensor in tensors.items():
        tensor *= 3e5 if name.endswith("up_proj.weight") else 1
        if name.endswith("k_proj.bias"):
            tensor[0] = 1e6
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def fp6(layout: str, **more: Any) -> dict[str, Any]:
    return {"scheme": {"format": "fp6", "group_size": "channel"}, "layout": layout, **more}


def sums(folder: Path, items: dict[str, Item]) -> dict[str, float]:
    """Measure the largest sum of each linear in float64, while the quantized model runs as a whole."""
    reference = load_dense_model(Checkpoint(folder))
    records = {n.removesuffix(".weight"): i.value for n, i in items.items() if isinstance(i.value, QuantizedTensor)}
    found = dict.fromkeys(records, 0.0)

    def see(linear: str, x: Tensor) -> None:
        record = records[linear]
        codes = record.dequantize(torch.float64) / record.scales.double()
        found[linear] = max(found[linear], float((x.flatten(0, -2).double() @ codes.T).abs().max()))

    for linear, record in records.items():
        module = reference.get_submodule(linear)
        module.weight.data = record.dequantize(torch.float32)
        module.register_forward_pre_hook(lambda _m, args, linear=linear: see(linear, args[0]))
    with torch.no_grad():
        for tokens in sequences():
            reference(tokens[None], use_cache=False)
    return found


def facts(items: dict[str, Item], fact: str) -> dict[str, Any]:
    """List a fact of the linears that have it, and it is not 0."""
    found = {name.removesuffix(".weight"): (item.facts or {}).get(fact) for name, item in items.items()}
    return {name: value for name, value in found.items() if value}


def test_the_largest_sum_of_all_documents_is_reported_in_the_last_block_too(outlier: Path, tmp_path: Path) -> None:
    items, _ = quantized(outlier, from_mapping(fp6("humming")), tmp_path)
    near = {linear: largest for linear, largest in sums(outlier, items).items() if largest > LEAST}
    assert sorted(near) == [f"model.layers.{block}.mlp.down_proj" for block in (0, 1)]
    assert facts(items, ROW_SUM) == pytest.approx(near, rel=1e-3)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in which one row of a `down_proj` sums to some 100,000 in steps of its scale."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = write_model("qwen2", tmp_path_factory.mktemp("planted") / "model", torch.float32, **sizes)
    src, seen = Checkpoint(folder), list[Tensor]()
    tensors = {name: src.get(name) for name in src.names()}
    model = load_dense_model(src)
    model.get_submodule(LAST).register_forward_pre_hook(lambda _m, args: seen.append(args[0][..., CHANNEL].abs().max()))
    for tokens in sequences():
        model(tokens[None], use_cache=False)
    tensors[f"{LAST}.weight"][:, CHANNEL] = 0
    tensors[f"{LAST}.weight"][ROW, CHANNEL] = tensors[f"{LAST}.weight"].abs().max()
    tensors[LAST.replace("down", "up") + ".weight"][CHANNEL] *= 4000 / float(max(seen))
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_scales_are_raised_where_sums_would_overflow_and_nowhere_else(planted: Path, tmp_path: Path) -> None:
    """The layout tcfpx, which quantkit's own kernels read, shows the codes that no scale is raised for."""
    recipes = [from_mapping(fp6(layout)) for layout in ("humming", "tcfpx")]
    items, plain = (quantized(planted, recipe, tmp_path)[0] for recipe in recipes)
    assert sums(planted, plain)[LAST] > 65504 > 4 * max(sums(planted, items).values())
    assert facts(items, "raised_scales") == {LAST: 1}
    assert facts(items, ROW_SUM) == facts(plain, "raised_scales") == {}
    for linear, item in items.items():
        value, other = item.value, plain[linear].value
        if not isinstance(value, QuantizedTensor) or not isinstance(other, QuantizedTensor):
            continue
        kept = torch.tensor([linear != f"{LAST}.weight" or row != ROW for row in range(len(value.codes))])
        if "layers.0." in linear:  # the inputs of the next block are others
            assert torch.equal(value.codes[kept], other.codes[kept]) and torch.equal(
                value.scales[kept], other.scales[kept]
            )
            assert (value.scales[~kept] / other.scales[~kept]).tolist() in ([], [[8.0]])


def test_scales_of_integers_are_not_raised(planted: Path, tmp_path: Path) -> None:
    items, _ = quantized(planted, from_mapping({"scheme": {"format": "int6", "group_size": "channel"}}), tmp_path)
    assert list(facts(items, ROW_SUM)) == [LAST] and not facts(items, "raised_scales")


def test_who_loads_the_folder_decides_whether_the_closing_table_warns(outlier: Path, tmp_path: Path) -> None:
    """A conversion takes the warning along only into a layout whose kernel overflows."""
    (tmp_path / "text.txt").write_text(TEXT)
    short = {"calibration": {"data": str(tmp_path / "text.txt"), "samples": 4, "max_length": 64}}
    humming = quantize(outlier, tmp_path / "humming", from_mapping(fp6("humming", **short)))
    tcfpx = quantize(outlier, tmp_path / "tcfpx", from_mapping(fp6("tcfpx", **short)))
    to_tcfpx, to_fp8 = (pack(tmp_path / "humming", tmp_path / f"to-{to}", to) for to in ("tcfpx", "compressed-tensors"))
    for report, warned in ((humming, True), (tcfpx, False), (to_tcfpx, False), (to_fp8, True)):
        text = " ".join(summary(report).split())
        assert ("65504" in text) == warned
        assert ("2 of 14 linears sum to" in text and "down_proj); vLLM's Humming kernels" in text) == warned
        assert ("serve it with vLLM's --quantization quantkit or use --layout tcfpx" in text) == warned
        assert [layer["name"] for layer in report["layers"] if ROW_SUM in layer] == (
            [f"model.layers.{block}.mlp.down_proj" for block in (0, 1)] if warned else []
        )


@pytest.mark.parametrize(
    ("layout", "scheme", "experts", "overflows"),
    [
        ("humming", "fp5:channel", False, True),
        ("humming", "int6:channel", False, True),
        ("humming", "int6:g64", False, False),
        ("compressed-tensors", "int3:channel", False, True),
        ("compressed-tensors", "int4:channel", False, False),
        ("tcfpx", "fp6:channel", False, False),
        ("humming", "fp6:channel", True, False),
    ],
)
def test_only_rows_that_humming_multiplies_overflow(layout: str, scheme: str, experts: bool, overflows: bool) -> None:
    assert sums_in_float16(layout, Scheme.parse(scheme), 512, 512, experts) == overflows


def test_integers_are_told_to_take_groups() -> None:
    """TC-FPx holds no integers, and no kernel of quantkit's plug-in those of six bits."""
    layers = [
        {"name": name, "scheme": "int6:channel", ROW_SUM: size} for name, size in (("a", 2e4), ("b", 9e4), ("c", 0.0))
    ]
    text = " ".join(summary({"command": "quantize", "layers": layers}).split())
    assert "2 of 3 linears sum to 90000 before a row's scale is applied (worst b)" in text
    assert "quantize in groups, like --group-size 64" in text and "tcfpx" not in text
