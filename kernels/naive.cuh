// y = x W^T + bias, the obvious way: one thread for each output, float32 sums along k in order, rounded once at the end.
//
// The judge of every faster kernel. The grid is (m, n / 64) of 64 threads; n is a multiple of 64 and k of 16.
#pragma once

#include "weights.cuh"

template <class Weight, class X, class Y>
DEVICE void naive(Weight weight, const X *__restrict__ x, const X *__restrict__ bias, Y *__restrict__ y) {
    u32 n = blockIdx.y * 64 + threadIdx.x;
    x += (u64)blockIdx.x * weight.K;
    float sum = 0;
    for (u32 k = 0; k < weight.K; k += 8) {
        // Eight zeros add nothing to any finite weights, and of a unit vector they are all but one: see proof.py.
        uint4 eight = *(const uint4 *)(x + k);
        if (!(eight.x | eight.y | eight.z | eight.w)) continue;
        for (u32 i = k; i < k + 8; i++) sum += to_float(x[i]) * weight(n, i);
    }
    if (bias) sum += to_float(bias[n]);
    store(y + (u64)blockIdx.x * weight.N + n, sum);
}
