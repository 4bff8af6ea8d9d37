// QUICK on sm_80 and newer (layouts.md 8): MARLIN's words in another order, and a zero point for every scale.
#include "int4.cuh"
#include "portable.cuh"

struct QuickWeight {
    static const u32 STEP = 16;
    static const bool GROUPED = true;
    // A stage has the codes in MARLIN's order, then 16 scales for each group, block of 64 rows and `a`, and at the end
    // 16 zero points of four bits. The 16 are eight values, each twice.
    template <u32 BN, u32 BK> static const u32 SCALES = BN * BK / 2;
    template <u32 BN, u32 BK> static const u32 ZEROS = SCALES<BN, BK> + BK / 32 * BN * 4;
    template <u32 BN, u32 BK> static const u32 BYTES = ZEROS<BN, BK> + BK / 32 * BN;
    const u32 *qweight;
    const u32 *qzeros;
    const half *scales;
    u32 n, k;
    Groups groups;

    // The index, after n0 / 32, of the eight scales of rows 64 * block + 8y + a of a tile, y in 0..7.
    DEVICE u32 eight(u32 block, u32 a) const {
        return block % 2 * (n / 16) + a / 4 * (n / 32) + 4 * (block / 2) + a % 4;
    }

    template <u32 BN, u32 BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
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
        groups.for_pieces_of<BK, BN / 4>(k0, [&](u32 i, u32 row, u32 piece, bool valid) {
            u32 block = piece / 16, offset = 16 * eight(block, piece / 2 % 8) + piece % 2 * 8;
            copy_async(to + SCALES<BN, BK> + 16 * i, of_scales + (row * 2 * n + offset), valid && 64 * block < n - n0);
        });
        const u32 *of_zeros = qzeros + ((u64)groups.of(k0) * (n / 4) + n0 / 16);
        groups.for_pieces_of<BK, BN / 16>(k0, [&](u32 i, u32 row, u32 piece, bool valid) {
            u32 block = piece / 4, offset = 2 * eight(block, piece % 4 * 2);
            copy_async(to + ZEROS<BN, BK> + 16 * i, of_zeros + (row * (n / 4) + offset), valid && 64 * block < n - n0);
        });
    }

    template <class S> struct Lane {
        const char *stage;
        const Position<S> &at;
        u32 place;
        uint4 words[2];
        uint2 zeros;
        const Masks mask;

        DEVICE Lane(const QuickWeight &, const char *stage, const Position<S> &at)
            : stage(stage), at(at), mask(gridDim.y - 1) {}

        DEVICE void enter(u32 group) {
            place = group * (S::BN / 8) + at.wn * 8 + at.lane / 4;
            zeros = ((const uint2 *)(stage + ZEROS<S::BN, S::BK>))[place];
        }

        DEVICE void load(u32 half_of_k) {
            const uint4 *from = (const uint4 *)stage + ((4 * at.wk + 2 * half_of_k) * S::WN + at.wn) * 32 + at.lane;
            words[0] = from[0];
            words[1] = from[S::WN * 32];
        }

        template <class X> DEVICE void operand(X type, u32 i, u32 j, u32 (&a)[4]) const {
            u32 four = j < 2 ? zeros.x : zeros.y;  // rows 16j + 8b + a are nibble 2j + b
            Zero zero0 = zero_of(type, mask, four, 2 * j % 4), zero1 = zero_of(type, mask, four, 2 * j % 4 + 1);
            decode(type, mask, word_of(words[i], j), zero0, zero1, a);
        }

        DEVICE void scales(float (&to)[4][2]) const {
            const uint4 *eight = (const uint4 *)(stage + SCALES<S::BN, S::BK>) + 2 * place;
#pragma unroll
            for (u32 y = 0; y < 8; y++) to[y / 2][y % 2] = to_float(half{(u16)word_of(eight[y / 4], y % 4)});
        }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 16 * j + 8 * b + a; }

    template <class X> DEVICE float factor(X, u32) const { return 1; }
};

template <class X, int T, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) quick_portable(
    const u32 *qweight, const u32 *qzeros, const half *scales, const X *x, const X *bias, X *y, float4 *parts,
    u32 *arrived, u32 m, u32 n, u32 k, u32 per, u32 group) {
    using S = Tile<QuickWeight, T, WN, WM, WK, STAGES>;
    portable(Product<S, X>{{qweight, qzeros, scales, n, k, Groups(k, group)}, x, bias, y, m}, parts, arrived, per);
}
