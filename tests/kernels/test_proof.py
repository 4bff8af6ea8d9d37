"""The proof by products finds a single wrong weight, and reports nothing for a right one.

Here a stand-in for the kernels multiplies on the CPU by the unpacked weight; test_naive.py runs the proof on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.cli.inspect import format_verification
from quantkit.cli.show import as_json
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.evaluation.verify import Verification
from quantkit.evaluation.weight_check import Row
from quantkit.kernels import JUDGES, MATMULS, none_for, proof
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress
from tests.kernels.operands import ONE_EACH, differs, packed, weight
from tests.layouts.samples import record


def unpacked(layout: str):  # type: ignore[no-untyped-def]
    def multiply(x: Tensor, tensors: Mapping[str, Tensor], scheme: Scheme, n: int, k: int, out: Tensor) -> Tensor:
        return out.copy_(x.float() @ LAYOUTS[layout].unpack(tensors, scheme).dequantize().t())

    return multiply


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in JUDGES:
        monkeypatch.setitem(JUDGES, layout, unpacked(layout))
        monkeypatch.setitem(MATMULS, layout, unpacked(layout))


@pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)
def test_a_good_weight_passes_and_one_flipped_bit_does_not(
    on_cpu: None, layout: str, label: str, n: int, k: int
) -> None:
    q = weight(label, n, k)
    tensors = packed(layout, q)
    found = proof.prove(layout, tensors, q)
    assert found.problems == () and 0 <= found.error < proof.BOUND
    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).view(-1)
        for bit in (5, 8 * data.numel() // 2 + 1, 8 * data.numel() - 2):
            data[bit // 8] ^= 1 << bit % 8
            wrong = differs(layout, tensors, q)
            assert wrong is None or (wrong and proof.prove(layout, tensors, q).problems), (name, bit)
            data[bit // 8] ^= 1 << bit % 8


def test_an_output_that_was_not_written_is_found(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, label, n, k = ONE_EACH[0]
    q = weight(label, n, k)
    real = JUDGES[layout]

    def forgetful(x: Tensor, *rest: object, out: Tensor) -> Tensor:
        last = out[-1:, -1:].clone()
        real(x, *rest, out=out)
        out[-1:, -1:] = last
        return out

    monkeypatch.setitem(MATMULS, layout, forgetful)
    found = proof.prove(layout, packed(layout, q), q)
    assert any("off by inf" in problem for problem in found.problems)
    assert any("weights as other values" in problem for problem in found.problems)


def test_scales_of_any_size_raise_no_false_alarm(on_cpu: None) -> None:
    """Subnormal scales and those next to float16's limit: products must neither vanish nor overflow."""
    for layout, label, n, k in ONE_EACH:
        q = record(Scheme.parse(label), n, k)
        for scales in (q.scales, torch.full_like(q.scales, 6e-8), torch.full_like(q.scales, 65504.0)):
            one = QuantizedTensor(q.scheme, q.codes, scales, q.zeros)
            found = proof.prove(layout, packed(layout, one), one)
            assert found.problems == (), (layout, float(scales[0, 0]))


def test_a_weight_of_zeros_has_no_error(on_cpu: None) -> None:
    q = weight("int4:g128", 64, 128)
    q.codes.fill_(8)
    assert proof.prove("marlin", packed("marlin", q), q) == proof.Proof(0.0, ())


def test_relative_error() -> None:
    reference = torch.tensor([[1.0, -3.0]])
    assert proof.relative_error(torch.tensor([[1.0, -3.0]]), reference) == 0
    assert proof.relative_error(torch.tensor([[1.5, -3.0]]), reference) == pytest.approx(0.125)
    assert proof.relative_error(torch.tensor([[-1.0, 3.0]]), reference) == 2, "signs count"
    for bad in (float("nan"), float("inf")):
        assert proof.relative_error(torch.tensor([[bad, -3.0]]), reference) == float("inf")
    assert proof.relative_error(torch.ones(1, 2), torch.zeros(1, 2)) == float("inf")
    assert proof.relative_error(torch.zeros(1, 2), torch.zeros(1, 2)) == 0


@pytest.mark.parametrize(
    "change", [lambda y: y[7].fill_(0), lambda y: y[:, 300].fill_(0), lambda y: y[3, 9:11].add_(1)]
)
def test_a_few_wrong_numbers_do_not_hide_in_a_mean(change: Callable[[Tensor], Tensor]) -> None:
    """A missing row is 0.03 % of all numbers, less than the mean error that rounding may cause."""
    reference = torch.randn(3000, 500, generator=torch.Generator().manual_seed(0))
    y = reference.half().float()
    assert proof.mismatch(y, reference) is None
    change(y)
    assert proof.relative_error(y, reference) < 3 * proof.BOUND
    assert proof.mismatch(y, reference) is not None


def test_activations_are_signed_and_reproducible() -> None:
    w = weight("int4:g128", 64, 128).dequantize()
    x = proof.activations(w, 16, torch.float16)
    assert torch.equal(x, proof.activations(w, 16, torch.float16))
    assert (x > 0).any() and (x < 0).any() and torch.isfinite(x).all()
    assert 0.2 < float((x.float() @ w.t()).std()) < 5


def test_the_note_names_the_kernels_that_ran() -> None:
    row = Row("a.b", (64, 128), "int4:g128", 100, True, None, None, None, True, 2.5e-4)
    bad = replace(row, module="a.c", problem="is wrong", product=False, error=None)
    found = Verification("marlin", (row, bad), {}, ("a.c: is wrong",), (), None, "marlin", "Some GPU", proof.BOUND)
    assert found.multiplied == 64 * 128 and found.errors == [2.5e-4]
    assert "marlin kernels on Some GPU" in found.note and "2.5e-04 at most (bound 0.001)" in found.note
    assert json.loads(as_json(found.to_dict()))["multiplied"] == 64 * 128
    assert (
        "product" in format_verification(found, Progress())
        and "FAILED" in format_verification(found, Progress()).splitlines()[1]
    )
    none = Verification("gptq", (row,), {}, (), (), unrun=none_for("gptq"))
    assert none.note.endswith("the bits alone are proved: no kernel of quantkit's own multiplies gptq")
    assert "product" not in format_verification(none, Progress())
