// QUICK: INT4 with zero points, in groups (LAYOUTS 8).
#include "naive.cuh"

template <class X, class Y>
__global__ void __launch_bounds__(64) quick_naive(
    const u32 *qweight, const u32 *qzeros, const half *scales, const X *x, const X *bias, Y *y, u32 n, u32 k,
    u32 group) {
    naive(Quick{qweight, qzeros, scales, n, k, group}, x, bias, y);
}
