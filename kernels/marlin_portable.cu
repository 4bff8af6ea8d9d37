// Dense MARLIN on sm_80 and newer (layouts.md 3): 16 bytes of a lane are its part of four operands, 64 columns.
#include "int4.cuh"
#include "portable.cuh"
#include "weights.cuh"

struct MarlinWeight {
    static const u32 STEP = 16;
    static const bool GROUPED = true;
    template <u32 BN, u32 BK> static const u32 SCALES = BN * BK / 2;
    template <u32 BN, u32 BK> static const u32 BYTES = SCALES<BN, BK> + Scales::BYTES<BN, BK>;
    const u32 *B;
    const half *s;
    u32 n, k;
    Groups groups;

    template <u32 BN, u32 BK> DEVICE void fetch(u32 to, u32 n0, u32 k0) const {
        const uint4 *from = (const uint4 *)B + ((u64)(k0 / 16) * (n / 2) + n0 / 2);
        for_pieces<BN * BK / 32>([&](u32 i) {
            u32 row = i / (BN / 2), piece = i % (BN / 2);
            copy_async(to + 16 * i, from + (row * (n / 2) + piece), 16 * row < k - k0 && 2 * piece < n - n0);
        });
        Scales{s, n, groups}.fetch<BN, BK>(to + SCALES<BN, BK>, n0, k0);
    }

    template <class S> struct Lane {
        const MarlinWeight &weight;
        const char *stage;
        const Position<S> &at;
        u32 row;
        uint4 words[2];
        const Masks mask;

        DEVICE Lane(const MarlinWeight &weight, const char *stage, const Position<S> &at)
            : weight(weight), stage(stage), at(at), mask(gridDim.y - 1) {}

        DEVICE void enter(u32 group) { row = group; }

        DEVICE void load(u32 half_of_k) {
            const uint4 *from = (const uint4 *)stage + ((4 * at.wk + 2 * half_of_k) * S::WN + at.wn) * 32 + at.lane;
            words[0] = from[0];
            words[1] = from[S::WN * 32];
        }

        template <class X> DEVICE void operand(X type, u32 i, u32 j, u32 (&a)[4]) const {
            const Zero eight = zero_of(type, Masks(0), SYMMETRIC_ZERO, 0);
            decode(type, mask, word_of(words[i], j), eight, eight, a);
        }

        DEVICE void scales(float (&to)[4][2]) const {
            const Scales scales{weight.s, weight.n, weight.groups};
            scales.read<S::BN>(stage + SCALES<S::BN, S::BK>, row, at.wn, at.lane, to);
        }
    };

    DEVICE static u32 row(u32 a, u32 j, u32 b) { return 16 * j + 8 * b + a; }

    template <class X> DEVICE float factor(X, u32 n) const { return groups.one() ? to_float(s[Marlin::single(n)]) : 1; }
};

template <class X, int T, int WN, int WM, int WK, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) marlin_portable(
    const u32 *B, const half *s, const X *x, const X *bias, X *y, float4 *parts, u32 *arrived, u32 m, u32 n, u32 k,
    u32 per, u32 group) {
    using S = Tile<MarlinWeight, T, WN, WM, WK, STAGES>;
    portable(Product<S, X>{{B, s, n, k, Groups(k, group)}, x, bias, y, m}, parts, arrived, per);
}
