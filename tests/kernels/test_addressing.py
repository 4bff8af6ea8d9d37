"""kernels/weights.cuh, compiled by a C++ compiler, finds every weight of packed tensors.

The tests of each layout compare its tensors with the published packers, so these tensors are right here.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.kernels import JUDGES
from tests.kernels.on_cpu import library
from tests.kernels.operands import CASES, TAKEN, packed
from tests.layouts.samples import record

#: Reads all weights of a layout, given as C++ expression, into `y` [n, k].
READERS = """
#include "weights.cuh"
#define READER(name, weight) \\
    extern "C" void name(void **t, float *y, u32 n, u32 k, u32 g) { \\
        auto read = weight; \\
        for (u32 i = 0; i < n; i++) for (u32 j = 0; j < k; j++) *y++ = read(i, j); \\
    }
#define WORDS(i) ((const u32 *)t[i])
#define HALVES(i) ((const half *)t[i])
READER(marlin, (Marlin{WORDS(0), HALVES(1), n, k, g}))
READER(marlin24, (Marlin24{WORDS(0), (const u16 *)t[1], HALVES(2), n, k, g}))
READER(quick, (Quick{WORDS(0), WORDS(1), HALVES(2), n, k, g}))
READER(tcfpx_fp6, (Tcfpx<3, 2>{WORDS(0), HALVES(1), n, k}))
READER(tcfpx_fp5, (Tcfpx<3, 1>{WORDS(0), HALVES(1), n, k}))
READER(tcfpx_fp6_e2m3, (Tcfpx<2, 3>{WORDS(0), HALVES(1), n, k}))
READER(tcfpx_fp5_e2m2, (Tcfpx<2, 2>{WORDS(0), HALVES(1), n, k}))
"""


@pytest.fixture(scope="module")
def readers() -> ctypes.CDLL:
    return library(READERS)


def read(readers: ctypes.CDLL, layout: str, tensors: dict[str, Tensor], scheme: Scheme, n: int, k: int) -> Tensor:
    name = layout.removesuffix("-ct")
    if name == "tcfpx":
        name += "_" + scheme.format.name.replace("-", "_")
    y = torch.full((n, k), float("nan"))
    parts = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors.values()))
    getattr(readers, name)(parts, ctypes.c_void_p(y.data_ptr()), n, k, scheme.group_size or k)
    return y


def same(found: Tensor, q: QuantizedTensor) -> bool:
    expected = q.dequantize()
    if q.scheme.sparsity:  # what was pruned is +0 in a sparse layout, and a zero code has the sign of its scale
        found, expected = found + 0.0, expected + 0.0
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_every_layout_with_a_kernel_is_tested() -> None:
    assert TAKEN.keys() == JUDGES.keys()


@pytest.mark.parametrize(("layout", "label", "n", "k"), CASES)
def test_every_weight_is_where_the_formulas_say(readers: ctypes.CDLL, layout: str, label: str, n: int, k: int) -> None:
    q = record(Scheme.parse(label), n, k, seed=n + k)  # scales of any size and sign, and zeros
    assert same(read(readers, layout, packed(layout, q), q.scheme, n, k), q)
