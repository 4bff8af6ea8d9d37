// TC-FPx on Hopper (layouts.md 7): codes of six or five bits in two planes are the left operand of warpgroup products.
//
// A block of 64 rows is contiguous along k in each plane. A lane's words of a 16 x 16 block are its fragment of the
// left operand, with n as the row. A warp may take any 16 rows, and takes neighbouring ones, which share the words of
// upper bits. The power of two that decoding leaves out is multiplied into the row's scale, once, in float32. bfloat16
// weights are converted instead: with the exponent range of float32 the sums would be subnormal.
#include "hopper_matmul.cuh"
#include "tcfpx_decode.cuh"

DEVICE void multiply_pair(half, u32 &a, u32 by) { asm("mul.f16x2 %0, %0, %1;" : "+r"(a) : "r"(by)); }

DEVICE void multiply_pair(bfloat, u32 &a, u32 by) { asm("mul.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(by)); }

// CONVERTED: each weight is multiplied by the power of two.
template <class X, int E, int M, int WORDS_, int WGS_, bool SHARED_, bool CONVERTED>
struct Tcfpx {
    using TYPE = X;
    using Code = Codes<X, E, M>;
    static constexpr int WORDS = WORDS_, WGS = WGS_, STRIDE = 16;
    static constexpr bool SHARED = SHARED_;
    static constexpr int BLOCKS = WORDS * (SHARED ? WGS : 1), COLUMNS = 64 * BLOCKS;
    static constexpr int PRODUCTS = K_STEP / 16, CHUNK = 0;
    // Bytes of a block of 64 rows by 16 of k in each plane, and of the whole stage.
    static constexpr int LOW = 512, HIGH = 128 * Code::HIGH, LOW_BYTES = BLOCKS * PRODUCTS * LOW;
    static constexpr int BYTES = LOW_BYTES + BLOCKS * PRODUCTS * HIGH, PADDED_BYTES = BYTES;

    struct Maps {
        const TensorMap &low, &high;  // 8-byte words, a row for each block; `low` is cut into pieces of 64 of k
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int column_tile, int step, u32 barrier, u64 policy) {
        const int row = column_tile * BLOCKS;
        copy_box(to, maps.low, 0, step * 2, row, barrier, policy);
        copy_tile(to + LOW_BYTES, maps.high, step * PRODUCTS * HIGH / 8, row, barrier, policy);
    }

    template <int TOKENS>
    struct Lane {
        static constexpr int SHARING = 4 / Code::HIGH;  // blocks of 16 rows that share words of upper bits
        static constexpr int HIGHS = (WORDS + SHARING - 1) / SHARING;
        // Products whose words are loaded ahead, as far as registers suffice.
        static constexpr int AHEAD = WORDS == 4 && TOKENS > 16 ? 2 : TOKENS == 256 ? 4 : PRODUCTS;
        int lane, column;
        u32 low_from, high_from, slot, low_at, high_at;
        u32 low[AHEAD][WORDS][1], high[AHEAD][HIGHS][1];
        half scales[WORDS][2];
        X shift[WORDS][2];

        DEVICE Lane(int warp, int group, int lane_, u32 zero) : lane(lane_) {
            const int block = warp * WORDS / 4 + (SHARED ? group * WORDS : 0), first = warp * WORDS % 4;
            column = 64 * block + 16 * first;
            low_from = block * PRODUCTS * LOW + first * 128 + lane * 4;
            high_from = LOW_BYTES + block * PRODUCTS * HIGH + first / SHARING * 128 + lane * 4;
            slot = (1 << 2 * Code::HIGH * (first % SHARING)) + zero;  // `zero` hides the shift from the compiler
        }

        // Loads the scales and biases of the rows from `column` on.
        DEVICE void start(const half *row_scales, const X *bias, int column) {
#pragma unroll
            for (int j = 0; j < WORDS; j++)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int row = column + 16 * j + 8 * b + lane / 4;
                    scales[j][b] = row_scales[row];
                    shift[j][b] = bias ? bias[row] : X{0};
                }
        }

        DEVICE void load(u32 stage) {
            low_at = stage + low_from, high_at = stage + high_from;
#pragma unroll
            for (int s = 0; s < AHEAD; s++) load_product(s);
        }

        DEVICE void ahead(int s) {
            if (s + AHEAD < PRODUCTS) load_product(s + AHEAD);
        }

        DEVICE void load_product(int s) {
#pragma unroll
            for (int j = 0; j < WORDS; j++) load_words<1>(low[s % AHEAD][j], low_at + s * LOW + j * 128);
#pragma unroll
            for (int i = 0; i < HIGHS; i++) load_words<1>(high[s % AHEAD][i], high_at + s * HIGH + i * 128);
        }

        DEVICE void operand(int s, int j, u32 (&left)[4]) const {
            u32 upper = high[s % AHEAD][j / SHARING][0];
            if constexpr (WORDS < SHARING) upper *= slot;  // a shift, on the multiplier, which is idle otherwise
            Code::decode(upper, low[s % AHEAD][j][0], j % SHARING, left);
            constexpr u32 two_to_up = 0x00010001u * ((EXPONENT_BIAS<X> + Code::UP) << MANTISSA<X>);
            if constexpr (CONVERTED)
#pragma unroll
                for (int i = 0; i < 4; i++) multiply_pair(X{}, left[i], two_to_up);
        }

        DEVICE float factor(int j, int b) const {
            if constexpr (CONVERTED)
                return to_float(scales[j][b]);
            else
                return to_float(scales[j][b]) * (1 << Code::UP);
        }
    };
};

template <
    class X, int TOKENS, int WORDS, int WGS, int STAGES, int E, int M, bool SHARED, int CLUSTER,
    bool CONVERTED = !IS_HALF<X>>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
tcfpx_hopper(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap low_map,
    const __grid_constant__ TensorMap high_map, const half *__restrict__ scales, const X *__restrict__ bias,
    X *__restrict__ y, float *__restrict__ sums, u32 *__restrict__ counters, int m, int n, int k) {
    using Weight = Tcfpx<X, E, M, WORDS, WGS, SHARED, CONVERTED>;
    matmul_hopper<Weight, TOKENS, STAGES, CLUSTER>(
        x_map, {low_map, high_map}, scales, bias, y, sums, counters, m, n, k);
}
