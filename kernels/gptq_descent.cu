// One block of a pass of coordinate descent over the codes of GPTQ (algorithms.md 8).
//
// Threads are laid out as in gptq_sweep.cu: 32 rows in the lanes, and 16 of up to 128 columns in each of eight warps.
// Warp after warp moves the values of its columns. The later warps then add the moves to their slopes, which stay in
// registers. Arrays are transposed, [columns, rows], so that the lanes of a warp access neighbours.
#include "gptq_grid.cuh"

constexpr int WARPS = 8, ROWS = 32, STEP = 16, COLUMNS = WARPS * STEP;

// v [b, n]: values of codes. e [b, n]: errors w - v * scale. slope [b, n]: H e as the block begins. h: the block of H,
// symmetric, row i at h + i * ld. scales, zeros [groups, n]; group_of [b]: each column's group. A column with no
// diagonal in H stays; with `frozen` so does each value of zero.
template <class Grid>
__global__ void __launch_bounds__(WARPS * 32, 1) gptq_descent(
    float *__restrict__ v, float *__restrict__ e, const float *__restrict__ slope, const float *__restrict__ h,
    const float *__restrict__ scales, const float *__restrict__ zeros, const int *__restrict__ group_of, Grid grid,
    int n, int b, int ld, int frozen) {
    __shared__ float moves[COLUMNS][ROWS]; // changes of errors; until a column is done, its scales
    extern __shared__ float4 fours_of_h[]; // [COLUMNS][COLUMNS], zero under the diagonal and outside of the block
    float *shared_h = (float *)fours_of_h;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS + lane, first = warp * STEP;
    bool inside = row < n;
#pragma unroll 8
    for (int at = threadIdx.x; at < COLUMNS * COLUMNS; at += WARPS * 32) {
        int i = at / COLUMNS, j = at % COLUMNS;
        shared_h[at] = i <= j && j < b ? h[(u64)i * ld + j] : 0;
    }

    float ahead[STEP], value[STEP], zero[STEP]; // `ahead`: slopes
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        bool there = inside && first + j < b;
        u64 at = (u64)(first + j) * n + row;
        ahead[j] = there ? slope[at] : 0;
        value[j] = there ? v[at] : 0;
        u64 group = there ? (u64)group_of[first + j] * n + row : 0;
        moves[first + j][lane] = there ? scales[group] : 1;
        zero[j] = there && zeros ? zeros[group] : 0;
    }
    for (int turn = 0; turn < WARPS; turn++) {
        __syncthreads(); // H is there, and so are the moves of the last turn
        if (turn > 0 && warp >= turn) {
            for (int i = (turn - 1) * STEP; i < turn * STEP; i++) {
                float move = moves[i][lane];
                const float4 *four = fours_of_h + (i * COLUMNS + first) / 4;
#pragma unroll
                for (int j = 0; j < STEP / 4; j++) {
                    float4 entry = four[j];
                    ahead[4 * j] += move * entry.x;
                    ahead[4 * j + 1] += move * entry.y;
                    ahead[4 * j + 2] += move * entry.z;
                    ahead[4 * j + 3] += move * entry.w;
                }
            }
        }
        if (warp != turn) continue;
#pragma unroll
        for (int j = 0; j < STEP; j++) {
            int column = first + j;
            const float *later = shared_h + column * COLUMNS + first;
            float scale = moves[column][lane], diagonal = later[j];
            float distance = ahead[j] / (scale * diagonal); // to the parabola's minimum, in steps of the grid
            float target = value[j] + distance, nearest = grid.nearest(target, zero[j]);
            // On ties the value stays; it also stays if its target is infinite or not a number.
            bool moved = diagonal > 0 && fabsf(target - nearest) < fabsf(distance) && !(frozen && value[j] == 0);
            float move = moved ? (value[j] - nearest) * scale : 0;
            value[j] = moved ? nearest : value[j];
            moves[column][lane] = move;
#pragma unroll
            for (int q = 0; q < STEP; q++)
                if (q > j) ahead[q] += move * later[q];
        }
    }
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        if (!inside || first + j >= b) continue;
        u64 at = (u64)(first + j) * n + row;
        v[at] = value[j];
        e[at] += moves[first + j][lane];
    }
}
