// Addresses and values of single weights, by the formulas of docs/layouts.md and with its letters.
//
// Each layout is a struct with the tensors of a packed weight. weight(n, k) is the exact value in float32, since it has
// at most five bits of a code times eleven of a scale. The code is plain and slow on purpose: the naive kernels use it,
// and every faster kernel is compared with them. Indices of words have 64 bits.
#pragma once

#include "common.cuh"

DEVICE int nibble(u32 word, u32 v) { return word >> 4 * v & 15; }

// layouts.md 3.2 and 3.3; for groups of 32 and 64 the run-time form of 3.6.
struct Marlin {
    const u32 *B;
    const half *s;
    u32 N, K, g;  // g == K: one scale per row

    DEVICE float operator()(u32 n, u32 k) const {
        u32 h = k % 16 / 8, q = k % 8 / 2, e = k % 2;
        u32 j = n % 64 / 16, b = n % 16 / 8, a = n % 8;
        u64 column = 128 * (n / 64) + 16 * a + 4 * q + j;
        int code = nibble(B[(u64)(k / 16) * 2 * N + column], 4 * e + 2 * b + h);
        return (float)(code - 8) * to_float(s[(u64)(k / g) * N + (g < K ? grouped(n) : single(n))]);
    }

    DEVICE static u32 grouped(u32 n) {
        u32 y = n % 64 / 8, x = n % 8;
        return n / 64 * 64 + 8 * x + y;
    }

    DEVICE static u32 single(u32 n) {
        u32 c = n % 32 / 8, i = n % 8 / 2, e = n % 2;
        return n / 32 * 32 + 8 * i + 2 * c + e;
    }
};

// layouts.md 4.1, 4.4 and 5.2. The metadata name the two of each four weights along k that are stored; others are 0.
struct Marlin24 {
    const u32 *B;
    const u16 *meta;
    const half *s;
    u32 N, K, g;  // g counts weights before pruning, as K does

    DEVICE float operator()(u32 n, u32 k) const {
        u32 quad = meta[metadata(n, k / 16)] >> 4 * (k % 16 / 4) & 15;
        u32 i0 = quad & 3, i1 = quad >> 2, i = k % 4;
        if (i != i0 && i != i1) return 0;
        u32 kc = k / 4 * 2 + (i == i1);
        u32 h = kc % 16 / 8, q = kc % 8 / 2, e = kc % 2;
        u32 a = n % 64 / 8, b = n % 8 / 4, j = n % 4;
        u64 column = 128 * (n / 64) + 16 * a + 4 * q + j;
        int code = nibble(B[(u64)(kc / 16) * 2 * N + column], 4 * e + 2 * b + h);
        return (float)(code - 8) * to_float(s[(u64)(k / g) * N + (g < K ? grouped(n) : n)]);
    }

    DEVICE u64 metadata(u32 n, u32 c) const {
        u32 n0 = n & 1, n1 = n >> 1 & 1, n2 = n >> 2 & 1;
        return (u64)(c / 2) * 2 * N + 128 * (n / 64) + 64 * n1 + 8 * (n >> 3 & 7) + 4 * n0 + 2 * (c & 1) + n2;
    }

    DEVICE static u32 grouped(u32 n) {
        u32 b = n % 8 / 4, c = n % 4;
        return n / 8 * 8 + 2 * c + b;
    }
};

// layouts.md 6.1 and 7: E exponent and M mantissa bits, one scale per row.
template <int E, int M> struct Tcfpx {
    static constexpr int BITS = 1 + E + M;
    const u32 *words;
    const half *s;
    u32 N, K;

    DEVICE float operator()(u32 n, u32 k) const {
        u32 high = segment<BITS - 4>(words, n, k);
        u32 low = segment<4>(words + (u64)N * K / 32 * (BITS - 4), n, k);
        return value(high << 4 | low) * to_float(s[n]);
    }

    // The field of Y bits of a code, from the plane that holds these fields (7.3).
    template <int Y> DEVICE u32 segment(const u32 *part, u32 n, u32 k) const {
        u32 kk = n % 64 / 16, hb = n % 16 / 8, l = n % 8;
        u32 cb = k % 16 / 8, q = k % 8 / 2, p = k % 2;
        u32 lane = 4 * l + q, el = 4 * cb + 2 * hb + p;
        u64 blk = ((u64)(n / 64) * (K / 16) + k / 16) * 4 + kk;
        u64 S = 8 * blk + el;
        const u32 L = 32 / Y;
        u32 pos = S % L;
        u32 sig = 0x1302 >> 4 * (pos % 4) & 15;  // 2, 0, 3, 1
        u32 o = L / 4 * sig + pos / 4;
        return part[S / L * 32 + lane] >> (32 - Y * (o + 1)) & ((1 << Y) - 1);
    }

    DEVICE static float value(u32 code) {
        const int bias = (1 << (E - 1)) - 1;
        u32 exponent = code >> M & ((1 << E) - 1), mantissa = code & ((1 << M) - 1);
        u32 steps = exponent ? ((1 << M) + mantissa) << exponent : mantissa << 1;  // of 2^-(bias + M)
        float magnitude = (float)steps / (1 << (bias + M));
        return code >> (E + M) ? -magnitude : magnitude;
    }
};

// layouts.md 8.2. Scales and zero points are stored twice; the first copies are read.
struct Quick {
    const u32 *qweight;
    const u32 *qzeros;
    const half *scales;
    u32 N, K, g;

    DEVICE float operator()(u32 n, u32 k) const {
        u32 kb = k / 32, ks = k % 32 / 16, r = k % 16 / 8, q = k % 8 / 2, e = k % 2;
        u32 bx = n / 128, ty = n % 128 / 64, j = n % 64 / 16, b = n % 16 / 8, a = n % 8;
        u64 L = ty * (N / 4) + a / 4 * (N / 8) + 16 * bx + 4 * (a % 4) + q;
        int code = nibble(qweight[(u64)4 * N * kb + 8 * L + 4 * ks + j], 4 * e + 2 * b + r);
        u32 x = 8 * (ty * (N / 16) + a / 4 * (N / 32) + 4 * bx + a % 4) + n % 64 / 8;
        int zero = nibble(qzeros[(u64)(k / g) * (N / 4) + x / 4], x % 4);
        return (float)(code - zero) * to_float(scales[(u64)(k / g) * 2 * N + 2 * x]);
    }
};
