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
    const u32 *B, const half *s, const X *x, const X *bias, Y *y, u32 n, u32 k, u32 group) {
    naive(Marlin{B, s, n, k, group}, x, bias, y);
}

// Sparse-MARLIN: 2:4-sparse symmetric INT4, groups of 128 or one scale per row (layouts.md 5).
template <class X, class Y>
__global__ void __launch_bounds__(64) marlin24_naive(
    const u32 *B, const u16 *meta, const half *s, const X *x, const X *bias, Y *y, u32 n, u32 k, u32 group) {
    naive(Marlin24{B, meta, s, n, k, group}, x, bias, y);
}

// TC-FPx: floating formats of six and five bits in bit planes, one scale per row (layouts.md 7).
template <class X, class Y, int E, int M>
__global__ void __launch_bounds__(64) tcfpx_naive(
    const u32 *words, const half *s, const X *x, const X *bias, Y *y, u32 n, u32 k) {
    naive(Tcfpx<E, M>{words, s, n, k}, x, bias, y);
}

// QUICK: INT4 with zero points, in groups (layouts.md 8).
template <class X, class Y>
__global__ void __launch_bounds__(64) quick_naive(
    const u32 *qweight, const u32 *qzeros, const half *scales, const X *x, const X *bias, Y *y, u32 n, u32 k,
    u32 group) {
    naive(Quick{qweight, qzeros, scales, n, k, group}, x, bias, y);
}
