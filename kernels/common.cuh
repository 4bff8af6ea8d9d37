// Types, and conversions between 16-bit floats and float32.
//
// `int` is for constants, template arguments and counts. `u32` is for words of memory and shared addresses. The
// portable frame and the naive kernels also index with it: they divide by sizes that are known at run time, and signed
// division takes more registers.
//
// NVRTC has no standard headers. Tests without a GPU compile weights.cuh and others with an ordinary C++ compiler; the
// functions that these need have a second form for it.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct half {
    u16 bits;
};
struct bfloat {
    u16 bits;
};

template <class X> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<half> = true;

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__

DEVICE float to_float(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE float to_float(bfloat x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest, ties to even; numbers that are too large become infinity.
DEVICE void store(float *to, float x) { *to = x; }

DEVICE void store(half *to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }

DEVICE void store(bfloat *to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }

// Lets the next launch begin before this one has ended, if it was launched to do so. Nothing before Hopper.
DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the previous launch has ended, and the data it wrote can be read.
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Rounds both numbers to nearest, and packs them with `low` in the low half.
DEVICE u32 pair(half, float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE u32 pair(bfloat, float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

#else

#define DEVICE inline

DEVICE float to_float(half x) {
    _Float16 y;
    __builtin_memcpy(&y, &x, 2);
    return y;
}

#endif
