// The steps of a mixture of experts beside its products: the activation between them, the sum over choices, and the
// order of rows that Hopper's copy engine needs.
//
// The grid is rows by pieces of rows. A thread has eight numbers, 16 bytes.
#include "routing.cuh"

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

// Copies the pieces of a row. From bfloat16 to float16 they are multiplied by a power of two that makes the largest
// number 2^14 to 2^15: all digits stay of numbers down to 2^-31 of it. Returns the factor that undoes this.
DEVICE float copy_row(const Eight<half> *from, Eight<half> *to, u32 lane, u32 pieces) {
#pragma unroll 8
    for (u32 i = lane; i < pieces; i += 32) to[i] = from[i];
    return 1;
}

DEVICE float copy_row(const Eight<bfloat> *from, Eight<bfloat> *to, u32 lane, u32 pieces) {
#pragma unroll 8
    for (u32 i = lane; i < pieces; i += 32) to[i] = from[i];
    return 1;
}

DEVICE float copy_row(const Eight<bfloat> *from, Eight<half> *to, u32 lane, u32 pieces) {
    u32 most = 0;
#pragma unroll 8
    for (u32 i = lane; i < pieces; i += 32)
#pragma unroll
        for (int j = 0; j < 8; j++) most = max(most, from[i].of[j].bits & 0x7fffu);
    for (u32 step = 16; step; step /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, step));
    const u32 exponent = min(268 - (most >> 7), 253u);
    const float power = __uint_as_float(exponent << 23);
#pragma unroll 4
    for (u32 i = lane; i < pieces; i += 32) {
        const Eight<bfloat> one = from[i];
        Eight<half> scaled;
#pragma unroll
        for (int j = 0; j < 8; j++) store(&scaled.of[j], to_float(one.of[j]) * power);
        to[i] = scaled;
    }
    return __uint_as_float((254 - exponent) << 23);
}

// A warp has a place of the list, or a row without an expert.
template <class X, class Z>
__global__ void __launch_bounds__(THREADS) gather_rows(
    const Eight<X> *x,  // [rows / choices, pieces]
    const u32 *list,    // of tiles, see routing.cuh
    Eight<Z> *sorted,   // [max_tiles * tile, pieces]: rows of x in the order of the list
    float *powers,      // [max_tiles * tile]: factors of these, or null
    Eight<X> *y,        // [rows, y_pieces]: rows without an expert become zeros
    u32 max_tiles,      // of the list
    u32 tile,           // rows of a tile
    u32 choices,        // consecutive rows of y that have the same row of x
    u32 pieces,         // numbers of a row of x, divided by eight
    u32 y_pieces        // numbers of a row of y, divided by eight
) {
    wait_for_predecessor();
    let_successor_start();
    const List<const u32> found(list, max_tiles);
    const u32 lane = threadIdx.x % 32, place = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const u32 used = found.counts[0] * tile;
    if (place >= used + found.counts[1]) return;
    const u32 row = found.rows[place];
    if (row == NO_ROW) return;
    if (place >= used) {
        for (u32 i = lane; i < y_pieces; i += 32) y[(u64)row * y_pieces + i] = Eight<X>{};
        return;
    }
    const float power = copy_row(x + (u64)(row / choices) * pieces, sorted + (u64)place * pieces, lane, pieces);
    if (powers && lane == 0) powers[place] = power;
}
