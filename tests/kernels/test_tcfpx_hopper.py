"""TC-FPx's kernel for Hopper: decoding; on a GPU every code, and the smallest activations."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from quantkit.core.formats import FP6, Format
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.kernels import proof
from quantkit.kernels.launcher import VARIANTS
from tests.kernels.hopper_cases import CASES
from tests.kernels.on_cpu import library
from tests.kernels.operands import packed, weight
from tests.kernels.products import TYPES, on_gpu, product

FORMATS = tuple(VARIANTS)

#: Decodes the left operands [blocks, 32 lanes, 4] of 16 x 16 blocks, of which `sharing` neighbours share upper bits.
DECODER = """
#include "tcfpx_decode.cuh"
template <class X, int E, int M>
int decode(const u32 *high, const u32 *low, u32 *left, int blocks) {
    using Code = Codes<X, E, M>;
    const int sharing = 4 / Code::HIGH;
    for (int i = 0; i < blocks; i++)
        for (int lane = 0; lane < 32; lane++, left += 4)
            Code::decode(high[i / sharing * 32 + lane], low[i * 32 + lane], i % sharing, *(u32(*)[4])left);
    return Code::UP;
}
#define DECODER(name, X, E, M) \\
    extern "C" int name(const u32 *h, const u32 *l, u32 *x, int blocks) { return decode<X, E, M>(h, l, x, blocks); }
"""


@pytest.fixture(scope="module")
def decoder() -> ctypes.CDLL:
    names = [(dtype, fmt) for dtype in TYPES for fmt in FORMATS]
    lines = [f"DECODER({_name(d, f)}, {'half' if d == torch.float16 else 'bfloat'}, {VARIANTS[f]})" for d, f in names]
    return library("\n".join([DECODER, *lines]))


def _name(dtype: torch.dtype, fmt: Format) -> str:
    return f"{fmt.name.replace('-', '_')}_{str(dtype).removeprefix('torch.')}"


def every_code(fmt: Format, n: int, k: int) -> QuantizedTensor:
    """Make a weight with each code in each position of a block, in some of its rows, and scales of one."""
    codes = (torch.arange(n)[:, None] * 5 + torch.arange(k) * 3 + torch.arange(k) // 16).remainder(2**fmt.bits)
    return QuantizedTensor(Scheme(fmt), codes.to(torch.uint8), torch.ones(n, 1, dtype=torch.float16))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_code_is_decoded_to_its_value_over_a_power_of_two(
    decoder: ctypes.CDLL, fmt: Format, dtype: torch.dtype
) -> None:
    """In every position of a lane's registers, among random codes: no bit of a neighbour may remain."""
    n, k = 128, 256
    q = weight(f"{fmt.name}:channel", n, k)
    words = packed("tcfpx", q)["weight"].view(-1)
    high, low = words[: n * k // 32 * (fmt.bits - 4)], words[n * k // 32 * (fmt.bits - 4) :]
    left = torch.empty(n * k // 256, 32, 4, dtype=torch.int32)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (high.contiguous(), low.contiguous(), left)]
    up = getattr(decoder, _name(dtype, fmt))(*pointers, len(left))
    # [64-row blocks, 16 of k, 16 rows of 64, a, q, h, b, p] of n = 8b + a, k = 8h + 2q + p.
    found = left.view(dtype).view(n // 64, k // 16, 4, 8, 4, 2, 2, 2).permute(0, 2, 6, 3, 1, 5, 4, 7).reshape(n, k)
    assert torch.equal(found.double() * 2.0**up, fmt.decode(q.codes).double())
    assert torch.equal(torch.signbit(found), torch.signbit(fmt.decode(q.codes)))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_unit_vectors_give_back_every_code(hopper_gpu: None, fmt: Format) -> None:
    n, k = 320, 320
    tensors, q = on_gpu("tcfpx", every_code(fmt, n, k))
    for dtype, tile in itertools.product(TYPES, CASES["tcfpx"].tiles(f"{fmt.name}:channel", n, k, torch.float16)):
        y = product("tcfpx", tensors, q, torch.eye(k, dtype=dtype, device="cuda"), tile=tile)
        assert torch.equal(y.t(), fmt.decode(q.codes).to(dtype)), (dtype, tile)


@pytest.mark.gpu
def test_the_smallest_activations_are_not_lost(hopper_gpu: None) -> None:
    """Products of subnormal float16 numbers and the smallest weights are still normal in float32."""
    tensors, q = on_gpu("tcfpx", every_code(FP6, 64, 64))
    x = torch.full((3, 64), 2.0**-24, device="cuda").half()
    y = product("tcfpx", tensors, q, x)
    reference = proof.reference(x, q.dequantize())
    assert torch.equal(y, reference.half())
