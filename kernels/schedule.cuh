// Which steps of k of which tiles a block does, and in which order. A unit is a step; those of a tile are neighbours.
//
// Also compiled by an ordinary C++ compiler, in a test that needs no GPU: a mistake here is a product that never ends.
#pragma once

#include "common.cuh"

// How steps of k are dealt out to blocks: each has `least`, the first `more` of them one besides.
struct Deal {
    int least, more;
    DEVICE int first(int block) const { return block * least + (block < more ? block : more); }
    DEVICE int owner(int unit) const {
        const int big = more * (least + 1);
        return unit < big ? unit / (least + 1) : more + (unit - big) / least;
    }
};

// A block's steps in the order that it takes them: tile by tile, the last one first, each in the order of k. So what it
// does of a tile that a later block ends comes first, and what earlier ones have begun it ends last.
struct Walk {
    int first, k_steps, tile, begin, end;  // of the tile, what is this block's: [begin, end) of units

    DEVICE Walk(int first_, int last, int k_steps_) : first(first_), k_steps(k_steps_), tile((last - 1) / k_steps_) {
        begin_tile(), end = last;
    }
    DEVICE void begin_tile() { begin = first > tile * k_steps ? first : tile * k_steps; }
    DEVICE bool there() const { return begin < end; }
    DEVICE void next() {
        tile--, end = begin;
        begin_tile();
    }
    DEVICE bool begins_tile() const { return begin == tile * k_steps; }
    DEVICE bool ends_tile() const { return end == (tile + 1) * k_steps; }
};
