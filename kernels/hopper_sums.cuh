// Adds the partial sums of a tile: of warpgroups in a block, of blocks in a cluster, or of blocks anywhere in the grid.
// Always in the order of k, so that every run returns the same bits.
//
// F is a Frame, B a Block (hopper_matmul.cuh).
#pragma once

#include "hopper.cuh"

constexpr int MAX_CLUSTER = 8;  // as CLUSTER: three to eight blocks, known at launch

// The first warpgroup adds the sums of the others, in order.
template <class F, class B>
DEVICE void hand_over(const B &b, int group, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int R = F::SUMS;
    const u32 mine = b.handed_over_at + threadIdx.x % 128 * 16;
    if (group > 0)
#pragma unroll
        for (int i = 0; i < F::ALL; i += 4)
            store_shared4(mine + ((group - 1) * F::ALL + i) * 512, &total[i / R][i % R]);
    sync_threads(1, 128 * F::WGS);
    if (group == 0)
#pragma unroll
        for (int i = 0; i < (F::WGS - 1) * F::ALL; i += 4) {
            float theirs[4];
            load_shared4(theirs, mine + i * 512);
#pragma unroll
            for (int e = 0; e < 4; e++) total[i / R % F::WORDS][i % R + e] += theirs[e];
        }
    sync_threads(1, 128 * F::WGS);
}

// The blocks that share a tile. Block `rank` adds the units u with u >> shift == rank; a single block adds all.
template <class F, int CLUSTER>
struct Team {
    int size, rank, shift;

    DEVICE Team() : size(1), rank(0), shift(0) {
        if constexpr (CLUSTER > 0) {
            size = CLUSTER == MAX_CLUSTER ? cluster_size() : CLUSTER;
            rank = cluster_rank();
        }
        while (size << shift < F::UNITS) shift++;
    }
    DEVICE int of(int unit) const { return unit >> shift; }
    DEVICE bool mine(int unit) const { return CLUSTER == 0 || of(unit) == rank; }
    // Bytes that the neighbours send.
    DEVICE int due() const {
        const int units = min(max(F::UNITS - (rank << shift), 0), 1 << shift);
        return (size - 1) * units * F::UNIT * 512 * F::OWNERS;
    }
    // Called by all threads of all blocks. No block writes to its neighbours before it has returned.
    DEVICE void sync() const {
        if constexpr (F::SEPARATE) cluster_wait();
        if constexpr (CLUSTER > 0 && !F::SEPARATE) cluster_sync();
    }
};

// Blocks of a cluster exchange their sums: each adds some units of all blocks, in the order of k.
template <class F, int CLUSTER, class B>
DEVICE void exchange(const B &b, const Team<F, CLUSTER> &team, float (&total)[F::WORDS][F::SUMS]) {
    auto sum = [&](int u, int e) -> float & {
        if constexpr (F::SPARSE) return total[e / 2][u / 2 * 4 + e % 2 * 2 + u % 2];
        return total[(F::UNIT * u + e) / F::SUMS][(F::UNIT * u + e) % F::SUMS];
    };
    const u32 to = (F::SEPARATE ? b.exchange_at : b.x_at) + threadIdx.x * 4 * F::UNIT;
    auto place = [&](int rank, int u) {
        const int unit = (rank << team.shift) + (u & ((1 << team.shift) - 1));
        return to + unit * F::UNIT * 512 * F::OWNERS;
    };
    team.sync();
#pragma unroll
    for (int u = 0; u < F::UNITS; u++)
        if (!team.mine(u)) {
            float v[F::UNIT];
#pragma unroll
            for (int e = 0; e < F::UNIT; e++) v[e] = sum(u, e);
            store_neighbour(place(team.rank, u), b.landed(), team.of(u), v);
        }
    barrier_wait(b.landed(), 0);
#pragma unroll
    for (int u = 0; u < F::UNITS; u++)
        if (team.mine(u))
#pragma unroll
            for (int e = 0; e < F::UNIT; e++) {
                float all = 0;
#pragma unroll
                for (int p = 0; p < CLUSTER; p++)
                    if (p < team.size) all += p == team.rank ? sum(u, e) : load_shared(place(p, u) + 4 * e);
                sum(u, e) = all;
            }
}

// The address of the partial sums of a warpgroup, for a tile that another block ends.
template <class F, class B>
DEVICE float4 *partial_of(const B &b, int block, int group) {
    return (float4 *)b.sums + ((long long)block * F::OWNERS + group) * 32 * F::ALL + threadIdx.x % 128;
}

// Stores the partial sums of a tile for the block that ends it.
template <class F, class B>
DEVICE void store_partial(const B &b, int tile, int group, const float (&total)[F::WORDS][F::SUMS]) {
    float4 *mine = partial_of<F>(b, blockIdx.x, group);
#pragma unroll
    for (int i = 0; i < F::ALL; i += 4) {
        const float *v = &total[i / F::SUMS][i % F::SUMS];
        __stcg(mine + i * 32, make_float4(v[0], v[1], v[2], v[3]));
    }
    sync_threads(2 + group, 128);
    const int to = b.owner(tile, b.k_steps - 1);
    if (threadIdx.x % 128 == 0) add_release(b.counters + to * F::OWNERS + group);
}

// Adds the partial sums of the blocks before to those of the tile's end, in the order of k. Blocks start in the order
// of their numbers, and store such sums first, so the blocks that this one waits for wait for no other.
template <class F, class B>
DEVICE void add_partials(const B &b, int tile, int group, float (&total)[F::WORDS][F::SUMS]) {
    const int from = b.owner(tile, 0), self = blockIdx.x;
    u32 *counter = b.counters + self * F::OWNERS + group;
    if (threadIdx.x % 128 == 0) {
        while (load_acquire(counter) < (u32)(self - from)) {}
        *counter = 0;  // as the next launch expects it
    }
    sync_threads(2 + group, 128);
    constexpr int GO = F::ALL <= 64 ? F::ALL : 64;         // registers of a part that are loaded at once,
    constexpr int BATCH = GO <= 8 ? 8 : GO <= 32 ? 2 : 1;  // and parts at once
    for (int part = from; part < self; part += BATCH)
#pragma unroll
        for (int go = 0; go < F::ALL; go += GO) {
            float4 theirs[BATCH][GO / 4];
#pragma unroll
            for (int p = 0; p < BATCH; p++)
#pragma unroll
                for (int i = 0; i < GO; i += 4)
                    theirs[p][i / 4] =
                        part + p < self ? __ldcg(partial_of<F>(b, part + p, group) + (go + i) * 32) : float4{};
#pragma unroll
            for (int p = 0; p < BATCH; p++)
#pragma unroll
                for (int i = 0; i < GO; i += 4) {
                    float *v = &total[(go + i) / F::SUMS][(go + i) % F::SUMS];
                    v[0] += theirs[p][i / 4].x, v[1] += theirs[p][i / 4].y;
                    v[2] += theirs[p][i / 4].z, v[3] += theirs[p][i / 4].w;
                }
        }
}
