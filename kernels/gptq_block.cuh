// A block of up to 128 columns, each of which depends on those before it: shared by the sweep of GPTQ and by descent.
//
// A block of threads holds 32 rows, one in each lane, and each of its eight warps has 16 columns. Warp after warp
// changes its columns. The later warps then add the effect of these changes to their own columns, which stay in
// registers. Arrays are transposed, [columns, rows], so that the lanes of a warp access neighbours.
#pragma once

#include "common.cuh"

constexpr int WARPS = 8, ROWS = 32, STEP = 16, COLUMNS = WARPS * STEP;

// The place of a thread: its row, and the first of its warp's STEP columns.
struct Place {
    int lane, warp, row, first;
    DEVICE Place()
        : lane(threadIdx.x % 32), warp(threadIdx.x / 32), row(blockIdx.x * ROWS + lane), first(warp * STEP) {}
};

// Copies the upper triangle of a matrix [b, b], row i at from + i * ld, to [COLUMNS, COLUMNS] in shared memory.
// Everything else there becomes zero, and so does the diagonal unless DIAGONAL.
template <bool DIAGONAL> DEVICE void load_triangle(float *to, const float *from, int b, int ld) {
#pragma unroll 8
    for (int at = threadIdx.x; at < COLUMNS * COLUMNS; at += WARPS * 32) {
        int i = at / COLUMNS, j = at % COLUMNS;
        to[at] = (DIAGONAL ? i <= j : i < j) && j < b ? from[(u64)i * ld + j] : 0;
    }
}

// Adds the changes of warp `turn - 1`'s columns, times their rows of a triangle, to this warp's columns.
DEVICE void add_changes(
    float (&column)[STEP], const float (&changes)[COLUMNS][ROWS], const float4 *triangle, const Place &at, int turn) {
    for (int i = (turn - 1) * STEP; i < turn * STEP; i++) {
        float change = changes[i][at.lane];
        const float4 *four = triangle + (i * COLUMNS + at.first) / 4;
#pragma unroll
        for (int j = 0; j < STEP / 4; j++) {
            float4 entry = four[j];
            column[4 * j] += change * entry.x;
            column[4 * j + 1] += change * entry.y;
            column[4 * j + 2] += change * entry.z;
            column[4 * j + 3] += change * entry.w;
        }
    }
}
