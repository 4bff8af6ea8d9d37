// Dense MARLIN on sm_80 and newer (layouts.md 3): 16 bytes of a lane are its part of four operands, 64 columns.
#include "int4.cuh"
#include "routed.cuh"
#include "weights.cuh"

template <class X_> struct MarlinWeight {
    using X = X_;
    static constexpr int STEP = 16;
    static constexpr bool GROUPED = true;
    template <int BN, int BK> static constexpr int SCALES = BN * BK / 2;
    template <int BN, int BK> static constexpr int BYTES = SCALES<BN, BK> + Scales::BYTES<BN, BK>;
    const u32 *B;
    const half *s;
    u32 n, k;
    Groups groups;

    DEVICE MarlinWeight of(u32 expert) const {
        const u32 scales = groups.one() ? 1 : groups.of(k);
        return {B + (u64)expert * (k / 16) * (2 * n), s + (u64)expert * scales * n, n, k, groups};
    }

    template <int BN, int BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        const uint4 *from = (const uint4 *)B + ((u64)(k0 / 16) * (n / 2) + n0 / 2);
        for_pieces<BN * BK / 32>([&](u32 i) {
            u32 row = i / (BN / 2), piece = i % (BN / 2);
            copy_async(to + 16 * i, from + (row * (n / 2) + piece), 16 * row < k - k0 && 2 * piece < n - n0);
        });
        Scales{s, n, groups}.fetch<BN, BK>(to + SCALES<BN, BK>, n0, k0);
    }

    template <class S> struct Lane {
        uint4 words, scales;

        DEVICE void load(const MarlinWeight &, const char *stage, const Position<S> &at, u32 s, u32) {
            words = ((const uint4 *)stage)[at.words + 32 * S::WN * s];
        }

        DEVICE void load_scales(const MarlinWeight &weight, const char *stage, const Position<S> &at, u32 row) {
            const Scales of_groups{weight.s, weight.n, weight.groups};
            scales = of_groups.load<S::BN>(stage + SCALES<S::BN, S::BK>, row, at.wn, at.lane);
        }

        DEVICE void operand(u32 j, u32 (&a)[4]) const {
            const Zero eight = zero_of(X{}, Masks(0), SYMMETRIC_ZERO, 0);
            decode(X{}, Masks(gridDim.y - 1), word_of(words, j), eight, eight, a);
        }

        DEVICE void scale_operand(u32 j, u32 (&a)[4]) const { scale_rows(a, word_of(scales, j)); }

        DEVICE float scale(u32 j, u32 b) const { return to_float(half{(u16)(word_of(scales, j) >> 16 * b)}); }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 16 * j + 8 * b + a; }

    DEVICE float factor(u32 n) const { return groups.one() ? to_float(s[Marlin::single(n)]) : 1; }
};

template <class X, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) marlin_portable(
    const u32 *B,   // [k / 16, 2n]: eight INT4 codes a word (layouts.md 3.2)
    const half *s,  // [k / group, n]: scales, permuted (3.3)
    const X *x,     // [m, k], float16 or bfloat16: activations
    const X *bias,  // [n], or null
    X *y,           // [m, n]: the product
    float4 *parts,  // [2 * blocks, BM * BN / 4]: partial sums of tiles that blocks share
    u32 *arrived,   // [blocks]: blocks of a tile that have stored theirs; zero before and after
    u32 m,          // tokens, up to 2^14
    u32 n,          // rows of the weight, a multiple of 64
    u32 k,          // columns of the weight, a multiple of 16
    u32 per,        // units of a block, after
    u32 rounds,     // of whole tiles, one of a block
    u32 group       // of k that share a scale; k if there is one scale per row
) {
    using S = Tile<MarlinWeight<X>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    portable(Product<S>{{B, s, n, k, Groups(k, group)}, x, bias, y, m}, parts, arrived, per, rounds);
}

template <class X, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) marlin_routed(
    const u32 *B,          // [experts, k / 16, 2n], as above
    const half *s,         // [experts, k / group, n]
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
    u32 k,                 // as above
    u32 group              // as above
) {
    using S = Tile<MarlinWeight<X>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    const Product<S> product{{B, s, n, k, Groups(k, group)}, x, nullptr, y, 0};
    routed(Routed<S>{product, list, weights, max_tiles, choices, whole}, parts, arrived);
}
