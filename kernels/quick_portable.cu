// QUICK on sm_80 and newer (layouts.md 8): MARLIN's words in another order, and a zero point for every scale.
#include "int4.cuh"
#include "routed.cuh"

template <class X_> struct QuickWeight {
    using X = X_;
    static constexpr int STEP = 16;
    static constexpr bool GROUPED = true;
    // A stage has the codes in MARLIN's order, then 16 scales for each group, block of 64 rows and `a`, and at the end
    // 16 zero points of four bits. The 16 are eight values, each twice.
    template <int BN, int BK> static constexpr int SCALES = BN * BK / 2;
    template <int BN, int BK> static constexpr int ZEROS = SCALES<BN, BK> + BK / 32 * BN * 4;
    template <int BN, int BK> static constexpr int BYTES = ZEROS<BN, BK> + BK / 32 * BN;
    const u32 *qweight;
    const u32 *qzeros;
    const half *scales;
    u32 n, k;
    Groups groups;

    DEVICE QuickWeight of(u32 expert) const {
        const u64 rows = (u64)expert * (groups.one() ? 1 : groups.of(k));  // of scales and zero points
        const u64 words = (u64)expert * (k / 4) * (n / 2);
        return {qweight + words, qzeros + rows * (n / 4), scales + rows * (2 * n), n, k, groups};
    }

    // The index, after n0 / 32, of the eight scales of rows 64 * block + 8y + a of a tile, y in 0..7.
    DEVICE u32 eight(u32 block, u32 a) const {
        return block % 2 * (n / 16) + a / 4 * (n / 32) + 4 * (block / 2) + a % 4;
    }

    template <int BN, int BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        const uint4 *from = (const uint4 *)qweight + ((u64)(k0 / 32) * n + n0 / 4);
        for_pieces<BN * BK / 32>([&](u32 i) {
            // In memory a lane has 32 contiguous bytes for 32 of k. In a stage each half of them is in a warp's vector.
            u32 step = i % 2, lane = i / 2 % 32, block = i / 64 % (BN / 64), row = i / BN, a = lane / 4, q = lane % 4;
            u32 L = block % 2 * (n / 4) + a / 4 * (n / 8) + 16 * (block / 2) + 4 * (a % 4) + q;
            u32 place = (2 * row + step) * (BN / 2) + 32 * block + lane;
            bool valid = 32 * row < k - k0 && 64 * block < n - n0;
            copy_async(to + 16 * place, from + (row * n + 2 * L + step), valid);
        });
        const half *of_scales = scales + ((u64)groups.of(k0) * 2 * n + n0 / 2);
        groups.for_pieces_of<BK, BN / 4>(k0, [&](u32 i, u32 row, u32 piece, bool valid, bool present) {
            u32 block = piece / 16, offset = 16 * eight(block, piece / 2 % 8) + piece % 2 * 8;
            bool inside = valid && 64 * block < n - n0;
            copy_async(to + SCALES<BN, BK> + 16 * i, of_scales + (row * 2 * n + offset), inside, present);
        });
        const u32 *of_zeros = qzeros + ((u64)groups.of(k0) * (n / 4) + n0 / 16);
        groups.for_pieces_of<BK, BN / 16>(k0, [&](u32 i, u32 row, u32 piece, bool valid, bool present) {
            u32 block = piece / 4, offset = 2 * eight(block, piece % 4 * 2);
            bool inside = valid && 64 * block < n - n0;
            copy_async(to + ZEROS<BN, BK> + 16 * i, of_zeros + (row * (n / 4) + offset), inside, present);
        });
    }

    template <class S> struct Lane {
        uint4 words, scales[2];
        uint2 zeros;

        DEVICE static u32 place(const Position<S> &at, u32 row) { return row * (S::BN / 8) + at.wn * 8 + at.lane / 4; }

        DEVICE void load(const QuickWeight &, const char *stage, const Position<S> &at, u32 s, u32 row) {
            words = ((const uint4 *)stage)[at.words + 32 * S::WN * s];
            zeros = ((const uint2 *)(stage + ZEROS<S::BN, S::BK>))[place(at, row)];
        }

        DEVICE void load_scales(const QuickWeight &, const char *stage, const Position<S> &at, u32 row) {
            const uint4 *eight = (const uint4 *)(stage + SCALES<S::BN, S::BK>) + 2 * place(at, row);
            scales[0] = eight[0];
            scales[1] = eight[1];
        }

        DEVICE void operand(u32 j, u32 (&a)[4]) const {
            const Masks mask(gridDim.y - 1);
            u32 four = j < 2 ? zeros.x : zeros.y;  // rows 16j + 8b + a are nibble 2j + b
            Zero zero0 = zero_of(X{}, mask, four, 2 * j % 4), zero1 = zero_of(X{}, mask, four, 2 * j % 4 + 1);
            decode(X{}, mask, word_of(words, j), zero0, zero1, a);
        }

        DEVICE u32 twice(u32 j, u32 b) const { return word_of(scales[j / 2], 2 * j % 4 + b); }

        DEVICE void scale_operand(u32 j, u32 (&a)[4]) const {
#pragma unroll
            for (u32 r = 0; r < 4; r++) a[r] = fma_pair(half{}, a[r], twice(j, r % 2), 0x80008000);
        }

        DEVICE float scale(u32 j, u32 b) const { return to_float(half{(u16)twice(j, b)}); }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 16 * j + 8 * b + a; }

    DEVICE float factor(u32) const { return 1; }
};

template <class X, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) quick_portable(
    const u32 *qweight,  // [k / 4, n / 2]: eight INT4 codes a word (layouts.md 8.2)
    const u32 *qzeros,   // [k / group, n / 4]: four-bit zero points, each twice
    const half *scales,  // [k / group, 2n]: scales, each twice
    const X *x,          // [m, k], float16 or bfloat16: activations
    const X *bias,       // [n], or null
    X *y,                // [m, n]: the product
    float4 *parts,       // [2 * blocks, BM * BN / 4]: partial sums of tiles that blocks share
    u32 *arrived,        // [blocks]: blocks of a tile that have stored theirs; zero before and after
    u32 m,               // tokens, up to 2^14
    u32 n,               // rows of the weight, a multiple of 128
    u32 k,               // columns of the weight, a multiple of 32
    u32 per,             // units of a block, after
    u32 rounds,          // of whole tiles, one of a block
    u32 group            // of k that share a scale and a zero point
) {
    using S = Tile<QuickWeight<X>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    portable(Product<S>{{qweight, qzeros, scales, n, k, Groups(k, group)}, x, bias, y, m}, parts, arrived, per, rounds);
}

template <class X, int FRAGMENTS, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) quick_routed(
    const u32 *qweight,    // [experts, k / 4, n / 2], as above
    const u32 *qzeros,     // [experts, k / group, n / 4]
    const half *scales,    // [experts, k / group, 2n]
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
    using S = Tile<QuickWeight<X>, FRAGMENTS, WN, WM, WK, STAGES, BLOCKS>;
    const Product<S> product{{qweight, qzeros, scales, n, k, Groups(k, group)}, x, nullptr, y, 0};
    routed(Routed<S>{product, list, weights, max_tiles, choices, whole}, parts, arrived);
}
