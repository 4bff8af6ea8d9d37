// One block of a pass of coordinate descent over the codes of GPTQ (algorithms.md 8).
//
// Threads are laid out as in gptq_block.cuh. A warp moves the values of its columns. Moves of earlier columns change
// its slopes. A column without a diagonal in H stays.
#include "gptq_block.cuh"
#include "gptq_grid.cuh"

template <class Grid>
__global__ void __launch_bounds__(WARPS * 32, 1) gptq_descent(
    float *__restrict__ v,             // [b, n]: values of codes, which are moved
    float *__restrict__ e,             // [b, n]: errors w - v * scale, which follow
    const float *__restrict__ slope,   // [b, n]: H e as the block begins
    const float *__restrict__ h,       // [b, b]: the block of H, symmetric, row i at h + i * ld
    const float *__restrict__ scales,  // [groups, n]
    const float *__restrict__ zeros,   // [groups, n], or null: zero points
    const int *__restrict__ group_of,  // [b]: the group of each column
    Grid grid,                         // the values of the format
    int n,                             // rows of the weight
    int b,                             // columns of the block, up to COLUMNS
    int ld,                            // columns of H
    int frozen                         // whether values of zero stay
) {
    __shared__ float moves[COLUMNS][ROWS]; // changes of errors; until a column is done, its scales
    extern __shared__ float4 fours_of_h[]; // [COLUMNS][COLUMNS], zero under the diagonal and outside of the block
    float *shared_h = (float *)fours_of_h;
    const Place at;
    int lane = at.lane, first = at.first, row = at.row;
    bool inside = row < n;
    load_triangle<true>(shared_h, h, b, ld);

    float ahead[STEP], value[STEP], zero[STEP]; // `ahead`: slopes
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        bool there = inside && first + j < b;
        u64 entry = (u64)(first + j) * n + row;
        ahead[j] = there ? slope[entry] : 0;
        value[j] = there ? v[entry] : 0;
        u64 group = there ? (u64)group_of[first + j] * n + row : 0;
        moves[first + j][lane] = there ? scales[group] : 1;
        zero[j] = there && zeros ? zeros[group] : 0;
    }
    for (int turn = 0; turn < WARPS; turn++) {
        __syncthreads(); // H is there, and so are the moves of the last turn
        if (turn > 0 && at.warp >= turn) add_changes(ahead, moves, fours_of_h, at, turn);
        if (at.warp != turn) continue;
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
        u64 entry = (u64)(first + j) * n + row;
        v[entry] = value[j];
        e[entry] += moves[first + j][lane];
    }
}
