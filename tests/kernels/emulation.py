"""Run kernels on a CPU: a C++ compiler builds their source, and fibers are the threads of a block.

The instructions of ampere.cuh and of common.cuh have forms here that do the same for a warp whose lanes take turns.
Blocks run one after another. So indices, barriers and the exchange of sums are tested where there is no GPU. Not in
here: the order in which a tensor core adds, and what only threads at the same time can do wrong.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from torch import Tensor

from quantkit.kernels.loader import source_dir
from tests.kernels.on_cpu import library

SHIMS = """
#pragma GCC diagnostic ignored "-Wparentheses"
#pragma GCC diagnostic ignored "-Wunused-function"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <setjmp.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x, y; };
static Index threadIdx, blockIdx, gridDim;
#define __global__ static
#define __launch_bounds__(...)
"""

MACHINE = """
alignas(16) uint4 pool[1 << 14];
u32 counts[1 << 16];
float4 fours_of_h[1 << 12];

// Threads of a block: each runs until it waits for others.
struct Copy { u32 to; const void *from; bool valid; u32 group; };
struct Fiber { ucontext_t context; jmp_buf place; bool started, ended; u32 turn, group; std::vector<Copy> copies; };
struct Meeting { u32 arrived, generation; };
struct Warp { Meeting meeting; u64 words[2][32][8]; };
static const u32 STACK = 1 << 16;
static std::unique_ptr<Fiber[]> fibers;
static std::unique_ptr<Warp[]> warps;
static std::vector<char> stacks;
static ucontext_t outside;
static u32 fiber_count, current, any;
static u64 progress;
static bool late;
static Meeting block;

static bool step() {
    const u32 before = current;
    for (u32 i = 1; i < fiber_count; i++) {
        const u32 next = (before + i) % fiber_count;
        if (fibers[next].ended) continue;
        current = threadIdx.x = next;
        if (_setjmp(fibers[before].place)) return true;
        if (fibers[next].started) _longjmp(fibers[next].place, 1);  // unlike setcontext without a call of the system
        fibers[next].started = true;
        setcontext(&fibers[next].context);
    }
    return false;
}

static void meet(Meeting &m, u32 count) {
    const u32 generation = m.generation;
    progress++;
    if (++m.arrived == count) {
        m.arrived = 0, m.generation++;
        return;
    }
    while (m.generation == generation) {
        const u64 before = progress;
        if (!step() || m.generation == generation && before == progress)
            fprintf(stderr, "thread %u waits for ever\\n", current), abort();
    }
}

static void __syncthreads() { meet(block, fiber_count); }

static int __syncthreads_or(int value) {
    any |= value != 0;
    __syncthreads();
    int found = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return found;
}

static void __threadfence() {}
static u32 atomicAdd(u32 *p, u32 value) { u32 old = *p; *p += value; return old; }
static u32 __umulhi(u32 x, u32 y) { return (u64)x * y >> 32; }
static u32 __byte_perm(u32 x, u32 y, u32 places) {
    u64 both = (u64)y << 32 | x;
    u32 found = 0;
    for (u32 i = 0; i < 4; i++) found |= (u32)(both >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
static u32 __popc(u32 x) { return __builtin_popcount(x); }
static u32 __ffs(u32 x) { return __builtin_ffs(x); }
static u32 min(u32 x, u32 y) { return x < y ? x : y; }
static u32 max(u32 x, u32 y) { return x < y ? y : x; }

// All lanes give eight words, and see those of all.
typedef u64 (*Words)[8];
template <class... W> static Words exchange(W... words) {
    Warp &warp = warps[current / 32];
    const u64 given[] = {(u64)words...};
    const u32 turn = fibers[current].turn++ % 2;
    memcpy(warp.words[turn][current % 32], given, sizeof given);
    meet(warp.meeting, 32);
    return warp.words[turn];
}

static u32 __match_any_sync(u32, u32 value) {
    Words all = exchange(value);
    u32 same = 0;
    for (u32 lane = 0; lane < 32; lane++) same |= (u32)(all[lane][0] == value) << lane;
    return same;
}
static void __syncwarp() { exchange(0); }
static u32 __shfl_sync(u32, u32 value, u32 lane) { return exchange(value)[lane][0]; }
static u32 __shfl_up_sync(u32, u32 value, u32 by) {
    u32 lane = current % 32;
    return exchange(value)[lane < by ? lane : lane - by][0];
}
static u32 __shfl_xor_sync(u32, u32 value, u32 by) { return exchange(value)[current % 32 ^ by][0]; }
template <class To, class From> static To bits_as(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static float __uint_as_float(u32 x) { return bits_as<float>(x); }
static u32 __float_as_uint(float x) { return bits_as<u32>(x); }
static float __shfl_xor_sync(u32, float value, u32 by) {
    return bits_as<float>((u32)exchange(bits_as<u32>(value))[current % 32 ^ by][0]);
}

// The functions of common.cuh and ampere.cuh.
static float to_float(bfloat x) { return bits_as<float>((u32)x.bits << 16); }
static u16 rounded(half, float x) { return bits_as<u16>((_Float16)x); }
static u16 rounded(bfloat, float x) {
    u32 bits = bits_as<u32>(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class X> static u32 pair(X type, float low, float high) {
    return rounded(type, low) | (u32)rounded(type, high) << 16;
}
struct Halves {
    float of[1 << 16];
    Halves() { for (u32 i = 0; i < 1 << 16; i++) of[i] = to_float(half{(u16)i}); }
};
static const Halves halves;
static float number(half, u32 word, u32 i) { return halves.of[(u16)(word >> 16 * i)]; }
static float number(bfloat, u32 word, u32 i) { return to_float(bfloat{(u16)(word >> 16 * i)}); }
template <class X> static u32 fma_pair(X t, u32 x, u32 y, u32 z) {
    return pair(t, fmaf(number(t, x, 0), number(t, y, 0), number(t, z, 0)),
                fmaf(number(t, x, 1), number(t, y, 1), number(t, z, 1)));
}
static u32 add_pair(half t, u32 x, u32 y) {
    return pair(t, number(t, x, 0) + number(t, y, 0), number(t, x, 1) + number(t, y, 1));
}
static void let_successor_start() {}
static void wait_for_predecessor() {}
static void store(half *to, float x) { to->bits = rounded(half{}, x); }
static void store(bfloat *to, float x) { to->bits = rounded(bfloat{}, x); }
static u32 shared_address(const void *p) { return (const char *)p - (const char *)pool; }
static void copy(const Copy &c) {
    char *to = (char *)pool + c.to;
    if (c.to % 16 || c.to + 16 > sizeof pool || (u64)c.from % 16) fprintf(stderr, "bad copy\\n"), abort();
    if (c.valid) memcpy(to, c.from, 16); else memset(to, 0, 16);
}
static void copy_async(u32 to, const void *from, bool valid) {
    Fiber &own = fibers[current];
    if (late) own.copies.push_back({to, from, valid, own.group}); else copy({to, from, valid, 0});
}
static void copy_async(u32 to, const void *from, bool valid, bool present) {
    if (present) copy_async(to, from, valid);
}
static u32 kept(u32 x) { return x; }
static void commit() { fibers[current].group++; }
template <int LATER> static void wait() {
    Fiber &own = fibers[current];
    std::vector<Copy> left;
    for (const Copy &c : own.copies) if (c.group + LATER < own.group) copy(c); else left.push_back(c);
    own.copies = left;
}
static void load_matrices(u32 (&to)[4], u32 address) {
    Words all = exchange(address);
    u32 lane = current % 32;
    for (u32 i = 0; i < 4; i++) memcpy(&to[i], (char *)pool + all[8 * i + lane / 4][0] + 4 * (lane % 4), 4);
}
template <class X> static void multiply_add(X t, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Words all = exchange(a[0], a[1], a[2], a[3], b0, b1);
    u32 lane = current % 32;
    for (u32 i = 0; i < 4; i++) {
        u32 b = i / 2, row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (u32 pair = 0; pair < 8; pair++) {
            u32 h = pair / 4, q = pair % 4, left = all[4 * row + q][b + 2 * h], right = all[4 * column + q][4 + h];
            c[i] += number(t, left, 0) * number(t, right, 0) + number(t, left, 1) * number(t, right, 1);
        }
    }
}
template <class X> static void multiply_add_sparse(
    X t, float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata, u32 selector) {
    Words all = exchange(a[0], a[1], a[2], a[3], (u64)b[1] << 32 | b[0], (u64)b[3] << 32 | b[2], metadata);
    u32 lane = current % 32;
    for (u32 i = 0; i < 4; i++) {
        u32 half_of_rows = i / 2, row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (u32 four = 0; four < 8; four++) {  // of columns of A
            u32 h = four / 4, q = four % 4, both = all[4 * row + q][half_of_rows + 2 * h];
            u32 places = all[4 * row + 2 * selector + h][6] >> 16 * half_of_rows + 4 * q & 15;
            if ((places & 3) >= places >> 2) fprintf(stderr, "bad metadata\\n"), abort();
            for (u32 e = 0; e < 2; e++) {
                u32 k = 4 * four + (e ? places >> 2 : places & 3);
                u64 right = all[4 * column + k % 8 / 2][4 + k / 16];
                c[i] += number(t, both, e) * number(t, (u32)(right >> 32 * (k / 8 % 2)), k % 2);
            }
        }
    }
}
static float4 load_past_l1(const float4 *p) { return *p; }

// Runs a grid: blocks in their order, or from the last to the first.
template <class A> static A argument(u64 value) {
    if constexpr (std::is_pointer_v<A>) return (A)value;
    else if constexpr (std::is_class_v<A>) return *(A *)value;
    else return (A)(u32)value;
}
static void (*body)();
static void entry() {
    body();
    progress++;
    fibers[current].ended = true;
    step();
    setcontext(&outside);  // the last one
}
template <class... A> static void (*called)(A...);
static const u64 *given;
template <class... A, size_t... I> static void call(std::index_sequence<I...>) {
    called<A...>(argument<A>(given[I])...);
}
template <class... A> static void run(void (*kernel)(A...), u32 width, u32 height, u32 threads, u32 backwards,
                                      u32 copies_late, const u64 *arguments) {
    called<A...> = kernel, given = arguments, late = copies_late;
    body = [] { call<A...>(std::index_sequence_for<A...>{}); };
    gridDim = {width, height};
    const u32 blocks = width * height;
    stacks.resize((size_t)threads * STACK);
    for (u32 i = 0; i < blocks; i++) {
        const u32 number = backwards ? blocks - 1 - i : i;
        blockIdx = {number % width, number / width};
        fiber_count = threads, block = {}, any = 0, current = threadIdx.x = 0;
        fibers.reset(new Fiber[threads]()), warps.reset(new Warp[threads / 32]());
        memset(pool, 0xff, sizeof pool);
        memset(counts, 0xff, sizeof counts);
        memset(fours_of_h, 0xff, sizeof fours_of_h);
        for (u32 thread = 0; thread < threads; thread++) {
            ucontext_t &context = fibers[thread].context;
            getcontext(&context);
            context.uc_stack.ss_sp = stacks.data() + (size_t)thread * STACK, context.uc_stack.ss_size = STACK;
            makecontext(&context, entry, 0);
        }
        fibers[0].started = true;
        swapcontext(&outside, &fibers[0].context);
    }
}
"""


def inlined(name: str) -> str:
    """Join a source and the headers that it includes, without those that `MACHINE` replaces."""
    seen = {"common.cuh", "ampere.cuh"}

    def text(file: str) -> str:
        lines = []
        for line in (source_dir() / file).read_text().splitlines():
            if line.startswith('#include "'):
                header = line.split('"')[1]
                if header not in seen:
                    seen.add(header)
                    lines.append(text(header))
            elif line != "#pragma once":
                lines.append(line)
        return "\n".join(lines)

    found = text(f"{name}.cu").replace("extern __shared__", "extern").replace("__shared__", "static")
    return f'{SHIMS}\n#include "common.cuh"\n{MACHINE}\n{found}'


@functools.cache
def built(name: str, instances: tuple[str, ...]) -> ctypes.CDLL:
    calls = [
        f'extern "C" void run{i}(u32 width, u32 height, u32 threads, u32 backwards, u32 late, const u64 *arguments) '
        f"{{ run({instance}, width, height, threads, backwards, late, arguments); }}"
        for i, instance in enumerate(instances)
    ]
    return library("\n".join([inlined(name), *calls]))


def address(data: Tensor | bytes) -> int:
    return data.data_ptr() if isinstance(data, Tensor) else ctypes.cast(data, ctypes.c_void_p).value or 0


def launch(
    name: str,
    instances: tuple[str, ...],
    instance: str,
    grid: tuple[int, int],
    threads: int,
    args: Sequence[Tensor | int | bytes | None],
    *,
    backwards: bool = False,
    late: bool = True,
) -> None:
    """Run one of the instances of a source on tensors of the CPU. `late`: copies arrive when they are waited for."""
    values = [address(arg) if isinstance(arg, Tensor | bytes) else arg or 0 for arg in args]
    run = getattr(built(name, instances), f"run{instances.index(instance)}")
    run(*grid, threads, int(backwards), int(late), (ctypes.c_uint64 * len(values))(*values))
