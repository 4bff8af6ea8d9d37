// Warpgroup products d[64, tokens] (+)= a[64, 16] b[16, tokens], a in registers, b in shared memory (sm_90a).
//
// `keep` = 0 starts from zero. A thread of warp w holds rows 16w + lane / 4 and 8 more; d[4t + {0, 1}] are tokens
// 8t + 2 (lane % 4) + {0, 1} of the first row, d[4t + {2, 3}] those of the second.
//
// The sparse products are d[64, tokens] (+)= a[64, 32] b[32, tokens]. Of each aligned four of a row of a, two are
// stored, so the registers are those of a dense a[64, 16]. `metadata` of lanes 4i + 2 * SELECTOR + h says which two:
// four bits for each four of columns 16h to 16h + 15, of row i of the warp in the low half and of row 8 + i in the high
// half.
#pragma once

#include "hopper.cuh"

template <int TOKENS, class X>
DEVICE void wgmma(float (&d)[TOKENS / 2], const u32 (&a)[4], u64 b, int keep);

// The instruction lists its registers one by one: LIST_n names the first n operands, SUMS_n(0) passes n sums for them.
#define LIST_4 "%0, %1, %2, %3"
#define LIST_8 LIST_4 ", %4, %5, %6, %7"
#define LIST_16 LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32 LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64                                                                                              \
    LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "   \
            "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_128                                                                                             \
    LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "   \
            "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "     \
            "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, "     \
            "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)

// TYPE is the instruction's name for X. The arguments after SUMS are the numbers of the operands that follow the sums:
// four registers of a and b, then P to S as each product uses them.
#define WGMMA(X, TYPE, TOKENS, SUMS, A0, A1, A2, A3, B, P, Q, S)                                                     \
    template <>                                                                                                      \
    DEVICE void wgmma<TOKENS, X>(float(&d)[SUMS], const u32(&a)[4], u64 b, int keep) {                               \
        asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #P ", 0;\n"                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32." TYPE "." TYPE " {" LIST_##SUMS "}, "     \
                     "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", keep, 1, 1, 0;\n}"                          \
                     : SUMS_##SUMS(0)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                               \
    }
#define WGMMA_SPARSE(X, TYPE, TOKENS, SUMS, A0, A1, A2, A3, B, P, Q, S)                                              \
    template <int SELECTOR>                                                                                          \
    DEVICE void wgmma_sparse(X, float(&d)[SUMS], const u32(&a)[4], u32 metadata, u64 b, int keep) {                  \
        asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #S ", 0;\n"                                          \
                     "wgmma.mma_async.sp.sync.aligned.m64n" #TOKENS "k32.f32." TYPE "." TYPE " {" LIST_##SUMS "}, "  \
                     "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", %" #P ", %" #Q ", keep, 1, 1, 0;\n}"        \
                     : SUMS_##SUMS(0)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata), "n"(SELECTOR), "r"(keep)); \
    }
#define WGMMA_ALL(...)                    \
    WGMMA(half, "f16", __VA_ARGS__)       \
    WGMMA(bfloat, "bf16", __VA_ARGS__)    \
    WGMMA_SPARSE(half, "f16", __VA_ARGS__) \
    WGMMA_SPARSE(bfloat, "bf16", __VA_ARGS__)

WGMMA_ALL(8, 4, 4, 5, 6, 7, 8, 9, 10, 11)
WGMMA_ALL(16, 8, 8, 9, 10, 11, 12, 13, 14, 15)
WGMMA_ALL(32, 16, 16, 17, 18, 19, 20, 21, 22, 23)
WGMMA_ALL(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
WGMMA_ALL(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
WGMMA_ALL(256, 128, 128, 129, 130, 131, 132, 133, 134, 135)
