// Sparse-MARLIN on Hopper (layouts.md 4.4, 5): sparse tensor-core products, with two of each four weights along k.
//
// The codes are MARLIN's words of the stored weights, and the metadata are in the order of the products. Rows a and 8 +
// a of word j are columns 8a + j and 8a + 4 + j of 64. So a lane holds neighbouring outputs, and writes them itself.
#include "hopper_matmul.cuh"
#include "int4.cuh"

// GROUP: of k that share a scale, 0 for one scale per row.
template <class X_, int WORDS_, int WGS_, int GROUP, bool SHARED_>
struct Marlin24Weight {
    using X = X_;
    static constexpr int WORDS = WORDS_, WGS = WGS_, STEP = 32;
    static constexpr bool SHARED = SHARED_, SINGLE = GROUP == 0;
    // Scales are multiplied into float16 weights instead of the sums. bfloat16 would round the product.
    static constexpr bool SCALED = SHARED && GROUP > 0 && IS_HALF<X>;
    static_assert(WORDS % 2 == 0 && GROUP % BK == 0, "metadata belong to two words, groups are whole stages");
    static constexpr int BN = 64 * WORDS * (SHARED ? WGS : 1);
    static constexpr int PRODUCTS = BK / STEP, CHUNK = GROUP && !SCALED ? PRODUCTS : 0;
    static constexpr int W_ROW = BN * 8, M_ROW = BN * 4;  // bytes for 32 of k
    static constexpr int M_AT = PRODUCTS * W_ROW, S_AT = M_AT + PRODUCTS * M_ROW;
    static constexpr int BYTES = S_AT + (GROUP ? BN * 2 : 0), PADDED_BYTES = BYTES;

    struct Maps {
        const TensorMap &words, &metadata, &scales;
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int n_tile, int step, int, u32 barrier, u64 policy) {
        copy_tile(to, maps.words, n_tile * BN, step * PRODUCTS, barrier, policy);
        copy_tile(to + M_AT, maps.metadata, n_tile * BN / 2, step * PRODUCTS, barrier, policy);
        if constexpr (GROUP > 0) copy_tile(to + S_AT, maps.scales, n_tile * BN, step, barrier, policy);
    }

    // The row of a warp's that row 8b + a of operand j is.
    DEVICE static int row(int n0, int a, int j, int b) { return n0 + 8 * a + 4 * b + j; }

    DEVICE static int single(int n) { return n; }

    DEVICE static float factor(half scale) { return to_float(scale); }

    template <int BM>
    struct Lane {
        static constexpr int LANE_WORDS = BN / 64;  // of a lane for 32 of k
        int block, word_0, lane, n0;  // of this warp: its 64 rows of the tile, its first word and row
        Masks mask;
        u32 codes[PRODUCTS][WORDS], chosen[PRODUCTS][WORDS / 2], scales[WORDS];

        DEVICE Lane(int warp, int group, int lane_, u32 zero) : lane(lane_), mask(zero) {
            block = warp * LANE_WORDS / 4;
            word_0 = warp * LANE_WORDS % 4 + (SHARED ? group * WORDS : 0);
            n0 = 64 * block + word_0;
        }

        DEVICE int quad() const { return lane / 4; }

        DEVICE void load(u32 stage) {
            const u32 words_at = stage + block * 512 + lane * 16 + word_0 * 4;
            const u32 metadata_at = stage + M_AT + block * 256 + word_0 / 2 * 128 + lane * 4;
#pragma unroll
            for (int s = 0; s < PRODUCTS; s++) {
                load_words<WORDS>(codes[s], words_at + s * W_ROW);
#pragma unroll
                for (int i = 0; i < WORDS / 2; i++)
                    load_words<1>((u32(&)[1])chosen[s][i], metadata_at + s * M_ROW + i * 128);
            }
            if constexpr (GROUP > 0)
                load_words<WORDS>(scales, stage + S_AT + block * 128 + lane / 4 * 16 + word_0 * 4);
        }

        DEVICE void ahead(int) {}

        DEVICE void operand(int s, int j, u32 (&left)[4]) const {
            const Zero eight = zero_of(X{}, Masks(0), SYMMETRIC_ZERO, 0);
            decode(X{}, mask, codes[s][j], eight, eight, left);
            if constexpr (SCALED)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 both = __byte_perm(scales[j], 0, i & 1 ? 0x3232 : 0x1010);
                    asm("mul.f16x2 %0, %0, %1;" : "+r"(left[i]) : "r"(both));
                }
        }

        // Two of four lanes hold the metadata of an operand, so a register has those of two.
        DEVICE u32 metadata(int s, int j) const { return chosen[s][j / 2]; }

        DEVICE float scale(int, int j, int b) const { return to_float(half{(u16)(scales[j] >> 16 * b)}); }

        // Writes the sums of the rows from n0 on. Each block of a cluster writes some tokens.
        template <class Rows, class Team>
        DEVICE void write(
            X *y, int m, int n, int m0, int n0, const Rows &rows, const Team &team,
            float (&total)[WORDS][BM / 2]) const {
            int at = m0 + lane % 4 * 2;
            X *to = y + (long long)at * n + n0 + lane / 4 * 8;
#pragma unroll
            for (int r = 0; r < BM / 4; r++) {
                const int e = r % 2;
                u32 v[WORDS];
#pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    const int b = i / (WORDS / 2), j = i % (WORDS / 2) * 2;
                    float two[2];
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        two[h] = total[j + h][r / 2 * 4 + 2 * b + e] * rows.factor(j + h, b) + rows.shift(j + h, b);
                    v[i] = pair(X{}, two[0], two[1]);
                }
                if (at < m && team.mine(r)) {
                    if constexpr (WORDS == 4)
                        *(uint4 *)to = make_uint4(v[0], v[1], v[2], v[3]);
                    else
                        *(u32 *)to = v[0], *(u32 *)(to + 4) = v[1];
                }
                at += e ? 7 : 1, to += e ? 7ll * n : n;
            }
        }
    };
};

template <class X, int BM, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
marlin24_hopper(
    const __grid_constant__ TensorMap x_map,  // [m, k], float16 or bfloat16: activations, in boxes [BM, 64]
    const __grid_constant__ TensorMap w_map,  // [k / 32, n], 8 bytes: codes (layouts.md 5.2), in boxes [BK / 32, BN]
    const __grid_constant__ TensorMap m_map,  // [k / 32, n / 2], 8 bytes: metadata (4.4), in boxes [BK / 32, BN / 2]
    const __grid_constant__ TensorMap s_map,  // [k / GROUP, n], float16: scales (5.2), in boxes [1, BN]
    const half *__restrict__ scales,          // [n]: scales; not read if there are groups
    const X *__restrict__ bias,               // [n], or null
    X *__restrict__ y,                        // [m, n]: the product
    float *__restrict__ sums,                 // partial sums of shared tiles, for each block and warpgroup
    u32 *__restrict__ counters,               // blocks of a tile that have stored theirs; zero before and after
    int m,                                    // tokens
    int n,                                    // rows of the weight, a multiple of 128
    int k                                     // columns of the weight, a multiple of 128
) {
    using Weight = Marlin24Weight<X, WORDS, WGS, GROUP, SHARED>;
    matmul_hopper<Weight, BM, STAGES, CLUSTER>(
        x_map, {w_map, m_map, s_map}, scales, bias, y, sums, counters, m, n, k);
}
