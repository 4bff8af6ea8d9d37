// Dense MARLIN on Hopper: packed words are the left operand of warpgroup products, straight from the copy engine's tiles.
//
// y^T = W x^T. A lane's word of a 16 x 16 tile is its fragment of a product's left operand with n as the row: nibble
// 4e + 2b + h is k = 8h + 2q + e, n = 8b + a, lane = 4a + q (LAYOUTS 3.2). Which 16 rows a warp brings is free, since
// rows of the operand are rows of the result, so weights go from shared memory to registers in vectors of up to 16
// bytes, and nothing is ever written back. Activations are the right operand, swizzled by the copy engine.
//
// One warpgroup produces (one thread of it issues all copies into a ring of stages), WGS warpgroups consume. They take
// stages in turn and add their sums at the end, or (SHARED) all of them take every stage, each other words of a lane.
#include "wgmma.cuh"

constexpr int K_STEP = 128;          // of k in a stage
constexpr int STEPS = K_STEP / 16;   // products in it

template <class X>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<half> = true;

// Codes of one word to the four registers of a left operand: (b, h) = (0, 0), (1, 0), (0, 1), (1, 1), values -8 to 7.
template <class X>
DEVICE void decode(u32 word, u32 (&a)[4]);

// 1024 + code by its bits; of the upper nibbles 1024 + 16 code, brought back by an exact product.
template <>
DEVICE void decode<half>(u32 word, u32 (&a)[4]) {
    const u32 low = 0x000f000f, high = 0x00f000f0, magic = 0x64006400, bias = 0x64086408;  // bias: 1032
    const u32 sixteenth = 0x2c002c00, bias_16 = 0xd480d480;                                // 1/16, -72
    const u32 next = word >> 8;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(a[0]) : "r"((word & low) | magic), "r"(bias));
    asm("sub.f16x2 %0, %1, %2;" : "=r"(a[1]) : "r"((next & low) | magic), "r"(bias));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(a[2]) : "r"((word & high) | magic), "r"(sixteenth), "r"(bias_16));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(a[3]) : "r"((next & high) | magic), "r"(sixteenth), "r"(bias_16));
}

// 128 + code by its bits, minus 136.
template <>
DEVICE void decode<bfloat>(u32 word, u32 (&a)[4]) {
    const u32 low = 0x000f000f, magic = 0x43004300, one = 0x3f803f80, bias = 0xc308c308;
    const u32 order[4] = {word, word >> 8, word >> 4, word >> 12};
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[i]) : "r"((order[i] & low) | magic), "r"(one), "r"(bias));
}

template <int WORDS>
DEVICE void load_words(u32 (&w)[WORDS], u32 address) {
    if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(address));
    else if constexpr (WORDS == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address));
}

DEVICE float low_half(u32 pair) { return to_float(half{(u16)pair}); }

// Sizes that depend on the instance alone; the launcher computes the same (quantkit/kernels/marlin_hopper.py).
template <int TOKENS, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED>
struct Tile {
    static constexpr int N = 64 * WORDS * (SHARED ? WGS : 1);  // columns of the weight
    static constexpr int SUMS = TOKENS / 2;                    // registers of one product
    static constexpr int OWNERS = SHARED ? WGS : 1;            // warpgroups that end up with sums
    static constexpr int X_BYTES = TOKENS * 2 * K_STEP, W_BYTES = N * K_STEP / 2;
    static constexpr int SCALE_ROWS = GROUP ? K_STEP / GROUP : 0;
    static constexpr int S_BYTES = SCALE_ROWS * N * 2, S_ROOM = (S_BYTES + 127) / 128 * 128;
    static constexpr int HANDED = SHARED ? 0 : (WGS - 1) * 128 * WORDS * SUMS * 4;  // sums on their way to the first
    // The phase that a warpgroup waits for must be the next one of its stage.
    static_assert(N <= 256 && (SHARED || STAGES % WGS == 0));
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

// X: half or bfloat. GROUP: rows of k that share a scale, 0 for one scale per column. CLUSTER: 0 deals the steps of all
// tiles evenly to a persistent grid; blocks that share a tile leave float32 sums in `sums`, and the last to arrive adds
// them in the order of k. Else a tile is one cluster's, which divides its k and adds up through shared memory.
template <class X, int TOKENS, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, 1) __cluster_dims__(CLUSTER > 1 ? CLUSTER : 1, 1, 1) marlin_hopper(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap s_map, const half *__restrict__ scales, const X *__restrict__ bias,
    X *__restrict__ y, float *__restrict__ sums, u32 *__restrict__ counters, int m, int n, int k) {
    using T = Tile<TOKENS, WORDS, WGS, STAGES, GROUP, SHARED>;
    constexpr int R = T::SUMS;
    constexpr bool SCALED = SHARED && GROUP > 0;  // scales go into the weights, not into the sums
    static_assert(!SCALED || IS_HALF<X>, "float16 scales do not fit bfloat16 weights");
    extern __shared__ unsigned char shared[];
    const u32 base = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 x_at = base, w_at = x_at + STAGES * T::X_BYTES, s_at = w_at + STAGES * T::W_BYTES;
    const u32 handed_at = s_at + STAGES * T::S_ROOM, barriers = handed_at + T::HANDED, flags = barriers + 16 * STAGES;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

    const int k_steps = (k + K_STEP - 1) / K_STEP, token_tiles = (m + TOKENS - 1) / TOKENS;
    const int units = (n + T::N - 1) / T::N * token_tiles * k_steps;
    const Deal deal = {units / (int)gridDim.x, units % (int)gridDim.x};
    int first = deal.first(blockIdx.x), last = deal.first(blockIdx.x + 1);
    if constexpr (CLUSTER > 0) {
        const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
        first = tile * k_steps + k_steps * rank / CLUSTER;
        last = tile * k_steps + k_steps * (rank + 1) / CLUSTER;
    }

    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers + 16 * i, 1);                     // full: the announcement of its bytes
            barrier_init(barriers + 16 * i + 8, 4 * T::OWNERS);     // empty: every warp that used it
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp >= 4 * WGS) {
        if constexpr (WGS == 2) give_registers<40>();
        if (thread == 128 * WGS) {
            prefetch(x_map);
            prefetch(w_map);
            int stage = 0, phase = 0, tile = first / k_steps, step = first % k_steps;
            for (int u = first; u < last; tile++, step = 0) {
                const int column = tile / token_tiles * T::N, token = tile % token_tiles * TOKENS;
                for (; u < last && step < k_steps; u++, step++) {
                    const u32 full = barriers + 16 * stage;
                    barrier_wait(full + 8, phase ^ 1);
                    barrier_arrive_expecting(full, T::X_BYTES + T::W_BYTES + T::S_BYTES);
                    copy_tile(w_at + stage * T::W_BYTES, w_map, column, step * STEPS, full);
#pragma unroll
                    for (int i = 0; i < K_STEP / 64; i++)
                        copy_tile(x_at + stage * T::X_BYTES + i * TOKENS * 128, x_map, step * K_STEP + 64 * i, token, full);
                    if constexpr (GROUP > 0)
                        copy_tile(s_at + stage * T::S_ROOM, s_map, column, step * T::SCALE_ROWS, full);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
        if constexpr (CLUSTER > 1) {
            __syncwarp();
            cluster_sync();
            cluster_sync();
        }
        return;
    }
    if constexpr (WGS == 2) take_registers<232>();

    const int group = warp / 4, w4 = warp % 4, a = lane / 4, q = lane % 4, place = thread % 128;
    // Which 64 columns of the tile this warp brings, and which of a lane's four words.
    constexpr int LANE_WORDS = T::N / 64;
    const int block = w4 * LANE_WORDS / 4, word_0 = w4 * LANE_WORDS % 4 + (SHARED ? group * WORDS : 0);
    float total[WORDS][R], part[WORDS][R];
    for (int u = first; u < last;) {
        const int tile = u / k_steps, tile_first = tile * k_steps, tile_last = tile_first + k_steps;
        const int begin = u, end = min(last, tile_last);
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll
            for (int r = 0; r < R; r++) total[j][r] = 0;
        for (; u < end; u++) {
            const int count = u - first, stage = count % STAGES;
            if (!SHARED && count % WGS != group) continue;
            const u32 full = barriers + 16 * stage;
            barrier_wait(full, (count / STAGES) & 1);
            __syncwarp();
            const u32 words_at = w_at + stage * T::W_BYTES + block * 512 + lane * 16 + word_0 * 4;
            const u32 scales_at = s_at + stage * T::S_ROOM + block * 128 + a * 16 + word_0 * 4;
            const u64 right = right_operand(x_at + stage * T::X_BYTES);
            constexpr int CHUNK = GROUP ? GROUP / 16 : STEPS;  // products that share a scale
            constexpr int AHEAD = WORDS == 4 && R > 8 ? 2 : STEPS;  // words loaded early, as far as registers go
            u32 codes[AHEAD][WORDS], scale[STEPS / CHUNK][WORDS], left[2][WORDS][4];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) load_words<WORDS>(codes[s], words_at + s * T::N * 8);
            if constexpr (GROUP > 0)
#pragma unroll
                for (int c = 0; c < STEPS / CHUNK; c++) load_words<WORDS>(scale[c], scales_at + c * T::N * 2);
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                // Four blocks of 1024 / 32 bytes along k lie in each 64 of it.
                const u64 right_s = right + (s / 4 * TOKENS * 8 + s % 4 * 2);
#pragma unroll
                for (int j = 0; j < WORDS; j++) {
                    decode<X>(codes[s % AHEAD][j], left[s & 1][j]);
                    if constexpr (SCALED)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const u32 both = __byte_perm(scale[s / CHUNK][j], 0, i & 1 ? 0x3232 : 0x1010);
                            asm("mul.f16x2 %0, %0, %1;" : "+r"(left[s & 1][j][i]) : "r"(both));
                        }
                }
                if (s + AHEAD < STEPS) load_words<WORDS>(codes[s % AHEAD], words_at + (s + AHEAD) * T::N * 8);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < WORDS; j++)
                    if constexpr (GROUP == 0 || SCALED)
                        wgmma<TOKENS, X>(total[j], left[s & 1][j], right_s, 1);
                    else
                        wgmma<TOKENS, X>(part[j], left[s & 1][j], right_s, s % CHUNK != 0);
                wgmma_commit();
                if (s % CHUNK != CHUNK - 1) {
                    wgmma_wait<1>();  // the left operand of the product before may be overwritten
                    continue;
                }
                wgmma_wait<0>();
                if constexpr (GROUP > 0 && !SCALED)
#pragma unroll
                    for (int j = 0; j < WORDS; j++) {
                        const float s0 = low_half(scale[s / CHUNK][j]), s1 = low_half(scale[s / CHUNK][j] >> 16);
#pragma unroll
                        for (int r = 0; r < R; r++) total[j][r] += part[j][r] * (r & 2 ? s1 : s0);
                    }
            }
            if (lane == 0) barrier_arrive(full + 8);
        }

        if constexpr (WGS > 1 && !SHARED) {  // the first warpgroup adds up the others' sums, in order
            const u32 mine = handed_at + place * 4;
            if (group > 0)
#pragma unroll
                for (int i = 0; i < WORDS * R; i++)
                    store_shared(mine + ((group - 1) * WORDS * R + i) * 512, total[i / R][i % R]);
            sync_threads(1, 128 * WGS);
            if (group == 0)
#pragma unroll
                for (int i = 0; i < (WGS - 1) * WORDS * R; i++)
                    total[i / R % WORDS][i % R] += load_shared(mine + i * 512);
            sync_threads(1, 128 * WGS);
        }
        if (!SHARED && group > 0) {
            if constexpr (CLUSTER > 1) {
                cluster_sync();
                cluster_sync();
            }
            continue;
        }

        // Blocks of a cluster exchange their sums: each adds up, in the order of k, a slice of the registers of all.
        constexpr int SLICES = CLUSTER > 1 ? CLUSTER : 1, SLICE = WORDS * R / SLICES;
        const int rank = CLUSTER > 1 ? (int)cluster_rank() : 0;
        if constexpr (CLUSTER > 1) {
            constexpr int PITCH = 512 * T::OWNERS;
            const u32 mine = base + thread * 4;  // the stages are used up, also the neighbours' after this:
            cluster_sync();
#pragma unroll
            for (int o = 0; o < SLICES; o++)
#pragma unroll
                for (int i = o * SLICE; i < (o + 1) * SLICE; i++)
                    if (o != rank) store_neighbour(mine + (rank * SLICE + i % SLICE) * PITCH, o, total[i / R][i % R]);
            cluster_sync();
#pragma unroll
            for (int o = 0; o < SLICES; o++)
#pragma unroll
                for (int i = o * SLICE; i < (o + 1) * SLICE; i++)
                    if (o == rank) {
                        float sum = 0;
#pragma unroll
                        for (int p = 0; p < SLICES; p++)
                            sum += p == o ? total[i / R][i % R] : load_shared(mine + (p * SLICE + i % SLICE) * PITCH);
                        total[i / R][i % R] = sum;
                    }
        }

        if (CLUSTER == 0 && (begin != tile_first || end != tile_last)) {  // other blocks have the rest of this tile
            constexpr int SLOT = 128 * WORDS * R * T::OWNERS;
            const int at = (SHARED ? group * 128 * WORDS * R : 0) + place;
            float *mine = sums + (long long)(2 * blockIdx.x + (begin == first ? 0 : 1)) * SLOT;
#pragma unroll
            for (int i = 0; i < WORDS * R; i++) __stcg(mine + i * 128 + at, total[i / R][i % R]);
            __threadfence();
            sync_threads(2 + group, 128);
            const int from = deal.owner(tile_first), to = deal.owner(tile_last - 1);
            u32 *counter = counters + from * T::OWNERS + (SHARED ? group : 0), flag = flags + 4 * group, all_there;
            if (place == 0) {
                const bool done = atomicAdd(counter, 1u) == (u32)(to - from);
                if (done) *counter = 0;  // as the next launch wants it
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"((u32)done) : "memory");
            }
            sync_threads(2 + group, 128);
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(all_there) : "r"(flag) : "memory");
            if (all_there) {
                __threadfence();
#pragma unroll
                for (int i = 0; i < WORDS * R; i++) total[i / R][i % R] = 0;
                constexpr int BATCH = WORDS * R <= 32 ? 4 : 1;  // parts that are fetched at once
                for (int b = from; b <= to; b += BATCH) {
                    float theirs[BATCH][WORDS * R];
#pragma unroll
                    for (int p = 0; p < BATCH; p++) {
                        const int slot = 2 * (b + p) + (deal.first(b + p) >= tile_first ? 0 : 1);
#pragma unroll
                        for (int i = 0; i < WORDS * R; i++)
                            theirs[p][i] = b + p <= to ? __ldcg(sums + (long long)slot * SLOT + i * 128 + at) : 0;
                    }
#pragma unroll
                    for (int p = 0; p < BATCH; p++)
#pragma unroll
                        for (int i = 0; i < WORDS * R; i++) total[i / R][i % R] += theirs[p][i];
                }
            }
            sync_threads(2 + group, 128);
            if (!all_there) continue;
        }

        const int column = tile / token_tiles * T::N + block * 64, token = tile % token_tiles * TOKENS;
        if (column >= n) continue;
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int row = column + 16 * (word_0 + j) + 8 * b + a, in = row % 32;
                // One scale per column: n = 8c + 2i + e of 32 is stored at 8i + 2c + e (LAYOUTS 3.3).
                const float factor = GROUP ? 1 : to_float(scales[row - in + 8 * (in % 8 / 2) + 2 * (in / 8) + in % 2]);
                const float more = bias ? to_float(bias[row]) : 0;
#pragma unroll
                for (int r = 2 * b; r < R; r += (r & 1) ? 3 : 1) {
                    const int at = token + 8 * (r / 4) + 2 * q + (r & 1);
                    if ((SLICES == 1 || (j * R + r) / SLICE == rank) && at < m)
                        store(y + (long long)at * n + row, total[j][r] * factor + more);
                }
            }
    }
}
