// Dense MARLIN on Hopper: packed words become the left operand of warpgroup products.
//
// A lane's word of a 16 x 16 tile is its fragment of the left operand, with n as the row: nibble 4e + 2b + h is
// k = 8h + 2q + e, n = 8b + a, lane = 4a + q (layouts.md 3.2). A warp may take any 16 rows, because rows of the operand
// are rows of the result. So weights go from shared memory to registers in vectors of up to 16 bytes, and nothing is
// written back. Activations are the right operand, swizzled by the copy engine.
#include "hopper_routed.cuh"
#include "int4.cuh"

// GROUP: of k that share a scale, 0 for one scale per row.
template <class X_, int WORDS_, int WGS_, int GROUP, bool SHARED_>
struct MarlinWeight {
    using X = X_;
    static constexpr int WORDS = WORDS_, WGS = WGS_, STEP = 16;
    static constexpr bool SHARED = SHARED_, SINGLE = GROUP == 0;
    // Scales are multiplied into float16 weights instead of the sums. bfloat16 would round the product.
    static constexpr bool SCALED = SHARED && GROUP > 0 && IS_HALF<X>;
    static constexpr int BN = 64 * WORDS * (SHARED ? WGS : 1);
    static constexpr int PRODUCTS = BK / STEP, CHUNK = GROUP && !SCALED ? GROUP / 16 : 0;
    static constexpr int SCALE_ROWS = GROUP ? BK / GROUP : 0;
    static constexpr int W_BYTES = BN * BK / 2, S_BYTES = SCALE_ROWS * BN * 2;
    static constexpr int BYTES = W_BYTES + S_BYTES, PADDED_BYTES = (BYTES + 127) / 128 * 128;

    struct Maps {
        const TensorMap &words, &scales;
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int n_tile, int step, int first, u32 barrier, u64 policy) {
        step += first;
        copy_tile(to, maps.words, n_tile * BN, step * PRODUCTS, barrier, policy);
        if constexpr (GROUP > 0)
            copy_tile(to + W_BYTES, maps.scales, n_tile * BN, step * SCALE_ROWS, barrier, policy);
    }

    // The row of a warp's that row 8b + a of operand j is.
    DEVICE static int row(int n0, int a, int j, int b) { return n0 + 16 * j + 8 * b + a; }

    // One scale per row: n = 8c + 2i + e of 32 is stored at 8i + 2c + e (layouts.md 3.3).
    DEVICE static int single(int n) {
        const int in = n % 32;
        return n - in + 8 * (in % 8 / 2) + 2 * (in / 8) + in % 2;
    }

    DEVICE static float factor(half scale) { return to_float(scale); }

    template <int BM>
    struct Lane {
        static constexpr int LANE_WORDS = BN / 64;                            // of a lane for 16 of k
        static constexpr int AHEAD = WORDS == 4 && BM > 16 ? 2 : PRODUCTS;  // products whose words are loaded ahead
        static constexpr int PER_SCALE = GROUP ? GROUP / 16 : PRODUCTS;
        int block, word_0, lane, n0;  // of this warp: its 64 rows of the tile, its first word and row
        Masks mask;
        u32 at, codes[AHEAD][WORDS], scales[PRODUCTS / PER_SCALE][WORDS];

        DEVICE Lane(int warp, int group, int lane_, u32 zero) : lane(lane_), mask(zero) {
            block = warp * LANE_WORDS / 4;
            word_0 = warp * LANE_WORDS % 4 + (SHARED ? group * WORDS : 0);
            n0 = 64 * block + 16 * word_0;
        }

        DEVICE int quad() const { return lane / 4; }

        DEVICE void load(u32 stage) {
            at = stage + block * 512 + lane * 16 + word_0 * 4;
#pragma unroll
            for (int s = 0; s < AHEAD; s++) load_words<WORDS>(codes[s], at + s * BN * 8);
            const u32 scales_at = stage + W_BYTES + block * 128 + lane / 4 * 16 + word_0 * 4;
            if constexpr (GROUP > 0)
#pragma unroll
                for (int c = 0; c < PRODUCTS / PER_SCALE; c++) load_words<WORDS>(scales[c], scales_at + c * BN * 2);
        }

        DEVICE void ahead(int s) {
            if (s + AHEAD < PRODUCTS) load_words<WORDS>(codes[s % AHEAD], at + (s + AHEAD) * BN * 8);
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
    };
};

template <class X, int BM, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
marlin_hopper(
    const __grid_constant__ TensorMap x_map,  // [m, k], float16 or bfloat16: activations, in boxes [BM, 64]
    const __grid_constant__ TensorMap w_map,  // [k / 16, n], 8 bytes: codes (layouts.md 3.2), in boxes [BK / 16, BN]
    const __grid_constant__ TensorMap s_map,  // [k / GROUP, n], float16: scales (3.3), in boxes [BK / GROUP, BN]
    const half *__restrict__ scales,          // [n]: scales, permuted (3.3); not read if there are groups
    const X *__restrict__ bias,               // [n], or null
    X *__restrict__ y,                        // [m, n]: the product
    float *__restrict__ sums,                 // partial sums of shared tiles, for each block and warpgroup
    u32 *__restrict__ counters,               // blocks of a tile that have stored theirs; zero before and after
    int m,                                    // tokens
    int n,                                    // rows of the weight, a multiple of 64
    int k                                     // columns of the weight, a multiple of 16
) {
    using Weight = MarlinWeight<X, WORDS, WGS, GROUP, SHARED>;
    matmul_hopper<Weight, BM, STAGES, CLUSTER>(x_map, {w_map, s_map}, scales, bias, y, sums, counters, m, n, k);
}

template <class X, int BM, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, class Y>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
marlin_routed_hopper(
    const __grid_constant__ TensorMap x_map,  // [max_tiles * BM, k]: in the order of the list, in boxes [BM, 64]
    const __grid_constant__ TensorMap w_map,  // [experts * k / 16, n], as above
    const __grid_constant__ TensorMap s_map,  // [experts * k / GROUP, n], as above
    const half *__restrict__ scales,          // [experts, n], as above
    Y *__restrict__ y,                        // [rows, n]: the products
    float *__restrict__ sums,                 // as above
    u32 *__restrict__ counters,               // as above
    const u32 *__restrict__ list,             // of tiles, see routing.cuh
    const float *__restrict__ weights,        // [rows]: factors of the rows of y, or null
    const float *__restrict__ powers,         // [max_tiles * BM]: factors of the places of the list, or null
    u32 max_tiles,                            // of the list
    int stride,                               // see hopper_routed.cuh
    int n,                                    // as above
    int k                                     // as above, a multiple of 128
) {
    routed_hopper<MarlinWeight<X, WORDS, WGS, GROUP, SHARED>, BM, STAGES, Y>(
        x_map, {w_map, s_map}, scales, y, sums, counters, list, weights, powers, max_tiles, stride, n, k);
}
