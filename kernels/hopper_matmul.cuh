// The frame of every product on Hopper: y^T = W x^T, whatever the weight is packed as.
//
// A weight is cut into tiles of columns by tokens, a tile into steps of k. One thread of a producing warpgroup issues
// all copies into a ring of stages; consuming warpgroups turn the packed words into left operands in registers and
// multiply. They take stages in turn and add their sums at the end, or (SHARED) all of them take every stage, each other
// rows of the weight. How words are fetched and decoded, and which rows they are, is the weight's own (`Weight`).
//
// A launch may begin while the one before it in the stream still runs: it fetches weights, which nobody writes, and
// waits before it reads activations or writes anything (see `loader.launch`).
//
// Weight: TYPE of activations, COLUMNS of a tile, WORDS (products side by side of a warpgroup), WGS, SHARED,
// PRODUCTS (steps of one stage), CHUNK (products that share a scale, 0: none), BYTES of a stage and ROOM for them,
// STRIDE from the rows of one product to those of the next, Maps, fetch, and what a thread does with it, Lane. A sparse
// weight has products of 32 of k; it issues them itself, and has no STRIDE but writes its sums.
#pragma once

#include "hopper_sums.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

constexpr int K_STEP = 128;  // of k in a stage

// Sizes that depend on the instance alone; the launcher computes the same (quantkit/kernels/hopper.py).
template <class Weight, int TOKENS, int STAGES, int CLUSTER>
struct Frame {
    static constexpr int WGS = Weight::WGS, WORDS = Weight::WORDS;
    static constexpr bool SPARSE = Weight::PRODUCTS == K_STEP / 32;
    static constexpr int SUMS = TOKENS / 2;                     // registers of one product
    static constexpr int ALL = WORDS * SUMS;                    // of a thread
    static constexpr int OWNERS = Weight::SHARED ? WGS : 1;     // warpgroups that end up with sums
    // Products that the second of two warpgroups with the same stages begins after the first, so that one multiplies
    // while the other waits for a stage, or writes. Once in a launch: nothing keeps the first from beginning two short
    // tiles before the second has begun one, and a barrier that is arrived at twice is full without who waits there.
    static constexpr bool LAGS = Weight::SHARED && WGS == 2 && TOKENS == 128 && (SPARSE || WORDS == 1);
    static constexpr int LAG = LAGS ? Weight::PRODUCTS / 2 : 0;
    // A stage is released when the first product of the next one is in flight too, so that none is waited for alone.
    // Not where scales wait for all products anyway or blocks wait for memory; nor for a sparse weight, whose last
    // product would read its metadata from registers that the next stage is loaded to.
    static constexpr bool LATE = Weight::SHARED && Weight::CHUNK == 0 && !SPARSE;
    static constexpr int X_BYTES = TOKENS * 2 * K_STEP;
    static constexpr int HANDED = Weight::SHARED ? 0 : (WGS - 1) * 512 * ALL;  // sums on their way to the first
    static constexpr int OUT_TOKENS = WORDS == 1 && TOKENS > 8 ? 16 : 8;       // laid down at once by a warp
    static constexpr int OUT_BYTES = OUT_TOKENS * WORDS * 32;                  // for them
    // Sums that a thread writes together, the least that a block of a cluster adds up: of a sparse weight a token's.
    static constexpr int UNIT = SPARSE ? 2 * WORDS : ALL >= 32 ? 4 : 2, UNITS = ALL / UNIT;
    // For few sums of a cluster there is room beside the stages, which neighbours may still use.
    static constexpr bool APART = CLUSTER > 0 && ALL * OWNERS <= 32;
    // A thread has a place for a unit of each block, or for twos, fours and so on of them: all units, or twice as many.
    static constexpr int PLACES = CLUSTER > 2 * UNITS ? CLUSTER : 2 * UNITS, PLACED = 512 * OWNERS * UNIT * PLACES;
    static constexpr int APART_BYTES = APART ? PLACED : 0;
    static_assert(CLUSTER == 0 || APART || PLACED / (CLUSTER == 2 ? 2 : 1) <= STAGES * (X_BYTES + Weight::ROOM), "room");
    // The phase that a warpgroup waits for must be the next one of its stage, and not that of one it has yet to release.
    static_assert(Weight::COLUMNS <= 256 && STAGES > 1 && (Weight::SHARED || STAGES % WGS == 0), "stages");
};

// The operands and where they lie in shared memory.
template <class F, class Weight, int STAGES>
struct Block {
    const typename Weight::TYPE *bias;
    typename Weight::TYPE *y;
    float *sums;
    u32 *counters;
    int m, n, k_steps, token_tiles;
    int rounds;       // of whole tiles for every block;
    int first, last;  // this block's share of the other tiles' steps of k, or of its cluster's tile
    Deal deal;
    u32 x_at, w_at, handed_at, out_at, apart_at, barriers;

    DEVICE void place(u32 base) {
        x_at = base;
        w_at = x_at + STAGES * F::X_BYTES;
        handed_at = w_at + STAGES * Weight::ROOM;
        out_at = handed_at + F::HANDED;
        apart_at = out_at + 4 * F::OWNERS * F::OUT_BYTES;
        barriers = apart_at + F::APART_BYTES;
    }
    DEVICE void deal_out(int column_tiles, int cluster) {
        if (cluster == 1) {
            const int blocks = gridDim.x, tiles = column_tiles * token_tiles, units = tiles % blocks * k_steps;
            rounds = tiles / blocks;
            deal = {units / blocks, units % blocks};
            first = deal.first(blockIdx.x), last = deal.first(blockIdx.x + 1);
        } else {
            const int tile = blockIdx.x / cluster, rank = blockIdx.x % cluster;
            rounds = 0;
            first = tile * k_steps + k_steps * rank / cluster;
            last = tile * k_steps + k_steps * (rank + 1) / cluster;
        }
    }
    DEVICE Walk walk() const { return {first, last, k_steps, (int)blockIdx.x, (int)gridDim.x, rounds}; }
    // Who begins or ends a tile that is dealt out.
    DEVICE int owner(int tile, int step) const { return deal.owner((tile - rounds * (int)gridDim.x) * k_steps + step); }
    DEVICE u32 full(int stage) const { return barriers + 16 * stage; }
    DEVICE u32 empty(int stage) const { return barriers + 16 * stage + 8; }
    DEVICE u32 landed() const { return barriers + 16 * STAGES; }  // the sums of the neighbours
};

// Call `use(tile, step of k, stage, round)` for the steps `from` to `to` of a block; a round fills all stages once.
template <int STAGES, class B, class Use>
DEVICE void for_steps(const B &b, int from, int to, Use use) {
    int count = 0;
    for (Walk w = b.walk(); w.there() && count < to; w.next())
        for (int step = w.begin; step < w.end && count < to; step++, count++)
            if (count >= from) use(w.tile, step, count % STAGES, count / STAGES);
}

// Issue all copies of a block. Weights go ahead as far as there are stages; activations wait for the launch before.
// Weights that one tile of tokens reads need not stay in the cache, where activations lie.
template <class F, class Weight, int TOKENS, int STAGES, class B>
DEVICE void produce(const B &b, const TensorMap &x_map, const typename Weight::Maps &maps) {
    auto fetch_weights = [&](int tile, int step, int stage) {
        barrier_arrive_expecting(b.full(stage), F::X_BYTES + Weight::BYTES);
        const u64 policy = b.token_tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
        Weight::fetch(maps, b.w_at + stage * Weight::ROOM, tile / b.token_tiles, step, b.full(stage), policy);
    };
    auto fetch_tokens = [&](int tile, int step, int stage) {
#pragma unroll
        for (int i = 0; i < K_STEP / 64; i++)
            copy_tile(b.x_at + stage * F::X_BYTES + i * TOKENS * 128, x_map, step * K_STEP + 64 * i,
                      tile % b.token_tiles * TOKENS, b.full(stage), EVICT_NORMAL);
    };
    for_steps<STAGES>(b, 0, STAGES, [&](int tile, int step, int stage, int) { fetch_weights(tile, step, stage); });
    wait_for_predecessor();
    for_steps<STAGES>(b, 0, STAGES, [&](int tile, int step, int stage, int) { fetch_tokens(tile, step, stage); });
    for_steps<STAGES>(b, STAGES, 0x7fffffff, [&](int tile, int step, int stage, int round) {
        barrier_wait(b.empty(stage), (round - 1) & 1);
        fetch_weights(tile, step, stage);
        fetch_tokens(tile, step, stage);
    });
}

// One product. A sparse weight knows which of its values are stored.
template <class F, class Weight, int TOKENS, class Lane>
DEVICE void multiply(
    const Lane &w, int s, int j, float (&d)[TOKENS / 2], const u32 (&left)[4], u64 right, int keep) {
    if constexpr (F::SPARSE)
        w.multiply(s, j, d, left, right, keep);
    else
        wgmma<TOKENS, typename Weight::TYPE>(d, left, right, keep);
}

// What is written by products in flight must not be used before they are waited for, which a compiler cannot know.
template <int WORDS, int SUMS>
DEVICE void written_until_here(float (&sums)[WORDS][SUMS]) {
#pragma unroll
    for (int j = 0; j < WORDS; j++)
#pragma unroll
        for (int r = 0; r < SUMS; r++) asm volatile("" : "+f"(sums[j][r]));
}

// Add the products of steps `count` to `end` of this block, all of one tile, as far as they are this warpgroup's.
template <class F, class Weight, int TOKENS, int STAGES, class B, class Lane>
DEVICE void accumulate(const B &b, Lane &w, int count, int end, int group, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int WORDS = F::WORDS, R = F::SUMS, PRODUCTS = Weight::PRODUCTS, CHUNK = Weight::CHUNK;
    float part[WORDS][R];
    bool begins = F::LAG > 0 && count == 0;
    bool first = true;
    auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) barrier_arrive(b.empty(stage));
    };
    for (; count < end; count++) {
        const int stage = count % STAGES;
        if (!Weight::SHARED && count % F::WGS != group) continue;
        barrier_wait(b.full(stage), (count / STAGES) & 1);
        __syncwarp();
        w.load(b.w_at + stage * Weight::ROOM);
        if (begins && group == 1) sync_threads(4, 256);
        const u64 right = right_operand(b.x_at + stage * F::X_BYTES);
        u32 left[2][WORDS][4];
#pragma unroll
        for (int s = 0; s < PRODUCTS; s++) {
            // Blocks of 1024 / 32 bytes along k lie in each 64 of it.
            constexpr int SPAN = K_STEP / PRODUCTS / 16;
            const u64 right_s = right + (SPAN * s / 4 * TOKENS * 8 + SPAN * s % 4 * 2);
#pragma unroll
            for (int j = 0; j < WORDS; j++) w.operand(s, j, left[s & 1][j]);
            w.ahead(s);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < WORDS; j++)
                if constexpr (CHUNK == 0)
                    multiply<F, Weight, TOKENS>(w, s, j, total[j], left[s & 1][j], right_s, 1);
                else
                    multiply<F, Weight, TOKENS>(w, s, j, part[j], left[s & 1][j], right_s, s % CHUNK != 0);
            wgmma_commit();
            if (s == F::LAG - 1 && begins && group == 0) arrive_threads(4, 256);
            if (F::LATE || s != PRODUCTS - 1 && (CHUNK == 0 || s % CHUNK != CHUNK - 1)) {
                wgmma_wait<1>();  // the left operand of the product before may be overwritten
                if (F::LATE && s == 0 && !first) release(stage ? stage - 1 : STAGES - 1);
                continue;
            }
            wgmma_wait<0>();
            if constexpr (CHUNK > 0) {
                written_until_here<WORDS>(part);
#pragma unroll
                for (int j = 0; j < WORDS; j++)
#pragma unroll
                    for (int r = 0; r < R; r++) total[j][r] += part[j][r] * w.scale(s, j, r / 2 % 2);
            }
        }
        if (!F::LATE) release(stage);
        begins = first = false;
    }
    if (F::LATE) {
        wgmma_wait<0>();
        release((end - 1) % STAGES);
    }
    written_until_here<WORDS>(total);
}

// Write a warp's 16 WORDS rows of y^T by its tokens: through shared memory, so that rows of y are written in 16 bytes.
// Of blocks in a cluster, each has some units, whole eights of tokens.
template <class F, class Weight, int TOKENS, class B, class Lane, class Team>
DEVICE void write(
    const B &b, const Lane &w, int column, int token, const Team &team, float (&total)[F::WORDS][F::SUMS]) {
    using X = typename Weight::TYPE;
    constexpr int WORDS = F::WORDS, ROWS = 16 * WORDS;
    constexpr int PIECES = ROWS / 8;  // of 16 bytes in a token's row
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 out = b.out_at + warp * F::OUT_BYTES;
#pragma unroll
    for (int t = 0; t < TOKENS; t += F::OUT_TOKENS) {
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll
            for (int e = 0; e < F::OUT_TOKENS; e += 8) {
                const float *v = &total[j][(t + e) / 2];
                u32 pieces[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float factor = w.factor(j, i), shift = to_float(w.shift[j][i]);
                    pieces[i] = pair(X{}, v[2 * i] * factor + shift, v[2 * i + 1] * factor + shift);
                }
                const int piece = 2 * j + lane / 8 % 2, row = e + lane % 8;
                store_transposed(out + row * ROWS * 2 + (piece ^ (row & (PIECES - 1))) * 16, pieces);
            }
        __syncwarp();
#pragma unroll
        for (int i = lane; i < F::OUT_TOKENS * PIECES; i += 32) {
            const int row = i / PIECES, piece = i % PIECES, at = token + t + row;
            const int to = column + piece / 2 * Weight::STRIDE + piece % 2 * 8;
            const int unit = (piece / 2 * F::SUMS + (t + row) / 8 * 4 + piece % 2 * 2) / F::UNIT;
            float v[4];
            load_shared4(v, out + row * ROWS * 2 + (piece ^ (row & (PIECES - 1))) * 16);
            if (team.mine(unit) && at < b.m && to < b.n)
                *(float4 *)(b.y + (long long)at * b.n + to) = make_float4(v[0], v[1], v[2], v[3]);
        }
        __syncwarp();
    }
}

// A whole launch. CLUSTER: 0 is a persistent grid, each block of which takes as many whole tiles and an even share of the
// steps of those that are left; the block that has such a tile's end adds up what others left in `sums`. Else a tile is
// one cluster's, of two blocks or of MANY, which divides its k and adds up through shared memory.
template <class Weight, int TOKENS, int STAGES, int CLUSTER>
DEVICE void matmul_hopper(
    const TensorMap &x_map, const typename Weight::Maps &maps, const half *scales, const typename Weight::TYPE *bias,
    typename Weight::TYPE *y, float *sums, u32 *counters, int m, int n, int k) {
    constexpr int WGS = Weight::WGS;
    using F = Frame<Weight, TOKENS, STAGES, CLUSTER>;
    extern __shared__ unsigned char shared[];
    let_successor_start();
    Block<F, Weight, STAGES> b{bias, y, sums, counters, m, n, (k + K_STEP - 1) / K_STEP, (m + TOKENS - 1) / TOKENS};
    b.place((shared_address(shared) + 1023) / 1024 * 1024);
    const Team<F, CLUSTER> team;
    b.deal_out((n + Weight::COLUMNS - 1) / Weight::COLUMNS, team.size);
    // The same in all lanes, and so that the compiler knows: what depends on it lies in uniform registers.
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(b.full(i), 1);                // the announcement of its bytes
            barrier_init(b.empty(i), 4 * F::OWNERS);  // every warp that used it
        }
        if constexpr (CLUSTER > 0) {
            barrier_init(b.landed(), 1);
            barrier_arrive_expecting(b.landed(), team.due());
        }
        barrier_init_done();
    }
    __syncthreads();
    if constexpr (F::APART) cluster_arrive();

    if (warp >= 4 * WGS) {
        if constexpr (WGS <= 2) give_registers<40>();
        if (thread == 128 * WGS) produce<F, Weight, TOKENS, STAGES>(b, x_map, maps);
        team.meet();
        return;
    }
    if constexpr (WGS <= 2) take_registers<WGS == 2 ? 232 : 216>();

    const int group = warp / 4;
    typename Weight::template Lane<TOKENS> w(warp % 4, group, thread % 32, (u32)(n >> 31));
    int count = 0;
    for (Walk walk = b.walk(); walk.there(); walk.next()) {
        const int column = walk.tile / b.token_tiles * Weight::COLUMNS + w.column;
        if (column < n) w.start(scales, bias, column);
        float total[F::WORDS][F::SUMS] = {};
        accumulate<F, Weight, TOKENS, STAGES>(b, w, count, count + walk.end - walk.begin, group, total);
        count += walk.end - walk.begin;
        if constexpr (WGS > 1 && !Weight::SHARED) hand_over<F>(b, group, total);
        if (!Weight::SHARED && group > 0) {
            team.meet();
            continue;
        }
        wait_for_predecessor();
        if constexpr (CLUSTER > 0) exchange<F, CLUSTER>(b, team, total);
        if (CLUSTER == 0 && !walk.ends_tile()) {
            leave<F>(b, walk.tile, group, total);
            continue;
        }
        if (CLUSTER == 0 && !walk.begins_tile()) gather<F>(b, walk.tile, group, total);
        const int token = walk.tile % b.token_tiles * TOKENS;
        if constexpr (F::SPARSE)
            w.write(y, m, n, column, token, team, total);
        else
            write<F, Weight, TOKENS>(b, w, column, token, team, total);
    }
}
