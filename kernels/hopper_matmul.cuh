// The frame of every product on Hopper: y^T = W x^T, for every layout.
//
// The product is cut into tiles of BN rows of the weight by BM tokens, and a tile into steps of BK along k. One thread
// of the producing warpgroup issues all copies into a ring of stages. Consuming warpgroups turn the packed words into
// left operands in registers and multiply. Either they take stages in turn and add their sums at the end, or (SHARED)
// all of them take every stage, each with other rows of the weight.
//
// A launch may begin while the one before it in the stream still runs. It may then fetch weights, which nobody writes,
// but waits before it reads activations or writes anything (see `loader.launch`).
//
// `Tokens` are the tiles of tokens, and the rows of y that these have: `Consecutive`, or those of experts
// (hopper_routed.cuh).
//
// A layout passes a struct `Weight`. README.md explains what both frames ask of it. This one also asks for:
//   WGS, SHARED       consuming warpgroups, and whether all take every stage
//   WORDS             operands of a warp side by side
//   BN                rows of a tile: 64 WORDS, times WGS if SHARED
//   PRODUCTS          along k in a stage: BK / STEP
//   CHUNK             products that share a scale, 0 if sums are not scaled during the loop
//   BYTES             of a stage; PADDED_BYTES with the alignment of the next one
//   Maps, fetch       the tensor maps, and the copies of a stage; `first` is where the weight of an expert begins, in
//                     steps along k or in blocks of 64 rows
//   SINGLE            whether there is one scale for each row; then `single(n)` is its index, `factor` its value
//   Lane::n0, quad    its warp's first row of the tile, and its row of eight (lane / 4)
//   Lane::load        takes a whole stage, scales included; `ahead(s)` loads more words while product s runs
//   Lane::write       of a sparse weight: writes the sums
#pragma once

#include "hopper_sums.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

constexpr int BK = 128;  // weights along k in a stage

// Sizes of an instance. The launcher computes the same (`HopperTiles.shared_bytes` in quantkit/kernels/hopper_tiles.py).
template <class Weight, int BM, int STAGES, int CLUSTER>
struct Frame {
    static constexpr int WGS = Weight::WGS, WORDS = Weight::WORDS;
    static constexpr bool SPARSE = Weight::STEP == 32;
    static constexpr int SUMS = BM / 2;                     // registers of the sums of one product
    static constexpr int ALL = WORDS * SUMS;                    // of all products of a thread
    static constexpr int OWNERS = Weight::SHARED ? WGS : 1;     // warpgroups that hold final sums
    // If LAGS, the second of two warpgroups begins LAG products after the first, so that one multiplies while the other
    // waits for a stage or writes. Only for the first tile of a launch: with short tiles the first warpgroup could get
    // two tiles ahead and arrive at the barrier twice, which would complete it without the second.
    static constexpr bool LAGS = Weight::SHARED && WGS == 2 && BM == 128 && (SPARSE || WORDS == 1);
    static constexpr int LAG = LAGS ? Weight::PRODUCTS / 2 : 0;
    // If LATE, a stage is released when the first product of the next stage is in flight, so the tensor cores never
    // idle in between. Not where scaling waits for all products anyway, or blocks wait for memory. Not for sparse
    // weights either: their last product still reads metadata from registers that the next stage overwrites.
    static constexpr bool LATE = Weight::SHARED && Weight::CHUNK == 0 && !SPARSE;
    static constexpr int X_BYTES = BM * 2 * BK;
    static constexpr int HANDED_OVER = Weight::SHARED ? 0 : (WGS - 1) * 512 * ALL;  // sums sent to the first warpgroup
    static constexpr int OUT_TOKENS = WORDS == 1 && BM > 8 ? 16 : 8;       // tokens that a warp writes at once
    static constexpr int OUT_BYTES = OUT_TOKENS * WORDS * 32;                  // of shared memory for these
    // A unit is the sums that a thread writes together, and the smallest share of a block of a cluster. For a sparse
    // weight it is the sums of one token.
    static constexpr int UNIT = SPARSE ? 2 * WORDS : ALL >= 32 ? 4 : 2, UNITS = ALL / UNIT;
    // If SEPARATE, the few sums of a cluster have their own memory, since neighbours may still use the stages.
    static constexpr bool SEPARATE = CLUSTER > 0 && ALL * OWNERS <= 32;
    // Units that a thread has memory for: one of each block, or rounded up to a power of two of them.
    static constexpr int PLACES = CLUSTER > 2 * UNITS ? CLUSTER : 2 * UNITS, PLACED = 512 * OWNERS * UNIT * PLACES;
    static constexpr int EXCHANGE_BYTES = SEPARATE ? PLACED : 0;
    static_assert(
        CLUSTER == 0 || SEPARATE || PLACED / (CLUSTER == 2 ? 2 : 1) <= STAGES * (X_BYTES + Weight::PADDED_BYTES),
        "the sums of the neighbours fit into the stages");
    // The phase that a warpgroup waits for must be the next one of its stage, and not that of one it has yet to
    // release.
    static_assert(Weight::BN <= 256 && STAGES > 1 && (Weight::SHARED || STAGES % WGS == 0), "stages");
};

// A tile of rows of the weight by tokens. `first` is as above.
struct Place {
    int n_tile, m_tile, first, expert;
};

// Consecutive tokens. Neighbouring tiles have the same rows of the weight, which is then read once.
template <class Y_> struct Consecutive {
    using Y = Y_;
    int m, m_tiles;
    DEVICE Place place(int tile) const { return {tile / m_tiles, tile % m_tiles, 0, 0}; }

    struct Places {  // of tile after tile
        DEVICE Place of(const Consecutive &tokens, int tile) const { return tokens.place(tile); }
    };

    // The rows of y of the tokens of a tile, whether these are there, and what is done to their sums.
    struct Outputs {
        int m0, m;
        DEVICE int row(int t, int token) const { return m0 + t + token; }
        DEVICE bool has(int row) const { return row < m; }
        DEVICE float weighted(int, int, float sum) const { return sum; }
    };
    template <int BM> DEVICE Outputs outputs(int m0) const { return {m0, m}; }
};

// The operands, this block's share of the work, and addresses in shared memory.
template <class F, class Weight, class Tokens, int STAGES>
struct Block {
    const typename Weight::X *bias;
    typename Tokens::Y *y;
    float *sums;
    u32 *counters;
    Tokens tokens;
    int n, k_steps;
    int rounds;       // of whole tiles for every block
    int first, last;  // this block's share of the steps of the remaining tiles, or of its cluster's tile
    Deal deal;
    u32 x_at, w_at, handed_over_at, out_at, exchange_at, barriers;

    DEVICE void place(u32 base) {
        x_at = base;
        w_at = x_at + STAGES * F::X_BYTES;
        handed_over_at = w_at + STAGES * Weight::PADDED_BYTES;
        out_at = handed_over_at + F::HANDED_OVER;
        exchange_at = out_at + 4 * F::OWNERS * F::OUT_BYTES;
        barriers = exchange_at + F::EXCHANGE_BYTES;
    }
    DEVICE void deal_out(int n_tiles, int cluster) {
        if (cluster == 1) {
            const int blocks = gridDim.x, tiles = n_tiles * tokens.m_tiles, units = tiles % blocks * k_steps;
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
    // The block that has a step of a tile that is dealt out.
    DEVICE int owner(int tile, int step) const { return deal.owner((tile - rounds * (int)gridDim.x) * k_steps + step); }
    DEVICE u32 full(int stage) const { return barriers + 16 * stage; }
    DEVICE u32 empty(int stage) const { return barriers + 16 * stage + 8; }
    DEVICE u32 landed() const { return barriers + 16 * STAGES; }  // the sums of the neighbours have arrived
};

// Calls `use(tile, step, stage, round)` for the steps `from` to `to` of a block. A round fills all stages once.
template <int STAGES, class B, class Use>
DEVICE void for_steps(const B &b, int from, int to, Use use) {
    int count = 0;
    for (Walk w = b.walk(); w.has_work() && count < to; w.next())
        for (int step = w.begin; step < w.end && count < to; step++, count++)
            if (count >= from) use(w.tile, step, count % STAGES, count / STAGES);
}

// Issues all copies of a block. Weights are fetched ahead into all stages; activations wait for the previous launch.
// Weights that only one tile of tokens reads leave the L2 cache first, so that activations stay in it.
template <class F, class Weight, class Tokens, int BM, int STAGES, class B>
DEVICE void produce(const B &b, const TensorMap &x_map, const typename Weight::Maps &maps) {
    typename Tokens::Places places;
    auto fetch_weights = [&](int tile, int step, int stage) {
        barrier_arrive_expecting(b.full(stage), F::X_BYTES + Weight::BYTES);
        const u64 policy = b.tokens.m_tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
        const Place from = places.of(b.tokens, tile);
        Weight::fetch(
            maps, b.w_at + stage * Weight::PADDED_BYTES, from.n_tile, step, from.first, b.full(stage), policy);
    };
    auto fetch_tokens = [&](int tile, int step, int stage) {
#pragma unroll
        for (int i = 0; i < BK / 64; i++)
            copy_tile(b.x_at + stage * F::X_BYTES + i * BM * 128, x_map, step * BK + 64 * i,
                      places.of(b.tokens, tile).m_tile * BM, b.full(stage), EVICT_NORMAL);
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

// Issues product s of operand j. Of four lanes, two pass the metadata of a sparse operand; j % 2 selects them.
template <class F, class Weight, int BM, class Lane>
DEVICE void multiply(
    const Lane &lane, int s, int j, float (&d)[BM / 2], const u32 (&left)[4], u64 right, int keep) {
    using X = typename Weight::X;
    if constexpr (!F::SPARSE)
        wgmma<BM, X>(d, left, right, keep);
    else if (j % 2)
        wgmma_sparse<1>(X{}, d, left, lane.metadata(s, j), right, keep);
    else
        wgmma_sparse<0>(X{}, d, left, lane.metadata(s, j), right, keep);
}

// What each row of a lane is multiplied by and what is added to it, once, at the end.
template <class Weight>
struct Rows {
    using X = typename Weight::X;
    half scales[Weight::WORDS][2];
    X bias[Weight::WORDS][2];

    // Loads the bias, and the scale if there is one for each row, of the rows from n0 on.
    DEVICE void load(const half *single_scales, const X *biases, int n0, int a) {
#pragma unroll
        for (int j = 0; j < Weight::WORDS; j++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int row = Weight::row(n0, a, j, b);
                if constexpr (Weight::SINGLE) scales[j][b] = single_scales[Weight::single(row)];
                bias[j][b] = biases ? biases[row] : X{0};
            }
    }

    DEVICE float factor(int j, int b) const {
        if constexpr (Weight::SINGLE)
            return Weight::factor(scales[j][b]);
        else
            return 1;
    }

    DEVICE float shift(int j, int b) const { return to_float(bias[j][b]); }
};

// Keeps the compiler from using sums before the asynchronous products that write them are complete.
template <int WORDS, int SUMS>
DEVICE void written_until_here(float (&sums)[WORDS][SUMS]) {
#pragma unroll
    for (int j = 0; j < WORDS; j++)
#pragma unroll
        for (int r = 0; r < SUMS; r++) asm volatile("" : "+f"(sums[j][r]));
}

// Adds the products of steps `count` to `end` of this block, all of one tile, as far as they belong to this warpgroup.
template <class F, class Weight, int BM, int STAGES, class B, class Lane>
DEVICE void accumulate(const B &b, Lane &lane, int count, int end, int group, float (&total)[F::WORDS][F::SUMS]) {
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
        lane.load(b.w_at + stage * Weight::PADDED_BYTES);
        if (begins && group == 1) sync_threads(4, 256);
        const u64 right = right_operand(b.x_at + stage * F::X_BYTES);
        u32 left[2][WORDS][4];
#pragma unroll
        for (int s = 0; s < PRODUCTS; s++) {
            // The address advances by 32 bytes for 16 of k, and by a whole matrix for 64.
            constexpr int SPAN = BK / PRODUCTS / 16;
            const u64 right_s = right + (SPAN * s / 4 * BM * 8 + SPAN * s % 4 * 2);
#pragma unroll
            for (int j = 0; j < WORDS; j++) lane.operand(s, j, left[s & 1][j]);
            lane.ahead(s);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < WORDS; j++)
                if constexpr (CHUNK == 0)
                    multiply<F, Weight, BM>(lane, s, j, total[j], left[s & 1][j], right_s, 1);
                else
                    multiply<F, Weight, BM>(lane, s, j, part[j], left[s & 1][j], right_s, s % CHUNK != 0);
            wgmma_commit();
            if (s == F::LAG - 1 && begins && group == 0) arrive_threads(4, 256);
            if (F::LATE || s != PRODUCTS - 1 && (CHUNK == 0 || s % CHUNK != CHUNK - 1)) {
                wgmma_wait<1>();  // the left operand of the previous product may be overwritten
                if (F::LATE && s == 0 && !first) release(stage ? stage - 1 : STAGES - 1);
                continue;
            }
            wgmma_wait<0>();
            if constexpr (CHUNK > 0) {
                written_until_here<WORDS>(part);
#pragma unroll
                for (int j = 0; j < WORDS; j++)
#pragma unroll
                    for (int r = 0; r < R; r++) total[j][r] += part[j][r] * lane.scale(s, j, r / 2 % 2);
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

// Writes a warp's 16 * WORDS rows of y^T through shared memory, so that rows of y are written in 16 bytes. Each block
// of a cluster writes its units, which are multiples of eight tokens.
template <class F, class Weight, class Tokens, int BM, class B, class Team>
DEVICE void write(
    const B &b, const Rows<Weight> &rows, int m0, int n0, const Team &team, float (&total)[F::WORDS][F::SUMS]) {
    const auto outputs = b.tokens.template outputs<BM>(m0);
    constexpr int WORDS = F::WORDS, ROWS = 16 * WORDS;
    constexpr int PIECES = ROWS / 8;  // of 16 bytes in the row of a token
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 out = b.out_at + warp * F::OUT_BYTES;
#pragma unroll
    for (int t = 0; t < BM; t += F::OUT_TOKENS) {
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll
            for (int e = 0; e < F::OUT_TOKENS; e += 8) {
                const float *v = &total[j][(t + e) / 2];
                u32 pieces[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float factor = rows.factor(j, i), shift = rows.shift(j, i);
                    const float low = v[2 * i] * factor + shift, high = v[2 * i + 1] * factor + shift;
                    pieces[i] = pair(typename Tokens::Y{}, outputs.weighted(t + e, 0, low), outputs.weighted(t + e, 1, high));
                }
                const int piece = 2 * j + lane / 8 % 2, row = e + lane % 8;
                store_transposed(out + row * ROWS * 2 + (piece ^ (row & (PIECES - 1))) * 16, pieces);
            }
        __syncwarp();
#pragma unroll
        for (int i = lane; i < F::OUT_TOKENS * PIECES; i += 32) {
            const int row = i / PIECES, piece = i % PIECES, at = outputs.row(t, row);
            const int to = Weight::row(n0, 0, piece / 2, piece % 2);
            const int unit = (piece / 2 * F::SUMS + (t + row) / 8 * 4 + piece % 2 * 2) / F::UNIT;
            float v[4];
            load_shared4(v, out + row * ROWS * 2 + (piece ^ (row & (PIECES - 1))) * 16);
            if (team.mine(unit) && outputs.has(at) && to < b.n)
                *(float4 *)(b.y + (long long)at * b.n + to) = make_float4(v[0], v[1], v[2], v[3]);
        }
        __syncwarp();
    }
}

// A launch. CLUSTER = 0: a persistent grid, in which each block takes equally many whole tiles, and an even share of
// the steps of the remaining tiles. The block with the end of such a tile adds the partial sums of the others.
// Otherwise a tile belongs to one cluster, whose blocks divide its k and add their sums through shared memory.
template <class Weight, int BM, int STAGES, int CLUSTER, class Tokens>
DEVICE void multiply_tiles(
    const Tokens &tokens, const TensorMap &x_map, const typename Weight::Maps &maps, const half *scales,
    const typename Weight::X *bias, typename Tokens::Y *y, float *sums, u32 *counters, int n, int k) {
    constexpr int WGS = Weight::WGS;
    using F = Frame<Weight, BM, STAGES, CLUSTER>;
    extern __shared__ unsigned char shared[];
    Block<F, Weight, Tokens, STAGES> b{bias, y, sums, counters, tokens, n, (k + BK - 1) / BK};
    b.place((shared_address(shared) + 1023) / 1024 * 1024);
    const Team<F, CLUSTER> team;
    b.deal_out((n + Weight::BN - 1) / Weight::BN, team.size);
    // The same in all lanes. The shuffle tells the compiler so, which then uses uniform registers.
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(b.full(i), 1);                // the announcement of the bytes
            barrier_init(b.empty(i), 4 * F::OWNERS);  // every warp that uses it
        }
        if constexpr (CLUSTER > 0) {
            barrier_init(b.landed(), 1);
            barrier_arrive_expecting(b.landed(), team.due());
        }
        barrier_init_done();
    }
    __syncthreads();
    if constexpr (F::SEPARATE) cluster_arrive();

    if (warp >= 4 * WGS) {
        if constexpr (WGS <= 2) give_registers<40>();
        if (thread == 128 * WGS) produce<F, Weight, Tokens, BM, STAGES>(b, x_map, maps);
        team.sync();
        return;
    }
    if constexpr (WGS <= 2) take_registers<WGS == 2 ? 232 : 216>();

    const int group = warp / 4;
    typename Weight::template Lane<BM> lane(warp % 4, group, thread % 32, (u32)(n >> 31));
    Rows<Weight> rows;
    int count = 0;
    for (Walk walk = b.walk(); walk.has_work(); walk.next()) {
        const Place at = b.tokens.place(walk.tile);
        const int n0 = at.n_tile * Weight::BN + lane.n0;
        if (n0 < n) rows.load(scales + (long long)at.expert * n, bias, n0, lane.quad());
        float total[F::WORDS][F::SUMS] = {};
        accumulate<F, Weight, BM, STAGES>(b, lane, count, count + walk.end - walk.begin, group, total);
        count += walk.end - walk.begin;
        if constexpr (WGS > 1 && !Weight::SHARED) hand_over<F>(b, group, total);
        if (!Weight::SHARED && group > 0) {
            team.sync();
            continue;
        }
        wait_for_predecessor();
        if constexpr (CLUSTER > 0) exchange<F, CLUSTER>(b, team, total);
        if (CLUSTER == 0 && !walk.ends_tile()) {
            store_partial<F>(b, walk.tile, group, total);
            continue;
        }
        if (CLUSTER == 0 && !walk.begins_tile()) add_partials<F>(b, walk.tile, group, total);
        const int m0 = b.tokens.place(walk.tile).m_tile * BM;
        if constexpr (F::SPARSE)
            lane.write(y, b.tokens.m, n, m0, n0, rows, team, total);
        else
            write<F, Weight, Tokens, BM>(b, rows, m0, n0, team, total);
    }
}

// The kernel of one weight.
template <class Weight, int BM, int STAGES, int CLUSTER>
DEVICE void matmul_hopper(
    const TensorMap &x_map, const typename Weight::Maps &maps, const half *scales, const typename Weight::X *bias,
    typename Weight::X *y, float *sums, u32 *counters, int m, int n, int k) {
    let_successor_start();
    multiply_tiles<Weight, BM, STAGES, CLUSTER>(
        Consecutive<typename Weight::X>{m, (m + BM - 1) / BM}, x_map, maps, scales, bias, y, sums, counters, n, k);
}
