// The scale search of GPTQ: the error of each candidate scale of each row in each group of columns (algorithms.md 4).
//
// TOGETHER lanes take as many candidates of a row, and then the next ones. Two neighbouring lanes share two: each has
// half of the columns of both, so that a word of R, which all lanes read from shared memory at once, serves two products.
// A lane's rounding errors stay in registers.
#include "gptq_grid.cuh"

constexpr int THREADS = 128, RESIDENT = 3, STEP = 32, TOGETHER = 8;

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

// Puts the lane's rounding errors of 32 columns, those before WIDTH, of both candidates into `delta`.
template <int WIDTH, class Grid, int G>
DEVICE void round_columns(float (&delta)[2][G / 2], const float *x, const float2 *candidates, Grid grid) {
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float scale = candidates[c].x, zero = candidates[c].y;
#pragma unroll
        for (int j = (WIDTH - STEP) / 2; j < WIDTH / 2; j += 4) {
            float weight[4];
            asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" // volatile, so that it is not kept in registers
                         : "=f"(weight[0]), "=f"(weight[1]), "=f"(weight[2]), "=f"(weight[3])
                         : "l"(x + 2 * j));
#pragma unroll
            for (int i = 0; i < 4; i++) delta[c][j + i] = weight[i] - grid.nearest(weight[i] / scale, zero) * scale;
        }
    }
}

template <class Grid, int G>
__global__ void __launch_bounds__(THREADS, RESIDENT) gptq_search(
    const float *__restrict__ x,       // [m, groups, G]: weights
    const float *__restrict__ scales,  // [candidates, m, groups]; not a number: never the best
    const float *__restrict__ zeros,   // [candidates, m, groups], or null: zero points
    const float *__restrict__ r,       // [groups, G, G]: upper triangular R, transposed
    float *__restrict__ errors,        // [candidates, m, groups]: the squared length of (x - nearest(x)) R, or infinity
    Grid grid,                         // the values of the format
    int m,                             // rows of the weight
    int groups,                        // of a row
    int candidates                     // scales to try
) {
    extern __shared__ float4 fours_of_r[];
    __shared__ float2 shared_candidates[THREADS]; // scale and zero point: registers are scarce
    float *shared_r = (float *)fours_of_r;
    const float2 *both = shared_candidates + threadIdx.x / 2 * 2;
    int half = threadIdx.x % 2, own = threadIdx.x % TOGETHER;
    int group = blockIdx.y, first = (u64)m * blockIdx.x / gridDim.x, last = (u64)m * (blockIdx.x + 1) / gridDim.x;
    const float infinity = __uint_as_float(0x7f800000u);
    for (int i = threadIdx.x; i < G * G; i += THREADS) shared_r[i] = i % G <= i / G ? r[(u64)group * G * G + i] : 0;
    __syncthreads();
    for (; first < last; first += THREADS / TOGETHER) {
        int row = first + threadIdx.x / TOGETHER;
        u64 part = (u64)min(row, last - 1) * groups + group;
        const float *mine = x + part * G + half * 4;
        float best = infinity;
        for (int tried = 0; tried < candidates; tried += TOGETHER) {
            float delta[2][G / 2];
            u64 at = (u64)min(tried + own, candidates - 1) * m * groups + part;
            __syncwarp();
            shared_candidates[threadIdx.x] = {scales[at], zeros ? zeros[at] : 0};
            // A sum only grows. All lanes end once each is above the best error of its row.
            round_columns<32, Grid, G>(delta, mine, both, grid);
            float sum = squares<32, G>(delta, fours_of_r, half);
            bool ends = __all_sync(~0u, sum > best);
            if constexpr (G > 32)
                if (!ends) {
                    round_columns<64, Grid, G>(delta, mine, both, grid);
                    sum += squares<64, G>(delta, fours_of_r, half);
                    ends = __all_sync(~0u, sum > best);
                }
            if constexpr (G > 64)
                if (!ends) {
                    round_columns<96, Grid, G>(delta, mine, both, grid);
                    float third = squares<96, G>(delta, fours_of_r, half);
                    ends = __all_sync(~0u, sum + third > best);
                    if (!ends) {
                        round_columns<128, Grid, G>(delta, mine, both, grid);
                        sum += third + squares<128, G>(delta, fours_of_r, half);
                    }
                }
            if (ends) sum = infinity;
            if (row < last && tried + own < candidates) errors[(u64)(tried + own) * m * groups + part] = sum;
            best = fminf(best, sum);
#pragma unroll
            for (int other = 1; other < TOGETHER; other *= 2)
                best = fminf(best, __shfl_xor_sync(~0u, best, other));
        }
    }
}
