// Sparse-MARLIN on sm_80 and newer (layouts.md 4.4, 5): products on the sparse tensor cores with the stored metadata.
//
// The layout has the order of a sparse left operand: rows a and 8 + a of operand j are columns 8a + j and 8a + 4 + j of
// a 64-column block. So a lane holds eight neighbouring outputs.
#include "int4.cuh"
#include "routed.cuh"

template <class X_> struct Marlin24Weight {
    using X = X_;
    static constexpr int STEP = 32;
    static constexpr bool GROUPED = true;
    template <int BN, int BK> static constexpr int META = BN * BK / 4;
    template <int BN, int BK> static constexpr int SCALES = META<BN, BK> + BN * BK / 8;
    template <int BN, int BK> static constexpr int BYTES = SCALES<BN, BK> + Scales::BYTES<BN, BK>;
    const u32 *B;
    const u16 *meta;
    const half *s;
    u32 n, k;
    Groups groups;

    DEVICE Marlin24Weight of(u32 expert) const {
        const u64 words = (u64)expert * (k / 32) * (2 * n), rows = (u64)expert * (groups.one() ? 1 : groups.of(k));
        return {B + words, meta + words, s + rows * n, n, k, groups};
    }

    template <int BN, int BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        const uint4 *codes = (const uint4 *)B + ((u64)(k0 / 32) * (n / 2) + n0 / 2);
        for_pieces<BN * BK / 64>([&](u32 i) {
            u32 row = i / (BN / 2), piece = i % (BN / 2);
            copy_async(to + 16 * i, codes + (row * (n / 2) + piece), 32 * row < k - k0 && 2 * piece < n - n0);
        });
        for_pieces<BN * BK / 128>([&](u32 i) {
            u32 row = i / (BN / 4), piece = i % (BN / 4);
            // Zeros are not valid metadata, so any other valid ones are copied past the ends.
            bool valid = 32 * row < k - k0 && 4 * piece < n - n0;
            u64 place = valid ? (u64)(k0 / 32 + row) * (n / 4) + n0 / 4 + piece : 0;
            copy_async(to + META<BN, BK> + 16 * i, (const uint4 *)meta + place, true);
        });
        Scales{s, n, groups}.fetch<BN, BK>(to + SCALES<BN, BK>, n0, k0);
    }

    template <class S> struct Lane {
        uint4 words, scales;
        u32 chosen[2];

        DEVICE void load(const Marlin24Weight &, const char *stage, const Position<S> &at, u32 s, u32) {
            u32 block = (2 * at.wk + s) * S::WN + at.wn;
            words = ((const uint4 *)stage)[at.words + 32 * S::WN * s];
            const u32 *from = (const u32 *)(stage + META<S::BN, S::BK>) + 64 * block + at.lane;
            chosen[0] = from[0];
            chosen[1] = from[32];
        }

        DEVICE void load_scales(const Marlin24Weight &weight, const char *stage, const Position<S> &at, u32 row) {
            const Scales of_groups{weight.s, weight.n, weight.groups};
            scales = of_groups.load<S::BN>(stage + SCALES<S::BN, S::BK>, row, at.wn, at.lane);
        }

        DEVICE void operand(u32 j, u32 (&a)[4]) const {
            const Zero eight = zero_of(X{}, Masks(0), SYMMETRIC_ZERO, 0);
            decode(X{}, Masks(gridDim.y - 1), word_of(words, j), eight, eight, a);
        }

        DEVICE u32 metadata(u32 j) const { return chosen[j / 2]; }  // of two operands, each in two of four lanes

        DEVICE void scale_operand(u32 j, u32 (&a)[4]) const { scale_rows(a, word_of(scales, j)); }

        DEVICE float scale(u32 j, u32 b) const { return to_float(half{(u16)(word_of(scales, j) >> 16 * b)}); }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 8 * a + 4 * b + j; }

    DEVICE float factor(u32 n) const { return groups.one() ? to_float(s[n]) : 1; }
};

template <class X, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) marlin24_portable(
    const u32 *B,     // [k / 32, 2n]: eight stored INT4 codes a word (layouts.md 5.2)
    const u16 *meta,  // [k / 32, 2n]: which two of each four weights are stored (4.4)
    const half *s,    // [k / group, n]: scales, permuted (5.2)
    const X *x,       // [m, k], float16 or bfloat16: activations
    const X *bias,    // [n], or null
    X *y,             // [m, n]: the product
    float4 *parts,    // [2 * blocks, BM * BN / 4]: partial sums of tiles that blocks share
    u32 *arrived,     // [blocks]: blocks of a tile that have stored theirs; zero before and after
    u32 m,            // tokens, up to 2^14
    u32 n,            // rows of the weight, a multiple of 64
    u32 k,            // columns of the weight, a multiple of 32
    u32 per,          // units of a block, after
    u32 rounds,       // of whole tiles, one of a block
    u32 group         // of k that share a scale; k if there is one scale per row
) {
    using S = Tile<Marlin24Weight<X>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    portable(Product<S>{{B, meta, s, n, k, Groups(k, group)}, x, bias, y, m}, parts, arrived, per, rounds);
}

template <class X, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) marlin24_routed(
    const u32 *B,          // [experts, k / 32, 2n], as above
    const u16 *meta,       // [experts, k / 32, 2n]
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
    using S = Tile<Marlin24Weight<X>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    const Product<S> product{{B, meta, s, n, k, Groups(k, group)}, x, nullptr, y, 0};
    routed(Routed<S>{product, list, weights, max_tiles, choices, whole}, parts, arrived);
}
