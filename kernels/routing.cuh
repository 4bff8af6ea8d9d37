// The list of tiles of a mixture of experts: routing.cu writes it, and routed.cuh reads it.
#pragma once

#include "common.cuh"

constexpr u32 NO_ROW = 0xffffffff;

// One array: two counts, the experts of the tiles, and the rows of the tiles, TILE for each. Every tile has rows of one
// expert, ascending; NO_ROW follows the last one. The rows without an expert stand behind the rows of the last tile.
template <class Word> struct List {
    Word *counts;  // [2]: tiles, and rows without an expert
    Word *experts, *rows;
    DEVICE List(Word *list, u32 max_tiles) : counts(list), experts(list + 2), rows(list + 2 + max_tiles) {}
};
