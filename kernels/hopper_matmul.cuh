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
// PRODUCTS (steps of one stage), CHUNK (products that share a scale; PRODUCTS: none), BYTES of a stage and ROOM for them,
// STRIDE from the rows of one product to those of the next, Maps, fetch, and what a thread does with it, Lane.
#pragma once

#include "wgmma.cuh"

constexpr int K_STEP = 128;  // of k in a stage

// Sizes that depend on the instance alone; the launcher computes the same (quantkit/kernels/hopper.py).
template <class Weight, int TOKENS, int STAGES>
struct Frame {
    static constexpr int WGS = Weight::WGS, WORDS = Weight::WORDS;
    static constexpr int SUMS = TOKENS / 2;                     // registers of one product
    static constexpr int ALL = WORDS * SUMS;                    // of a thread
    static constexpr int OWNERS = Weight::SHARED ? WGS : 1;     // warpgroups that end up with sums
    static constexpr int X_BYTES = TOKENS * 2 * K_STEP;
    static constexpr int HANDED = Weight::SHARED ? 0 : (WGS - 1) * 512 * ALL;  // sums on their way to the first
    static constexpr int OUT_TOKENS = WORDS == 1 && TOKENS > 8 ? 16 : 8;       // laid down at once by a warp
    static constexpr int OUT_BYTES = OUT_TOKENS * WORDS * 32;                  // for them
    // The phase that a warpgroup waits for must be the next one of its stage.
    static_assert(Weight::COLUMNS <= 256 && (Weight::SHARED || STAGES % WGS == 0), "stages");
};

// How steps of k are dealt out to blocks: each has `least`, the first `more` of them one besides.
struct Deal {
    int least, more;
    DEVICE int first(int block) const { return block * least + min(block, more); }
    DEVICE int owner(int unit) const {
        const int big = more * (least + 1);
        return unit < big ? unit / (least + 1) : more + (unit - big) / least;
    }
};

// The operands and where they lie in shared memory.
template <class F, class Weight, int STAGES>
struct Block {
    const typename Weight::TYPE *bias;
    typename Weight::TYPE *y;
    float *sums;
    u32 *counters;
    int m, n, k_steps, token_tiles;
    int first, last;  // this block's units, steps of k of tiles one after the other
    Deal deal;
    u32 x_at, w_at, handed_at, out_at, barriers, flags;

    DEVICE void place(u32 base) {
        x_at = base;
        w_at = x_at + STAGES * F::X_BYTES;
        handed_at = w_at + STAGES * Weight::ROOM;
        out_at = handed_at + F::HANDED;
        barriers = out_at + 4 * F::OWNERS * F::OUT_BYTES;
        flags = barriers + 16 * STAGES;
    }
    DEVICE void deal_out(int column_tiles, int cluster) {
        if (cluster == 0) {
            const int units = column_tiles * token_tiles * k_steps;
            deal = {units / (int)gridDim.x, units % (int)gridDim.x};
            first = deal.first(blockIdx.x), last = deal.first(blockIdx.x + 1);
        } else {
            const int tile = blockIdx.x / cluster, rank = blockIdx.x % cluster;
            first = tile * k_steps + k_steps * rank / cluster;
            last = tile * k_steps + k_steps * (rank + 1) / cluster;
        }
    }
    DEVICE u32 full(int stage) const { return barriers + 16 * stage; }
    DEVICE u32 empty(int stage) const { return barriers + 16 * stage + 8; }
};

// Issue all copies of a block. Weights go ahead as far as there are stages; activations wait for the launch before.
template <class F, class Weight, int TOKENS, int STAGES, class B>
DEVICE void produce(const B &b, const TensorMap &x_map, const typename Weight::Maps &maps) {
    auto fetch_weights = [&](int u, int stage) {
        barrier_arrive_expecting(b.full(stage), F::X_BYTES + Weight::BYTES);
        const int tile = u / b.k_steps;
        Weight::fetch(maps, b.w_at + stage * Weight::ROOM, tile / b.token_tiles, u - tile * b.k_steps, b.full(stage));
    };
    auto fetch_tokens = [&](int u, int stage) {
        const int tile = u / b.k_steps, step = u - tile * b.k_steps, token = tile % b.token_tiles * TOKENS;
#pragma unroll
        for (int i = 0; i < K_STEP / 64; i++)
            copy_tile(b.x_at + stage * F::X_BYTES + i * TOKENS * 128, x_map, step * K_STEP + 64 * i, token, b.full(stage));
    };
    const int early = min(b.last, b.first + STAGES);
    for (int u = b.first; u < early; u++) fetch_weights(u, u - b.first);
    wait_for_predecessor();
    for (int u = b.first; u < early; u++) fetch_tokens(u, u - b.first);
    for (int u = early, stage = 0, phase = 0; u < b.last; u++) {
        barrier_wait(b.empty(stage), phase);
        fetch_weights(u, stage);
        fetch_tokens(u, stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// Add the products of the units from u to `end`, all of one tile, as far as they are this warpgroup's.
template <class F, class Weight, int TOKENS, int STAGES, class B, class Lane>
DEVICE void accumulate(const B &b, Lane &w, int u, int end, int group, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int WORDS = F::WORDS, R = F::SUMS, PRODUCTS = Weight::PRODUCTS, CHUNK = Weight::CHUNK;
    float part[WORDS][R];
    for (; u < end; u++) {
        const int count = u - b.first, stage = count % STAGES;
        if (!Weight::SHARED && count % F::WGS != group) continue;
        barrier_wait(b.full(stage), (count / STAGES) & 1);
        __syncwarp();
        w.load(b.w_at + stage * Weight::ROOM);
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
                    wgmma<TOKENS, typename Weight::TYPE>(total[j], left[s & 1][j], right_s, 1);
                else
                    wgmma<TOKENS, typename Weight::TYPE>(part[j], left[s & 1][j], right_s, s % CHUNK != 0);
            wgmma_commit();
            if (s != PRODUCTS - 1 && (CHUNK == 0 || s % CHUNK != CHUNK - 1)) {
                wgmma_wait<1>();  // the left operand of the product before may be overwritten
                continue;
            }
            wgmma_wait<0>();
            if constexpr (CHUNK > 0)
#pragma unroll
                for (int j = 0; j < WORDS; j++)
#pragma unroll
                    for (int r = 0; r < R; r++) total[j][r] += part[j][r] * w.scale(s, j, r / 2 % 2);
        }
        if (threadIdx.x % 32 == 0) barrier_arrive(b.empty(stage));
    }
}

// The first warpgroup adds up the others' sums, in order.
template <class F, class B>
DEVICE void hand_over(const B &b, int group, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int R = F::SUMS;
    const u32 mine = b.handed_at + threadIdx.x % 128 * 16;
    if (group > 0)
#pragma unroll
        for (int i = 0; i < F::ALL; i += 4) store_shared4(mine + ((group - 1) * F::ALL + i) * 512, &total[i / R][i % R]);
    sync_threads(1, 128 * F::WGS);
    if (group == 0)
#pragma unroll
        for (int i = 0; i < (F::WGS - 1) * F::ALL; i += 4) {
            float theirs[4];
            load_shared4(theirs, mine + i * 512);
#pragma unroll
            for (int e = 0; e < 4; e++) total[i / R % F::WORDS][i % R + e] += theirs[e];
        }
    sync_threads(1, 128 * F::WGS);
}

// Blocks of a cluster exchange their sums: each adds up, in the order of k, a slice of the registers of all.
template <class F, int CLUSTER, class B>
DEVICE void exchange(const B &b, int rank, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int R = F::SUMS, SLICE = F::ALL / CLUSTER, PITCH = 512 * F::OWNERS;
    const u32 mine = b.x_at + threadIdx.x * 4;  // the stages are used up, also the neighbours' after this:
    cluster_sync();
#pragma unroll
    for (int o = 0; o < CLUSTER; o++)
#pragma unroll
        for (int i = o * SLICE; i < (o + 1) * SLICE; i++)
            if (o != rank) store_neighbour(mine + (rank * SLICE + i % SLICE) * PITCH, o, total[i / R][i % R]);
    cluster_sync();
#pragma unroll
    for (int o = 0; o < CLUSTER; o++)
#pragma unroll
        for (int i = o * SLICE; i < (o + 1) * SLICE; i++)
            if (o == rank) {
                float sum = 0;
#pragma unroll
                for (int p = 0; p < CLUSTER; p++)
                    sum += p == o ? total[i / R][i % R] : load_shared(mine + (p * SLICE + i % SLICE) * PITCH);
                total[i / R][i % R] = sum;
            }
}

// Leave the sums of a part of a tile; the last of its blocks to do so adds all parts up in the order of k and goes on.
template <class F, bool SHARED, class B>
DEVICE bool share(const B &b, int tile_first, int begin, int group, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int R = F::SUMS, SLOT = 128 * F::ALL * F::OWNERS;
    const int place = threadIdx.x % 128, at = (SHARED ? group * 128 * F::ALL : 0) + place * 4;
    float *mine = b.sums + (long long)(2 * blockIdx.x + (begin == b.first ? 0 : 1)) * SLOT + at;
#pragma unroll
    for (int i = 0; i < F::ALL; i += 4) {
        const float *v = &total[i / R][i % R];
        __stcg((float4 *)(mine + i * 128), make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    sync_threads(2 + group, 128);
    const int from = b.deal.owner(tile_first), to = b.deal.owner(tile_first + b.k_steps - 1);
    const u32 flag = b.flags + 4 * group;
    if (place == 0) {
        u32 *counter = b.counters + from * F::OWNERS + (SHARED ? group : 0);
        const bool done = atomicAdd(counter, 1u) == (u32)(to - from);
        if (done) *counter = 0;  // as the next launch wants it
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"((u32)done) : "memory");
    }
    sync_threads(2 + group, 128);
    u32 all_there;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(all_there) : "r"(flag) : "memory");
    if (all_there) {
        __threadfence();
        constexpr int GO = F::ALL <= 64 ? F::ALL : 64;           // registers that are fetched at once of a part,
        constexpr int BATCH = GO <= 8 ? 8 : GO <= 32 ? 4 : 1;  // and parts
#pragma unroll
        for (int i = 0; i < F::ALL; i++) total[i / R][i % R] = 0;
        for (int part = from; part <= to; part += BATCH)
#pragma unroll
            for (int go = 0; go < F::ALL; go += GO) {
                float4 theirs[BATCH][GO / 4];
#pragma unroll
                for (int p = 0; p < BATCH; p++) {
                    const int slot = 2 * (part + p) + (b.deal.first(part + p) >= tile_first ? 0 : 1);
                    const float *there = b.sums + (long long)slot * SLOT + at + go * 128;
#pragma unroll
                    for (int i = 0; i < GO; i += 4)
                        theirs[p][i / 4] = part + p <= to ? __ldcg((const float4 *)(there + i * 128)) : float4{};
                }
#pragma unroll
                for (int p = 0; p < BATCH; p++)
#pragma unroll
                    for (int i = 0; i < GO; i += 4) {
                        float *v = &total[(go + i) / R][(go + i) % R];
                        v[0] += theirs[p][i / 4].x, v[1] += theirs[p][i / 4].y;
                        v[2] += theirs[p][i / 4].z, v[3] += theirs[p][i / 4].w;
                    }
            }
    }
    sync_threads(2 + group, 128);
    return all_there;
}

// Write a warp's 16 WORDS rows of y^T by its tokens: through shared memory, so that rows of y are written in 16 bytes.
// Of blocks in a cluster, each has its slice of the registers, whole eights of tokens.
template <class F, class Weight, int TOKENS, int CLUSTER, class B, class Lane>
DEVICE void write(const B &b, const Lane &w, int column, int token, int rank, float (&total)[F::WORDS][F::SUMS]) {
    using X = typename Weight::TYPE;
    constexpr int WORDS = F::WORDS, R = F::SUMS, SLICE = F::ALL / CLUSTER, ROWS = 16 * WORDS;
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
            // In a cluster registers go in order of words, tokens, rows.
            const bool mine = CLUSTER == 1 || (piece / 2 * R + (t + row) / 8 * 4 + piece % 2 * 2) / SLICE == rank;
            float v[4];
            load_shared4(v, out + row * ROWS * 2 + (piece ^ (row & (PIECES - 1))) * 16);
            if (mine && at < b.m && to < b.n)
                *(float4 *)(b.y + (long long)at * b.n + to) = make_float4(v[0], v[1], v[2], v[3]);
        }
        __syncwarp();
    }
}

// A whole launch. CLUSTER: 0 deals the steps of all tiles evenly to a persistent grid; blocks that share a tile leave
// float32 sums in `sums`. Else a tile is one cluster's, which divides its k and adds up through shared memory.
template <class Weight, int TOKENS, int STAGES, int CLUSTER>
DEVICE void matmul_hopper(
    const TensorMap &x_map, const typename Weight::Maps &maps, const half *scales, const typename Weight::TYPE *bias,
    typename Weight::TYPE *y, float *sums, u32 *counters, int m, int n, int k) {
    constexpr int BLOCKS = CLUSTER > 1 ? CLUSTER : 1, WGS = Weight::WGS;
    using F = Frame<Weight, TOKENS, STAGES>;
    extern __shared__ unsigned char shared[];
    let_successor_start();
    Block<F, Weight, STAGES> b{bias, y, sums, counters, m, n, (k + K_STEP - 1) / K_STEP, (m + TOKENS - 1) / TOKENS};
    b.place((shared_address(shared) + 1023) / 1024 * 1024);
    b.deal_out((n + Weight::COLUMNS - 1) / Weight::COLUMNS, CLUSTER);
    // The same in all lanes, and so that the compiler knows: what depends on it lies in uniform registers.
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(b.full(i), 1);                // the announcement of its bytes
            barrier_init(b.empty(i), 4 * F::OWNERS);  // every warp that used it
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp >= 4 * WGS) {
        if constexpr (WGS <= 2) give_registers<40>();
        if (thread == 128 * WGS) produce<F, Weight, TOKENS, STAGES>(b, x_map, maps);
        __syncwarp();
        if constexpr (CLUSTER > 1) {
            cluster_sync();
            cluster_sync();
        }
        return;
    }
    if constexpr (WGS <= 2) take_registers<WGS == 2 ? 232 : 216>();

    const int group = warp / 4, rank = CLUSTER > 1 ? (int)cluster_rank() : 0;
    typename Weight::template Lane<TOKENS> w(warp % 4, group, thread % 32, (u32)(n >> 31));
    for (int u = b.first; u < b.last;) {
        const int tile = u / b.k_steps, tile_first = tile * b.k_steps, begin = u;
        const int column = tile / b.token_tiles * Weight::COLUMNS + w.column;
        u = min(b.last, tile_first + b.k_steps);
        if (column < n) w.start(scales, bias, column);
        float total[F::WORDS][F::SUMS] = {};
        accumulate<F, Weight, TOKENS, STAGES>(b, w, begin, u, group, total);
        if constexpr (WGS > 1 && !Weight::SHARED) hand_over<F>(b, group, total);
        if (!Weight::SHARED && group > 0) {
            if constexpr (CLUSTER > 1) {
                cluster_sync();
                cluster_sync();
            }
            continue;
        }
        wait_for_predecessor();
        if constexpr (CLUSTER > 1) exchange<F, CLUSTER>(b, rank, total);
        const bool whole = begin == tile_first && u == tile_first + b.k_steps;
        if (CLUSTER == 0 && !whole && !share<F, Weight::SHARED>(b, tile_first, begin, group, total)) continue;
        write<F, Weight, TOKENS, BLOCKS>(b, w, column, tile % b.token_tiles * TOKENS, rank, total);
    }
}
