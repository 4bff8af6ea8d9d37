// Dense MARLIN on Hopper: packed words become the left operand of warpgroup products.
//
// A lane's word of a 16 x 16 tile is its fragment of the left operand, with n as the row: nibble 4e + 2b + h is
// k = 8h + 2q + e, n = 8b + a, lane = 4a + q (layouts.md 3.2). A warp may take any 16 rows, because rows of the operand
// are rows of the result. So weights go from shared memory to registers in vectors of up to 16 bytes, and nothing is
// written back. Activations are the right operand, swizzled by the copy engine.
#include "hopper_matmul.cuh"
#include "int4.cuh"

// GROUP: rows of k that share a scale, 0 for one scale per column.
template <class X, int WORDS_, int WGS_, int GROUP, bool SHARED_>
struct Marlin {
    using TYPE = X;
    static constexpr int WORDS = WORDS_, WGS = WGS_, STRIDE = 16;
    static constexpr bool SHARED = SHARED_;
    // Scales are multiplied into float16 weights instead of the sums. bfloat16 would round the product.
    static constexpr bool SCALED = SHARED && GROUP > 0 && IS_HALF<X>;
    static constexpr int COLUMNS = 64 * WORDS * (SHARED ? WGS : 1);
    static constexpr int PRODUCTS = K_STEP / 16, CHUNK = GROUP && !SCALED ? GROUP / 16 : 0;
    static constexpr int SCALE_ROWS = GROUP ? K_STEP / GROUP : 0;
    static constexpr int W_BYTES = COLUMNS * K_STEP / 2, S_BYTES = SCALE_ROWS * COLUMNS * 2;
    static constexpr int BYTES = W_BYTES + S_BYTES, PADDED_BYTES = (BYTES + 127) / 128 * 128;

    struct Maps {
        const TensorMap &words, &scales;
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int column_tile, int step, u32 barrier, u64 policy) {
        copy_tile(to, maps.words, column_tile * COLUMNS, step * PRODUCTS, barrier, policy);
        if constexpr (GROUP > 0)
            copy_tile(to + W_BYTES, maps.scales, column_tile * COLUMNS, step * SCALE_ROWS, barrier, policy);
    }

    template <int TOKENS>
    struct Lane {
        static constexpr int LANE_WORDS = COLUMNS / 64;                            // of a lane for 16 of k
        static constexpr int AHEAD = WORDS == 4 && TOKENS > 16 ? 2 : PRODUCTS;  // products whose words are loaded ahead
        static constexpr int PER_SCALE = GROUP ? GROUP / 16 : PRODUCTS;
        int block, word_0, lane, column;  // of this warp: its 64 columns in the tile, its first word
        Masks mask;
        u32 at, codes[AHEAD][WORDS], scales[PRODUCTS / PER_SCALE][WORDS];
        half single[WORDS][2];
        X shift[WORDS][2];

        DEVICE Lane(int warp, int group, int lane_, u32 zero) : lane(lane_), mask(zero) {
            block = warp * LANE_WORDS / 4;
            word_0 = warp * LANE_WORDS % 4 + (SHARED ? group * WORDS : 0);
            column = 64 * block + 16 * word_0;
        }

        // Loads the scales and biases of the rows from `column` on.
        DEVICE void start(const half *single_scales, const X *bias, int column) {
#pragma unroll
            for (int j = 0; j < WORDS; j++)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int row = column + 16 * j + 8 * b + lane / 4, in = row % 32;
                    // One scale per column: n = 8c + 2i + e of 32 is stored at 8i + 2c + e (layouts.md 3.3).
                    if (GROUP == 0) single[j][b] = single_scales[row - in + 8 * (in % 8 / 2) + 2 * (in / 8) + in % 2];
                    shift[j][b] = bias ? bias[row] : X{0};
                }
        }

        DEVICE void load(u32 stage) {
            at = stage + block * 512 + lane * 16 + word_0 * 4;
#pragma unroll
            for (int s = 0; s < AHEAD; s++) load_words<WORDS>(codes[s], at + s * COLUMNS * 8);
            const u32 scales_at = stage + W_BYTES + block * 128 + lane / 4 * 16 + word_0 * 4;
            if constexpr (GROUP > 0)
#pragma unroll
                for (int c = 0; c < PRODUCTS / PER_SCALE; c++) load_words<WORDS>(scales[c], scales_at + c * COLUMNS * 2);
        }

        DEVICE void ahead(int s) {
            if (s + AHEAD < PRODUCTS) load_words<WORDS>(codes[s % AHEAD], at + (s + AHEAD) * COLUMNS * 8);
        }

        DEVICE void operand(int s, int j, u32 (&left)[4]) const {
            const Zero eight = zero_of(X{}, Masks(0), SYMMETRIC_ZERO, 0);
            decode(X{}, mask, codes[s % AHEAD][j], eight, eight, left);
            if constexpr (SCALED)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 both = __byte_perm(scales[s / PER_SCALE][j], 0, i & 1 ? 0x3232 : 0x1010);
                    asm("mul.f16x2 %0, %0, %1;" : "+r"(left[i]) : "r"(both));
                }
        }

        DEVICE float scale(int s, int j, int b) const {
            return to_float(half{(u16)(scales[s / PER_SCALE][j] >> 16 * b)});
        }

        DEVICE float factor(int j, int b) const { return GROUP ? 1 : to_float(single[j][b]); }
    };
};

template <class X, int TOKENS, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
marlin_hopper(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap s_map, const half *__restrict__ scales, const X *__restrict__ bias,
    X *__restrict__ y, float *__restrict__ sums, u32 *__restrict__ counters, int m, int n, int k) {
    using Weight = Marlin<X, WORDS, WGS, GROUP, SHARED>;
    matmul_hopper<Weight, TOKENS, STAGES, CLUSTER>(x_map, {w_map, s_map}, scales, bias, y, sums, counters, m, n, k);
}
