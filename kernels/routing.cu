// Sorts the rows of a mixture of experts by expert, in one block: each warp counts its rows, then places them.
//
// Rows keep their order within an expert, so the list is the same in every run.
#include "routing.cuh"

constexpr u32 THREADS = 1024, WARPS = THREADS / 32, EVERY_LANE = 0xffffffff;

// Calls `use(row, column, before)` for all rows of a warp. The column is the expert, or `experts` without one. `before`
// was in `counts` for this column, plus one for each row of the warp before this one; the sum is left there.
template <class Id, class Use>
DEVICE void for_rows(const Id *ids, u32 begin, u32 end, u32 experts, u32 *counts, Use use) {
    u32 lane = threadIdx.x % 32;
    for (u32 start = begin; start < end; start += 32) {
        u32 row = start + lane, column = NO_ROW;
        if (row < end) {
            Id id = ids[row];
            column = id < 0 || id >= (Id)experts ? experts : (u32)id;
        }
        u32 same = __match_any_sync(EVERY_LANE, column), leader = __ffs(same) - 1, before = 0;
        if (row < end && lane == leader) {
            before = counts[column];
            counts[column] = before + __popc(same);
        }
        before = __shfl_sync(EVERY_LANE, before, leader) + __popc(same & ((1u << lane) - 1));
        if (row < end) use(row, column, before);
        __syncwarp();  // another lane may lead the next rows of this column
    }
}

// Adds up the values of the threads before this one; `all` is the sum of all.
DEVICE u32 sum_before(u32 value, u32 &all) {
    __shared__ u32 of_warps[WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(EVERY_LANE, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    u32 before = 0;
    all = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w == warp) before = all;
        all += of_warps[w];
    }
    return before + sum - value;
}

template <class Id>
__global__ void __launch_bounds__(THREADS) routing(
    const Id *ids,   // [rows]: the expert of each row; others than 0 to experts - 1 are none
    u32 *list,       // see routing.cuh
    u32 rows,        // of y
    u32 experts,     // fewer than 1024
    u32 tile,        // rows of a tile
    u32 max_tiles    // of the list
) {
    extern __shared__ u32 counts[];  // [WARPS + 1, experts + 1]: rows of a column; later those of the warps before
    const List found(list, max_tiles);
    u32 columns = experts + 1, share = (rows + THREADS - 1) / THREADS * 32;  // rows of a warp
    u32 begin = threadIdx.x / 32 * share, end = min(begin + share, rows), used = (rows + share - 1) / share;
    u32 *own = counts + threadIdx.x / 32 * columns, *starts = counts + WARPS * columns;
    wait_for_predecessor();
    let_successor_start();
    for (u32 i = threadIdx.x; i < used * columns; i += THREADS) counts[i] = 0;
    __syncthreads();
    for_rows(ids, begin, end, experts, own, [](u32, u32, u32) {});
    __syncthreads();
    u32 column = threadIdx.x, total = 0, tiles = 0, all;
    if (column < columns) {
        for (u32 warp = 0; warp < used; warp++) {
            u32 count = counts[warp * columns + column];
            counts[warp * columns + column] = total;
            total += count;
        }
        if (column < experts) tiles = (total + tile - 1) / tile;
    }
    u32 start = sum_before(tiles, all) * tile;
    if (column < columns) {
        starts[column] = start;  // of rows without an expert: behind the last tile
        for (u32 i = total; i < tiles * tile; i++) found.rows[start + i] = NO_ROW;
    }
    if (column == experts) found.counts[0] = all, found.counts[1] = total;
    __syncthreads();
    for_rows(ids, begin, end, experts, own, [&](u32 row, u32 column, u32 before) {
        u32 place = starts[column] + before;
        found.rows[place] = row;
        if (column < experts && before % tile == 0) found.experts[place / tile] = column;
    });
}
