// TC-FPx on sm_80 and newer (layouts.md 7): codes of six or five bits in two planes.
//
// Decoded codes are their values divided by a power of two. For float16, the float32 sums are multiplied by it. For
// bfloat16, with the exponent range of float32, these sums would be subnormal, so each weight is multiplied by it.
#include "routed.cuh"
#include "tcfpx_decode.cuh"

template <class X_, int E, int M> struct TcfpxWeight {
    using X = X_;
    using Code = Codes<X, E, M>;
    static constexpr int STEP = 16;
    static constexpr bool GROUPED = false;
    static constexpr int HIGH = Code::HIGH;  // bits of a code in the first plane; the second has four
    template <int BN, int BK> static constexpr int BYTES = BN * BK / 8 * (HIGH + 4);
    const u32 *words;
    const half *s;
    u32 n, k;

    DEVICE TcfpxWeight of(u32 expert) const {
        return {words + (u64)expert * (k / 32 * (HIGH + 4)) * n, s + (u64)expert * n, n, k};
    }

    // A plane of Y bits has 8 Y * k bytes for each 64 rows, in memory and in a stage.
    template <int Y, int BN, int BK> DEVICE void fetch_plane(u32 to, const u32 *plane, u32 n0, u32 k0) const {
        const uint4 *from = (const uint4 *)plane + ((u64)(n0 / 64) * (k / 2 * Y) + k0 / 2 * Y);
        for_pieces<BN * BK / 128 * Y>([&](u32 i) {
            u32 block = i / (BK / 2 * Y), piece = i % (BK / 2 * Y);
            bool valid = 64 * block < n - n0 && piece < (k - k0) / 2 * Y;
            copy_async(to + 16 * i, from + (block * (k / 2 * Y) + piece), valid);
        });
    }

    template <int BN, int BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        fetch_plane<4, BN, BK>(to, words + (u64)n * k / 32 * HIGH, n0, k0);
        fetch_plane<HIGH, BN, BK>(to + BN * BK / 2, words, n0, k0);
    }

    template <class S> struct Lane {
        u32 lows[4], highs[HIGH];

        DEVICE void load(const TcfpxWeight &, const char *stage, const Position<S> &at, u32 s, u32) {
            u32 block = at.wn * (S::BK / 16) + 4 * at.wk + s;
            const u32 *low = (const u32 *)stage + 128 * block + at.lane;
            const u32 *high = (const u32 *)(stage + S::BN * S::BK / 2) + 32 * HIGH * block + at.lane;
#pragma unroll
            for (u32 i = 0; i < 4; i++) lows[i] = low[32 * i];
#pragma unroll
            for (u32 i = 0; i < HIGH; i++) highs[i] = high[32 * i];
        }

        DEVICE void operand(u32 j, u32 (&a)[4]) const {
            Code::decode(highs[j * HIGH / 4], lows[j], j % (4 / HIGH), a);
            if constexpr (!IS_HALF<X>) {
                const u32 factor = 0x00800080 * (127 + Code::UP), zero = 0x80008000;
#pragma unroll
                for (int r = 0; r < 4; r++) a[r] = fma_pair(X{}, a[r], factor, zero);
            }
        }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 16 * j + 8 * b + a; }

    DEVICE float factor(u32 n) const {
        if constexpr (IS_HALF<X>)
            return to_float(s[n]) * (1 << Code::UP);
        else
            return to_float(s[n]);
    }
};

template <class X, int E, int M, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) tcfpx_portable(
    const u32 *words,  // [n, k * bits / 32]: the plane of high bits, then that of four low bits (layouts.md 7)
    const half *s,     // [n]: scales
    const X *x,        // [m, k], float16 or bfloat16: activations
    const X *bias,     // [n], or null
    X *y,              // [m, n]: the product
    float4 *parts,     // [2 * blocks, BM * BN / 4]: partial sums of tiles that blocks share
    u32 *arrived,      // [blocks]: blocks of a tile that have stored theirs; zero before and after
    u32 m,             // tokens, up to 2^14
    u32 n,             // rows of the weight, a multiple of 64
    u32 k,             // columns of the weight, a multiple of 64
    u32 per,           // units of a block, after
    u32 rounds         // of whole tiles, one of a block
) {
    using S = Tile<TcfpxWeight<X, E, M>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    portable(Product<S>{{words, s, n, k}, x, bias, y, m}, parts, arrived, per, rounds);
}

template <class X, int E, int M, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) tcfpx_routed(
    const u32 *words,      // [experts, n, k * bits / 32], as above
    const half *s,         // [experts, n]
    const X *x,            // [rows / choices, k], float16 or bfloat16: activations
    X *y,                  // [rows, n]: the products
    float4 *parts,         // as above
    u32 *arrived,          // as above
    const u32 *list,       // of tiles, see routing.cuh
    const float *weights,  // [rows]: factors of the rows of y, or null
    u32 max_tiles,         // see routed.cuh
    u32 choices,           // see routed.cuh
    u32 whole,             // see routed.cuh
    u32 n,                 // as above
    u32 k                  // as above
) {
    using S = Tile<TcfpxWeight<X, E, M>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    const Product<S> product{{words, s, n, k}, x, nullptr, y, 0};
    routed(Routed<S>{product, list, weights, max_tiles, choices, whole}, parts, arrived);
}
