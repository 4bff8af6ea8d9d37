"""One packed linear: layouts, shapes of activations, casts, torch.compile and repacking."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import KernelError
from quantkit.kernels import MATMULS
from tests.inference.samples import compiled, gauss, packed, same, values
from tests.layouts.samples import HELD, record, tame

ALL = [(layout, label) for layout, (labels, _) in HELD.items() for label in labels]
#: Leading dimensions of activations.
BATCHES: list[tuple[int, ...]] = [(1,), (3, 5), (0,), (2, 0), (2, 1, 3), ()]


CASTS = [nn.Module.bfloat16, nn.Module.half, nn.Module.double, partial(nn.Module.to, dtype=torch.float16)]


@pytest.mark.parametrize(("layout", "label"), ALL)
def test_every_layout_multiplies_as_its_decoded_weight(layout: str, label: str) -> None:
    q = values(label)
    layer = packed(layout, q)
    for dtype, batch in zip((torch.float32, torch.float16, torch.bfloat16) * 2, BATCHES, strict=True):
        x = gauss(*batch, 256).to(dtype)
        assert same(layer(x), linear(x, q.dequantize(dtype), layer.bias.to(dtype)))


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("compressed-tensors", "fp6:channel")])
def test_a_cast_of_the_model_changes_no_weight(cast: partial, layout: str, label: str) -> None:
    layer = packed(layout, record(Scheme.parse(label), 128, 256))  # scales that bfloat16 cannot represent
    before = {suffix: tensor.clone() for suffix, tensor in layer.packed().items()}
    cast(layer)
    for suffix, tensor in layer.packed().items():
        assert tensor.dtype == before[suffix].dtype
        assert torch.equal(tensor.view(torch.uint8), before[suffix].view(torch.uint8)), suffix
    assert layer.bias.dtype != torch.float32


def test_packed_tensors_require_no_gradient() -> None:
    layer = packed("marlin", values("int4:g128"))
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("x", [gauss(2, 255), gauss(256, 2), torch.zeros(2, 256, dtype=torch.int64)])
def test_activations_of_a_wrong_shape_or_dtype_are_refused(x: Tensor) -> None:
    with pytest.raises(KernelError, match="a packed linear of 256 inputs got") as caught:
        packed("marlin", values("int4:g128"))(x)
    assert "\n" not in str(caught.value)


def test_a_compiled_graph_has_one_operator_and_no_break() -> None:
    q = values("int4:g128")
    layer = packed("marlin", q)
    call, operators = compiled(layer)
    for m in (2, 5):
        x = gauss(m, 256)
        assert same(call(x), linear(x, q.dequantize(), layer.bias))
    assert operators == ["quantkit.multiply"]


REPACKED = {
    "compressed-tensors int4:g128": "marlin",
    "compressed-tensors int4:channel": "marlin",
    "compressed-tensors int4:g32": "quick",
    "compressed-tensors int4:g128:asym": "quick",
    "compressed-tensors int4:g128:24": "marlin24",
    "compressed-tensors fp6:channel": "tcfpx",
    "compressed-tensors fp5-e2m2:channel": "tcfpx",
    "humming fp5:channel": "tcfpx",
    "gptq int4:g128": "marlin",
    "gptq int4:g64:asym": "quick",
    "gptq-v2 int4:channel:asym": "quick",
    "awq int4:g128": "marlin",
    "awq int4:g64:asym": "quick",
}


@pytest.mark.parametrize("case", REPACKED)
@pytest.mark.parametrize("fits", [True, False])
def test_repacking_changes_no_value(case: str, fits: bool) -> None:
    layout, label = case.split()
    shape = (128, 256) if fits else (96, 3 * (Scheme.parse(label).group_size or 32))
    q = values(label, *shape)
    layer = packed(layout, q)
    x = gauss(4, shape[1])
    before = layer(x)
    assert layer.repack() is None
    assert layer.layout == REPACKED[case] and layer.layout in MATMULS
    assert {name for name, _ in layer.named_parameters()} == {*layer.packed(), "bias"}  # the old tensors are gone
    assert torch.equal(layer.record().dequantize()[:, : shape[1]], q.dequantize())
    assert torch.allclose(layer(x), before, atol=1e-4)
    form = layer.packed()
    assert layer.repack() is None and all(
        layer.packed()[suffix].data_ptr() == form[suffix].data_ptr() for suffix in form
    )


def test_asymmetric_weights_are_repacked_for_marlin_if_possible() -> None:
    q = values("int4:g128:asym")
    q = QuantizedTensor(q.scheme, q.codes.clamp(4, 11), q.scales, q.zeros.clamp(7, 9))  # type: ignore[union-attr]
    layer = packed("awq", q)
    assert layer.repack() is None and layer.layout == "marlin" and layer.scheme.symmetric
    assert torch.equal(layer.record().dequantize(), q.dequantize())


def test_repacking_casts_scales_to_the_dtype_of_the_kernel() -> None:
    layer = packed("marlin", tame(values("int4:g128"), torch.bfloat16))
    x, before = gauss(2, 256), layer.packed()["s"]
    y = layer(x)
    layer.set_packed("marlin", layer.scheme, (128, 256), {"B": layer.packed()["B"], "s": before.bfloat16()}, 128)
    assert same(layer(x), y)
    assert layer.repack() is None
    assert torch.equal(layer.packed()["s"], before) and layer.packed()["s"].dtype == torch.float16


def test_a_weight_without_a_kernel_is_unchanged_with_a_reason() -> None:
    scheme = replace(Scheme.parse("int4:g128"), group_size=16)
    layer = packed("compressed-tensors", tame(record(scheme, 128, 256), torch.float16))
    why = layer.repack()
    assert why is not None and "int4:g16" in why and layer.layout == "compressed-tensors"
