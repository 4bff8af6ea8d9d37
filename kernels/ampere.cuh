// Instructions of sm_80 as functions: asynchronous copies, matrix loads, and products of a 16 x 16 and a 16 x 8 tile.
//
// Fragments are described with lane = 4 * a + q, a in 0..7, q in 0..3.
#pragma once

#include "common.cuh"

// The same number, which the compiler cannot compute anew for each use.
DEVICE u32 kept(u32 x) {
    asm volatile("mov.u32 %0, %0;" : "+r"(x));
    return x;
}

// Copies 16 bytes without registers and L1, or writes 16 zeros. The copy is complete after `wait`.
DEVICE void copy_async(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// The same if `present`, without a branch.
DEVICE void copy_async(u32 to, const void *from, bool valid, bool present) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }" ::"r"(to), "l"(from),
        "r"(valid ? 16 : 0), "r"((u32)present)
        : "memory");
}

// Closes the group of all copies of this thread since the last one.
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most the last LATER groups of this thread are still in flight.
template <int LATER> DEVICE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

// Loads four 8 x 8 matrices of 16-bit numbers. Lane 8i + r passes the address of row r of matrix i, and receives the
// numbers 2q, 2q + 1 of row a of every matrix.
DEVICE void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// c += A B in float32. Register b + 2h of A holds row 8b + a, columns 8h + 2q + {0, 1}. Register h of B holds column a,
// rows 8h + 2q + {0, 1}. Number 2b + e of C is row 8b + a, column 2q + e.
DEVICE void multiply_add(half, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply_add(bfloat, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if __CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ >= 5  // from CUDA 12.5; the form that is fast on newer GPUs
#define SPARSE "mma.sp::ordered_metadata"
#else
#define SPARSE "mma.sp"
#endif

// c += A B where A is 16 x 32, and two of each aligned four in a row are stored: register b + 2h holds those of row
// 8b + a, columns 16h + 4q + {0, 1, 2, 3}. `metadata` of lanes 4a + 2 * SELECTOR + h says which two they are: four bits
// for every four of columns 16h to 16h + 15, of row a in the low half, of row 8 + a in the high half. Register h of B
// holds column a, rows 8h + 2q + {0, 1}.
template <int SELECTOR>
DEVICE void multiply_add_sparse(half, float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    asm(SPARSE ".sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(SELECTOR));
}

template <int SELECTOR>
DEVICE void multiply_add_sparse(bfloat, float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    asm(SPARSE ".sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(SELECTOR));
}

template <class X>
DEVICE void multiply_add_sparse(
    X type, float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata, u32 selector) {
    if (selector)
        multiply_add_sparse<1>(type, c, a, b, metadata);
    else
        multiply_add_sparse<0>(type, c, a, b, metadata);
}

// x + y for both numbers of a word.
DEVICE u32 add_pair(half, u32 x, u32 y) {
    asm("add.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}

// x * y + z for both numbers of a word.
DEVICE u32 fma_pair(half, u32 x, u32 y, u32 z) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(x), "r"(y), "r"(z));
    return x;
}

DEVICE u32 fma_pair(bfloat, u32 x, u32 y, u32 z) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(x), "r"(y), "r"(z));
    return x;
}

// Loads values that other blocks wrote: L1 may hold older ones.
DEVICE float4 load_past_l1(const float4 *p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
