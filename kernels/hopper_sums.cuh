// How the sums of a tile come together, when several have parts of them: warpgroups of a block, blocks of a cluster, or
// blocks anywhere that the steps of its k were dealt out to. Always in the order of k, so that they are the same bits.
//
// F is a Frame, B a Block (hopper_matmul.cuh).
#pragma once

#include "hopper.cuh"

constexpr int MANY = 8;  // as CLUSTER: any number of blocks from three to this, as launched

// The first warpgroup adds up the others' sums, in order.
template <class F, class B>
DEVICE void hand_over(const B &b, int group, float (&total)[F::WORDS][F::SUMS]) {
    constexpr int R = F::SUMS;
    const u32 mine = b.handed_at + threadIdx.x % 128 * 16;
    if (group > 0)
#pragma unroll
        for (int i = 0; i < F::ALL; i += 4) store_shared4(mine + ((group - 1) * F::ALL + i) * 512, &total[i / R][i % R]);
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

// The blocks that share a tile: `rank` adds up the units u with u >> shift == rank. One block alone has all.
template <class F, int CLUSTER>
struct Team {
    int size, rank, shift;

    DEVICE Team() : size(1), rank(0), shift(0) {
        if constexpr (CLUSTER > 0) {
            size = CLUSTER == MANY ? cluster_size() : CLUSTER;
            rank = cluster_rank();
        }
        while (size << shift < F::UNITS) shift++;
    }
    DEVICE int of(int unit) const { return unit >> shift; }
    DEVICE bool mine(int unit) const { return CLUSTER == 0 || of(unit) == rank; }
    // How many bytes come from the neighbours.
    DEVICE int due() const {
        const int units = min(max(F::UNITS - (rank << shift), 0), 1 << shift);
        return (size - 1) * units * F::UNIT * 512 * F::OWNERS;
    }
    // All threads of all blocks call this: before it has returned no block writes to its neighbours.
    DEVICE void meet() const {
        if constexpr (F::APART) cluster_wait();
        if constexpr (CLUSTER > 0 && !F::APART) cluster_meet();
    }
};

// Blocks of a cluster exchange their sums: each adds up, in the order of k, some units of all.
template <class F, int CLUSTER, class B>
DEVICE void exchange(const B &b, const Team<F, CLUSTER> &team, float (&total)[F::WORDS][F::SUMS]) {
    auto sum = [&](int u, int e) -> float & {
        if constexpr (F::SPARSE) return total[e / 2][u / 2 * 4 + e % 2 * 2 + u % 2];
        return total[(F::UNIT * u + e) / F::SUMS][(F::UNIT * u + e) % F::SUMS];
    };
    const u32 to = (F::APART ? b.apart_at : b.x_at) + threadIdx.x * 4 * F::UNIT;
    auto place = [&](int rank, int u) {
        const int unit = (rank << team.shift) + (u & ((1 << team.shift) - 1));
        return to + unit * F::UNIT * 512 * F::OWNERS;
    };
    team.meet();
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

// Where a warpgroup of a block leaves its sums of a tile that another block ends.
template <class F, class B>
DEVICE float4 *left_by(const B &b, int block, int group) {
    return (float4 *)b.sums + ((long long)block * F::OWNERS + group) * 32 * F::ALL + threadIdx.x % 128;
}

// Leave the sums of a tile for the block that ends it.
template <class F, class B>
DEVICE void leave(const B &b, int tile, int group, const float (&total)[F::WORDS][F::SUMS]) {
    float4 *mine = left_by<F>(b, blockIdx.x, group);
#pragma unroll
    for (int i = 0; i < F::ALL; i += 4) {
        const float *v = &total[i / F::SUMS][i % F::SUMS];
        __stcg(mine + i * 32, make_float4(v[0], v[1], v[2], v[3]));
    }
    sync_threads(2 + group, 128);
    const int to = b.owner(tile, b.k_steps - 1);
    if (threadIdx.x % 128 == 0) add_release(b.counters + to * F::OWNERS + group);
}

// Add to the sums of a tile's end those of the blocks before, in the order of k. Blocks start in the order of their
// numbers and leave such sums before all else, so what is waited for does not wait for anybody.
template <class F, class B>
DEVICE void gather(const B &b, int tile, int group, float (&total)[F::WORDS][F::SUMS]) {
    const int from = b.owner(tile, 0), self = blockIdx.x;
    u32 *counter = b.counters + self * F::OWNERS + group;
    if (threadIdx.x % 128 == 0) {
        while (load_acquire(counter) < (u32)(self - from)) {}
        *counter = 0;  // as the next launch wants it
    }
    sync_threads(2 + group, 128);
    constexpr int GO = F::ALL <= 64 ? F::ALL : 64;         // registers that are fetched at once of a part,
    constexpr int BATCH = GO <= 8 ? 8 : GO <= 32 ? 2 : 1;  // and parts
    for (int part = from; part < self; part += BATCH)
#pragma unroll
        for (int go = 0; go < F::ALL; go += GO) {
            float4 theirs[BATCH][GO / 4];
#pragma unroll
            for (int p = 0; p < BATCH; p++)
#pragma unroll
                for (int i = 0; i < GO; i += 4)
                    theirs[p][i / 4] =
                        part + p < self ? __ldcg(left_by<F>(b, part + p, group) + (go + i) * 32) : float4{};
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
