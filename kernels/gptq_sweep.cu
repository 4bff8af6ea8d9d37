// The inner steps of GPTQ: round the columns of a block one after the other (algorithms.md 5.2).
//
// Threads are laid out as in gptq_block.cuh. A warp rounds its columns. Errors of earlier columns change its targets.
#include "gptq_block.cuh"
#include "gptq_grid.cuh"

// Which two entries of four stay: those whose removal costs most, the lower index on ties. A bit for each.
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

template <class Grid, bool SPARSE>
__global__ void __launch_bounds__(WARPS * 32, 1) gptq_sweep(
    float *__restrict__ t,             // [b, n]: targets, then values of codes
    float *__restrict__ d,             // [b, n]: errors w - t * scale are written
    const float *__restrict__ w,       // [b, n]: weights
    const float *__restrict__ v,       // [b, b]: the block of V, row i at v + i * ld
    const float *__restrict__ scales,  // [groups, n], or null where nothing is rounded
    const float *__restrict__ zeros,   // [groups, n], or null: zero points
    const int *__restrict__ group_of,  // [b]: the group of each column
    bool *mask,                        // [b, n], of a 2:4 weight: which entries stay
    const float *r,                    // [b], or null: with r and ahead, the mask is chosen here, as each four begin
    const float *ahead,                // [b, 4], or null
    Grid grid,                         // the values of the format
    int n,                             // rows of the weight
    int b,                             // columns of the block, up to COLUMNS
    int ld                             // columns of V
) {
    __shared__ float errors[COLUMNS][ROWS]; // until a column is rounded, its scales: registers are scarce
    __shared__ float shared_r[COLUMNS], shared_ahead[COLUMNS * 4];
    extern __shared__ float4 fours_of_v[]; // [COLUMNS][COLUMNS], zero on and under the diagonal and outside the block
    float *shared_v = (float *)fours_of_v;
    const Place at;
    int lane = at.lane, first = at.first, row = at.row;
    bool inside = row < n;
    load_triangle<false>(shared_v, v, b, ld);
    if (SPARSE && r && threadIdx.x < b) {
        shared_r[threadIdx.x] = r[threadIdx.x];
        for (int q = 0; q < 4; q++) shared_ahead[4 * threadIdx.x + q] = ahead[4 * threadIdx.x + q];
    }

    float target[STEP], weight[STEP], zero[STEP];
    u32 kept = 0; // a bit for each column of this warp
#pragma unroll
    for (int j = 0; j < STEP; j++) {
        bool there = inside && first + j < b;
        u64 entry = (u64)(first + j) * n + row;
        target[j] = there ? t[entry] : 0;
        weight[j] = there ? w[entry] : 0;
        u64 group = there && scales ? (u64)group_of[first + j] * n + row : 0;
        errors[first + j][lane] = there && scales ? scales[group] : 1;
        zero[j] = there && zeros ? zeros[group] : 0;
        if (SPARSE && !r && there) kept |= (u32)mask[entry] << j;
    }
    for (int turn = 0; turn < WARPS; turn++) {
        __syncthreads(); // V is there, and so are the errors of the last turn
        if (turn > 0 && at.warp >= turn) add_changes(target, errors, fours_of_v, at, turn);
        if (at.warp != turn) continue;
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
        u64 entry = (u64)(first + j) * n + row;
        t[entry] = target[j];
        d[entry] = errors[first + j][lane];
        if (SPARSE && r) mask[entry] = kept >> j & 1;
    }
}
