// The reference kernels: y = x W^T + bias with one thread for each output, for every layout.
//
// Sums are float32, in the order of k, and rounded once at the end. All faster kernels are compared with these. The
// grid is (m, n / 64) of 64 threads; n is a multiple of 64, k of 16.
#include "weights.cuh"

template <class Weight, class X, class Y>
DEVICE void naive(Weight weight, const X *__restrict__ x, const X *__restrict__ bias, Y *__restrict__ y) {
    u32 n = blockIdx.y * 64 + threadIdx.x;
    x += (u64)blockIdx.x * weight.K;
    float sum = 0;
    for (u32 k = 0; k < weight.K; k += 8) {
        // Zeros add nothing to a finite sum, and unit vectors consist of them (proof.py), so eight are skipped at once.
        uint4 eight = *(const uint4 *)(x + k);
        if (!(eight.x | eight.y | eight.z | eight.w)) continue;
        for (u32 i = k; i < k + 8; i++) sum += to_float(x[i]) * weight(n, i);
    }
    if (bias) sum += to_float(bias[n]);
    store(y + (u64)blockIdx.x * weight.N + n, sum);
}

// Dense MARLIN: symmetric INT4, groups of 128, 64 or 32, or one scale per row (layouts.md 3).
template <class X, class Y>
__global__ void __launch_bounds__(64) marlin_naive(
    const u32 *B,   // [k / 16, 2n]: eight INT4 codes a word (layouts.md 3.2)
    const half *s,  // [k / group, n]: scales, permuted (3.3)
    const X *x,     // [m, k], float16 or bfloat16: activations
    const X *bias,  // [n], or null
    Y *y,           // [m, n], of the type of x or float32: the product
    u32 n,          // rows of the weight, a multiple of 64
    u32 k,          // columns of the weight, a multiple of 16
    u32 group       // of k that share a scale; k if there is one scale per row
) {
    naive(Marlin{B, s, n, k, group}, x, bias, y);
}

// Sparse-MARLIN: 2:4-sparse symmetric INT4, groups of 128 or one scale per row (layouts.md 5).
template <class X, class Y>
__global__ void __launch_bounds__(64) marlin24_naive(
    const u32 *B,     // [k / 32, 2n]: eight stored INT4 codes a word (layouts.md 5.2)
    const u16 *meta,  // [k / 32, 2n]: which two of each four weights are stored (4.4)
    const half *s,    // [k / group, n]: scales, permuted (5.2)
    const X *x,       // [m, k], float16 or bfloat16: activations
    const X *bias,    // [n], or null
    Y *y,             // [m, n], of the type of x or float32: the product
    u32 n,            // rows of the weight, a multiple of 64
    u32 k,            // columns of the weight, a multiple of 32
    u32 group         // of k that share a scale; k if there is one scale per row
) {
    naive(Marlin24{B, meta, s, n, k, group}, x, bias, y);
}

// TC-FPx: floating formats of six and five bits in bit planes, one scale per row (layouts.md 7).
template <class X, class Y, int E, int M>
__global__ void __launch_bounds__(64) tcfpx_naive(
    const u32 *words,  // [n, k * bits / 32]: the plane of high bits, then that of four low bits (layouts.md 7)
    const half *s,     // [n]: scales
    const X *x,        // [m, k], float16 or bfloat16: activations
    const X *bias,     // [n], or null
    Y *y,              // [m, n], of the type of x or float32: the product
    u32 n,             // rows of the weight, a multiple of 64
    u32 k              // columns of the weight, a multiple of 64
) {
    naive(Tcfpx<E, M>{words, s, n, k}, x, bias, y);
}

// QUICK: INT4 with zero points, in groups (layouts.md 8).
template <class X, class Y>
__global__ void __launch_bounds__(64) quick_naive(
    const u32 *qweight,  // [k / 4, n / 2]: eight INT4 codes a word (layouts.md 8.2)
    const u32 *qzeros,   // [k / group, n / 4]: four-bit zero points, each twice
    const half *scales,  // [k / group, 2n]: scales, each twice
    const X *x,          // [m, k], float16 or bfloat16: activations
    const X *bias,       // [n], or null
    Y *y,                // [m, n], of the type of x or float32: the product
    u32 n,               // rows of the weight, a multiple of 128
    u32 k,               // columns of the weight, a multiple of 32
    u32 group            // of k that share a scale and a zero point
) {
    naive(Quick{qweight, qzeros, scales, n, k, group}, x, bias, y);
}
