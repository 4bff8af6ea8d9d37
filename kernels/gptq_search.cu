// The scale search of GPTQ: the error of each candidate scale of each row in each group of columns (algorithms.md 4).
//
// Two neighbouring lanes take two candidates. Each lane has half of the columns of both, so that a word of R, which all
// lanes read from shared memory at once, serves two products. A lane's rounding errors stay in registers.
#include "gptq_grid.cuh"

constexpr int THREADS = 128, RESIDENT = 3, STEP = 32;

// The squared length of 32 entries of delta R, those before WIDTH, for the lane's own candidate. `r` is R transposed.
// The columns are divided in fours: the lane whose `half` is 1 has the second, fourth, ... four.
template <int WIDTH, int G>
DEVICE float squares(const float (&delta)[2][G / 2], const float4 *r, int half) {
    float sum = 0;
#pragma unroll 2
    for (int i = WIDTH - STEP; i < WIDTH; i++) {
        const float4 *column = r + i * G / 4 + half;
        float part[2][2] = {};
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            float4 value = column[2 * j];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                part[c][0] += delta[c][4 * j] * value.x;
                part[c][1] += delta[c][4 * j + 1] * value.y;
                part[c][0] += delta[c][4 * j + 2] * value.z;
                part[c][1] += delta[c][4 * j + 3] * value.w;
            }
        }
        float first = part[0][0] + part[0][1], second = part[1][0] + part[1][1];
        float error = (half ? second : first) + __shfl_xor_sync(~0u, half ? first : second, 1);
        sum += error * error;
    }
    return sum;
}

template <class Grid, int G>
__global__ void __launch_bounds__(THREADS, RESIDENT) gptq_search(
    const float *__restrict__ x,       // [m, groups, G]: weights
    const float *__restrict__ scales,  // [candidates, m, groups]
    const float *__restrict__ zeros,   // [candidates, m, groups], or null: zero points
    const float *__restrict__ r,       // [groups, G, G]: upper triangular R, transposed
    float *__restrict__ errors,        // [candidates, m, groups]: the squared length of (x - nearest(x)) R
    Grid grid,                         // the values of the format
    int m,                             // rows of the weight
    int groups,                        // of a row
    int candidates                     // scales to try
) {
    extern __shared__ float4 fours_of_r[];
    float *shared_r = (float *)fours_of_r;
    int half = threadIdx.x % 2, each = m * candidates; // items of a group; each block takes as many of all items
    u64 next = (u64)groups * each * blockIdx.x / gridDim.x, end = (u64)groups * each * (blockIdx.x + 1) / gridDim.x;
    while (next < end) {
        int group = next / each, item = next % each, last = min((u64)each, item + end - next);
        next += last - item;
        __syncthreads(); // R of the group before is no longer read
        for (int i = threadIdx.x; i < G * G; i += THREADS) shared_r[i] = i % G <= i / G ? r[(u64)group * G * G + i] : 0;
        __syncthreads();
        for (; item < last; item += THREADS) {
            float delta[2][G / 2], sum = 0;
            u64 at[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int own = min(item + (int)threadIdx.x / 2 * 2 + c, last - 1), row = own / candidates;
                u64 part = (u64)row * groups + group;
                at[c] = (u64)(own % candidates) * m * groups + part;
                float scale = scales[at[c]], zero = zeros ? zeros[at[c]] : 0;
#pragma unroll
                for (int j = 0; j < G / 2; j++) {
                    float weight = x[part * G + j / 4 * 8 + half * 4 + j % 4];
                    delta[c][j] = weight - grid.nearest(weight / scale, zero) * scale;
                }
            }
            sum += squares<32, G>(delta, fours_of_r, half);
            if constexpr (G > 32) sum += squares<64, G>(delta, fours_of_r, half);
            if constexpr (G > 64)
                sum += squares<96, G>(delta, fours_of_r, half) + squares<128, G>(delta, fours_of_r, half);
            if (item + (int)threadIdx.x < last) errors[half ? at[1] : at[0]] = sum;
        }
    }
}
