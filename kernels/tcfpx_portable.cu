// TC-FPx on sm_80 and newer (layouts.md 7): codes of six or five bits in two planes.
//
// Decoded codes are their values divided by a power of two. For float16, the float32 sums are multiplied by it. For
// bfloat16, with the exponent range of float32, these sums would be subnormal, so each weight is multiplied by it.
#include "portable.cuh"
#include "tcfpx_decode.cuh"

template <int E, int M> struct TcfpxWeight {
    static const u32 STEP = 16;
    static const bool GROUPED = false;
    static const u32 HIGH = E + M - 3;  // bits of a code in the first plane; the second has four
    template <u32 BN, u32 BK> static const u32 BYTES = BN * BK / 8 * (HIGH + 4);
    const u32 *words;
    const half *s;
    u32 n, k;

    // A plane of Y bits has 8 Y * k bytes for each 64 rows, in memory and in a stage.
    template <u32 Y, u32 BN, u32 BK> DEVICE void fetch_plane(u32 to, const u32 *plane, u32 n0, u32 k0) const {
        const uint4 *from = (const uint4 *)plane + ((u64)(n0 / 64) * (k / 2 * Y) + k0 / 2 * Y);
        for_pieces<BN * BK / 128 * Y>([&](u32 i) {
            u32 block = i / (BK / 2 * Y), piece = i % (BK / 2 * Y);
            bool valid = 64 * block < n - n0 && piece < (k - k0) / 2 * Y;
            copy_async(to + 16 * i, from + (block * (k / 2 * Y) + piece), valid);
        });
    }

    template <u32 BN, u32 BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        fetch_plane<4, BN, BK>(to, words + (u64)n * k / 32 * HIGH, n0, k0);
        fetch_plane<HIGH, BN, BK>(to + BN * BK / 2, words, n0, k0);
    }

    template <class S> struct Lane {
        const u32 *low, *high;
        u32 lows[2][4], highs[2][HIGH];

        DEVICE Lane(const TcfpxWeight &, const char *stage, const Position<S> &at) {
            u32 block = at.wn * (S::BK / 16) + 4 * at.wk;
            low = (const u32 *)stage + 128 * block + at.lane;
            high = (const u32 *)(stage + S::BN * S::BK / 2) + 32 * HIGH * block + at.lane;
        }

        DEVICE void load(u32 half_of_k) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) lows[i / 4][i % 4] = low[256 * half_of_k + 32 * i];
#pragma unroll
            for (u32 i = 0; i < 2 * HIGH; i++) highs[i / HIGH][i % HIGH] = high[64 * HIGH * half_of_k + 32 * i];
        }

        DEVICE void operand(half, u32 i, u32 j, u32 (&a)[4]) const {
            Codes<half, E, M>::decode(highs[i][j * HIGH / 4], lows[i][j], j % (4 / HIGH), a);
        }

        DEVICE void operand(bfloat type, u32 i, u32 j, u32 (&a)[4]) const {
            const u32 factor = 0x00800080 * (127 + Codes<bfloat, E, M>::UP), zero = 0x80008000;
            Codes<bfloat, E, M>::decode(highs[i][j * HIGH / 4], lows[i][j], j % (4 / HIGH), a);
#pragma unroll
            for (u32 r = 0; r < 4; r++) a[r] = fma_pair(type, a[r], factor, zero);
        }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 16 * j + 8 * b + a; }

    DEVICE float factor(half, u32 n) const { return to_float(s[n]) * (1 << Codes<half, E, M>::UP); }
    DEVICE float factor(bfloat, u32 n) const { return to_float(s[n]); }
};

template <class X, int E, int M, int T, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) tcfpx_portable(
    const u32 *words, const half *s, const X *x, const X *bias, X *y, float4 *parts, u32 *arrived, u32 m, u32 n, u32 k,
    u32 per) {
    using S = Tile<TcfpxWeight<E, M>, T, WN, WM, WK, STAGES>;
    portable(Product<S, X>{{words, s, n, k}, x, bias, y, m}, parts, arrived, per);
}
