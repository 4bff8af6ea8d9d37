"""Fused linears compute what separate ones do, hold each weight once and save it under its own name."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantkit
from benchmarks.random_model import Variant, build, variants
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.inference.packed_linear import FusedLinear, PackedLinear, PackedWeight, fuse_linears, sibling_linears
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import recast
from quantkit.layouts.schemes import Schemes
from tests.benchmarks.samples import CPU, LLAMA, QUIET, tiny
from tests.folders import stored
from tests.inference.samples import (
    NS,
    Attention,
    attention,
    bits,
    compiled,
    decoded,
    gauss,
    layers,
    logits,
    packed,
    records,
    same,
)
from tests.layouts.samples import HELD, write_folder
from tests.tiny_models import write_model

UNITS = {name: layout.STACKING_UNIT for name, layout in LAYOUTS.items() if layout.STACKING_UNIT}
STACKED = [(layout, label) for layout in UNITS for label in HELD[layout][0]]


def other_form(part: PackedLinear, layout: str, label: str) -> None:
    (q,) = records(label, (part.n,))
    part.set_packed(layout, q.scheme, q.shape, LAYOUTS[layout].pack(q), part.out_features)


class Products:
    """Counts products, by the method that all of them go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def counted(weight: PackedWeight, x: Tensor) -> Tensor:
            self.count += 1
            return plain(weight, x)

        plain = PackedWeight.multiply
        monkeypatch.setattr(PackedWeight, "multiply", counted)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(monkeypatch)


@pytest.mark.parametrize(("layout", "label"), STACKED)
@pytest.mark.parametrize("k", [128, 384])  # one group, for which scales have another order, and several
def test_stacking_packed_weights_equals_packing_the_stacked_weight(layout: str, label: str, k: int) -> None:
    qs = records(label, k=k)
    whole = QuantizedTensor(qs[0].scheme, torch.cat([q.codes for q in qs]), torch.cat([q.scales for q in qs]))
    parts = [LAYOUTS[layout].pack(q) for q in qs]
    found, wanted = LAYOUTS[layout].stack(whole.scheme, parts), LAYOUTS[layout].pack(whole)
    assert found.keys() == wanted.keys()
    for suffix in wanted:
        assert same(found[suffix], wanted[suffix]) if suffix != "B_meta" else torch.equal(found[suffix], wanted[suffix])
    start = 0
    for q, part in zip(qs, parts, strict=True):
        again = LAYOUTS[layout].cut(q.scheme, found, sum(NS), range(start, start + q.shape[0]))
        start += q.shape[0]
        assert again.keys() == part.keys()
        for suffix in part:
            assert torch.equal(again[suffix], part[suffix]) and again[suffix].is_contiguous()
            assert again[suffix].dtype == part[suffix].dtype
            assert again[suffix].untyped_storage().data_ptr() != found[suffix].untyped_storage().data_ptr()


@pytest.mark.parametrize(("layout", "label", "bias"), [(*case, i % 2 == 0) for i, case in enumerate(STACKED)])
def test_fused_linears_compute_the_products_of_separate_ones(layout: str, label: str, bias: bool) -> None:
    separate, fused = attention(layout, label, bias)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 256), (2, 5, 256), (1, 1, 256), (0, 256), (256,)):
            x = gauss(*shape).to(dtype)
            for wanted, found in zip(separate(x), fused(x), strict=True):
                assert found.shape == wanted.shape and found.dtype == wanted.dtype
                assert torch.allclose(found, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for was, now in zip(separate.children(), fused.children(), strict=True):
        assert isinstance(was, PackedLinear) and isinstance(now, PackedLinear)
        assert now.record().equal(was.record()) and now.device == was.device and now.extra_repr() == was.extra_repr()


def test_padded_linears_are_fused_and_return_no_padding() -> None:
    qs = records("int4:g128", (100, 60, 30), 200 + 56)
    for q in qs:
        q.codes[:, 200:] = 8
    stored_sizes = [(128, 256), (64, 256), (64, 256)]
    parts = []
    for q, size in zip(qs, stored_sizes, strict=True):
        moved = recast(q, q.scheme, size)
        true = (q.shape[0], 200)
        parts.append(PackedLinear("marlin", q.scheme, size, true, LAYOUTS["marlin"].pack(moved), gauss(true[0])))
    separate = Attention(parts)
    fused = copy.deepcopy(separate)
    assert FusedLinear(next(sibling_linears(fused))).fuse()
    x = gauss(2, 3, 200)
    for wanted, found in zip(separate(x), fused(x), strict=True):
        assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: setattr(part, "bias", None),
        lambda part: other_form(part, "quick", "int4:g128"),
        lambda part: other_form(part, "marlin", "int4:channel"),
        lambda part: setattr(part, "in_features", 200),
    ],
    ids=["bias", "layout", "scheme", "inputs"],
)
def test_linears_that_differ_in_more_than_n_are_not_fused(change: Any) -> None:
    module = Attention([packed("marlin", q) for q in records("int4:g128", (256, 128, 384))])
    change(module.k_proj)
    (siblings,) = sibling_linears(module)
    assert siblings == [module.q_proj, module.v_proj]
    all_three = FusedLinear([*siblings, module.k_proj])
    assert not all_three.fuse() and not all_three.is_fused and len(list(module.q_proj.parameters())) == 3


@pytest.mark.parametrize("layout", ["quick", "compressed-tensors"])
def test_layouts_that_cannot_be_stacked_are_not_fused(layout: str) -> None:
    module = Attention([packed(layout, q) for q in records("int4:g128")])
    assert not FusedLinear(next(sibling_linears(module))).fuse()


def test_cross_attention_and_dense_linears_are_no_siblings() -> None:
    class CrossAttention(Attention):
        pass

    parts = [packed("marlin", q) for q in records("int4:g128")]
    assert list(sibling_linears(CrossAttention(parts))) == []
    assert list(sibling_linears(nn.ModuleDict({"cross_attn": Attention(parts)}))) == []
    module = Attention(parts)
    module.q_proj = module.k_proj = nn.Linear(256, 128)  # type: ignore[assignment]
    assert list(sibling_linears(module)) == []


def test_one_product_serves_all_siblings_and_leaves_no_cache(products: Products) -> None:
    _, fused = attention()
    for _ in range(2):
        products.count = 0
        q, k, v = fused(gauss(4, 256))
        assert products.count == 1
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert fused.q_proj.fused.cached is None


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_another_tensor_gets_its_own_product(grad: Any, products: Products) -> None:
    separate, fused = attention()
    with grad():
        x, y = gauss(4, 256), gauss(4, 256, seed=1)
        for name, given in (("q", x), ("k", y), ("v", x), ("q", x), ("q", x), ("v", y), ("k", y)):
            found, wanted = (getattr(module, f"{name}_proj")(given) for module in (fused, separate))
            assert torch.allclose(found, wanted, atol=1e-4), name


def test_a_write_in_place_invalidates_the_cached_product() -> None:
    separate, fused = attention()
    x = gauss(4, 256)
    fused.q_proj(x)
    x.mul_(2)
    assert torch.allclose(fused.k_proj(x), separate.k_proj(x), atol=1e-4)


def test_an_unread_product_is_freed_with_its_activations() -> None:
    _, fused = attention()
    x = gauss(4, 256)
    y = weakref.ref(fused.q_proj(x)._base)
    gc.collect()
    assert y() is not None
    del x
    assert y() is None and fused.q_proj.fused.cached is None


def test_a_deleted_model_frees_its_weights_at_once() -> None:
    _, fused = attention()
    fused(gauss(2, 256))
    weight = weakref.ref(fused.q_proj.fused.B)
    gc.collect()
    gc.disable()
    try:
        del fused
        assert weight() is None
    finally:
        gc.enable()


def test_a_whole_model_compiles_without_a_graph_break() -> None:
    model = tiny()
    made, _ = build(model, variants(model, ["marlin"], [], [])[1], torch.float32, CPU, QUIET)
    ids, (call, operators) = torch.arange(12)[None], compiled(made)
    with torch.no_grad():
        expected = made(ids, use_cache=False).logits
        for siblings in list(sibling_linears(made)):
            assert FusedLinear(siblings).fuse()
        found = call(ids, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-4) and len(operators) == 2 * 4


def test_a_compiled_graph_distinguishes_input_tensors() -> None:
    separate, fused = attention()

    def both(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return module.q_proj(x), module.k_proj(y), module.v_proj(x), module.q_proj(y), module.v_proj(y)

    call = torch.compile(both, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for seed in (0, 1, 2):
            x = gauss(3, 256, seed=seed)
            for found, wanted in zip(call(fused, x), both(separate, x), strict=True):
                assert torch.allclose(found, wanted, atol=1e-4)


def test_casts_change_no_weight_and_moves_keep_linears_fused() -> None:
    separate, fused = attention("tcfpx", "fp6:channel")
    before = {suffix: tensor.clone() for suffix, tensor in fused.q_proj.fused.packed().items()}
    fused.half().to("cpu").bfloat16()
    owner = fused.q_proj.fused
    assert owner.is_fused and owner.bias.dtype == torch.bfloat16
    assert all(torch.equal(owner.packed()[suffix], before[suffix]) for suffix in before)
    x = gauss(2, 256).bfloat16()
    for found, wanted in zip(fused(x), separate.bfloat16()(x), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("tcfpx", "fp6:channel")])
def test_fused_weights_are_stored_once_and_saved_under_their_own_names(
    layout: str, label: str, tmp_path: Path, products: Products
) -> None:
    source = write_model("qwen2", tmp_path / "dense", hidden_size=128, intermediate_size=256, num_attention_heads=2)
    write_folder(source, tmp_path / "out", layout, Schemes(Scheme.parse(label), ignore=("lm_head",)))
    model: Any = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float16)
    before = sum(p.nbytes for p in model.parameters())
    alone = {id(layer) for layer in layers(model)} - {id(p) for group in sibling_linears(model) for p in group}
    assert len(alone) == 2 * 2 and len(layers(model)) == 14  # the outputs of attention and of the gate
    expected = logits(model)
    assert products.count == 14
    for siblings in list(sibling_linears(model)):
        assert FusedLinear(siblings).fuse()
    assert sum(p.nbytes for p in model.parameters()) == before
    products.count = 0
    assert torch.allclose(logits(model), expected, rtol=1e-2, atol=1e-2) and products.count == 2 * 4
    states = model.state_dict()
    assert all(torch.equal(bits(states[name]), bits(tensor)) for name, tensor in stored(tmp_path / "out").items())
    model.save_pretrained(tmp_path / "saved")
    was, now = stored(tmp_path / "out"), stored(tmp_path / "saved")
    assert was.keys() == now.keys() and all(torch.equal(bits(was[name]), bits(now[name])) for name in was)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "saved")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert torch.equal(logits(quantkit.load(tmp_path / "saved", device="cpu")), decoded(tmp_path / "out"))


def test_linears_with_device_hooks_are_fused_too(small_llama: Path, tmp_path: Path, products: Products) -> None:
    write_folder(small_llama, tmp_path / "out", "marlin", Schemes(Scheme.parse("int4:g128"), ignore=("lm_head",)))
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    where |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model: Any = quantkit.load(tmp_path / "out", device_map=where, dtype=torch.float32)
    assert hasattr(model.model.layers[0].self_attn.q_proj, "_hf_hook")
    near = list(sibling_linears(model))
    assert len(near) == 2 and all(FusedLinear(siblings).fuse() for siblings in near)
    assert torch.allclose(logits(model), decoded(tmp_path / "out"), atol=1e-4)
    assert products.count == 4 + 7, "linears on the disk are not fused"


def test_a_model_on_a_cpu_is_not_fused_and_loads_its_own_state() -> None:
    made, _ = build(tiny(), Variant("marlin", {}), torch.float32, CPU, QUIET)
    assert not any(isinstance(module, FusedLinear) for module in made.modules())
    model = tiny()
    made, _ = build(model, variants(model, ["marlin"], [], [])[1], torch.float32, CPU, QUIET)
    fused_linears = {module for module in made.modules() if isinstance(module, FusedLinear)}
    assert len(fused_linears) == 2 * LLAMA["num_hidden_layers"] and not any(fused.is_fused for fused in fused_linears)
    states = made.state_dict()
    assert not any("fused" in name for name in states)
    made.load_state_dict(states)  # the names are those of separate linears
    fuse_linears(made)
