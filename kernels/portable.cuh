// The frame of every product on sm_80 and newer: y^T = W x^T with mma.sync, whatever the weight is packed as.
//
// A warp has 64 rows of the weight, as four left operands side by side, 8 T tokens, and 64 of k in each stage of a ring
// that cp.async fills. The layouts are in the order of these operands, so that a lane decodes what it reads in registers.
// Weights are multiplied as small exact numbers, and float32 sums by scales: no scale is ever rounded to the dtype of
// the activations, nor a weight.
//
// The work is a list of units, a tile of outputs by BK of k, those of a tile together; block b takes `per` units from
// b * per on. A tile of several blocks is added up from their parts, in order of k, by whichever of them comes last:
// the sums are the same in every run.
//
// Weight: the tensors, n and k, and what differs from layout to layout:
//   STEP              of k in a product: 16, or 32 where two of each four weights are stored
//   GROUPED           whether scales change along k; then sums of 64 of k, or 32, are scaled by them
//   BYTES<BN, BK>     of shared memory for BN rows by BK of k
//   fetch<BN, BK>     starts to copy them; what is past the ends of n and k counts as nothing
//   row(a, j, b)      which of 64 rows row 8b + a of operand j is
//   factor(type, n)   what the sums of a row are multiplied by at the end
//   Lane              what a lane holds: enter (32 of k), load (a step of the 64), operand, metadata, scale, fine
#pragma once

#include "ampere.cuh"

static const u32 THREADS = 256;

// Eight warps: WN for 64 rows each, by WM for 8 T tokens each, by WK for 64 of k each.
template <class Weight_, int T_, int WN_, int WM_, int WK_, int STAGES_> struct Tile {
    using Weight = Weight_;
    static const u32 T = T_, WN = WN_, WM = WM_, WK = WK_, STAGES = STAGES_;
    static const u32 BN = 64 * WN, BM = 8 * T * WM, BK = 64 * WK;
    // A stage in bytes: what the weight wants, then activations [BM, BK].
    static const u32 X_AT = Weight::template BYTES<BN, BK>, STAGE = X_AT + BM * BK * 2;
    static const u32 ROW = BN + 4;  // floats, of a row of sums: eight rows apart are other banks
    static_assert(WN * WM * WK * 32 == THREADS, "warps");
    static_assert(X_AT % 16 == 0, "activations are copied in 16 bytes");
};

template <class S, class X> struct Product {
    typename S::Weight weight;
    const X *x, *bias;
    X *y;
    u32 m;
};

// Where a thread stands in its tile: its warp's place along n, m and k, and itself in the warp.
template <class S> struct Place {
    u32 lane, wn, wm, wk;
    DEVICE Place() {
        u32 warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        wn = warp % S::WN;
        wm = warp / S::WN % S::WM;
        wk = warp / (S::WN * S::WM);
    }
};

// Calls `use(i)` for i below COUNT, dealt to the threads of the block.
template <u32 COUNT, class Use> DEVICE void for_pieces(Use use) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i += THREADS)
        if (COUNT % THREADS == 0 || i + threadIdx.x < COUNT) use(i + threadIdx.x);
}

// Calls `use(i, row, piece)` for PIECES of every group, row of the scales, that BK of k from k0 on belong to.
template <u32 BK, u32 PIECES, class Use> DEVICE void for_groups(u32 k0, u32 group, Use use) {
    u32 first = k0 / group;
    for_pieces<BK / 32 * PIECES>([&](u32 i) {
        u32 row = first + i / PIECES;
        if (row * group < k0 + BK) use(i, row, i % PIECES);
    });
}

// Scales of groups as the MARLIN layouts have them: those of a lane's eight rows are one vector (LAYOUTS 3.3, 5.2).
struct Scales {
    template <u32 BN, u32 BK> static const u32 BYTES = BK / 32 * BN * 2;
    const half *s;
    u32 n, k, group;

    template <u32 BN, u32 BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        for_groups<BK, BN / 8>(k0, group, [&](u32 i, u32 row, u32 piece) {
            bool valid = row * group < k && n0 + 8 * piece < n;
            copy_async(to + 16 * i, s + ((u64)row * n + n0 + 8 * piece), valid);
        });
    }
};

// A lane's vector of them; word j has those of rows a and 8 + a of operand j.
template <u32 BN> struct Eight {
    uint4 eight;

    DEVICE void read(const char *scales, u32 row, u32 wn, u32 lane) {
        eight = ((const uint4 *)scales)[row * (BN / 8) + wn * 8 + lane / 4];
    }

    DEVICE void scale(u32 j, float (&scale)[2]) const {
        u32 word = word_of(eight, j);
        scale[0] = to_float(half{(u16)word});
        scale[1] = to_float(half{(u16)(word >> 16)});
    }
};

// Which piece of 16 bytes of a row of activations lies where: eight rows never meet in a bank.
DEVICE u32 swizzled(u32 token, u32 piece) { return piece ^ (token & 7); }

// Starts to copy what a unit needs. Past the ends of m and k activations are zeros.
template <class S, class X> DEVICE void fetch(const Product<S, X> &p, u32 stage, u32 m0, u32 n0, u32 k0) {
    p.weight.template fetch<S::BN, S::BK>(stage, n0, k0);
    for_pieces<S::BM * S::BK / 8>([&](u32 i) {
        u32 token = i / (S::BK / 8), piece = i % (S::BK / 8), k = p.weight.k;
        bool valid = m0 + token < p.m && k0 + 8 * piece < k;
        u32 to = token * (S::BK / 8) + swizzled(token, piece);
        copy_async(stage + S::X_AT + 16 * to, p.x + ((u64)(m0 + token) * k + k0 + 8 * piece), valid);
    });
}

// sums += scale * part, part = 0.
template <u32 T, class Lane> DEVICE void add_scaled(float (&sums)[4][T][4], float (&part)[4][T][4], const Lane &lane) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float scale[2];
        lane.scale(j, scale);
#pragma unroll
        for (u32 t = 0; t < T; t++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                sums[j][t][i] += scale[i / 2] * part[j][t][i];
                part[j][t][i] = 0;
            }
        }
    }
}

// Adds the products of a warp's 64 of k in a stage that begins at k0.
template <class S, class X>
DEVICE void multiply(
    const Product<S, X> &p, const Place<S> &at, const char *stage, u32 k0, float (&sums)[4][S::T][4]) {
    using Weight = typename S::Weight;
    const u32 STEPS = 32 / Weight::STEP;
    u32 tokens = shared_address(stage + S::X_AT), token = 8 * S::T * at.wm + at.lane % 8;
    typename Weight::template Lane<S> lane(p.weight, stage, at, k0);
    float part[4][S::T][4] = {};
    auto &into = Weight::GROUPED ? part : sums;
#pragma unroll
    for (u32 half_of_k = 0; half_of_k < 2; half_of_k++) {
        u32 x[S::T][4];  // of 8 tokens, 32 of k: the right operands of two products, or of one that is sparse
#pragma unroll
        for (u32 t = 0; t < S::T; t++) {
            u32 piece = swizzled(token, 8 * at.wk + 4 * half_of_k + at.lane / 8);
            load_matrices(x[t], tokens + 16 * ((token + 8 * t) * (S::BK / 8) + piece));
        }
        if constexpr (Weight::GROUPED) lane.enter(half_of_k);
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            lane.load(half_of_k * STEPS + i);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 w[4];
                lane.operand(X{}, j, w);
#pragma unroll
                for (u32 t = 0; t < S::T; t++) {
                    if constexpr (STEPS == 2)
                        multiply_add(X{}, into[j][t], w, x[t][2 * i], x[t][2 * i + 1]);
                    else
                        multiply_add_sparse(X{}, into[j][t], w, x[t], lane.metadata(j), j % 2);
                }
            }
        }
        if constexpr (Weight::GROUPED)
            if (half_of_k == 1 || lane.fine) add_scaled(sums, part, lane);
    }
}

// Adds the products of the units from `begin` to `end` of a tile, while the next STAGES - 1 are on their way.
template <class S, class X>
DEVICE void accumulate(
    const Product<S, X> &p, const Place<S> &at, const char *pool, u32 m0, u32 n0, u32 begin, u32 end,
    float (&sums)[4][S::T][4]) {
    u32 ring = shared_address(pool);
#pragma unroll
    for (u32 i = 0; i < S::STAGES - 1; i++) {
        if (begin + i < end) fetch(p, ring + i * S::STAGE, m0, n0, (begin + i) * S::BK);
        commit();
    }
    for (u32 i = begin, slot = 0; i < end; i++) {
        wait<S::STAGES - 2>();
        __syncthreads();
        u32 ahead = i + S::STAGES - 1, free = slot ? slot - 1 : S::STAGES - 1;
        if (ahead < end) fetch(p, ring + free * S::STAGE, m0, n0, ahead * S::BK);
        commit();  // of nothing at the end, so that the count of groups is that of units
        multiply(p, at, pool + slot * S::STAGE, i * S::BK, sums);
        slot = slot + 1 < S::STAGES ? slot + 1 : 0;
    }
    wait<0>();
    __syncthreads();  // from here on the ring is free
}

// Lays the sums of the block's warps in shared memory, [WK, BM, ROW].
template <class S> DEVICE void lay_down(const Place<S> &at, const float (&sums)[4][S::T][4], float *tile) {
    u32 a = at.lane / 4, q = at.lane % 4;
    tile += (at.wk * S::BM + 8 * S::T * at.wm + 2 * q) * S::ROW + 64 * at.wn;
#pragma unroll
    for (u32 t = 0; t < S::T; t++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                tile[(8 * t + i % 2) * S::ROW + S::Weight::row(a, j, i / 2)] = sums[j][t][i];
        }
    }
}

DEVICE void add(float4 &sum, float4 v) {
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
}

// The last steps to four outputs: the factor of their rows, the bias, the dtype.
template <class S, class X> DEVICE void finish(const Product<S, X> &p, u32 token, u32 n, float4 sum) {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        v[i] *= p.weight.factor(X{}, n + i);
        if (p.bias) v[i] += to_float(p.bias[n + i]);
    }
    *(uint2 *)(p.y + (u64)token * p.weight.n + n) = uint2{pair(X{}, v[0], v[1]), pair(X{}, v[2], v[3])};
}

// Calls `use(i, token, n)` for every four outputs of a tile that the product has; i counts fours in the tile.
template <class S, class X, class Use> DEVICE void for_outputs(const Product<S, X> &p, u32 m0, u32 n0, Use use) {
    const u32 fours = S::BN / 4;
    for (u32 i = threadIdx.x; i < S::BM * fours; i += THREADS) {
        u32 token = i / fours, n = i % fours * 4;
        if (m0 + token < p.m && n0 + n < p.weight.n) use(i, token, n);
    }
}

// The kernel: this block's units, tile by tile.
template <class S, class X>
DEVICE void portable(const Product<S, X> &p, float4 *parts, u32 *arrived, u32 per) {
    extern __shared__ uint4 pool[];
    const Place<S> at;
    u32 depth = (p.weight.k + S::BK - 1) / S::BK, rows = (p.m + S::BM - 1) / S::BM;
    u32 units = depth * rows * ((p.weight.n + S::BN - 1) / S::BN);
    u32 unit = blockIdx.x * per, stop = min(unit + per, units);
    while (unit < stop) {
        u32 tile = unit / depth, first = tile * depth, begin = unit - first, end = min(stop - first, depth);
        u32 m0 = tile % rows * S::BM, n0 = tile / rows * S::BN;
        unit = first + end;

        float sums[4][S::T][4] = {};
        accumulate(p, at, (const char *)pool, m0, n0, begin, end, sums);
        lay_down(at, sums, (float *)pool);
        __syncthreads();
        u32 from = first / per, to = (first + depth - 1) / per;  // the blocks of this tile
        // A block has at most two tiles in part, the one it starts in and the one it ends in.
        auto part = [&](u32 block) { return parts + (u64)(2 * block + (first > block * per)) * (S::BM * S::BN / 4); };
        for_outputs(p, m0, n0, [&](u32 i, u32 token, u32 n) {
            const float4 *four = (const float4 *)((const float *)pool + token * S::ROW + n);
            float4 sum = *four;
            for (u32 w = 1; w < S::WK; w++) add(sum, four[w * S::BM * S::ROW / 4]);
            if (from == to)
                finish(p, m0 + token, n0 + n, sum);
            else
                part(blockIdx.x)[i] = sum;
        });
        if (from < to) {
            __threadfence();
            __syncthreads();
            if (__syncthreads_or(threadIdx.x == 0 && atomicAdd(arrived + from, 1) == to - from)) {
                __threadfence();
                if (threadIdx.x == 0) arrived[from] = 0;  // for the next launch; no other tile begins in that block
                for_outputs(p, m0, n0, [&](u32 i, u32 token, u32 n) {
                    float4 sum = load_past_l1(part(from) + i);
#pragma unroll 8
                    for (u32 block = from + 1; block <= to; block++) add(sum, load_past_l1(part(block) + i));
                    finish(p, m0 + token, n0 + n, sum);
                });
            }
        }
        __syncthreads();  // the next tile's copies overwrite the sums
    }
}
