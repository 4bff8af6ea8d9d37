// The steps of a mixture of experts beside its products: the activation between them, and the sum over choices.
//
// The grid is rows by pieces of rows. A thread has eight numbers, 16 bytes.
#include "common.cuh"

constexpr u32 THREADS = 256;

template <class X> struct alignas(16) Eight {
    X of[8];
};

template <class X>
__global__ void __launch_bounds__(THREADS) silu_multiply(
    const Eight<X> *h,  // [rows, 2 * pieces]: gate, then up
    Eight<X> *a,        // [rows, pieces]: silu(gate) * up, rounded once
    u32 pieces          // numbers of a row of `a`, divided by eight
) {
    wait_for_predecessor();
    let_successor_start();
    const u64 row = blockIdx.x;
    const u32 piece = blockIdx.y * THREADS + threadIdx.x;
    if (piece >= pieces) return;
    const Eight<X> gate = h[2 * row * pieces + piece], up = h[(2 * row + 1) * pieces + piece];
    Eight<X> found;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = to_float(gate.of[j]);
        store(&found.of[j], x / (1 + expf(-x)) * to_float(up.of[j]));
    }
    a[row * pieces + piece] = found;
}

template <class X>
__global__ void __launch_bounds__(THREADS) sum_choices(
    const Eight<X> *z,  // [m, choices, pieces]
    Eight<X> *y,        // [m, pieces]: sums in float32, in the order of the choices, rounded once
    u32 pieces,         // numbers of a row, divided by eight
    u32 choices
) {
    wait_for_predecessor();
    let_successor_start();
    const u64 row = blockIdx.x;
    const u32 piece = blockIdx.y * THREADS + threadIdx.x;
    if (piece >= pieces) return;
    float sums[8] = {};
#pragma unroll 8
    for (u32 choice = 0; choice < choices; choice++) {
        const Eight<X> one = z[(row * choices + choice) * pieces + piece];
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] += to_float(one.of[j]);
    }
    Eight<X> found;
#pragma unroll
    for (int j = 0; j < 8; j++) store(&found.of[j], sums[j]);
    y[row * pieces + piece] = found;
}
