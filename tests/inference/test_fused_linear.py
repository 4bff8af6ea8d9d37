"""Linears that are multiplied as one: other weights, products of other activations, a second copy, a lost name."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantkit
from quantkit.bench.random_model import Variant, build, variants
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.inference.fused_linear import Joint, families, join
from quantkit.inference.packed_linear import PackedLinear
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import restated
from quantkit.layouts.schemes import Schemes
from quantkit.layouts.stacking import UNITS, cut, stack
from tests.bench.test_random_model import CPU, LLAMA, QUIET, tiny
from tests.inference.test_load import bits, decoded, layers, logits, stored
from tests.inference.test_packed_linear import gauss, same
from tests.inference.test_packed_linear import packed as made_packed
from tests.layouts.samples import HELD, record, tame, write_folder
from tests.tiny_models import write_model

STACKED = [(layout, label) for layout in UNITS for label in HELD[layout][0]]
NS = (256, 128, 384)


def records(label: str, ns: Sequence[int] = NS, k: int = 256) -> list[QuantizedTensor]:
    return [tame(record(Scheme.parse(label), n, k, seed=i), torch.float16) for i, n in enumerate(ns)]


def linear(layout: str, q: QuantizedTensor, bias: bool = True) -> PackedLinear:
    b = gauss(q.shape[0], seed=q.shape[0]) if bias else None
    return PackedLinear(layout, q.scheme, q.shape, q.shape, LAYOUTS[layout].pack(q), b)


def other_form(part: PackedLinear, layout: str, label: str) -> None:
    (q,) = records(label, (part.n,))
    part.hold(layout, q.scheme, q.shape, LAYOUTS[layout].pack(q))


class Attention(nn.Module):
    """Three linears of one tensor, as models have them."""

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = parts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * 1
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def attention(layout: str = "marlin", label: str = "int4:g128", bias: bool = True) -> tuple[Attention, Attention]:
    """Return linears beside each other, apart and as one."""
    apart = Attention([made_packed(layout, q, bias) for q in records(label)])
    united = copy.deepcopy(apart)
    (family,) = families(united)
    assert Joint(family).unite() and list(families(united)) == []
    return apart, united


class Products:
    """Counts products, by the operator that all of them go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from quantkit.inference import fused_linear, packed_linear

        self.count = 0

        def counted(*args: Any) -> Tensor:
            self.count += 1
            return plain(*args)

        plain = packed_linear.multiplied
        monkeypatch.setattr(fused_linear, "multiplied", counted)
        monkeypatch.setattr(packed_linear, "multiplied", counted)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(monkeypatch)


# ------------------------------------------------------------------------------------------------ the weights


@pytest.mark.parametrize(("layout", "label"), STACKED)
@pytest.mark.parametrize("k", [128, 384])  # of one group, where scales have another order, and of several
def test_stacked_packings_are_the_packing_of_the_stacked_weight(layout: str, label: str, k: int) -> None:
    qs = records(label, k=k)
    whole = QuantizedTensor(qs[0].scheme, torch.cat([q.codes for q in qs]), torch.cat([q.scales for q in qs]))
    parts = [LAYOUTS[layout].pack(q) for q in qs]
    found, wanted = stack(layout, whole.scheme, parts), LAYOUTS[layout].pack(whole)
    assert found.keys() == wanted.keys()
    for suffix in wanted:
        assert same(found[suffix], wanted[suffix]) if suffix != "B_meta" else torch.equal(found[suffix], wanted[suffix])
    start = 0
    for q, part in zip(qs, parts, strict=True):
        again = cut(layout, q.scheme, found, sum(NS), range(start, start + q.shape[0]))
        start += q.shape[0]
        assert again.keys() == part.keys()
        for suffix in part:
            assert torch.equal(again[suffix], part[suffix]) and again[suffix].is_contiguous()
            assert again[suffix].dtype == part[suffix].dtype
            assert again[suffix].untyped_storage().data_ptr() != found[suffix].untyped_storage().data_ptr()


def test_a_unit_smaller_than_the_layouts_own_would_mix_weights() -> None:
    for layout, unit in UNITS.items():
        scheme = Scheme.parse(HELD[layout][0][0])
        LAYOUTS[layout].check(scheme, unit, 128)


@pytest.mark.parametrize(("layout", "label"), STACKED)
@pytest.mark.parametrize("bias", [True, False])
def test_as_one_linears_say_what_they_say_apart(layout: str, label: str, bias: bool) -> None:
    apart, united = attention(layout, label, bias)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 256), (2, 5, 256), (1, 1, 256), (0, 256), (256,)):
            x = gauss(*shape).to(dtype)
            for wanted, found in zip(apart(x), united(x), strict=True):
                assert found.shape == wanted.shape and found.dtype == wanted.dtype
                assert torch.allclose(found, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for was, now in zip(apart.children(), united.children(), strict=True):
        assert isinstance(was, PackedLinear) and isinstance(now, PackedLinear)
        assert now.record().equal(was.record()) and now.device == was.device and now.extra_repr() == was.extra_repr()


def test_padded_linears_are_one_without_their_padding() -> None:
    qs = records("int4:g128", (100, 60, 30), 200 + 56)
    for q in qs:
        q.codes[:, 200:] = 8
    stored_sizes = [(128, 256), (64, 256), (64, 256)]
    parts = []
    for q, size in zip(qs, stored_sizes, strict=True):
        moved = restated(q, q.scheme, size)
        true = (q.shape[0], 200)
        parts.append(PackedLinear("marlin", q.scheme, size, true, LAYOUTS["marlin"].pack(moved), gauss(true[0])))
    apart = Attention(parts)
    united = copy.deepcopy(apart)
    assert Joint(next(families(united))).unite()
    x = gauss(2, 3, 200)
    for wanted, found in zip(apart(x), united(x), strict=True):
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
def test_linears_that_differ_in_more_than_n_stay_apart_and_the_others_do_not(change: Any) -> None:
    module = Attention([made_packed("marlin", q) for q in records("int4:g128", (256, 128, 384))])
    change(module.k_proj)
    (family,) = families(module)
    assert family == [module.q_proj, module.v_proj]
    everyone = Joint([*family, module.k_proj])
    assert not everyone.unite() and not everyone.united and len(list(module.q_proj.parameters())) == 3


@pytest.mark.parametrize("layout", ["quick", "compressed-tensors"])
def test_layouts_that_cannot_be_stacked_stay_apart(layout: str) -> None:
    module = Attention([made_packed(layout, q) for q in records("int4:g128")])
    assert not Joint(next(families(module))).unite()


def test_attention_to_another_sequence_and_dense_linears_are_no_family() -> None:
    class CrossAttention(Attention):
        pass

    parts = [made_packed("marlin", q) for q in records("int4:g128")]
    assert list(families(CrossAttention(parts))) == []
    assert list(families(nn.ModuleDict({"cross_attn": Attention(parts)}))) == []
    module = Attention(parts)
    module.q_proj = module.k_proj = nn.Linear(256, 128)  # type: ignore[assignment]
    assert list(families(module)) == []


# ------------------------------------------------------------------------------------------------ the products


def test_one_product_for_all_and_nothing_is_kept(products: Products) -> None:
    _, united = attention()
    for _ in range(2):
        products.count = 0
        q, k, v = united(gauss(4, 256))
        assert products.count == 1
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert united.q_proj.joint._held is None


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_another_tensor_gets_another_product(grad: Any, products: Products) -> None:
    apart, united = attention()
    with grad():
        x, y = gauss(4, 256), gauss(4, 256, seed=1)
        for name, given in (("q", x), ("k", y), ("v", x), ("q", x), ("q", x), ("v", y), ("k", y)):
            found, wanted = (getattr(module, f"{name}_proj")(given) for module in (united, apart))
            assert torch.allclose(found, wanted, atol=1e-4), name


def test_what_was_written_into_a_tensor_is_seen() -> None:
    apart, united = attention()
    x = gauss(4, 256)
    united.q_proj(x)
    x.mul_(2)
    assert torch.allclose(united.k_proj(x), apart.k_proj(x), atol=1e-4)


def test_products_that_nobody_asks_for_go_with_their_activations() -> None:
    _, united = attention()
    x = gauss(4, 256)
    y = weakref.ref(united.q_proj(x)._base)
    gc.collect()
    assert y() is not None
    del x
    assert y() is None and united.q_proj.joint._held is None


def test_a_model_that_is_dropped_frees_its_weights_at_once() -> None:
    _, united = attention()
    united(gauss(2, 256))
    weight = weakref.ref(united.q_proj.joint.B)
    gc.collect()
    gc.disable()
    try:
        del united
        assert weight() is None
    finally:
        gc.enable()


def test_a_compiler_sees_one_product_and_no_break() -> None:
    apart, united = attention()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(united, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for m in (2, 5, 7):
            x = gauss(m, 256)
            for found, wanted in zip(compiled(x), apart(x), strict=True):
                assert torch.allclose(found, wanted, atol=1e-4)
    assert [name for name in seen if "quantkit" in name] == ["quantkit.packed_linear"]
    assert united.q_proj.joint._traced is None


def test_a_whole_model_is_compiled_without_a_break() -> None:
    model = tiny()
    made, _ = build(model, variants(model, ["marlin"], [], [])[1], torch.float32, CPU, QUIET)
    ids, seen = torch.arange(12)[None], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(node for node in graph.graph.nodes if "quantkit" in str(node.target))
        return graph

    with torch.no_grad():
        expected = made(ids, use_cache=False).logits
        for family in list(families(made)):
            assert Joint(family).unite()
        found = torch.compile(made, fullgraph=True, backend=backend)(ids, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-4) and len(seen) == 2 * 4


def test_a_compiler_tells_tensors_apart() -> None:
    apart, united = attention()

    def both(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return module.q_proj(x), module.k_proj(y), module.v_proj(x), module.q_proj(y), module.v_proj(y)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for seed in (0, 1, 2):
            x = gauss(3, 256, seed=seed)
            for found, wanted in zip(compiled(united, x), both(apart, x), strict=True):
                assert torch.allclose(found, wanted, atol=1e-4)


# ------------------------------------------------------------------------------------------------ in a model


def test_casts_change_no_weight_and_moves_keep_linears_one() -> None:
    apart, united = attention("tcfpx", "fp6:channel")
    before = {suffix: tensor.clone() for suffix, tensor in united.q_proj.joint.packed().items()}
    united.half().to("cpu").bfloat16()
    joint = united.q_proj.joint
    assert joint.united and joint.bias.dtype == torch.bfloat16
    assert all(torch.equal(joint.packed()[suffix], before[suffix]) for suffix in before)
    x = gauss(2, 256).bfloat16()
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(apart.bfloat16()(x), united(x), strict=True))


@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("tcfpx", "fp6:channel")])
def test_weights_are_held_once_and_saved_under_their_own_names(
    layout: str, label: str, tmp_path: Path, products: Products
) -> None:
    source = write_model("qwen2", tmp_path / "dense", hidden_size=128, intermediate_size=256, num_attention_heads=2)
    write_folder(source, tmp_path / "out", layout, Schemes(Scheme.parse(label), ignore=("lm_head",)))
    model: Any = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float16)
    before = sum(p.nbytes for p in model.parameters())
    alone = {id(layer) for layer in layers(model)} - {id(p) for f in families(model) for p in f}
    assert len(alone) == 2 * 2 and len(layers(model)) == 14  # the outputs of attention and of the gate
    expected = logits(model)
    assert products.count == 14
    for family in list(families(model)):
        assert Joint(family).unite()
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


def test_hooks_that_bring_activations_to_a_device_keep_linears_one(
    small_llama: Path, tmp_path: Path, products: Products
) -> None:
    write_folder(small_llama, tmp_path / "out", "marlin", Schemes(Scheme.parse("int4:g128"), ignore=("lm_head",)))
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    where |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model: Any = quantkit.load(tmp_path / "out", device_map=where, dtype=torch.float32)
    assert hasattr(model.model.layers[0].self_attn.q_proj, "_hf_hook")
    near = list(families(model))
    assert len(near) == 2 and all(Joint(family).unite() for family in near)
    assert torch.allclose(logits(model), decoded(tmp_path / "out"), atol=1e-4)
    assert products.count == 4 + 7, "those on the disk stay apart"


def test_models_on_a_cpu_are_decoded_one_linear_at_a_time() -> None:
    made, _ = build(tiny(), Variant("marlin", {}), torch.float32, CPU, QUIET)
    assert not any(isinstance(module, Joint) for module in made.modules())
    model = tiny()
    made, _ = build(model, variants(model, ["marlin"], [], [])[1], torch.float32, CPU, QUIET)
    joints = {module for module in made.modules() if isinstance(module, Joint)}
    assert len(joints) == 2 * LLAMA["num_hidden_layers"] and not any(joint.united for joint in joints)
    states = made.state_dict()
    assert not any("joint" in name for name in states)
    made.load_state_dict(states)  # what has not been united is loaded as ever
    join(made)
