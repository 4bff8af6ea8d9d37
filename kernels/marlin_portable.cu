// Dense MARLIN on sm_80 and newer: y^T = W x^T with mma.sync, the weights as its left operand (LAYOUTS 3).
//
// In a word of B, nibble 4e + 2b + h of lane 4a + q is n = 8b + a, k = 8h + 2q + e of a 16 x 16 block: what the lane
// holds of a left operand whose rows are n. So a lane's 16 bytes in shared memory are its part of four such blocks, 64
// columns, and are decoded in registers. Codes are multiplied as the integers -8..7, and float32 sums of at most 64
// products by the scale of their group: no scale is ever rounded to the dtype of the activations, nor a weight.
//
// The work is a list of units, a tile of outputs by BK of k, those of a tile together; block b takes `per` units from
// b * per on. A tile of several blocks is added up from their parts, in order of k, by whichever of them comes last:
// the sums are the same in every run.
#include "ampere.cuh"
#include "weights.cuh"

// Eight warps: WN for 64 columns each, by WM for 8 T tokens each, by WK for 64 of k each.
template <int T_, int WN_, int WM_, int WK_, int STAGES_> struct Tile {
    static const u32 T = T_, WN = WN_, WM = WM_, WK = WK_, STAGES = STAGES_, THREADS = 256;
    static const u32 BN = 64 * WN, BM = 8 * T * WM, BK = 64 * WK;
    // A stage in bytes: weights in their order, activations [BM, BK], scales of up to BK / 32 groups.
    static const u32 X_AT = BN * BK / 2, S_AT = X_AT + BM * BK * 2, STAGE = S_AT + BK / 32 * BN * 2;
    static const u32 ROW = BN + 4;  // floats, of a row of sums: eight rows apart are other banks
    static_assert(WN * WM * WK * 32 == THREADS, "warps");
    static_assert(BN * BK / 32 % THREADS == 0 && BM * BK / 8 % THREADS == 0, "every thread copies as much");
    static_assert(BK / 32 * BN / 8 <= THREADS, "scales are copied at once");
};

template <class X> struct Product {
    const u32 *B;
    const half *s;
    const X *x, *bias;
    X *y;
    u32 m, n, k, group;
    DEVICE bool single() const { return group == k; }  // one scale per row
};

// Which piece of 16 bytes of a row of activations lies where: eight rows never meet in a bank.
DEVICE u32 swizzled(u32 token, u32 piece) { return piece ^ (token & 7); }

// Starts to copy what a unit needs. Past the ends of m, n and k there are zeros.
template <class S, class X> DEVICE void fetch(const Product<X> &p, u32 stage, u32 m0, u32 n0, u32 k0) {
#pragma unroll
    for (u32 i = 0; i < S::X_AT / 16; i += S::THREADS) {
        u32 at = i + threadIdx.x, row = k0 / 16 + at / (S::BN / 2), piece = at % (S::BN / 2);
        bool valid = row < p.k / 16 && n0 + 2 * piece < p.n;
        copy_async(stage + 16 * at, (const uint4 *)p.B + ((u64)row * (p.n / 2) + n0 / 2 + piece), valid);
    }
#pragma unroll
    for (u32 i = 0; i < S::BM * S::BK / 8; i += S::THREADS) {
        u32 at = i + threadIdx.x, token = at / (S::BK / 8), piece = at % (S::BK / 8);
        bool valid = m0 + token < p.m && k0 + 8 * piece < p.k;
        u32 to = token * (S::BK / 8) + swizzled(token, piece);
        copy_async(stage + S::X_AT + 16 * to, p.x + ((u64)(m0 + token) * p.k + k0 + 8 * piece), valid);
    }
    u32 at = threadIdx.x, row = at / (S::BN / 8), piece = at % (S::BN / 8);
    if (p.single() || row * p.group >= S::BK) return;
    row += k0 / p.group;
    bool valid = row * p.group < p.k && n0 + 8 * piece < p.n;
    copy_async(stage + S::S_AT + 16 * at, p.s + ((u64)row * p.n + n0 + 8 * piece), valid);
}

// A word of codes as a left operand of integers. A code in the low bits of the mantissa of 1024 (bfloat: 128) is added
// to it; four bits higher, its sixteenfold is.
DEVICE void decode(half type, u32 word, u32 (&a)[4]) {
    const u32 one = 0x3c003c00, sixteenth = 0x2c002c00;
    const u32 low = 0x000f000f, high = 0x00f000f0, magic = 0x64006400;
    const u32 low_zero = 0xe408e408, high_zero = 0xd480d480;  // -1032, -72
    u32 rest = word >> 8;
    a[0] = fma_pair(type, word & low | magic, one, low_zero);
    a[2] = fma_pair(type, word & high | magic, sixteenth, high_zero);
    a[1] = fma_pair(type, rest & low | magic, one, low_zero);
    a[3] = fma_pair(type, rest & high | magic, sixteenth, high_zero);
}

DEVICE void decode(bfloat type, u32 word, u32 (&a)[4]) {
    const u32 one = 0x3f803f80, low = 0x000f000f, magic = 0x43004300, zero = 0xc308c308;  // zero is -136
    a[0] = fma_pair(type, word & low | magic, one, zero);
    a[2] = fma_pair(type, word >> 4 & low | magic, one, zero);
    a[1] = fma_pair(type, word >> 8 & low | magic, one, zero);
    a[3] = fma_pair(type, word >> 12 & low | magic, one, zero);
}

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

// sums += scale * part, part = 0: a lane has rows n = 8y + a of 64, y in 0..7, and their scales are one vector.
template <u32 T> DEVICE void add_scaled(float (&sums)[4][T][4], float (&part)[4][T][4], const uint4 *scales) {
    uint4 eight = scales ? *scales : uint4{0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float scale[2] = {to_float(half{(u16)words[j]}), to_float(half{(u16)(words[j] >> 16)})};
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

// Adds the products of a warp's 64 of k in a stage.
template <class S, class X>
DEVICE void multiply(const Product<X> &p, const Place<S> &at, const char *stage, float (&sums)[4][S::T][4]) {
    const uint4 *weights = (const uint4 *)stage + (4 * at.wk * S::WN + at.wn) * 32 + at.lane;
    u32 tokens = shared_address(stage + S::X_AT), token = 8 * S::T * at.wm + at.lane % 8;
    const uint4 *scales = p.single() ? 0 : (const uint4 *)(stage + S::S_AT) + at.wn * 8 + at.lane / 4;
    u32 group = p.single() ? 0 : at.wk * 64 / p.group;
    float part[4][S::T][4] = {};
#pragma unroll
    for (u32 half_of_k = 0; half_of_k < 2; half_of_k++) {
        u32 x[S::T][4];  // of 8 tokens, 32 of k: the right operands of two products
#pragma unroll
        for (u32 t = 0; t < S::T; t++) {
            u32 piece = swizzled(token, 8 * at.wk + 4 * half_of_k + at.lane / 8);
            load_matrices(x[t], tokens + 16 * ((token + 8 * t) * (S::BK / 8) + piece));
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            uint4 four = weights[(2 * half_of_k + i) * S::WN * 32];
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 w[4];
                decode(X{}, words[j], w);
#pragma unroll
                for (u32 t = 0; t < S::T; t++) multiply_add(X{}, part[j][t], w, x[t][2 * i], x[t][2 * i + 1]);
            }
        }
        if (half_of_k == 1 || p.group == 32) {
            const uint4 *row = scales ? scales + group * (S::BN / 8) : scales;
            add_scaled<S::T>(sums, part, row);
            if (p.group == 32) group++;
        }
    }
}

// Adds the products of the units from `begin` to `end` of a tile, while the next STAGES - 1 are on their way.
template <class S, class X>
DEVICE void accumulate(
    const Product<X> &p, const Place<S> &at, const char *pool, u32 m0, u32 n0, u32 begin, u32 end,
    float (&sums)[4][S::T][4]) {
    u32 ring = shared_address(pool);
#pragma unroll
    for (u32 i = 0; i < S::STAGES - 1; i++) {
        if (begin + i < end) fetch<S>(p, ring + i * S::STAGE, m0, n0, (begin + i) * S::BK);
        commit();
    }
    for (u32 i = begin, slot = 0; i < end; i++) {
        wait<S::STAGES - 2>();
        __syncthreads();
        u32 ahead = i + S::STAGES - 1, free = slot ? slot - 1 : S::STAGES - 1;
        if (ahead < end) fetch<S>(p, ring + free * S::STAGE, m0, n0, ahead * S::BK);
        commit();  // of nothing at the end, so that the count of groups is that of units
        multiply<S>(p, at, pool + slot * S::STAGE, sums);
        slot = slot + 1 < S::STAGES ? slot + 1 : 0;
    }
    wait<0>();
    __syncthreads();  // from here on the ring is free
}

// Lays the sums of the block's warps in shared memory, [WK, BM, ROW].
template <class S> DEVICE void lay_down(const Place<S> &at, const float (&sums)[4][S::T][4], float *tile) {
    u32 a = at.lane / 4, q = at.lane % 4;
    tile += (at.wk * S::BM + 8 * S::T * at.wm + 2 * q) * S::ROW + 64 * at.wn + a;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
#pragma unroll
        for (u32 t = 0; t < S::T; t++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) tile[(8 * t + i % 2) * S::ROW + 16 * j + 8 * (i / 2)] = sums[j][t][i];
        }
    }
}

DEVICE void add(float4 &sum, float4 v) {
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
}

// The last steps to four outputs: the scale of their rows if there is but one, the bias, the dtype.
template <class X> DEVICE void finish(const Product<X> &p, u32 token, u32 n, float4 sum) {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (p.single()) v[i] *= to_float(p.s[Marlin::single(n + i)]);
        if (p.bias) v[i] += to_float(p.bias[n + i]);
    }
    *(uint2 *)(p.y + (u64)token * p.n + n) = uint2{pair(X{}, v[0], v[1]), pair(X{}, v[2], v[3])};
}

// Calls `use(i, token, n)` for every four outputs of a tile that the product has; i counts fours in the tile.
template <class S, class X, class Use> DEVICE void for_outputs(const Product<X> &p, u32 m0, u32 n0, Use use) {
    const u32 fours = S::BN / 4;
    for (u32 i = threadIdx.x; i < S::BM * fours; i += S::THREADS) {
        u32 token = i / fours, n = i % fours * 4;
        if (m0 + token < p.m && n0 + n < p.n) use(i, token, n);
    }
}

template <class X, int T, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(256, BLOCKS) marlin_portable(
    const u32 *B, const half *s, const X *x, const X *bias, X *y, float4 *parts, u32 *arrived, u32 m, u32 n, u32 k,
    u32 group, u32 per) {
    using S = Tile<T, WN, WM, WK, STAGES>;
    extern __shared__ uint4 pool[];
    const Product<X> p{B, s, x, bias, y, m, n, k, group};
    const Place<S> at;
    u32 depth = (k + S::BK - 1) / S::BK, rows = (m + S::BM - 1) / S::BM;
    u32 units = depth * rows * ((n + S::BN - 1) / S::BN);
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
        for_outputs<S>(p, m0, n0, [&](u32 i, u32 token, u32 n) {
            const float4 *four = (const float4 *)((const float *)pool + token * S::ROW + n);
            float4 sum = *four;
            for (u32 w = 1; w < WK; w++) add(sum, four[w * S::BM * S::ROW / 4]);
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
                for_outputs<S>(p, m0, n0, [&](u32 i, u32 token, u32 n) {
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
