// Sparse-MARLIN on Hopper (layouts.md 4.4, 5): sparse tensor-core products, with two of each four weights along k.
//
// The codes are MARLIN's words of the stored weights, and the metadata are in the order of the products. Rows a and 8 +
// a of word j are columns 8a + j and 8a + 4 + j of 64. So a lane holds neighbouring outputs, and writes them itself.
#include "hopper_matmul.cuh"
#include "int4.cuh"

// GROUP: rows of k that share a scale, 0 for one scale per column.
template <class X, int WORDS_, int WGS_, int GROUP, bool SHARED_>
struct Marlin24 {
    using TYPE = X;
    static constexpr int WORDS = WORDS_, WGS = WGS_;
    static constexpr bool SHARED = SHARED_;
    // Scales are multiplied into float16 weights instead of the sums. bfloat16 would round the product.
    static constexpr bool SCALED = SHARED && GROUP > 0 && IS_HALF<X>;
    static_assert(WORDS % 2 == 0 && GROUP % K_STEP == 0, "metadata belong to two words, groups are whole stages");
    static constexpr int COLUMNS = 64 * WORDS * (SHARED ? WGS : 1);
    static constexpr int PRODUCTS = K_STEP / 32, CHUNK = GROUP && !SCALED ? PRODUCTS : 0;
    static constexpr int W_ROW = COLUMNS * 8, M_ROW = COLUMNS * 4;  // bytes for 32 of k
    static constexpr int M_AT = PRODUCTS * W_ROW, S_AT = M_AT + PRODUCTS * M_ROW;
    static constexpr int BYTES = S_AT + (GROUP ? COLUMNS * 2 : 0), PADDED_BYTES = BYTES;

    struct Maps {
        const TensorMap &words, &metadata, &scales;
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int column_tile, int step, u32 barrier, u64 policy) {
        copy_tile(to, maps.words, column_tile * COLUMNS, step * PRODUCTS, barrier, policy);
        copy_tile(to + M_AT, maps.metadata, column_tile * COLUMNS / 2, step * PRODUCTS, barrier, policy);
        if constexpr (GROUP > 0) copy_tile(to + S_AT, maps.scales, column_tile * COLUMNS, step, barrier, policy);
    }

    template <int TOKENS>
    struct Lane {
        static constexpr int LANE_WORDS = COLUMNS / 64;  // of a lane for 32 of k
        int block, word_0, lane, column;  // of this warp: its 64 columns in the tile, its first word
        Masks mask;
        u32 codes[PRODUCTS][WORDS], metadata[PRODUCTS][WORDS / 2], scales[WORDS];
        half single[WORDS][2];
        X shift[WORDS][2];

        DEVICE Lane(int warp, int group, int lane_, u32 zero) : lane(lane_), mask(zero) {
            block = warp * LANE_WORDS / 4;
            word_0 = warp * LANE_WORDS % 4 + (SHARED ? group * WORDS : 0);
            column = 64 * block + word_0;
        }

        // Loads the scales and biases of the rows from `column` on.
        DEVICE void start(const half *single_scales, const X *bias, int column) {
#pragma unroll
            for (int j = 0; j < WORDS; j++)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int row = column + lane / 4 * 8 + 4 * b + j;
                    if (GROUP == 0) single[j][b] = single_scales[row];
                    shift[j][b] = bias ? bias[row] : X{0};
                }
        }

        DEVICE void load(u32 stage) {
            const u32 words_at = stage + block * 512 + lane * 16 + word_0 * 4;
            const u32 metadata_at = stage + M_AT + block * 256 + word_0 / 2 * 128 + lane * 4;
#pragma unroll
            for (int s = 0; s < PRODUCTS; s++) {
                load_words<WORDS>(codes[s], words_at + s * W_ROW);
#pragma unroll
                for (int i = 0; i < WORDS / 2; i++)
                    load_words<1>((u32(&)[1])metadata[s][i], metadata_at + s * M_ROW + i * 128);
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

        // The metadata of each of two words are in two of four lanes.
        DEVICE void multiply(
            int s, int j, float (&d)[TOKENS / 2], const u32 (&left)[4], u64 right, int keep) const {
            if (j % 2)
                wgmma_sparse<1>(X{}, d, left, metadata[s][j / 2], right, keep);
            else
                wgmma_sparse<0>(X{}, d, left, metadata[s][j / 2], right, keep);
        }

        DEVICE float scale(int, int j, int b) const { return to_float(half{(u16)(scales[j] >> 16 * b)}); }

        DEVICE float factor(int j, int b) const { return GROUP ? 1 : to_float(single[j][b]); }

        // Writes the sums of the rows from `column` on. Each block of a cluster writes some tokens.
        template <class Team>
        DEVICE void write(
            X *y, int m, int n, int column, int token, const Team &team, float (&total)[WORDS][TOKENS / 2]) const {
            int at = token + lane % 4 * 2;
            X *to = y + (long long)at * n + column + lane / 4 * 8;
#pragma unroll
            for (int r = 0; r < TOKENS / 4; r++) {
                const int e = r % 2;
                u32 v[WORDS];
#pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    const int b = i / (WORDS / 2), j = i % (WORDS / 2) * 2;
                    float two[2];
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        two[h] = total[j + h][r / 2 * 4 + 2 * b + e] * factor(j + h, b) + to_float(shift[j + h][b]);
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

template <class X, int TOKENS, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
marlin24_hopper(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap m_map, const __grid_constant__ TensorMap s_map, const half *__restrict__ scales,
    const X *__restrict__ bias, X *__restrict__ y, float *__restrict__ sums, u32 *__restrict__ counters, int m, int n,
    int k) {
    using Weight = Marlin24<X, WORDS, WGS, GROUP, SHARED>;
    matmul_hopper<Weight, TOKENS, STAGES, CLUSTER>(
        x_map, {w_map, m_map, s_map}, scales, bias, y, sums, counters, m, n, k);
}
