// Sparse-MARLIN: 2:4-sparse symmetric INT4, groups of 128 or one scale per row (LAYOUTS 5).
#include "naive.cuh"

template <class X, class Y>
__global__ void __launch_bounds__(64) marlin24_naive(
    const u32 *B, const u16 *meta, const half *s, const X *x, const X *bias, Y *y, u32 n, u32 k, u32 group) {
    naive(Marlin24{B, meta, s, n, k, group}, x, bias, y);
}
