// The portable frame for mixtures of experts: a tile has rows of one expert, gathered from x and scattered to y.
//
// routing.cu sorts the rows by expert and lists the tiles. A launch does not know how many there are, so each block
// computes its share. A tile that shares its expert with the next one is followed by it, so the weight is in the L2
// cache.
#pragma once

#include "portable.cuh"
#include "routing.cuh"

// A product of rows with the weights of their experts.
template <class S> struct Routed {
    Product<S> product;    // `m` is not used, and there is no bias
    const u32 *list;       // see routing.cuh
    const float *weights;  // a factor for each row of y, or null
    u32 max_tiles;         // of the list
    u32 choices;           // consecutive rows of y that have the same row of x
    u32 whole;             // from so many tiles on, none is shared, if every block has at most one
};

// The rows of x and y that the tokens of a tile have, in shared memory.
struct OfExpert {
    const u32 *x_rows, *y_rows;
    const float *weights;
    DEVICE bool has(u32 token) const { return y_rows[token] != NO_ROW; }
    DEVICE u64 first() const { return 0; }
    DEVICE u64 of_x(u32 token) const { return x_rows[token]; }
    DEVICE u64 of_y(u32 token) const { return y_rows[token]; }
    DEVICE float weighted(u32 token, float sum) const { return weights ? sum * weights[y_rows[token]] : sum; }
};

// Writes zeros to the rows of y that no expert here computes.
template <class S> DEVICE void clear(const Product<S> &p, const u32 *rows, u32 count) {
    u32 pieces = p.weight.n / 8;
    for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
        uint4 *to = (uint4 *)(p.y + (u64)rows[i] * p.weight.n);
        for (u32 piece = threadIdx.x; piece < pieces; piece += THREADS) to[piece] = uint4{0, 0, 0, 0};
    }
}

// The kernel: this block's units, tile by tile.
template <class S> DEVICE void routed(const Routed<S> &r, float4 *parts, u32 *arrived) {
    __shared__ u32 x_rows[S::BM], y_rows[S::BM];
    const Position<S> at;
    const Product<S> &p = r.product;
    wait_for_predecessor();
    let_successor_start();
    const List list(r.list, r.max_tiles);
    const u32 tiles = list.counts[0];
    clear(p, list.rows + tiles * S::BM, list.counts[1]);
    u32 depth = (p.weight.k + S::BK - 1) / S::BK, all = tiles * ((p.weight.n + S::BN - 1) / S::BN), units = all * depth;
    u32 per = all >= r.whole && all <= gridDim.x ? depth : (units + gridDim.x - 1) / gridDim.x;
    u32 unit = blockIdx.x * per, stop = min(unit + per, units);
    while (unit < stop) {
        const Share share(unit, stop, depth);
        u32 tile = share.tile % tiles;
        __syncthreads();  // the rows of the tile before are in use until here
        if (threadIdx.x < S::BM) {
            u32 row = list.rows[tile * S::BM + threadIdx.x];
            y_rows[threadIdx.x] = row;
            x_rows[threadIdx.x] = row == NO_ROW ? 0 : row / r.choices;
        }
        const Product<S> of_tile{p.weight.of(list.experts[tile]), p.x, nullptr, p.y, 0};
        __syncthreads();
        multiply_share(
            of_tile, OfExpert{x_rows, y_rows, r.weights}, at, share, share.tile / tiles * S::BN, depth, per, parts,
            arrived);
        unit = share.next();
    }
}
