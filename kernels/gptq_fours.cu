// One block of a pass of descent over the aligned fours of a 2:4 weight (algorithms.md 9).
//
// Threads are laid out as in gptq_block.cuh. For each four of its columns a warp tries all pairs that may stay, with the
// best values of both, and takes the best pair if the loss falls. Moves of earlier columns change its slopes.
#include "gptq_block.cuh"
#include "gptq_grid.cuh"

constexpr float SINGULAR = 1e-6f, FALL = 1e-6f;

template <class Grid>
__global__ void __launch_bounds__(WARPS * 32, 1) gptq_fours(
    float *__restrict__ v,            // [b, n]: values of codes, which are moved
    float *__restrict__ e,            // [b, n]: errors w - v * scale, which follow
    const float *__restrict__ slope,  // [b, n]: H e as the block begins
    const float *__restrict__ h,      // [b, b]: the block of H, symmetric, row i at h + i * ld
    const float *__restrict__ scales, // [groups, n], or null where nothing is rounded
    const int *__restrict__ group_of, // [b]: the group of each column, the same in a four
    Grid grid,                        // the values of the format
    int n,                            // rows of the weight
    int b,                            // columns of the block, up to COLUMNS, a multiple of four
    int ld                            // columns of H
) {
    __shared__ float moves[COLUMNS][ROWS]; // changes of errors; until a column is done, its scales
    extern __shared__ float4 fours_of_h[]; // [COLUMNS][COLUMNS], zero under the diagonal and outside of the block
    float *shared_h = (float *)fours_of_h;
    const Place at;
    int lane = at.lane, first = at.first, row = at.row;
    bool inside = row < n;
    load_triangle<true>(shared_h, h, b, ld);

    float ahead[STEP], value[STEP]; // `ahead`: slopes
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        bool there = inside && first + j < b;
        u64 entry = (u64)(first + j) * n + row;
        ahead[j] = there ? slope[entry] : 0;
        value[j] = there ? v[entry] : 0;
        moves[first + j][lane] = there && scales ? scales[(u64)group_of[first + j] * n + row] : 1;
    }
    for (int turn = 0; turn < WARPS; turn++) {
        __syncthreads(); // H is there, and so are the moves of the last turn
        if (turn > 0 && at.warp >= turn) add_changes(ahead, moves, fours_of_h, at, turn);
        if (at.warp != turn) continue;
#pragma unroll
        for (int j = 0; j < STEP; j += 4) {
            const float *block = shared_h + (first + j) * COLUMNS + first + j;
            float scale = moves[first + j][lane], now[4], to[4], given[4], gain = 0; // `to`: slopes from zero
#pragma unroll
            for (int p = 0; p < 4; p++) {
                to[p] = ahead[j + p];
#pragma unroll
                for (int q = 0; q < 4; q++)
                    to[p] += block[(p < q ? p : q) * COLUMNS + (p < q ? q : p)] * (value[j + q] * scale);
                gain += value[j + p] * scale * (ahead[j + p] + to[p]);
                given[p] = now[p] = value[j + p];
            }
            float least = -gain - FALL * fabsf(gain);
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    if (p == q) continue; // the value at p is rounded first, that at q makes up for it
                    float pp = block[p * COLUMNS + p], qq = block[q * COLUMNS + q];
                    float pq = block[(p < q ? p : q) * COLUMNS + (p < q ? q : p)], both = pp * qq - pq * pq;
                    float one = grid.nearest((to[p] * qq - to[q] * pq) / both / scale, 0), x = one * scale;
                    float rest = to[q] - pq * x, other = grid.nearest(rest / qq / scale, 0), y = other * scale;
                    float loss = x * (pp * x - 2 * to[p]) + y * (qq * y - 2 * rest);
                    if (!(both > SINGULAR * pp * qq) || !(loss < least)) continue;
                    least = loss;
#pragma unroll
                    for (int i = 0; i < 4; i++) now[i] = i == p ? one : i == q ? other : 0;
                }
#pragma unroll
            for (int p = 0; p < 4; p++) {
                float move = (given[p] - now[p]) * scale;
                const float *later = shared_h + (first + j + p) * COLUMNS + first;
                value[j + p] = now[p];
                moves[first + j + p][lane] = move;
#pragma unroll
                for (int q = 0; q < STEP; q++)
                    if (q > j + 3) ahead[q] += move * later[q];
            }
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
