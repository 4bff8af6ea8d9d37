// The Hopper frame for mixtures of experts: a tile has rows of one expert.
//
// routing.cu sorts the rows by expert and lists the tiles. `gather_rows` puts the activations of the tiles one after the
// other, so that the copy engine reads them. The products are scattered to the rows of y.
//
// If Y is bfloat16 and scales have groups, activations are float16 numbers, each row times a power of two: so scales can
// be multiplied into the weights.
#pragma once

#include "hopper_matmul.cuh"
#include "routing.cuh"

template <class Y_> struct OfExperts {
    using Y = Y_;
    const u32 *experts, *rows;  // of the tiles, see routing.cuh
    const float *weights;       // a factor for each row of y, or null
    const float *powers;        // of each place in the tiles, or null
    int m_tiles, n_tiles;
    int stride;  // of an expert's weight: steps along k, or blocks of 64 rows

    DEVICE Place place(int tile) const {
        Place found;
        Squares{m_tiles, n_tiles}.find(tile, found.m_tile, found.n_tile);
        found.expert = experts[found.m_tile];
        found.first = found.expert * stride;
        return found;
    }

    // Finding a place takes four divisions and a load, so the last one is reused.
    struct Places {
        Place last;
        int tile = -1;
        DEVICE Place of(const OfExperts &tokens, int wanted) {
            if (wanted != tile) last = tokens.place(wanted), tile = wanted;
            return last;
        }
    };

    // As in `Consecutive`. A lane holds every 32nd row of the tile.
    template <int BM> struct Outputs {
        int rows[BM / 32];
        float weights[BM / 32];

        DEVICE Outputs(const OfExperts &of, int m0) {
#pragma unroll
            for (int i = 0; i < BM / 32; i++) {
                const int place = m0 + 32 * i + threadIdx.x % 32;
                rows[i] = of.rows[place];
                weights[i] = of.powers ? of.powers[place] : 1;
            }
#pragma unroll
            for (int i = 0; i < BM / 32; i++)
                if (of.weights && rows[i] >= 0) weights[i] *= of.weights[rows[i]];
        }
        DEVICE int row(int t, int token) const { return __shfl_sync(~0u, rows[t / 32], t % 32 + token); }
        DEVICE bool has(int row) const { return row >= 0; }
        DEVICE float weighted(int t, int i, float sum) const {
            return sum * __shfl_sync(~0u, weights[t / 32], t % 32 + threadIdx.x % 4 * 2 + i);
        }
    };
    template <int BM> DEVICE Outputs<BM> outputs(int m0) const { return {*this, m0}; }
};

// The kernel of some experts.
template <class Weight, int BM, int STAGES, class Y>
DEVICE void routed_hopper(
    const TensorMap &x_map, const typename Weight::Maps &maps, const half *scales, Y *y, float *sums, u32 *counters,
    const u32 *list, const float *weights, const float *powers, u32 max_tiles, int stride, int n, int k) {
    wait_for_predecessor();
    let_successor_start();
    const List<const u32> found(list, max_tiles);
    const int m_tiles = found.counts[0], n_tiles = (n + Weight::BN - 1) / Weight::BN;
    const OfExperts<Y> tokens{found.experts, found.rows, weights, powers, m_tiles, n_tiles, stride};
    multiply_tiles<Weight, BM, STAGES, 0>(tokens, x_map, maps, scales, nullptr, y, sums, counters, n, k);
}
