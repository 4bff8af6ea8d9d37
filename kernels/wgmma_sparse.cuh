// Warpgroup products of a sparse left operand: d[64, tokens] (+)= a[64, 32] b[32, tokens] (sm_90a), as in wgmma.cuh.
//
// Of each aligned four of a row of a, two are stored: the registers are those of a dense a[64, 16]. Which two they are is
// in `metadata` of lanes 4i + 2 * SELECTOR + h: four bits for each four of columns 16h to 16h + 15, of row i of the warp
// in the low half and of row 8 + i in the high half.
#pragma once

#include "hopper.cuh"

#define LIST_4 "%0, %1, %2, %3"
#define LIST_8 LIST_4 ", %4, %5, %6, %7"
#define LIST_16 LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32 LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64                                                                                              \
    LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "   \
            "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)

// The last eight arguments are the numbers of the operands after the sums.
#define WGMMA_SPARSE(X, NAME, TOKENS, SUMS, A0, A1, A2, A3, B, METADATA, SELECT, KEEP)                               \
    template <int SELECTOR>                                                                                          \
    DEVICE void wgmma_sparse(X, float(&d)[SUMS], const u32(&a)[4], u32 metadata, u64 b, int keep) {                  \
        asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #KEEP ", 0;\n"                                       \
                     "wgmma.mma_async.sp.sync.aligned.m64n" #TOKENS "k32.f32." NAME "." NAME " {" LIST_##SUMS "}, "  \
                     "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", %" #METADATA ", %" #SELECT                  \
                     ", keep, 1, 1, 0;\n}"                                                                           \
                     : SUMS_##SUMS(0)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata), "n"(SELECTOR), "r"(keep)); \
    }
#define WGMMA_SPARSE_BOTH(...)                \
    WGMMA_SPARSE(half, "f16", __VA_ARGS__)    \
    WGMMA_SPARSE(bfloat, "bf16", __VA_ARGS__)

WGMMA_SPARSE_BOTH(8, 4, 4, 5, 6, 7, 8, 9, 10, 11)
WGMMA_SPARSE_BOTH(16, 8, 8, 9, 10, 11, 12, 13, 14, 15)
WGMMA_SPARSE_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22, 23)
WGMMA_SPARSE_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
WGMMA_SPARSE_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
