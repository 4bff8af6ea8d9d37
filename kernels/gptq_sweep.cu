// The inner steps of GPTQ: round the columns of a block one after the other (algorithms.md 5.2).
//
// A block of threads holds 32 rows, one in each lane, and each of its eight warps 16 of up to 128 columns. Warp after warp
// rounds its columns; the later warps then add the errors to their targets, which stay in registers. Arrays are
// transposed, [columns, rows], so that the lanes of a warp access neighbours.
#include "gptq_grid.cuh"

constexpr int WARPS = 8, ROWS = 32, STEP = 16, COLUMNS = WARPS * STEP;

// Which two entries of a quad stay: those whose removal costs most, the lower index on ties. A bit for each.
DEVICE u32 best_two(const float *target, const float *weight, const float *r, const float *ahead) {
    float score[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        score[q] = r[q] * weight[q];
#pragma unroll
        for (int p = 0; p < 4; p++) score[q] += ahead[4 * q + p] * (target[p] - weight[p]);
        score[q] = fabsf(score[q]);
    }
    u32 kept = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int beaten = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j != i) beaten += i < j ? score[i] >= score[j] : score[i] > score[j];
        kept |= (u32)(beaten >= 2) << i;
    }
    return kept;
}

// t [b, n]: targets, then values of codes. d [b, n]: errors w - t * scale. w [b, n]: weights. v: the block of V, row i at
// v + i * ld. scales, zeros [groups, n]; group_of [b]: each column's group. mask [b, n]: which entries of a 2:4 weight
// stay; with r [b] and ahead [b, 4] it is chosen here, as each quad begins.
template <class Grid, bool SPARSE>
__global__ void __launch_bounds__(WARPS * 32, 1) gptq_sweep(
    float *__restrict__ t, float *__restrict__ d, const float *__restrict__ w, const float *__restrict__ v,
    const float *__restrict__ scales, const float *__restrict__ zeros, const int *__restrict__ group_of,
    bool *mask, const float *r, const float *ahead, Grid grid, int n, int b, int ld) {
    __shared__ float errors[COLUMNS][ROWS]; // until a column is rounded, its scales: registers are scarce
    __shared__ float shared_r[COLUMNS], shared_ahead[COLUMNS * 4];
    extern __shared__ float4 fours_of_v[]; // [COLUMNS][COLUMNS], zero on and under the diagonal and outside of the block
    float *shared_v = (float *)fours_of_v;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS + lane, first = warp * STEP;
    bool inside = row < n;
#pragma unroll 8
    for (int at = threadIdx.x; at < COLUMNS * COLUMNS; at += WARPS * 32) {
        int i = at / COLUMNS, j = at % COLUMNS;
        shared_v[at] = i < j && j < b ? v[(u64)i * ld + j] : 0;
    }
    if (SPARSE && r && threadIdx.x < b) {
        shared_r[threadIdx.x] = r[threadIdx.x];
        for (int q = 0; q < 4; q++) shared_ahead[4 * threadIdx.x + q] = ahead[4 * threadIdx.x + q];
    }

    float target[STEP], weight[STEP], zero[STEP];
    u32 kept = 0; // a bit for each column of this warp
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        bool there = inside && first + j < b;
        u64 at = (u64)(first + j) * n + row;
        target[j] = there ? t[at] : 0;
        weight[j] = there ? w[at] : 0;
        u64 group = there && scales ? (u64)group_of[first + j] * n + row : 0;
        errors[first + j][lane] = there && scales ? scales[group] : 1;
        zero[j] = there && zeros ? zeros[group] : 0;
        if (SPARSE && !r && there) kept |= (u32)mask[at] << j;
    }
    for (int turn = 0; turn < WARPS; turn++) {
        __syncthreads(); // V is there, and so are the errors of the last turn
        if (turn > 0 && warp >= turn) {
            for (int i = (turn - 1) * STEP; i < turn * STEP; i++) {
                float error = errors[i][lane];
                const float4 *four = fours_of_v + (i * COLUMNS + first) / 4;
#pragma unroll
                for (int j = 0; j < STEP / 4; j++) {
                    float4 value = four[j];
                    target[4 * j] += error * value.x;
                    target[4 * j + 1] += error * value.y;
                    target[4 * j + 2] += error * value.z;
                    target[4 * j + 3] += error * value.w;
                }
            }
        }
        if (warp != turn) continue;
#pragma unroll
        for (int j = 0; j < STEP; j++) {
            int column = first + j;
            if (SPARSE && r && j % 4 == 0)
                kept |= best_two(target + j, weight + j, shared_r + column, shared_ahead + column * 4) << j;
            float x = SPARSE && !(kept >> j & 1) ? 0 : target[j];
            float scale = errors[column][lane], value = grid.nearest(x / scale, zero[j]);
            float error = inside && column < b ? weight[j] - value * scale : 0;
            target[j] = value;
            errors[column][lane] = error;
            const float *later = shared_v + column * COLUMNS + first;
#pragma unroll
            for (int q = 0; q < STEP; q++)
                if (q > j) target[q] += error * later[q];
        }
    }
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        if (!inside || first + j >= b) continue;
        u64 at = (u64)(first + j) * n + row;
        t[at] = target[j];
        d[at] = errors[first + j][lane];
        if (SPARSE && r) mask[at] = kept >> j & 1;
    }
}
