// QUICK on Hopper (layouts.md 8): MARLIN's words in another order, which make the same left operands, and zero points.
//
// 32 of k are four rows in memory: one for each half of 128 columns (ty) and each half of eight (a / 4). In each row
// 128 columns take 512 bytes, so the weights of a stage are one box of 16 rows. A lane's two vectors of 32 of k are
// neighbours, so a warp loads every other 16 bytes. Swizzled by the copy engine in pieces of 128 bytes, these loads
// have no bank conflicts.
#include "hopper_routed.cuh"
#include "int4.cuh"

// GROUP: of k that share a scale and a zero point.
template <class X_, int WORDS_, int WGS_, int GROUP, bool SHARED_>
struct QuickWeight {
    using X = X_;
    static constexpr int WORDS = WORDS_, WGS = WGS_, STEP = 16;
    static constexpr bool SHARED = SHARED_, SINGLE = false;
    // Scales are multiplied into float16 weights instead of the sums. bfloat16 would round the product.
    static constexpr bool SCALED = SHARED && IS_HALF<X>;
    static constexpr int BN = 64 * WORDS * (SHARED ? WGS : 1), PIECES = BN / 32;
    static_assert(BN % 128 == 0, "two blocks of 64 columns are interleaved in memory");
    static constexpr int PRODUCTS = BK / STEP, CHUNK = SCALED ? 0 : GROUP / 16;
    static constexpr int PER_SCALE = GROUP / 16, GROUPS = BK / GROUP;
    // Bytes of a row of codes, of scales and of zero points in a stage; a row holds a quarter of the columns.
    static constexpr int W_ROW = BN * 4, S_ROW = BN, Z_ROW = BN / 4;
    static constexpr int S_AT = 16 * W_ROW, Z_AT = S_AT + 4 * GROUPS * S_ROW, BYTES = Z_AT + 4 * GROUPS * Z_ROW;
    static constexpr int PADDED_BYTES = (BYTES + 1023) / 1024 * 1024;  // the swizzle depends on the address

    struct Maps {
        const TensorMap &words, &zeros, &scales;
    };

    DEVICE static void fetch(const Maps &maps, u32 to, int n_tile, int step, int first, u32 barrier, u64 policy) {
        step += first;
        copy_box(to, maps.words, 0, n_tile * PIECES, step * 16, barrier, policy);
        copy_tile(to + S_AT, maps.scales, n_tile * BN / 2, step * 4 * GROUPS, barrier, policy);
        copy_tile(to + Z_AT, maps.zeros, n_tile * BN / 32, step * 4 * GROUPS, barrier, policy);
    }

    // The row of a warp's that row 8b + a of operand j is.
    DEVICE static int row(int n0, int a, int j, int b) { return n0 + 16 * j + 8 * b + a; }

    template <int BM>
    struct Lane {
        static constexpr int LANE_WORDS = BN / 64;                          // of a lane for 16 of k
        static constexpr int AHEAD = WORDS * BM == 128 ? 2 : PRODUCTS;  // products whose words are loaded ahead
        static constexpr int Z_WORDS = WORDS == 4 ? 2 : 1;                       // zero points of four words
        int block, word_0, n0;  // of this warp: its 64 rows of the tile, its first word and row
        int a;
        Masks mask;
        u32 places[2], s_place, z_place;  // in a stage: of even and odd products
        u32 at[2], codes[AHEAD][WORDS], scales[GROUPS][2 * WORDS], zeros[GROUPS][Z_WORDS];
        Zero zero[WORDS][2];

        DEVICE Lane(int warp, int group, int lane, u32 zero) : a(lane / 4), mask(zero) {
            block = warp * LANE_WORDS / 4;
            word_0 = warp * LANE_WORDS % 4 + (SHARED ? group * WORDS : 0);
            n0 = 64 * block + 16 * word_0;
            const int row = block % 2 * 2 + a / 4, piece = row * PIECES + block / 2 * 4 + a % 4, q = lane % 4;
#pragma unroll
            for (int i = 0; i < 2; i++) places[i] = piece * 128 + ((2 * q + i) ^ (piece % 8)) * 16 + word_0 * 4;
            s_place = S_AT + row * S_ROW + block / 2 * 128 + a % 4 * 32 + word_0 * 8;
            z_place = Z_AT + row * Z_ROW + block / 2 * 32 + a % 4 * 8 + word_0 / 2 * 4;
        }

        DEVICE int quad() const { return (int)threadIdx.x % 32 / 4; }

        DEVICE void load_codes(int s) { load_words<WORDS>(codes[s % AHEAD], at[s % 2] + s / 2 * 4 * W_ROW); }

        DEVICE void load(u32 stage) {
#pragma unroll
            for (int i = 0; i < 2; i++) at[i] = stage + places[i];
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                load_words<Z_WORDS>(zeros[g], stage + z_place + g * 4 * Z_ROW);
                if (WORDS == 1) zeros[g][0] >>= word_0 % 2 * 8;
            }
#pragma unroll
            for (int s = 0; s < AHEAD; s++) load_codes(s);
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                load_words<2 * WORDS>(scales[g], stage + s_place + g * 4 * S_ROW);
        }

        DEVICE void ahead(int s) {
            if (s + AHEAD < PRODUCTS) load_codes(s + AHEAD);
        }

        DEVICE void operand(int s, int j, u32 (&left)[4]) {
            if (s % PER_SCALE == 0)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int y = 2 * j + b;
                    zero[j][b] = zero_of(X{}, mask, zeros[s / PER_SCALE][y / 4], y % 4);
                }
            decode(X{}, mask, codes[s % AHEAD][j], zero[j][0], zero[j][1], left);
            if constexpr (SCALED)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    asm("mul.f16x2 %0, %0, %1;" : "+r"(left[i]) : "r"(scales[s / PER_SCALE][2 * j + i % 2]));
        }

        DEVICE float scale(int s, int j, int b) const {
            return to_float(half{(u16)scales[s / PER_SCALE][2 * j + b]});
        }
    };
};

template <class X, int BM, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
quick_hopper(
    const __grid_constant__ TensorMap x_map,  // [m, k], float16 or bfloat16: activations, in boxes [BM, 64]
    const __grid_constant__ TensorMap w_map,  // [k / 8, n / 32, 16], 8 bytes: codes, in boxes [BK / 8, BN / 32, 16]
    const __grid_constant__ TensorMap z_map,  // [4k / GROUP, n / 32], 8 bytes: zeros, in boxes [4 BK / GROUP, BN / 32]
    const __grid_constant__ TensorMap s_map,  // [4k / GROUP, n / 2], float16: scales, in boxes [4 BK / GROUP, BN / 2]
    const half *__restrict__ scales,          // not read
    const X *__restrict__ bias,               // [n], or null
    X *__restrict__ y,                        // [m, n]: the product
    float *__restrict__ sums,                 // partial sums of shared tiles, for each block and warpgroup
    u32 *__restrict__ counters,               // blocks of a tile that have stored theirs; zero before and after
    int m,                                    // tokens
    int n,                                    // rows of the weight, a multiple of 128
    int k                                     // columns of the weight, a multiple of 32
) {
    using Weight = QuickWeight<X, WORDS, WGS, GROUP, SHARED>;
    matmul_hopper<Weight, BM, STAGES, CLUSTER>(
        x_map, {w_map, z_map, s_map}, scales, bias, y, sums, counters, m, n, k);
}

template <class X, int BM, int WORDS, int WGS, int STAGES, int GROUP, bool SHARED, class Y>
__global__ void __launch_bounds__(128 * WGS + 128, WGS == 1 ? 2 : 1)
quick_routed_hopper(
    const __grid_constant__ TensorMap x_map,  // [max_tiles * BM, k]: in the order of the list, in boxes [BM, 64]
    const __grid_constant__ TensorMap w_map,  // [experts * k / 8, n / 32, 16], as above
    const __grid_constant__ TensorMap z_map,  // [experts * 4k / GROUP, n / 32], as above
    const __grid_constant__ TensorMap s_map,  // [experts * 4k / GROUP, n / 2], as above
    const half *__restrict__ scales,          // not read
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
    routed_hopper<QuickWeight<X, WORDS, WGS, GROUP, SHARED>, BM, STAGES, Y>(
        x_map, {w_map, z_map, s_map}, scales, y, sums, counters, list, weights, powers, max_tiles, stride, n, k);
}
