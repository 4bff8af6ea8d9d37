// TC-FPx on Hopper (layouts.md 7): codes of six or five bits in two planes are the left operand of warpgroup products.
//
// A block of 64 rows is contiguous along k in each plane. A lane's words of a 16 x 16 block are its fragment of the
// left operand, with n as the row. A warp may take any 16 rows, and takes neighbouring ones, which share the words of
// upper bits. The power of two that decoding leaves out is multiplied into the row's scale, once, in float32. bfloat16
// weights are converted instead: with the exponent range of float32 the sums would be subnormal.
#include "hopper_routed.cuh"
#include "tcfpx_decode.cuh"

DEVICE void multiply_pair(half, u32 &a, u32 by) { asm("mul.f16x2 %0, %0, %1;" : "+r"(a) : "r"(by)); }

DEVICE void multiply_pair(bfloat, u32 &a, u32 by) { asm("mul.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(by)); }

// CONVERTED: each weight is multiplied by the power of two.
template <class X_, int E, int M, int WORDS_, int WGS_, bool SHARED_, bool CONVERTED>
struct TcfpxWeight {
    using X = X_;
    using Code = Codes<X, E, M>;
    static constexpr int WORDS = WORDS_, WGS = WGS_, STEP = 16;
    static constexpr bool SHARED = SHARED_, SINGLE = true;
    static constexpr int BLOCKS = WORDS * (SHARED ? WGS : 1), BN = 64 * BLOCKS;
    static constexpr int PRODUCTS = BK / STEP, CHUNK = 0;
    // Bytes of a block of 64 rows by 16 of k in each plane, and of the whole stage.
    static constexpr int LOW = 512, HIGH = 128 * Code::HIGH, LOW_BYTES = BLOCKS * PRODUCTS * LOW;
    static constexpr int BYTES = LOW_BYTES + BLOCKS * PRODUCTS * HIGH, PADDED_BYTES = BYTES;

    struct Maps {
        const TensorMap &low, &high;  // 8-byte words, a row for each block; `low` is cut into pieces of 64 of k
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int n_tile, int step, int first, u32 barrier, u64 policy) {
        const int row = n_tile * BLOCKS;
        copy_box(to, maps.low, 0, step * 2, row + first, barrier, policy);
        copy_tile(to + LOW_BYTES, maps.high, step * PRODUCTS * HIGH / 8, row + first * (4 / Code::HIGH), barrier, policy);
    }

    // The row of a warp's that row 8b + a of operand j is.
    DEVICE static int row(int n0, int a, int j, int b) { return n0 + 16 * j + 8 * b + a; }

    DEVICE static int single(int n) { return n; }

    DEVICE static float factor(half scale) {
        if constexpr (CONVERTED)
            return to_float(scale);
        else
            return to_float(scale) * (1 << Code::UP);
    }

    template <int BM>
    struct Lane {
        static constexpr int SHARING = 4 / Code::HIGH;  // blocks of 16 rows that share words of upper bits
        static constexpr int HIGHS = (WORDS + SHARING - 1) / SHARING;
        // Products whose words are loaded ahead, as far as registers suffice.
        static constexpr int AHEAD = WORDS == 4 && BM > 16 ? 2 : BM == 256 ? 4 : PRODUCTS;
        int lane, n0;
        u32 low_from, high_from, slot, low_at, high_at;
        u32 low[AHEAD][WORDS][1], high[AHEAD][HIGHS][1];

        DEVICE Lane(int warp, int group, int lane_, u32 zero) : lane(lane_) {
            const int block = warp * WORDS / 4 + (SHARED ? group * WORDS : 0), first = warp * WORDS % 4;
            n0 = 64 * block + 16 * first;
            low_from = block * PRODUCTS * LOW + first * 128 + lane * 4;
            high_from = LOW_BYTES + block * PRODUCTS * HIGH + first / SHARING * 128 + lane * 4;
            slot = (1 << 2 * Code::HIGH * (first % SHARING)) + zero;  // `zero` hides the shift from the compiler
        }

        DEVICE int quad() const { return lane / 4; }

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
    };
};

template <
    class X, int BM, int WORDS, int WGS, int STAGES, int E, int M, bool SHARED, int CLUSTER,
    bool CONVERTED = !IS_HALF<X>>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
tcfpx_hopper(
    const __grid_constant__ TensorMap x_map,     // [m, k], float16 or bfloat16: activations, in boxes [BM, 64]
    const __grid_constant__ TensorMap low_map,   // [n / 64, k / 64, 256], 8 bytes: low bits; [BN / 64, BK / 64, 256]
    const __grid_constant__ TensorMap high_map,  // [n / 64, k * HIGH], 8 bytes: high bits; [BN / 64, BK * HIGH]
    const half *__restrict__ scales,             // [n]: scales
    const X *__restrict__ bias,                  // [n], or null
    X *__restrict__ y,                           // [m, n]: the product
    float *__restrict__ sums,                    // partial sums of shared tiles, for each block and warpgroup
    u32 *__restrict__ counters,                  // blocks of a tile that have stored theirs; zero before and after
    int m,                                       // tokens
    int n,                                       // rows of the weight, a multiple of 64
    int k                                        // columns of the weight, a multiple of 64
) {
    using Weight = TcfpxWeight<X, E, M, WORDS, WGS, SHARED, CONVERTED>;
    matmul_hopper<Weight, BM, STAGES, CLUSTER>(
        x_map, {low_map, high_map}, scales, bias, y, sums, counters, m, n, k);
}

template <class X, int BM, int WORDS, int WGS, int STAGES, int E, int M, bool SHARED, class Y>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
tcfpx_routed_hopper(
    const __grid_constant__ TensorMap x_map,     // [max_tiles * BM, k]: activations in the order of the list, in boxes [BM, 64]
    const __grid_constant__ TensorMap low_map,   // as above, of all experts with what is between them
    const __grid_constant__ TensorMap high_map,  // as above, of all experts with what is between them
    const half *__restrict__ scales,             // [experts, n]: scales
    Y *__restrict__ y,                           // [rows, n]: the products
    float *__restrict__ sums,                    // as above
    u32 *__restrict__ counters,                  // as above
    const u32 *__restrict__ list,                // of tiles, see routing.cuh
    const float *__restrict__ weights,           // [rows]: factors of the rows of y, or null
    const float *__restrict__ powers,            // [max_tiles * BM]: factors of the places of the list, or null
    u32 max_tiles,                               // of the list
    int stride,                                  // see hopper_routed.cuh
    int n,                                       // as above
    int k                                        // as above, a multiple of 128
) {
    routed_hopper<TcfpxWeight<X, E, M, WORDS, WGS, SHARED, !IS_HALF<X>>, BM, STAGES, Y>(
        x_map, {low_map, high_map}, scales, y, sums, counters, list, weights, powers, max_tiles, stride, n, k);
}
