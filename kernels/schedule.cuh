// The schedule of a block on Hopper: which steps of which tiles it takes, and in which order.
//
// A unit is a step along k; the units of a tile are neighbours. A test without a GPU compiles this with an ordinary C++
// compiler, because a mistake here is a product that never ends.
#pragma once

#include "common.cuh"

// Even shares of units: each block has `least`, and the first `more` blocks have one more.
struct Deal {
    int least, more;
    DEVICE int first(int block) const { return block * least + (block < more ? block : more); }
    DEVICE int owner(int unit) const {
        const int big = more * (least + 1);
        return unit < big ? unit / (least + 1) : more + (unit - big) / least;
    }
};

// Tiles of tokens by rows of the weight, in squares of SIDE by as many as a grid takes at a time, so that what neighbours
// read is in the L2 cache. Within a square, neighbours have the same rows of the weight.
struct Squares {
    static constexpr int SIDE = 8;
    int m_tiles, n_tiles;
    DEVICE void find(int tile, int &m_tile, int &n_tile) const {
        const int from = tile / (SIDE * n_tiles) * SIDE, in = tile % (SIDE * n_tiles);
        const int side = m_tiles - from < SIDE ? m_tiles - from : SIDE;
        m_tile = from + in % side, n_tile = in / side;
    }
};

// The steps of a block in their order. The grid takes whole tiles in rounds, one for each block, and the steps of the
// remaining tiles are dealt out. A block does its share of these first, from the last tile to the first. So it begins
// with the tile that a later block ends, and does last the end of a tile that earlier blocks have begun.
struct Walk {
    int first, last;  // this block's share of the steps that are dealt out
    int k_steps, block, blocks, rounds, round;
    int tile, begin, end;  // steps of k of a tile

    DEVICE Walk(int first_, int last_, int k_steps_, int block_, int blocks_, int rounds_)
        : first(first_), last(last_), k_steps(k_steps_), block(block_), blocks(blocks_), rounds(rounds_), round(0) {
        next();
    }
    DEVICE bool has_work() const { return tile >= 0; }
    DEVICE void next() {
        if (last > first) {
            const int dealt = (last - 1) / k_steps, from = dealt * k_steps;
            tile = rounds * blocks + dealt;
            begin = first > from ? first - from : 0, end = last - from;
            last = from + begin;
        } else {
            tile = round < rounds ? round * blocks + block : -1;
            begin = 0, end = k_steps, round++;
        }
    }
    DEVICE bool begins_tile() const { return begin == 0; }
    DEVICE bool ends_tile() const { return end == k_steps; }
};
