// Dense MARLIN: symmetric INT4, groups of 128, 64 or 32 or one scale per row (LAYOUTS 3).
#include "naive.cuh"

template <class X, class Y>
__global__ void __launch_bounds__(64) marlin_naive(
    const u32 *B, const half *s, const X *x, const X *bias, Y *y, u32 n, u32 k, u32 group) {
    naive(Marlin{B, s, n, k, group}, x, bias, y);
}
