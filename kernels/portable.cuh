// The frame of every product on sm_80 and newer: y^T = W x^T with mma.sync, for every layout.
//
// A warp has 64 rows of the weight, as four left operands side by side, 8 FRAGMENTS tokens, and 64 of k in each stage
// of a ring that cp.async fills. The layouts have the order of these operands, so a lane decodes its words in
// registers. Codes are multiplied as small exact numbers, and scales are applied to float32 sums. So neither scales nor
// weights are rounded to the dtype of the activations. Only where the registers do not suffice for the sums of a group,
// in tiles of many tokens, float16 scales are multiplied into float16 weights.
//
// The work is a list of units, each a tile of outputs by BK of k; the units of a tile are neighbours. If there are many
// tiles, the blocks take whole ones first. Of the units of the others block b takes `per` from b * per on. If several
// blocks share a tile, the last one to finish adds their parts in order of k: the sums are the same in every run.
//
// A layout passes a struct `Weight` with the tensors, n and k. README.md explains what both frames ask of it. This one
// also asks for:
//   GROUPED           whether scales change along k; then `groups` finds them, and sums are scaled where groups end
//   BYTES<BN, BK>     of shared memory for BN rows by BK of k
//   fetch<BN, BK>     starts to copy them; data past the ends of n and k must add nothing
//   factor(n)         the factor of the sums of row n at the end
//   Lane              what a thread holds of one product: `load` and `load_scales` (of its group) fill it,
//                     `scale_operand` multiplies a decoded operand by the scales of its rows
//
// `Rows` are those of x and y that the tokens of a tile have: consecutive ones, or those of an expert (routed.cuh).
#pragma once

#include "ampere.cuh"

constexpr int THREADS = 256;

// The place of a piece of 16 bytes in a row of activations, so that eight rows have no bank conflicts.
DEVICE u32 swizzled(u32 token, u32 piece) { return piece ^ (token & 7); }

// Eight warps: WN for 64 rows each, by WM for 8 FRAGMENTS tokens each, by WK for 64 of k each.
template <class Weight_, int FRAGMENTS_, int WN_, int WM_, int WK_, int STAGES_, int BLOCKS> struct Tile {
    using Weight = Weight_;
    static constexpr int FRAGMENTS = FRAGMENTS_, WN = WN_, WM = WM_, WK = WK_, STAGES = STAGES_;
    static constexpr int BN = 64 * WN, BM = 8 * FRAGMENTS * WM, BK = 64 * WK;
    // Bytes of a stage: the weight, then activations [BM, BK].
    static constexpr int X_AT = Weight::template BYTES<BN, BK>, STAGE = X_AT + BM * BK * 2;
    static constexpr int ROW = BN + 4;  // floats of a row of sums, padded so that eight rows use different banks
    static constexpr int AT_ONCE = FRAGMENTS < 4 ? FRAGMENTS : 4;  // fragments of 8 tokens whose sums fit at once
    static constexpr int PASSES = FRAGMENTS / AT_ONCE;
    static constexpr int AHEAD = Weight::STEP == 16 && FRAGMENTS % 2 ? 2 : 1;  // products that are loaded at once
    static constexpr int BUFFERS = BLOCKS == 1 ? 2 : 1;  // of operands; two blocks have other warps instead
    // Weights are scaled if there are no registers for `part`.
    static constexpr bool SCALED = Weight::GROUPED && FRAGMENTS * BLOCKS == 8;
    static_assert(WN * WM * WK * 32 == THREADS, "warps");
    static_assert(X_AT % 16 == 0, "activations are copied in 16 bytes");
};

template <class S> struct Product {
    using X = typename S::Weight::X;
    typename S::Weight weight;
    const X *x, *bias;
    X *y;
    u32 m;
};

// The position of a thread in its tile: of its warp along n, m and k, and of its lane.
template <class S> struct Position {
    static constexpr bool WIDE = S::AHEAD * S::Weight::STEP == 32;  // matrices loaded together: 8 tokens by 32 of k
    u32 lane, wn, wm, wk;
    u32 words;   // the lane's vector of words in a stage, if those of a product are in the order of warps along n
    u32 tokens;  // the place of its first matrix's row in the activations of a stage
    u32 token, piece, copied;  // what the thread copies of them first: from index `piece` along k, to this place
    DEVICE Position() {
        u32 warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        wn = warp % S::WN;
        wm = warp / S::WN % S::WM;
        wk = warp / (S::WN * S::WM);
        words = kept((wk * (64 / S::Weight::STEP) * S::WN + wn) * 32 + lane);
        u32 row = 8 * S::FRAGMENTS * wm + lane % 8 + (WIDE ? 0 : lane / 16 * 8);  // else 16 by 16
        tokens = kept(16 * (row * (S::BK / 8) + swizzled(row, 8 * wk + (WIDE ? lane / 8 : lane / 8 % 2))));
        token = kept(threadIdx.x / (S::BK / 8));
        piece = kept(threadIdx.x % (S::BK / 8) * 8);
        copied = kept(2 * S::BK * token + 16 * swizzled(token, piece / 8));
    }
};

// Calls `use(i)` for all i below COUNT, divided among the threads of the block.
template <int COUNT, class Use> DEVICE void for_pieces(Use use) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i += THREADS)
        if (COUNT % THREADS == 0 || i + threadIdx.x < COUNT) use(i + threadIdx.x);
}

// Finds the group of an index along k, which is a row of the scales. It divides by multiplying, which is exact while
// k * size < 2^35.
struct Groups {
    u32 k, size, inverse;

    DEVICE Groups(u32 k, u32 size) : k(k), size(size), inverse(size < k ? (1ull << 35) / size + 1 : 0) {}
    DEVICE bool one() const { return inverse == 0; }
    DEVICE u32 of(u32 index) const { return __umulhi(index, inverse) >> 3; }

    // Calls `use(i, row, piece, valid, present)` for PIECES of every group in the BK of k from k0 on. Rows count from
    // the first of these groups; past the end of k, `valid` is false, and `present` is for pieces that no group has.
    template <int BK, int PIECES, class Use> DEVICE void for_pieces_of(u32 k0, Use use) const {
        constexpr u32 COUNT = BK / 32 * PIECES;
        u32 first = of(k0);
        for_pieces<(COUNT + THREADS - 1) / THREADS * THREADS>([&](u32 i) {
            u32 row = i / PIECES, start = (first + row) * size;
            use(i, row, i % PIECES, start < k, (i < COUNT) & (start < k0 + BK));
        });
    }
};

DEVICE u32 word_of(const uint4 &v, u32 i) { return i < 2 ? i ? v.y : v.x : i == 2 ? v.z : v.w; }

// Scales of groups in the MARLIN layouts: those of a lane's eight rows are one vector (layouts.md 3.3, 5.2).
struct Scales {
    template <int BN, int BK> static constexpr int BYTES = BK / 32 * BN * 2;
    const half *s;
    u32 n;
    Groups groups;

    template <int BN, int BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        const half *from = s + ((u64)groups.of(k0) * n + n0);
        groups.for_pieces_of<BK, BN / 8>(k0, [&](u32 i, u32 row, u32 piece, bool valid, bool present) {
            copy_async(
                to + 16 * i, from + (row * n + 8 * piece), valid & (8 * piece < n - n0), present & !groups.one());
        });
    }

    // Loads the scales of rows a and 8 + a of each operand. A single group is applied at the end.
    template <int BN> DEVICE uint4 load(const char *stage, u32 row, u32 wn, u32 lane) const {
        const uint4 ones{0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
        return groups.one() ? ones : ((const uint4 *)stage)[row * (BN / 8) + wn * 8 + lane / 4];
    }
};


// Multiplies an operand by the scales of rows a and 8 + a, which have one half of a word each.
DEVICE void scale_rows(u32 (&a)[4], u32 word) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        a[r] = fma_pair(half{}, a[r], __byte_perm(word, 0, r % 2 ? 0x3232 : 0x1010), 0x80008000);
    }
}

// The rows of x and y from m0 on.
struct Consecutive {
    u32 m0, m;
    DEVICE bool has(u32 token) const { return token < m - m0; }
    DEVICE u64 first() const { return m0; }
    DEVICE u32 of_x(u32 token) const { return token; }  // counted from the first
    DEVICE u64 of_y(u32 token) const { return m0 + token; }
    DEVICE float weighted(u32, float sum) const { return sum; }
};

// Starts the copies of a unit. Activations of no row, and past the end of k, are zeros.
template <class S, class Rows>
DEVICE void fetch(const Product<S> &p, const Rows &rows, const Position<S> &at, u32 stage, u32 n0, u32 k0) {
    p.weight.template fetch<S::BN, S::BK>(stage, n0, k0);
    u32 k = p.weight.k;
    const auto *from = p.x + (rows.first() * k + k0);
    constexpr u32 AT_ONCE = THREADS / (S::BK / 8);  // tokens
    static_assert(S::BM % AT_ONCE == 0 && AT_ONCE % 8 == 0, "a thread's copies have one place in a row");
#pragma unroll
    for (u32 i = 0; i < S::BM; i += AT_ONCE) {
        u32 token = i + at.token;
        bool valid = rows.has(token) & (at.piece < k - k0);
        copy_async(stage + S::X_AT + at.copied + 2 * S::BK * i, from + (rows.of_x(token) * k + at.piece), valid);
    }
}

// What a lane needs of some products of its warp: right operands, and words of the weight. One is in use while the next
// is being loaded.
template <class S> struct Operands {
    u32 x[S::AHEAD][S::FRAGMENTS][S::Weight::STEP / 8];
    typename S::Weight::template Lane<S> lane[S::AHEAD];
};

// Whether a group can end with product `s` of a warp's stage: groups are multiples of 32.
template <class S> DEVICE constexpr bool can_end(u32 s) { return (s + 1) * S::Weight::STEP % 32 == 0; }

// Loads the operands of products s to s + AHEAD - 1 of a warp's 64 of k, from a stage that begins at k0.
template <class S>
DEVICE void load(const Product<S> &p, const Position<S> &at, const char *stage, u32 k0, u32 s, Operands<S> &to) {
    using Weight = typename S::Weight;
    constexpr bool WIDE = Position<S>::WIDE;
    u32 from = shared_address(stage + S::X_AT) + (at.tokens ^ 2 * Weight::STEP * s);
#pragma unroll
    for (u32 t = 0; t < S::FRAGMENTS; t += WIDE ? 1 : 2) {
        u32 four[4];
        load_matrices(four, from + 16 * 8 * t * (S::BK / 8));
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if constexpr (WIDE)
                to.x[i * S::AHEAD / 4][t][i % (4 / S::AHEAD)] = four[i];
            else
                to.x[0][t + i / 2][i % 2] = four[i];
        }
    }
#pragma unroll
    for (u32 i = 0; i < S::AHEAD; i++) {
        u32 group = 0;
        if constexpr (Weight::GROUPED)
            group = p.weight.groups.of(k0 + 64 * at.wk + (s + i) * Weight::STEP) - p.weight.groups.of(k0);
        to.lane[i].load(p.weight, stage, at, s + i, group);
        if constexpr (Weight::GROUPED)
            if (S::SCALED || can_end<S>(s + i)) to.lane[i].load_scales(p.weight, stage, at, group);
    }
}

// sums += scale * part, part = 0.
template <int FRAGMENTS, class Lane>
DEVICE void add_scaled(float (&sums)[4][FRAGMENTS][4], float (&part)[4][FRAGMENTS][4], const Lane &lane) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
#pragma unroll
        for (u32 b = 0; b < 2; b++) {
            float scale = lane.scale(j, b);
#pragma unroll
            for (u32 t = 0; t < FRAGMENTS; t++) {
#pragma unroll
                for (u32 i = 2 * b; i < 2 * b + 2; i++) {
                    sums[j][t][i] += scale * part[j][t][i];
                    part[j][t][i] = 0;
                }
            }
        }
    }
}

// Adds the products of operands to `into`.
template <class S>
DEVICE void multiply(const Operands<S> &of, u32 i, float (&into)[4][S::FRAGMENTS][4]) {
    using X = typename S::Weight::X;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 a[4];
        of.lane[i].operand(j, a);
        if constexpr (S::SCALED) of.lane[i].scale_operand(j, a);
#pragma unroll
        for (u32 t = 0; t < S::FRAGMENTS; t++) {
            if constexpr (S::Weight::STEP == 16)
                multiply_add(X{}, into[j][t], a, of.x[i][t][0], of.x[i][t][1]);
            else
                multiply_add_sparse(X{}, into[j][t], a, of.x[i][t], of.lane[i].metadata(j), j % 2);
        }
    }
}

struct Unit {
    u32 k0;     // where it begins
    bool last;  // of a share
};

// Adds the products of a unit, from a step on, while the operands after those in use are being loaded from this stage
// or from the next. `enter(later)` precedes the first load from a stage. This is no loop, because NVRTC 13.0 does not
// unroll one with so large a body, and the operands would be in memory.
template <u32 STEP, class S, class Enter>
DEVICE void multiply_steps(
    const Product<S> &p, const Position<S> &at, Unit unit, const char *stage, const char *next,
    Operands<S> (&operands)[S::BUFFERS], float (&part)[4][S::FRAGMENTS][4], float (&sums)[4][S::FRAGMENTS][4],
    const Enter &enter) {
    using Weight = typename S::Weight;
    constexpr u32 PRODUCTS = 64 / Weight::STEP, STEPS = PRODUCTS / S::AHEAD, BUFFERS = S::BUFFERS;
    constexpr u32 AHEAD = STEP + BUFFERS - 1;  // the step that is being loaded
    constexpr bool PARTED = Weight::GROUPED && !S::SCALED, LATER = AHEAD == STEPS;
    if constexpr (STEP < STEPS) {
        if constexpr (AHEAD % STEPS == 0) enter(LATER);
        const u32 k0 = unit.k0;
        load(p, at, LATER ? next : stage, LATER ? k0 + S::BK : k0, AHEAD % STEPS * S::AHEAD, operands[AHEAD % BUFFERS]);
#pragma unroll
        for (u32 s = 0; s < S::AHEAD; s++) {
            multiply(operands[STEP % BUFFERS], s, PARTED ? part : sums);
            if constexpr (PARTED) {
                const u32 product = STEP * S::AHEAD + s, k = k0 + 64 * at.wk + product * Weight::STEP;
                const u32 after = product + 1 < PRODUCTS ? k + Weight::STEP : k0 + 64 * at.wk + S::BK;
                const Groups &groups = p.weight.groups;
                const bool last = product + 1 == PRODUCTS && unit.last;
                if (can_end<S>(product) && (last || groups.of(after) != groups.of(k))) {
                    __syncwarp();  // a branch, as predicates would take the time of all these instructions
                    add_scaled(sums, part, operands[STEP % BUFFERS].lane[s]);
                }
            }
        }
        multiply_steps<STEP + 1>(p, at, unit, stage, next, operands, part, sums, enter);
    }
}

// Adds the products of the units `begin` to `end` of a tile, while the next STAGES - 1 are being copied, and with two
// buffers the operands after those in use are being loaded.
template <class S, class Rows>
DEVICE void accumulate(
    const Product<S> &p, const Rows &rows, const Position<S> &at, const char *pool, u32 n0, u32 begin, u32 end,
    float (&sums)[4][S::FRAGMENTS][4]) {
    u32 ring = shared_address(pool);
    float part[4][S::FRAGMENTS][4] = {};
    Operands<S> operands[S::BUFFERS];
#pragma unroll
    for (u32 i = 0; i < S::STAGES - 1; i++) {
        if (begin + i < end) fetch(p, rows, at, ring + i * S::STAGE, n0, (begin + i) * S::BK);
        commit();
    }
    // Waits for a unit, whose predecessor nobody reads any more. A copy of nothing at the end saves a branch between
    // products, if there are registers for all addresses.
    auto enter = [&](u32 unit, u32 slot) {
        u32 ahead = unit + S::STAGES - 1, free = slot ? slot - 1 : S::STAGES - 1;
        wait<S::STAGES - 2>();
        __syncthreads();
        if (S::BUFFERS == 2 && !S::SCALED && S::Weight::GROUPED || ahead < end)
            fetch(p, rows, at, ring + free * S::STAGE, n0, ahead < end ? ahead * S::BK : p.weight.k);
        commit();  // one group for each unit
    };
    if (S::BUFFERS == 2) {
        enter(begin, 0);
        load(p, at, pool, begin * S::BK, 0, operands[0]);
    }
    for (u32 i = begin, slot = 0; i < end; i++) {
        u32 next = slot + 1 < S::STAGES ? slot + 1 : 0;
        const char *stage = pool + slot * S::STAGE, *after = pool + next * S::STAGE;
        multiply_steps<0>(p, at, Unit{i * S::BK, i + 1 == end}, stage, after, operands, part, sums, [&](bool later) {
            enter(i + later, later ? next : slot);
        });
        slot = next;
    }
    wait<0>();
    __syncthreads();  // the ring may be overwritten from here on
}

// Stores the sums of AT_ONCE fragments of every warp in shared memory, [WK, BM / PASSES, ROW].
template <class S>
DEVICE void store_sums(const Position<S> &at, const float (&sums)[4][S::FRAGMENTS][4], u32 pass, float *tile) {
    u32 a = at.lane / 4, q = at.lane % 4;
    tile += ((at.wk * S::WM + at.wm) * 8 * S::AT_ONCE + 2 * q) * S::ROW + 64 * at.wn;
#pragma unroll
    for (u32 t = 0; t < S::AT_ONCE; t++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                tile[(8 * t + i % 2) * S::ROW + S::Weight::row(a, j, i / 2)] = sums[j][pass * S::AT_ONCE + t][i];
        }
    }
}

DEVICE void add(float4 &sum, float4 v) {
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
}

// Finishes four outputs: applies the factors of their rows and the bias, and rounds to the dtype.
template <class S, class Rows>
DEVICE void finish(const Product<S> &p, const Rows &rows, u32 token, u32 n, float4 sum) {
    using X = typename Product<S>::X;
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        v[i] *= p.weight.factor(n + i);
        if (p.bias) v[i] += to_float(p.bias[n + i]);
        v[i] = rows.weighted(token, v[i]);
    }
    *(uint2 *)(p.y + rows.of_y(token) * p.weight.n + n) = uint2{pair(X{}, v[0], v[1]), pair(X{}, v[2], v[3])};
}

// Calls `use(i, row, token, n)` for every four outputs of a pass inside the product. i counts the fours in the tile,
// token by token, and `row` is the row of their sums.
template <class S, class Rows, class Use>
DEVICE void for_outputs(const Product<S> &p, const Rows &rows, u32 pass, u32 n0, Use use) {
    const u32 fours = S::BN / 4, of_pass = S::BM / S::PASSES, of_warp = 8 * S::AT_ONCE;
    for (u32 i = threadIdx.x; i < of_pass * fours; i += THREADS) {
        u32 row = i / fours, n = n0 + i % fours * 4;
        u32 token = (row / of_warp * S::PASSES + pass) * of_warp + row % of_warp;
        if (rows.has(token) && n < p.weight.n) use(token * fours + i % fours, row, token, n);
    }
}

// Adds the parts of the blocks `from` to `to` of a tile in their order, and finishes its outputs. Eight loads are in
// flight at once, because each is a trip to the L2 cache.
template <class S, class Rows, class Part>
DEVICE void add_parts(const Product<S> &p, const Rows &rows, u32 n0, u32 from, u32 to, Part part) {
    constexpr u32 FOURS = S::BM * S::BN / 4, OUTPUTS = FOURS < 4 * THREADS ? 1 : 4, PARTS = 8 / OUTPUTS;
    for (u32 first = threadIdx.x; first < FOURS; first += OUTPUTS * THREADS) {
        float4 sums[OUTPUTS] = {};
        u32 token[OUTPUTS], n[OUTPUTS];
        bool valid[OUTPUTS];
#pragma unroll
        for (u32 j = 0; j < OUTPUTS; j++) {
            token[j] = (first + j * THREADS) / (S::BN / 4), n[j] = n0 + (first + j * THREADS) % (S::BN / 4) * 4;
            valid[j] = rows.has(token[j]) && n[j] < p.weight.n;
        }
        for (u32 block = from; block <= to; block += PARTS) {
            float4 loaded[PARTS][OUTPUTS] = {};
#pragma unroll
            for (u32 i = 0; i < PARTS * OUTPUTS; i++) {
                u32 b = i / OUTPUTS, j = i % OUTPUTS;
                if (valid[j] && block + b <= to) loaded[b][j] = load_past_l1(part(block + b) + first + j * THREADS);
            }
#pragma unroll
            for (u32 i = 0; i < PARTS * OUTPUTS; i++) add(sums[i % OUTPUTS], loaded[i / OUTPUTS][i % OUTPUTS]);
        }
#pragma unroll
        for (u32 j = 0; j < OUTPUTS; j++)
            if (valid[j]) finish(p, rows, token[j], n[j], sums[j]);
    }
}

// The units of a tile that a block takes, `begin` to `end` of its `depth`. The tile begins with unit `first` of all.
struct Share {
    u32 tile, first, begin, end;
    DEVICE Share(u32 unit, u32 stop, u32 depth)
        : tile(unit / depth), first(tile * depth), begin(unit - first), end(min(stop - first, depth)) {}
    DEVICE u32 next() const { return first + end; }
};

// Multiplies this block's share of a tile. The last of the blocks that share the tile stores it.
template <class S, class Rows>
DEVICE void multiply_share(
    const Product<S> &p, const Rows &rows, const Position<S> &at, const Share &share, u32 n0, u32 depth, u32 per,
    float4 *parts, u32 *arrived) {
    extern __shared__ uint4 pool[];
    float sums[4][S::FRAGMENTS][4] = {};
    accumulate(p, rows, at, (const char *)pool, n0, share.begin, share.end, sums);
    const u32 first = share.first, from = first / per, to = (first + depth - 1) / per;  // the tile's blocks
    // A block shares at most two tiles with others: the one it starts in and the one it ends in.
    auto part = [&](u32 block) { return parts + (u64)(2 * block + (first > block * per)) * (S::BM * S::BN / 4); };
#pragma unroll
    for (u32 pass = 0; pass < S::PASSES; pass++) {
        store_sums(at, sums, pass, (float *)pool);
        __syncthreads();
        for_outputs(p, rows, pass, n0, [&](u32 i, u32 row, u32 token, u32 n) {
            const float4 *four = (const float4 *)((const float *)pool + row * S::ROW + (n - n0));
            float4 sum = *four;
            for (u32 w = 1; w < S::WK; w++) add(sum, four[w * S::BM / S::PASSES * S::ROW / 4]);
            if (from == to)
                finish(p, rows, token, n, sum);
            else
                part(blockIdx.x)[i] = sum;
        });
        __syncthreads();  // the sums are overwritten next
    }
    if (from == to) return;
    __threadfence();
    if (__syncthreads_or(threadIdx.x == 0 && atomicAdd(arrived + from, 1) == to - from)) {
        __threadfence();
        if (threadIdx.x == 0) arrived[from] = 0;  // for the next launch; no other tile uses this counter
        add_parts(p, rows, n0, from, to, part);
    }
}

// The kernel: `rounds` whole tiles, one of each round of as many as there are blocks; then this block's units of the
// other tiles, tile by tile.
template <class S>
DEVICE void portable(const Product<S> &p, float4 *parts, u32 *arrived, u32 per, u32 rounds) {
    const Position<S> at;
    u32 depth = (p.weight.k + S::BK - 1) / S::BK, rows = (p.m + S::BM - 1) / S::BM;
    u32 shared = rounds * gridDim.x, tiles = rows * ((p.weight.n + S::BN - 1) / S::BN);  // the first that is shared
    u32 unit = blockIdx.x * per, stop = min(unit + per, (tiles - shared) * depth);
    for (u32 round = 0; round < rounds || unit < stop; round++) {
        bool whole = round < rounds;
        const Share share(whole ? 0 : unit, whole ? depth : stop, depth);
        u32 tile = whole ? round * gridDim.x + blockIdx.x : shared + share.tile;
        const Consecutive of_tile{tile % rows * S::BM, p.m};
        multiply_share(p, of_tile, at, share, tile / rows * S::BN, depth, whole ? depth : per, parts, arrived);
        if (!whole) unit = share.next();
    }
}
