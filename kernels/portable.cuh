// The frame of every product on sm_80 and newer: y^T = W x^T with mma.sync, for every layout.
//
// A warp has 64 rows of the weight, as four left operands side by side, 8 FRAGMENTS tokens, and 64 of k in each stage
// of a ring that cp.async fills. The layouts have the order of these operands, so a lane decodes its words in
// registers. Codes are multiplied as small exact numbers, and scales are applied to float32 sums. So neither scales nor
// weights are rounded to the dtype of the activations.
//
// The work is a list of units, each a tile of outputs by BK of k; the units of a tile are neighbours. Block b takes
// `per` units from b * per on. If several blocks share a tile, the last one to finish adds their parts in order of k:
// the sums are the same in every run.
//
// A layout passes a struct `Weight` with the tensors, n and k. README.md explains what both frames ask of it. This one
// also asks for:
//   GROUPED           whether scales change along k; then `groups` finds them, and sums are scaled where groups end
//   BYTES<BN, BK>     of shared memory for BN rows by BK of k
//   fetch<BN, BK>     starts to copy them; data past the ends of n and k must add nothing
//   factor(n)         the factor of the sums of row n at the end
//   Lane::enter       begins with a group; `load` takes half of a warp's 64 of k; `load_scales` precedes `scale`
//
// `Rows` are those of x and y that the tokens of a tile have: consecutive ones, or those of an expert (routed.cuh).
#pragma once

#include "ampere.cuh"

constexpr int THREADS = 256;

// Eight warps: WN for 64 rows each, by WM for 8 FRAGMENTS tokens each, by WK for 64 of k each.
template <class Weight_, int FRAGMENTS_, int WN_, int WM_, int WK_, int STAGES_> struct Tile {
    using Weight = Weight_;
    static constexpr int FRAGMENTS = FRAGMENTS_, WN = WN_, WM = WM_, WK = WK_, STAGES = STAGES_;
    static constexpr int BN = 64 * WN, BM = 8 * FRAGMENTS * WM, BK = 64 * WK;
    // Bytes of a stage: the weight, then activations [BM, BK].
    static constexpr int X_AT = Weight::template BYTES<BN, BK>, STAGE = X_AT + BM * BK * 2;
    static constexpr int ROW = BN + 4;  // floats of a row of sums, padded so that eight rows use different banks
    static constexpr int AT_ONCE = FRAGMENTS < 4 ? FRAGMENTS : 4;  // fragments of 8 tokens whose sums fit at once
    static constexpr int PASSES = FRAGMENTS / AT_ONCE;
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
    u32 lane, wn, wm, wk;
    DEVICE Position() {
        u32 warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        wn = warp % S::WN;
        wm = warp / S::WN % S::WM;
        wk = warp / (S::WN * S::WM);
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

    // Calls `use(i, row, piece, valid)` for PIECES of every group in the BK of k from k0 on. Rows count from the first
    // of these groups; past the end of k, `valid` is false.
    template <int BK, int PIECES, class Use> DEVICE void for_pieces_of(u32 k0, Use use) const {
        u32 first = of(k0);
        for_pieces<BK / 32 * PIECES>([&](u32 i) {
            u32 row = i / PIECES, start = (first + row) * size;
            if (start < k0 + BK) use(i, row, i % PIECES, start < k);
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
        if (groups.one()) return;
        const half *from = s + ((u64)groups.of(k0) * n + n0);
        groups.for_pieces_of<BK, BN / 8>(k0, [&](u32 i, u32 row, u32 piece, bool valid) {
            copy_async(to + 16 * i, from + (row * n + 8 * piece), valid && 8 * piece < n - n0);
        });
    }

    // Loads the scales of rows a and 8 + a of each operand j. A single group is applied at the end.
    template <int BN> DEVICE void load(const char *stage, u32 row, u32 wn, u32 lane, float (&to)[4][2]) const {
        uint4 eight = uint4{0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
        if (!groups.one()) eight = ((const uint4 *)stage)[row * (BN / 8) + wn * 8 + lane / 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 word = word_of(eight, j);
            to[j][0] = to_float(half{(u16)word});
            to[j][1] = to_float(half{(u16)(word >> 16)});
        }
    }
};

// The place of a piece of 16 bytes in a row of activations, so that eight rows have no bank conflicts.
DEVICE u32 swizzled(u32 token, u32 piece) { return piece ^ (token & 7); }

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
DEVICE void fetch(const Product<S> &p, const Rows &rows, u32 stage, u32 n0, u32 k0) {
    p.weight.template fetch<S::BN, S::BK>(stage, n0, k0);
    u32 k = p.weight.k;
    const auto *from = p.x + (rows.first() * k + k0);
    for_pieces<S::BM * S::BK / 8>([&](u32 i) {
        u32 token = i / (S::BK / 8), piece = i % (S::BK / 8);
        u32 to = token * (S::BK / 8) + swizzled(token, piece);
        bool valid = rows.has(token) && 8 * piece < k - k0;
        copy_async(stage + S::X_AT + 16 * to, from + (rows.of_x(token) * k + 8 * piece), valid);
    });
}

// sums += scale * part, part = 0.
template <int FRAGMENTS, class Lane>
DEVICE void add_scaled(float (&sums)[4][FRAGMENTS][4], float (&part)[4][FRAGMENTS][4], Lane &lane) {
    lane.load_scales();
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
#pragma unroll
        for (u32 t = 0; t < FRAGMENTS; t++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                sums[j][t][i] += lane.scale(j, i / 2) * part[j][t][i];
                part[j][t][i] = 0;
            }
        }
    }
}

// Adds the products of a warp's 64 of k, in a stage that begins at k0, to `part`. Where a group ends, adds the scaled
// `part` to `sums`.
template <class S>
DEVICE void multiply(
    const Product<S> &p, const Position<S> &at, const char *stage, u32 k0, bool last, float (&part)[4][S::FRAGMENTS][4],
    float (&sums)[4][S::FRAGMENTS][4]) {
    using Weight = typename S::Weight;
    using X = typename Weight::X;
    constexpr int PRODUCTS = 32 / Weight::STEP;
    u32 tokens = shared_address(stage + S::X_AT), token = 8 * S::FRAGMENTS * at.wm + at.lane % 8, k = k0 + 64 * at.wk;
    typename Weight::template Lane<S> lane(p.weight, stage, at);
    auto &into = Weight::GROUPED ? part : sums;
#pragma unroll
    for (u32 half_of_k = 0; half_of_k < 2; half_of_k++) {
        u32 x[S::FRAGMENTS][4];  // 8 tokens by 32 of k: the right operands of two products, or of one sparse product
#pragma unroll
        for (u32 t = 0; t < S::FRAGMENTS; t++) {
            u32 piece = swizzled(token, 8 * at.wk + 4 * half_of_k + at.lane / 8);
            load_matrices(x[t], tokens + 16 * ((token + 8 * t) * (S::BK / 8) + piece));
        }
        if constexpr (Weight::GROUPED) {
            const Groups &groups = p.weight.groups;
            if (!half_of_k || groups.of(k + 32) != groups.of(k)) {
                if (half_of_k) add_scaled(sums, part, lane);
                lane.enter(groups.of(k + 32 * half_of_k) - groups.of(k0));
            }
        }
        lane.load(half_of_k);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
#pragma unroll
            for (int s = 0; s < PRODUCTS; s++) {
                u32 a[4];
                lane.operand(s, j, a);
#pragma unroll
                for (u32 t = 0; t < S::FRAGMENTS; t++) {
                    if constexpr (Weight::STEP == 16)
                        multiply_add(X{}, into[j][t], a, x[t][2 * s], x[t][2 * s + 1]);
                    else
                        multiply_add_sparse(X{}, into[j][t], a, x[t], lane.metadata(s, j), j % 2);
                }
            }
        }
    }
    if constexpr (Weight::GROUPED)
        if (last || p.weight.groups.of(k + S::BK) != p.weight.groups.of(k + 32)) add_scaled(sums, part, lane);
}

// Adds the products of the units `begin` to `end` of a tile, while the next STAGES - 1 are being copied.
template <class S, class Rows>
DEVICE void accumulate(
    const Product<S> &p, const Rows &rows, const Position<S> &at, const char *pool, u32 n0, u32 begin, u32 end,
    float (&sums)[4][S::FRAGMENTS][4]) {
    u32 ring = shared_address(pool);
    float part[4][S::FRAGMENTS][4] = {};
#pragma unroll
    for (u32 i = 0; i < S::STAGES - 1; i++) {
        if (begin + i < end) fetch(p, rows, ring + i * S::STAGE, n0, (begin + i) * S::BK);
        commit();
    }
    for (u32 i = begin, slot = 0; i < end; i++) {
        wait<S::STAGES - 2>();
        __syncthreads();
        u32 ahead = i + S::STAGES - 1, free = slot ? slot - 1 : S::STAGES - 1;
        if (ahead < end) fetch(p, rows, ring + free * S::STAGE, n0, ahead * S::BK);
        commit();  // empty at the end, so that there is one group for each unit
        multiply(p, at, pool + slot * S::STAGE, i * S::BK, i + 1 == end, part, sums);
        slot = slot + 1 < S::STAGES ? slot + 1 : 0;
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
// `row` is the row of their sums, and `token` the one of the tile.
template <class S, class Rows, class Use>
DEVICE void for_outputs(const Product<S> &p, const Rows &rows, u32 pass, u32 n0, Use use) {
    const u32 fours = S::BN / 4, of_pass = S::BM / S::PASSES, of_warp = 8 * S::AT_ONCE;
    for (u32 i = threadIdx.x; i < of_pass * fours; i += THREADS) {
        u32 row = i / fours, n = n0 + i % fours * 4;
        u32 token = (row / of_warp * S::PASSES + pass) * of_warp + row % of_warp;
        if (rows.has(token) && n < p.weight.n) use(pass * of_pass * fours + i, row, token, n);
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
        for (u32 pass = 0; pass < S::PASSES; pass++) {
            for_outputs(p, rows, pass, n0, [&](u32 i, u32, u32 token, u32 n) {
                float4 sum = load_past_l1(part(from) + i);
#pragma unroll 8
                for (u32 block = from + 1; block <= to; block++) add(sum, load_past_l1(part(block) + i));
                finish(p, rows, token, n, sum);
            });
        }
    }
}

// The kernel: this block's units, tile by tile.
template <class S>
DEVICE void portable(const Product<S> &p, float4 *parts, u32 *arrived, u32 per) {
    const Position<S> at;
    u32 depth = (p.weight.k + S::BK - 1) / S::BK, rows = (p.m + S::BM - 1) / S::BM;
    u32 units = depth * rows * ((p.weight.n + S::BN - 1) / S::BN);
    u32 unit = blockIdx.x * per, stop = min(unit + per, units);
    while (unit < stop) {
        const Share share(unit, stop, depth);
        const Consecutive of_tile{share.tile % rows * S::BM, p.m};
        multiply_share(p, of_tile, at, share, share.tile / rows * S::BN, depth, per, parts, arrived);
        unit = share.next();
    }
}
