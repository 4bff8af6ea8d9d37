"""The kernels of coordinate descent and of tuning, run by an ordinary C++ compiler, against the same steps in torch.

A block of threads is as many threads of the CPU, and they meet at a barrier. So the arithmetic and the indices are
tested where there is no GPU. Only the order of sums differs from torch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.core.formats import FORMATS, Format
from quantkit.kernels import gptq as kernels
from quantkit.kernels.loader import source_dir
from tests.kernels.descents import CASES, problem, same_rows, solved
from tests.kernels.on_cpu import library
from tests.kernels.tuned import TUNED, same_tuning

SHIMS = """
#include <math.h>
#include <string.h>
#include <pthread.h>
#include <thread>
#include <vector>
struct float4 { float x, y, z, w; };
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
#define __global__ static
#define __shared__ static
#define __launch_bounds__(...)
"""
BARRIER = """
static pthread_barrier_t barrier;
#define __syncthreads() pthread_barrier_wait(&barrier)
"""
CALL = """
extern "C" void run_NAME(float *v, float *e, float *slope, float *h, float *scales, float *zeros, int *group_of,
                     void *grid, int n, int b, int ld, int frozen) {
    pthread_barrier_init(&barrier, 0, 256);
    for (unsigned block = 0; block < (unsigned)(n + 31) / 32; block++) {
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < 256; i++)
            threads.emplace_back([=] {
                threadIdx.x = i, blockIdx.x = block;
                gptq_descent<NAME>(v, e, slope, h, scales, zeros, group_of, *(NAME *)grid, n, b, ld, frozen);
            });
        for (auto &thread : threads) thread.join();
    }
    pthread_barrier_destroy(&barrier);
}
"""

#: Warps, and what common.cuh has for a GPU alone.
WARPS = """
static pthread_barrier_t warps[8];
static float lanes[256];
static void __syncwarp() { pthread_barrier_wait(warps + threadIdx.x / 32); }
static float __shfl_xor_sync(unsigned, float x, int other) {
    lanes[threadIdx.x] = x, __syncwarp();
    x = lanes[threadIdx.x ^ other], __syncwarp();
    return x;
}
#include "common.cuh"
static float to_float(bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }
static void store(bfloat *to, float x) {
    unsigned bits = __float_as_uint(x);
    to->bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static void store(half *to, float x) {
    _Float16 y = x;
    memcpy(to, &y, 2);
}
"""
STEP = """
extern "C" void tune_NAME(bfloat *dense, bfloat *gradient, float *latent, float *squares, float *factors,
                          float *factor_squares, float *scales, float *zeros, unsigned char *codes, float *values,
                          float *steps, void *grid, void *step, int groups, int size) {
    for (auto &warp : warps) pthread_barrier_init(&warp, 0, 32);
    for (unsigned block = 0; block < (unsigned)(groups + 7) / 8; block++) {
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < 256; i++)
            threads.emplace_back([=] {
                threadIdx.x = i, blockIdx.x = block;
                gptq_tune<NAME>(dense, gradient, latent, squares, factors, factor_squares, scales, zeros, codes, values,
                                steps, *(NAME *)grid, *(Step *)step, groups, size);
            });
        for (auto &thread : threads) thread.join();
    }
    for (auto &warp : warps) pthread_barrier_destroy(&warp);
}
"""


@pytest.fixture(scope="module")
def compiled() -> ctypes.CDLL:
    source = (source_dir() / "gptq_descent.cu").read_text()
    dynamic = "extern __shared__ float4 fours_of_h[];"
    assert dynamic in source
    source = source.replace(dynamic, "static float4 fours_of_h[COLUMNS * COLUMNS / 4];")
    calls = [CALL.replace("NAME", grid) for grid in kernels.GRIDS]
    return library("\n".join([SHIMS, BARRIER, source, *calls]))


@pytest.mark.parametrize("case", [case for case in CASES if case[1] < 100], ids=str)
def test_the_kernel_moves_codes_as_torch_does(compiled: ctypes.CDLL, case: tuple[str, int, int, str]) -> None:
    def run(
        slope: Tensor, e: Tensor, v: Tensor, h: Tensor, columns: kernels.Columns, fmt: object, frozen: bool
    ) -> None:
        name, grid = kernels.grid_of(FORMATS[case[0]], columns.zeros is not None)
        given = [v, e, slope, h, *columns]
        pointers = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in given]
        getattr(compiled, f"run_{name}")(*pointers, grid, v.shape[1], len(v), h.stride(0), int(frozen))

    name, n, b, kind = case
    expected, found = solved(name, problem(name, n, b, kind)), solved(name, problem(name, n, b, kind), run)
    same_rows(expected, found)
    assert torch.isfinite(found.e).all() and (n == 1 or not torch.equal(found.v, problem(name, n, b, kind).v))


@pytest.fixture(scope="module")
def tuning() -> ctypes.CDLL:
    calls = [STEP.replace("NAME", grid) for grid in kernels.GRIDS]
    return library("\n".join([SHIMS, WARPS, (source_dir() / "gptq_tune.cu").read_text(), *calls]))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label", TUNED)
def test_a_step_of_tuning_is_that_of_torch(
    tuning: ctypes.CDLL, label: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(dense: Tensor, gradient: Tensor, moved: Any, start: Any, fmt: Format, step: bytes) -> None:
        name, grid = kernels.grid_of(fmt, start[1] is not None)
        given = [dense, gradient, *moved, *start]
        pointers = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in given]
        groups = moved[2].numel()
        getattr(tuning, f"tune_{name}")(*pointers, grid, step, groups, dense.numel() // groups)

    monkeypatch.setattr(kernels, "tune", tune)
    same_tuning(label, stored, "cpu", monkeypatch)
