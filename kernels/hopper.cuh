// Instructions of sm_90a as functions: barriers that count bytes, tile copies by the copy engine, clusters of blocks.
//
// Addresses in shared memory are 32-bit. A phase of a barrier (8 bytes) ends when all arrivals and all announced bytes
// are there. A thread waits for the phase of a given parity.
#pragma once

#include "common.cuh"

// An opaque descriptor of a matrix in global memory, made on the host (quantkit/kernels/tensormap.py).
struct __align__(64) TensorMap {
    char bytes[128];
};

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Policies for the L2 cache, as `createpolicy.fractional.L2` returns them (the constants of CUTLASS for sm_90).
constexpr u64 EVICT_FIRST = 0x12f0000000000000, EVICT_NORMAL = 0x1000000000000000;

// Copies the box of `map` that begins at (column, row). Elements outside the matrix arrive as zeros.
DEVICE void copy_tile(u32 to, const TensorMap &map, int column, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"((u64)&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The descriptor of the right operand: for each token a row of 64 values of k, 128 bytes, swizzled in blocks of eight
// tokens, 1024 bytes.
DEVICE u64 right_operand(u32 address) {
    return (u64)((address >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Named barriers: 1 hands sums over, 2 and 3 belong to one warpgroup each, 4 starts the warpgroup that lags.
DEVICE void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting.
DEVICE void arrive_threads(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// All threads of a cluster arrive and wait. `relaxed`: this orders no memory accesses, which would take much longer.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Writes N numbers to the same address in a neighbour's shared memory, and counts their bytes on its barrier.
template <int N>
DEVICE void store_neighbour(u32 address, u32 barrier, u32 rank, const float (&v)[N]) {
    u32 there, its;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its) : "r"(barrier), "r"(rank));
    constexpr int WIDE = N % 4 ? 2 : 4;  // so that a warp writes without gaps
#pragma unroll
    for (int i = 0; i < N; i += WIDE)
        if constexpr (WIDE == 2)
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                    there + 4 * i),
                "f"(v[i]), "f"(v[i + 1]), "r"(its)
                : "memory");
        else
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                    there + 4 * i),
                "f"(v[i]), "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3]), "r"(its)
                : "memory");
}

DEVICE float load_shared(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

DEVICE void store_shared4(u32 address, const float *v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

DEVICE void load_shared4(float *v, u32 address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(address)
                 : "memory");
}

// Stores two 8 x 8 matrices of 16-bit numbers transposed, each column as a row of 16 bytes. Lane 4a + q holds row a,
// columns 2q + {0, 1}. Lanes 8i + c, 0 to 15, pass the address for column c of matrix i.
DEVICE void store_transposed(u32 address, const u32 (&v)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(v[0]), "r"(v[1])
                 : "memory");
}

// Adds one to a counter. Whoever sees the sum also sees all that this block wrote before its last barrier.
DEVICE void add_release(u32 *p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }

// Loads a counter. Data that other blocks wrote before they added to it can be read afterwards.
DEVICE u32 load_acquire(const u32 *p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// Sets the registers of each thread of a warpgroup, to fewer or to more.
template <int REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int WORDS>
DEVICE void load_words(u32 (&w)[WORDS], u32 address) {
    if constexpr (WORDS == 8) {
        load_words<4>((u32(&)[4])w[0], address);
        load_words<4>((u32(&)[4])w[4], address + 16);
    } else if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(address));
    else if constexpr (WORDS == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address));
}

// As `copy_tile`, for a matrix whose rows are cut into pieces: the box begins at (column, piece, row).
DEVICE void copy_box(u32 to, const TensorMap &map, int column, int piece, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"((u64)&map), "r"(column), "r"(piece), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}
