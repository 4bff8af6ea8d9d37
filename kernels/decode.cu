// Kernels that decode rows of a packed weight to 16-bit floats; cuBLAS multiplies with these.
//
// The grid is (k / 256 rounded up, blocks of 64 rows), of 256 threads: 32 times eight columns, by eight rows.
#include "decoded.cuh"

template <class X, class Rows> DEVICE void decode_rows(const Rows &weight, X *y, u32 first) {
    const u32 k = 8 * (32 * blockIdx.x + threadIdx.x % 32);
    if (k < weight.K) write_rows(weight, y, first, blockIdx.y, threadIdx.x / 32, k);
}

// Dense MARLIN (layouts.md 3).
template <class X>
__global__ void __launch_bounds__(256) marlin_decode(
    const u32 *__restrict__ B,   // [k / 16, 2n]: eight INT4 codes a word (layouts.md 3.2)
    const half *__restrict__ s,  // [k / group, n]: scales, permuted (3.3)
    X *__restrict__ y,           // [rows, k], float16 or bfloat16: the decoded rows
    u32 first,                   // block of 64 rows of the weight with which y begins
    u32 n,                       // rows of the weight, a multiple of 64
    u32 k,                       // columns of the weight, a multiple of 16
    u32 group                    // of k that share a scale; k if there is one scale per row
) {
    decode_rows(MarlinRows{B, s, n, k, group}, y, first);
}

// Sparse-MARLIN (layouts.md 5), the weights that are not stored included.
template <class X>
__global__ void __launch_bounds__(256) marlin24_decode(
    const u32 *__restrict__ B,     // [k / 32, 2n]: eight stored INT4 codes a word (layouts.md 5.2)
    const u16 *__restrict__ meta,  // [k / 32, 2n]: which two of each four weights are stored (4.4)
    const half *__restrict__ s,    // [k / group, n]: scales, permuted (5.2)
    X *__restrict__ y,             // [rows, k], float16 or bfloat16: the decoded rows
    u32 first,                     // block of 64 rows of the weight with which y begins
    u32 n,                         // rows of the weight, a multiple of 64
    u32 k,                         // columns of the weight, a multiple of 32
    u32 group                      // of k that share a scale; k if there is one scale per row
) {
    decode_rows(Marlin24Rows{B, meta, s, n, k, group}, y, first);
}

// TC-FPx (layouts.md 7).
template <class X, int E, int M>
__global__ void __launch_bounds__(256) tcfpx_decode(
    const u32 *__restrict__ words,  // [n, k * bits / 32]: the plane of high bits, then that of four low bits
    const half *__restrict__ s,     // [n]: scales
    X *__restrict__ y,              // [rows, k], float16 or bfloat16: the decoded rows
    u32 first,                      // block of 64 rows of the weight with which y begins
    u32 n,                          // rows of the weight, a multiple of 64
    u32 k                           // columns of the weight, a multiple of 64
) {
    decode_rows(TcfpxRows<E, M>{words, s, n, k}, y, first);
}

// QUICK (layouts.md 8).
template <class X>
__global__ void __launch_bounds__(256) quick_decode(
    const u32 *__restrict__ qweight,  // [k / 4, n / 2]: eight INT4 codes a word (layouts.md 8.2)
    const u32 *__restrict__ qzeros,   // [k / group, n / 4]: four-bit zero points, each twice
    const half *__restrict__ scales,  // [k / group, 2n]: scales, each twice
    X *__restrict__ y,                // [rows, k], float16 or bfloat16: the decoded rows
    u32 first,                        // block of 64 rows of the weight with which y begins
    u32 n,                            // rows of the weight, a multiple of 128
    u32 k,                            // columns of the weight, a multiple of 32
    u32 group                         // of k that share a scale and a zero point
) {
    decode_rows(QuickRows{qweight, qzeros, scales, n, k, group}, y, first);
}
