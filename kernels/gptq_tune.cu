// One step of tuning the codes and scales of a weight against a gradient (algorithms.md 8.1).
//
// A warp has a group of columns of a row. It moves latent values and adds up the slope of the scale's factor, then moves
// the factor, and writes the weight that the new codes and the new scale give.
#include "gptq_grid.cuh"

constexpr int WARPS = 8, BLOCKS = 6; // together on a multiprocessor: 40 registers each, none spilled

// What all groups share. `weight` is that of all gradients so far in the mean squares, `frozen` the code that stays or
// -1, `digits` the bits of a stored scale's mantissa.
struct Step {
    float rate, factor_rate, weight, decay, tiny, bound, least_factor, largest_factor, smallest_scale, largest_half;
    int frozen, digits;
};

// Moves a number by about `rate` against its slope, whose mean square follows.
DEVICE float moved(float x, float slope, float rate, float &square, const Step &by) {
    square = square * by.decay + slope * slope * (1 - by.decay);
    return x - slope / (sqrtf(square / by.weight) + by.tiny) * rate;
}

template <class X> DEVICE float rounded(float x) {
    X y;
    store(&y, x);
    return to_float(y);
}

// Rounds the mantissa of a number to some bits, ties to even; its leading bit, which is not stored, is odd.
DEVICE float shortened(float x, int digits) {
    u32 bits = __float_as_uint(x), unit = 1u << (23 - digits), odd = digits ? bits / unit & 1 : 1;
    return __uint_as_float((bits + unit / 2 - 1 + odd) & ~(unit - 1));
}

// The scale as it is stored; one that would overflow keeps its start value.
DEVICE float stored_scale(float start, float factor, float largest, const Step &by) {
    float found = start * factor;
    float size = fmaxf(fabsf(rounded<half>(by.digits < 10 ? shortened(found, by.digits) : found)), by.smallest_scale);
    return start != 0 && size * largest <= by.largest_half ? copysignf(size, found) : start;
}

template <class Grid>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS) gptq_tune(
    bfloat *__restrict__ dense,          // [groups, size]: the weight is written
    const bfloat *__restrict__ gradient, // [groups, size]: of the loss by the weight
    float *__restrict__ latent,          // [groups, size]
    float *__restrict__ squares,         // [groups, size]: mean squares of slopes
    float *__restrict__ factors,         // [groups]
    float *__restrict__ factor_squares,  // [groups]
    const float *__restrict__ scales,    // [groups]: at the start
    const float *__restrict__ zeros,     // [groups], or null: zero points
    const float *__restrict__ centers,   // [groups, size]: the middle of a latent value's range
    const unsigned char *__restrict__ codes, // [groups, size]: at the start
    const float *__restrict__ steps,     // of each code: the distance to its nearest neighbour
    Grid grid,                           // the values of the format
    Step by,
    int groups,                          // of all rows
    int size                             // columns of a group
) {
    int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32;
    if (group >= groups) return;
    u64 first = (u64)group * size;
    float scale = scales[group], zero = zeros ? zeros[group] : 0, sum = 0;
    float low = grid.lowest(zero), high = grid.highest(zero);
#pragma unroll 4
    for (int i = lane; i < size; i += 32) {
        u64 at = first + i;
        int code = codes[at];
        float x = latent[at], slope = to_float(gradient[at]) * scale, step = steps[code], center = centers[at];
        sum += slope * (code == by.frozen ? 0 : grid.nearest(x, zero));
        float square = squares[at];
        x = moved(x, slope * step, by.rate * step, square, by);
        float reach = by.bound * step;
        latent[at] = fminf(fmaxf(x, fmaxf(center - reach, low)), fminf(center + reach, high));
        squares[at] = square;
    }
#pragma unroll
    for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    float square = factor_squares[group];
    float factor = moved(factors[group], sum, by.factor_rate, square, by);
    factor = fminf(fmaxf(factor, by.least_factor), by.largest_factor);
    scale = stored_scale(scale, factor, fmaxf(-low, high), by);
    __syncwarp(); // each lane has read the factor
    if (lane == 0) factors[group] = factor, factor_squares[group] = square;
#pragma unroll 4
    for (int i = lane; i < size; i += 32) {
        u64 at = first + i;
        store(dense + at, codes[at] == by.frozen ? 0 : grid.nearest(latent[at], zero) * scale);
    }
}
