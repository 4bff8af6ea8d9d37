// What GPTQ's Hessian asks of each token: its norm, and its scaling where it is extreme (algorithms.md 2).
//
// A block of threads takes a token, a thread eight neighbouring channels at a time. The sum has a fixed order.
#include "common.cuh"

constexpr int THREADS = 256;

template <class T>
struct alignas(16) Eight {
    T values[8];
};

template <class T>
__global__ void __launch_bounds__(THREADS) gptq_norms(
    const T *__restrict__ x,               // [tokens, k], float16 or bfloat16
    const float *__restrict__ magnitudes,  // [k]: the unit of each channel
    float *__restrict__ norms,             // [tokens]: the length of each token of x / magnitudes
    int k                                  // channels, a multiple of eight
) {
    __shared__ float sums[THREADS / 32];
    const Eight<T> *token = (const Eight<T> *)(x + (u64)blockIdx.x * k);
    const Eight<float> *units = (const Eight<float> *)magnitudes;
    float sum = 0;
    for (int i = threadIdx.x; i < k / 8; i += THREADS) {
        Eight<T> eight = token[i];
        Eight<float> unit = units[i];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float part = to_float(eight.values[j]) / unit.values[j];
            sum += part * part;
        }
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < THREADS / 32; warp++) sum += sums[warp];
    norms[blockIdx.x] = sqrtf(sum);
}

template <class T>
__global__ void __launch_bounds__(THREADS) gptq_scale(
    T *x,                               // [tokens, k], float16 or bfloat16: multiplied in place
    const float *__restrict__ factors,  // [tokens]; most are 1, and such tokens are not read
    int k                               // channels
) {
    float factor = factors[blockIdx.x];
    if (factor == 1) return;
    T *token = x + (u64)blockIdx.x * k;
    for (int i = threadIdx.x; i < k; i += THREADS) store(token + i, to_float(token[i]) * factor);
}
