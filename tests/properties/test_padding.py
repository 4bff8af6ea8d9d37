"""`quantize --pad`: zeros past a weight's true shape do not change the weight, and the report states them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.algorithms import rtn
from quantkit.algorithms.hessian import Hessian
from quantkit.calibration.stages.solve import solve, solve_uncalibrated
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import NumericError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import broken_rule
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.command_line import RTN, call, refused
from tests.folders import tensors
from tests.tiny_models import write_model

GPTQ = ("--samples", 2, "--max-length", 64, "--set", "clip=none")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with biases whose linears fit no kernel layout: [96, 96], [160, 96] and [96, 160]."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "attention_bias": True, "mlp_bias": True}
    return write_model("llama", tmp_path_factory.mktemp("odd") / "model", **sizes)


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / REPORT).read_text()))


def layers(folder: Path) -> dict[str, dict[str, Any]]:
    return {layer["name"]: layer for layer in report(folder)["layers"]}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tcfpx", ("--format", "fp6")),
        ("quick", ("--group-size", 32, "--asym", "--set", "gptq.descent=1")),
        ("marlin24", ("--group-size", "channel", "--prune", "2:4")),
    ],
)
def test_a_padded_model_equals_the_unpadded_one(
    layout: str, options: tuple[object, ...], odd: Path, calib: Path, tmp_path: Path
) -> None:
    asked = (odd, *options, "--calib", calib, *GPTQ)
    assert "add --set pad=true" in call("quantize", *asked, "--layout", layout, "-o", tmp_path / "no", code=1).stderr
    plain, out = tmp_path / "plain", tmp_path / "padded"
    call("quantize", *asked, "--layout", "compressed-tensors", "-o", plain, "-q")
    planned = json.loads(call("plan", *asked, "--layout", layout, "--set", "pad=true", "--json").stdout)
    printed = call("quantize", *asked, "--layout", layout, "--set", "pad=true", "-o", out)
    assert "padded with zeros" in printed.stdout and "only quantkit reads their true shapes" in printed.stderr
    totals = report(out)["totals"]
    weights = sum(each["bytes"] for each in planned["files"]["each"] if each["name"].endswith(".safetensors"))
    assert (weights, planned["bits_per_weight"]) == (totals["bytes"], totals["bits_per_weight"])

    src, before = Checkpoint(out), layers(plain)
    for name, layer in layers(out).items():
        assert tuple(layer.pop("true_shape")) == src.true_size(name) == tuple(before[name]["shape"])
        assert tuple(layer["shape"]) == src.size(name) != src.true_size(name)
        assert broken_rule(LAYOUTS[layout], src.scheme(name), *src.size(name)) is None
        same = layer.keys() - {"shape", "layout", "digest", "seconds"}
        assert {key: layer[key] for key in same} == {key: before[name][key] for key in same}
        weight = src.dense(f"{name}.weight")
        assert torch.equal(weight, Checkpoint(plain).dense(f"{name}.weight"))
        assert src.get(f"{name}.bias").shape == weight.shape[:1]

    assert "padded with zeros to" in call("verify", out, "--against", plain).stdout
    assert "] in [" in call("inspect", out).stdout
    call("convert", f"{layout}-to-compressed-tensors", out, "-o", tmp_path / "back", "-q")
    assert tensors(tmp_path / "back") == tensors(plain)
    assert Checkpoint(tmp_path / "back").schemes == Checkpoint(plain).schemes


def test_a_partial_last_group_has_the_scale_of_its_own_columns(odd: Path, tmp_path: Path) -> None:
    """k of 96 and 160 in groups of 128."""
    call("quantize", odd, "--method", "rtn", "--layout", "marlin", "--set", "pad=true", "-o", tmp_path / "out", "-q")
    src, dense = Checkpoint(tmp_path / "out"), Checkpoint(odd)
    for name, layer in layers(tmp_path / "out").items():
        weight, q = dense.get(f"{name}.weight"), src.quantized(name)
        n, k = weight.shape
        for i, part in enumerate(weight.split(128, 1)):
            alone, _ = rtn.quantize(part.contiguous(), Scheme.parse("int4:channel"), clip="search")
            assert torch.equal(q.codes[:n, 128 * i : 128 * i + part.shape[1]], alone.codes)
            assert torch.equal(q.scales[:n, i], alone.scales[:, 0])
        assert bool((q.codes[:, k:] == 8).all()) and bool((q.codes[n:] == 8).all()) and bool((q.scales[n:] == 1).all())
        weights = weight.float()
        error = float((src.dense(f"{name}.weight", torch.float32) - weights).norm() / weights.norm())
        assert layer["relative_error"] == pytest.approx(error, rel=1e-5)
    call("verify", tmp_path / "out", "-q")
    call("convert", "marlin-to-quick", tmp_path / "out", "--pad", "-o", tmp_path / "quick", "-q")
    quick = Checkpoint(tmp_path / "quick")
    assert all(torch.equal(quick.dense(f"{m}.weight"), src.dense(f"{m}.weight")) for m in src.modules())


# ------------------------------------------------------------------------------------------------ the solver alone


def made(label: str, k: int, changes: dict[str, Any], dead: int = 3) -> Item:
    """Solve a weight `[24, k]` with correlated inputs of very different sizes, some of them dead."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(24, k, generator=random).half()
    x = torch.randn(700, k, generator=random) @ torch.randn(k, k, generator=random)
    x *= torch.logspace(-1, 1, k)[torch.randperm(k, generator=random)]
    x[:, :dead] = 0
    hessian = Hessian(k, "cpu")
    hessian.add(x)
    scheme = {"symmetric": ":asym" not in label, "sparsity": "2:4" if label.endswith(":24") else None}
    recipe = from_mapping({"pad": True, "scheme": scheme, **changes})
    (item,) = solve({"x": weight}, {"x": Scheme.parse(label)}, hessian, recipe, Progress(quiet=True))
    return item


@pytest.mark.parametrize(
    ("ending", "changes"),
    [
        ("", {}),
        ("", {"gptq": {"act_order": "off"}}),
        ("", {"gptq": {"damp_kind": "mean", "damp": 0.5}}),
        ("", {"metric": "diag", "signed": True, "gptq": {"refit": True}}),
        (":asym", {"clip": "none"}),
        (":24", {}),
        (":24", {"prune": "wanda", "gptq": {"act_order": "off"}}),
        ("", {"method": "rtn", "metric": "block"}),
        (":asym", {"method": "rtn", "metric": "diag"}),
    ],
)
def test_padded_columns_change_no_real_column(ending: str, changes: dict[str, Any]) -> None:
    """Compare a group of 160 columns with one of 256 that ends at 160."""
    cut, own = made(f"int4:g256{ending}", 160, changes), made(f"int4:g160{ending}", 160, changes)
    a, b = cut.value, own.value
    assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and cut.facts and own.facts
    assert (a.shape, b.shape) == ((24, 256), (24, 160))
    assert torch.equal(a.codes[:, :160], b.codes) and torch.equal(a.scales, b.scales)
    assert torch.equal(a.dequantize()[:, :160], b.dequantize()) and not bool(a.dequantize()[:, 160:].any())
    assert cut.facts.pop("true_shape") == [24, 160] and cut.facts.keys() == own.facts.keys()
    assert cut.facts.get("dead_columns", 3) == 3
    for key in cut.facts.keys() - {"seconds"}:
        known = own.facts[key]
        assert cut.facts[key] == (pytest.approx(known, rel=1e-4) if isinstance(known, float) else known), key


def test_a_partial_quad_keeps_two_of_its_columns() -> None:
    item = made("int4:channel:24", 158, {"layout": "marlin24"})
    assert isinstance(item.value, QuantizedTensor) and item.facts
    assert item.value.shape == (128, 256) and item.facts["true_shape"] == [24, 158]
    assert bool((item.value.codes[:24, 156:158] != 8).any())
    assert item.facts["kept"] + item.facts["zeros"] == 24 * 158


def test_nan_is_counted_in_the_true_shape() -> None:
    recipe: Recipe = from_mapping({"method": "rtn", "pad": True, "layout": "marlin"})
    weight = torch.ones(8, 100)
    weight[3, 4] = torch.nan
    with pytest.raises(NumericError, match=r"x: 1 of 800 .*\[3, 4\]"):
        solve_uncalibrated({"x": weight}, recipe.scheme, recipe)


def test_padding_is_offered_only_where_it_helps(odd: Path, tmp_path: Path) -> None:
    error = refused(
        "quantize", odd, *RTN, "--layout", "marlin", "--group-size", 100, "--set", "pad=true", out=tmp_path / "out"
    )
    assert "add --set pad=true" not in error and "group" in error
    found = refused("quantize", odd, *RTN, "--layout", "tcfpx", "--format", "fp6", lines=2, out=tmp_path / "out")
    assert all(line.endswith("add --set pad=true to fill it up with zeros") for line in found.splitlines())
    tied = write_model("llama", tmp_path / "tied", vocab_size=257, tie_word_embeddings=True, num_hidden_layers=1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{skip: [], layout: marlin, method: rtn}")
    error = refused("quantize", tied, "--recipe", recipe, out=tmp_path / "out")
    assert "tied to the embeddings" in error and "add --set pad=true" not in error


def test_zero_points_of_odd_rows_are_padded_and_not_only_offered_to_be_rounded_again(tmp_path: Path) -> None:
    """The data do not allow to restate them as symmetric: a padded weight holds any zero point."""
    odd_rows = write_model("llama", tmp_path / "model", head_dim=72, num_key_value_heads=1)
    call("quantize", odd_rows, *RTN, "--asym", "--group-size", "channel", "-o", tmp_path / "asym")
    asked = ("pack", tmp_path / "asym", "--layout", "humming")
    error = refused(*asked, out=tmp_path / "no")
    assert "cannot be re-centred to 8" in error and "add --pad to fill it up with zeros" in error
    call(*asked, "--pad", "-o", tmp_path / "padded")
    before, after = Checkpoint(tmp_path / "asym"), Checkpoint(tmp_path / "padded")
    name = "model.layers.0.self_attn.k_proj"
    assert after.true_size(name) == (72, 128) and after.scheme(name) == before.scheme(name)
    assert all(torch.equal(before.dense(f"{each}.weight"), after.dense(f"{each}.weight")) for each in before.modules())
