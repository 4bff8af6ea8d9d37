// The scale search of GPTQ: the error of each candidate scale of each row, for one group of columns (algorithms.md 4).
//
// A warp takes one row and 32 candidates, one in each lane. A lane's rounding errors stay in registers. R is read from
// shared memory, where all lanes read the same word at once.
#include "gptq_grid.cuh"

constexpr int WARPS = 4, STEP = 32;

// The squared length of the entries of delta R before WIDTH, the last 32 of them. `r` is R transposed.
template <int WIDTH, int G>
DEVICE float squares(const float (&delta)[G], const float4 *r) {
    float sum = 0;
#pragma unroll 2
    for (int i = WIDTH - STEP; i < WIDTH; i++) {
        const float4 *column = r + i * G / 4;
        float part[4] = {};
#pragma unroll
        for (int j = 0; j < WIDTH / 4; j++) {
            float4 value = column[j];
            part[0] += delta[4 * j] * value.x;
            part[1] += delta[4 * j + 1] * value.y;
            part[2] += delta[4 * j + 2] * value.z;
            part[3] += delta[4 * j + 3] * value.w;
        }
        float error = (part[0] + part[1]) + (part[2] + part[3]);
        sum += error * error;
    }
    return sum;
}

// x [m, G]: the group's weights, row i at x + i * ld. scales, zeros [candidates, m]. r [G, G]: upper triangular.
// errors [candidates, m]: the squared length of (x - nearest(x)) R.
template <class Grid, int G>
__global__ void __launch_bounds__(WARPS * 32) gptq_search(
    const float *__restrict__ x, const float *__restrict__ scales, const float *__restrict__ zeros,
    const float *__restrict__ r, float *__restrict__ errors, Grid grid, int m, int ld, int candidates) {
    extern __shared__ float4 fours_of_r[]; // transposed: column i of R begins at i * G
    float *shared_r = (float *)fours_of_r;
    for (int i = threadIdx.x; i < G * G; i += WARPS * 32) {
        int row = i / G, column = i % G;
        shared_r[column * G + row] = row <= column ? r[i] : 0;
    }
    __syncthreads();
    int lane = threadIdx.x % 32, turns = (candidates + 31) / 32;
    for (int unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < m * turns; unit += gridDim.x * WARPS) {
        int row = unit / turns, candidate = unit % turns * 32 + lane;
        u64 at = (u64)min(candidate, candidates - 1) * m + row;
        float scale = scales[at], zero = zeros ? zeros[at] : 0, delta[G], sum = 0;
#pragma unroll
        for (int j = 0; j < G; j++) {
            float weight = x[(u64)row * ld + j];
            delta[j] = weight - grid.nearest(weight / scale, zero) * scale;
        }
sum += squares<32>(delta, fours_of_r);
        if constexpr (G > 32) sum += squares<64>(delta, fours_of_r);
        if constexpr (G > 64) sum += squares<96>(delta, fours_of_r) + squares<128>(delta, fours_of_r);
        if (candidate < candidates) errors[at] = sum;
    }
}
