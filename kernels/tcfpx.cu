// TC-FPx: floating formats of six and five bits in bit planes, one scale per row (LAYOUTS 7).
#include "naive.cuh"

template <class X, class Y, int E, int M>
__global__ void __launch_bounds__(64) tcfpx_naive(
    const u32 *words, const half *s, const X *x, const X *bias, Y *y, u32 n, u32 k) {
    naive(Tcfpx<E, M>{words, s, n, k}, x, bias, y);
}
