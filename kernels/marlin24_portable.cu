// Sparse-MARLIN on sm_80 and newer (layouts.md 4.4, 5): products on the sparse tensor cores with the stored metadata.
//
// The layout has the order of a sparse left operand: rows a and 8 + a of operand j are columns 8a + j and 8a + 4 + j of
// a 64-column block. So a lane holds eight neighbouring outputs.
#include "int4.cuh"
#include "portable.cuh"

struct Marlin24Weight {
    static const u32 STEP = 32;
    static const bool GROUPED = true;
    template <u32 BN, u32 BK> static const u32 META = BN * BK / 4;
    template <u32 BN, u32 BK> static const u32 SCALES = META<BN, BK> + BN * BK / 8;
    template <u32 BN, u32 BK> static const u32 BYTES = SCALES<BN, BK> + Scales::BYTES<BN, BK>;
    const u32 *B;
    const u16 *meta;
    const half *s;
    u32 n, k;
    Groups groups;

    template <u32 BN, u32 BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        const uint4 *codes = (const uint4 *)B + ((u64)(k0 / 32) * (n / 2) + n0 / 2);
        for_pieces<BN * BK / 64>([&](u32 i) {
            u32 row = i / (BN / 2), piece = i % (BN / 2);
            copy_async(to + 16 * i, codes + (row * (n / 2) + piece), 32 * row < k - k0 && 2 * piece < n - n0);
        });
        const uint4 *chosen = (const uint4 *)meta + ((u64)(k0 / 32) * (n / 4) + n0 / 4);
        for_pieces<BN * BK / 128>([&](u32 i) {
            u32 row = i / (BN / 4), piece = i % (BN / 4);
            // Zeros are not valid metadata, so any other valid ones are copied past the ends.
            u32 offset = 32 * row < k - k0 && 4 * piece < n - n0 ? row * (n / 4) + piece : 0;
            copy_async(to + META<BN, BK> + 16 * i, chosen + offset, true);
        });
        Scales{s, n, groups}.fetch<BN, BK>(to + SCALES<BN, BK>, n0, k0);
    }

    template <class S> struct Lane {
        const Marlin24Weight &weight;
        const char *stage;
        const Position<S> &at;
        u32 row, chosen[2];
        uint4 words;
        const Masks mask;

        DEVICE Lane(const Marlin24Weight &weight, const char *stage, const Position<S> &at)
            : weight(weight), stage(stage), at(at), mask(gridDim.y - 1) {}

        DEVICE void enter(u32 group) { row = group; }

        DEVICE void load(u32 half_of_k) {
            u32 block = (2 * at.wk + half_of_k) * S::WN + at.wn;
            words = ((const uint4 *)stage)[32 * block + at.lane];
            const u32 *from = (const u32 *)(stage + META<S::BN, S::BK>) + 64 * block + at.lane;
            chosen[0] = from[0];
            chosen[1] = from[32];
        }

        template <class X> DEVICE void operand(X type, u32, u32 j, u32 (&a)[4]) const {
            const Zero eight = zero_of(type, Masks(0), SYMMETRIC_ZERO, 0);
            decode(type, mask, word_of(words, j), eight, eight, a);
        }

        DEVICE u32 metadata(u32 j) const { return chosen[j / 2]; }  // of two operands, each in two of four lanes

        DEVICE void scales(float (&to)[4][2]) const {
            const Scales scales{weight.s, weight.n, weight.groups};
            scales.read<S::BN>(stage + SCALES<S::BN, S::BK>, row, at.wn, at.lane, to);
        }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 8 * a + 4 * b + j; }

    template <class X> DEVICE float factor(X, u32 n) const { return groups.one() ? to_float(s[n]) : 1; }
};

template <class X, int T, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) marlin24_portable(
    const u32 *B, const u16 *meta, const half *s, const X *x, const X *bias, X *y, float4 *parts, u32 *arrived, u32 m,
    u32 n, u32 k, u32 per, u32 group) {
    using S = Tile<Marlin24Weight, T, WN, WM, WK, STAGES>;
    portable(Product<S, X>{{B, meta, s, n, k, Groups(k, group)}, x, bias, y, m}, parts, arrived, per);
}
