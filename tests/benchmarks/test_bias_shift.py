"""The kernel that converts exponents by integers, which the figure of ZeroQuant(4+2) compares with one shift."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from benchmarks.bias_shift import INTEGERS, NAME, write_sources
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import LAUNCHERS, loader
from tests.kernels.conftest import kernel_cache as kernel_cache, nvrtc as nvrtc
from tests.kernels.on_cpu import library


@pytest.mark.parametrize("name", ["fp6", "fp5", "fp6-e2m3", "fp5-e2m2"])
def test_an_exponent_is_converted_as_by_a_product(name: str) -> None:
    """Subnormal codes and both zeros too."""
    fmt = FORMATS[name]
    up = 15 - (2 ** (fmt.ebits - 1) - 1)
    text = f"""
    #include "common.cuh"
    static inline int __clz(u32 x) {{ return __builtin_clz(x); }}
    {INTEGERS}
    extern "C" u32 convert(u32 both) {{ multiply_pair(half{{}}, both, 0x00010001u * ({15 + up} << 10)); return both; }}
    """
    convert = library(text).convert
    convert.restype, convert.argtypes = ctypes.c_uint32, [ctypes.c_uint32]
    wanted = torch.tensor(fmt.values).half()
    small = (wanted.double() * 2.0**-up).half()
    assert torch.equal(small.double() * 2.0**up, wanted.double())
    bits = [one & 0xFFFF for one in small.view(torch.int16).tolist()]
    for i, low in enumerate(bits):
        both = convert(bits[-1 - i] << 16 | low)
        found = torch.tensor([both & 0xFFFF, both >> 16]).to(torch.int32).to(torch.int16).view(torch.half)
        assert found.view(torch.int16).tolist() == wanted[[i, -1 - i]].view(torch.int16).tolist()


@pytest.mark.usefixtures("nvrtc", "kernel_cache")
def test_the_kernel_compiles(tmp_path: Path) -> None:
    folder = write_sources(tmp_path / "kernels")
    kernel = LAUNCHERS["tcfpx"].kernels(Scheme.parse("fp6:channel"), 4096, 4096).hopper
    assert kernel is not None
    instance = kernel.instance(torch.float16, kernel.choice.tiles[0]).replace("tcfpx_hopper", NAME)
    loader.cached(NAME, (instance.removesuffix(">") + ", true>",), "sm_90a", folder)
