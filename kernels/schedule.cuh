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

// A block's steps in the order that it takes them. A grid takes as many whole tiles for each block as there are, round by
// round; the steps of the tiles that are left are dealt out. Of these a block does its share first, the last tile first:
// so what it does of a tile that a later block ends comes before all else, and what earlier ones have begun it ends late.
struct Walk {
    int first, last;  // of the steps that are dealt out, what is this block's
    int k_steps, block, blocks, rounds, round;
    int tile, begin, end;  // steps of k of a tile

    DEVICE Walk(int first_, int last_, int k_steps_, int block_, int blocks_, int rounds_)
        : first(first_), last(last_), k_steps(k_steps_), block(block_), blocks(blocks_), rounds(rounds_), round(0) {
        next();
    }
    DEVICE bool there() const { return tile >= 0; }
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
