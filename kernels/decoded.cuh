// Decodes packed weights to rows of 16-bit floats, for products of so many tokens that cuBLAS is the fastest.
//
// A thread decodes eight columns, from k on, of eight rows in a block of 64: those that lie in its words beside each
// other. Piece i of 16 bytes belongs to row(a, i) of the block. Neighbouring threads have neighbouring columns, so a
// warp writes 512 contiguous bytes at a time. Letters are those of docs/layouts.md. Values are computed in float32,
// where code times scale is exact, and rounded once. A test without a GPU compiles this with an ordinary C++ compiler.
#pragma once

#include "tcfpx_decode.cuh"
#include "weights.cuh"

// Column pairs of the eight rows, as words of two 16-bit floats.
using Pieces = u32[8][4];

// A code in the low bits of 2^23 is 2^23 + code, and `offset` is 2^23 plus the zero point.
constexpr float TWO_23 = 8388608.f;
DEVICE float number(u32 code, float offset) { return as_float(0x4b000000 | code) - offset; }

// Two neighbours along k, from the low bits of both halves of `codes`.
template <class X> DEVICE u32 scaled(X type, u32 codes, float offset, float scale) {
    const u32 two = codes & 0x000f000f;
    return pair(type, number(two & 0xffff, offset) * scale, number(two >> 16, offset) * scale);
}

// Words of MARLIN's order (layouts.md 3.2): `words` has those of q = 0, then `stride` further those of q = 1, and so on.
template <class X>
DEVICE void int4_pieces(
    X type, const uint4 *words, u32 stride, u32 h, const float (&offset)[8], const float (&scale)[8], Pieces &pieces) {
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        const uint4 four = words[q * stride];
        const u32 word[4] = {four.x >> 4 * h, four.y >> 4 * h, four.z >> 4 * h, four.w >> 4 * h};
#pragma unroll
        for (u32 i = 0; i < 8; i++)  // i = 2j + b
            pieces[i][q] = scaled(type, word[i / 2] >> i % 2 * 8, offset[i], scale[i]);
    }
}

// layouts.md 3.2 and 3.3.
struct MarlinRows {
    const u32 *B;
    const half *s;
    u32 N, K, g;

    DEVICE static u32 row(u32 a, u32 i) { return 8 * i + a; }

    template <class X> DEVICE void decode(X type, u32 block, u32 a, u32 k, Pieces &pieces) const {
        const half *scales = s + (u64)(k / g) * N + 64 * block;
        float offset[8], scale[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            offset[i] = TWO_23 + 8;
            scale[i] = to_float(scales[g < K ? Marlin::grouped(row(a, i)) : Marlin::single(row(a, i))]);
        }
        const u32 *words = B + (u64)(k / 16) * 2 * N + 128 * block + 16 * a;
        int4_pieces(type, (const uint4 *)words, 1, k % 16 / 8, offset, scale, pieces);
    }
};

// layouts.md 8.2.
struct QuickRows {
    const u32 *qweight;
    const u32 *qzeros;
    const half *scales;
    u32 N, K, g;

    DEVICE static u32 row(u32 a, u32 i) { return 8 * i + a; }

    template <class X> DEVICE void decode(X type, u32 block, u32 a, u32 k, Pieces &pieces) const {
        const u32 bx = block / 2, ty = block % 2;
        const u32 x = ty * (N / 16) + a / 4 * (N / 32) + 4 * bx + a % 4;
        const half *scale_of = scales + (u64)(k / g) * 2 * N + 16 * x;
        const u32 *zero_of = qzeros + (u64)(k / g) * (N / 4) + 2 * x;
        float offset[8], scale[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            offset[i] = TWO_23 + nibble(zero_of[i / 4], i % 4);
            scale[i] = to_float(scale_of[2 * i]);
        }
        const u32 L = ty * (N / 4) + a / 4 * (N / 8) + 16 * bx + 4 * (a % 4);
        const u32 *words = qweight + (u64)4 * N * (k / 32) + 8 * L + 4 * (k % 32 / 16);
        int4_pieces(type, (const uint4 *)words, 2, k % 16 / 8, offset, scale, pieces);
    }
};

// layouts.md 4.1, 4.4 and 5.2. A weight that is not stored is zero with the sign of its scale.
struct Marlin24Rows {
    const u32 *B;
    const u16 *meta;
    const half *s;
    u32 N, K, g;

    DEVICE static u32 row(u32 a, u32 i) { return 8 * a + i; }

    template <class X> DEVICE void decode(X type, u32 block, u32 a, u32 k, Pieces &pieces) const {
        const u32 h = k % 32 / 16, u = k % 16 / 8;
        const u64 line = (u64)(k / 32) * 2 * N + 128 * block;
        const uint4 *words = (const uint4 *)(B + line + 16 * a);
        const u32 *metadata = (const u32 *)(meta + line + 8 * a) + h;
        const half *scales = s + (u64)(k / g) * N + 64 * block;
        float scale[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) scale[i] = to_float(scales[g < K ? Marlin24::grouped(row(a, i)) : row(a, i)]);
#pragma unroll
        for (u32 t = 0; t < 2; t++) {
            const u32 q = 2 * u + t;
            const uint4 four = words[q];
            const u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) {  // i = 4b + j, and the bits n2 n1 n0 of the row
                const u32 two = metadata[32 * (i / 2 % 2) + 2 * (i % 2)];
                const u32 quad = (i / 4 ? two >> 16 : two) >> 4 * q & 15;
                const u32 stored = scaled(type, word[i % 4] >> 4 * h >> i / 4 * 8, TWO_23 + 8, scale[i]);
                const u32 zero = as_bits(scale[i]) >> 16 & 0x8000;
                u32 x[4];
#pragma unroll
                for (u32 place = 0; place < 4; place++)
                    x[place] = place == quad >> 2 ? stored >> 16 : place == (quad & 3) ? stored & 0xffff : zero;
                pieces[i][2 * t] = x[0] | x[1] << 16;
                pieces[i][2 * t + 1] = x[2] | x[3] << 16;
            }
        }
    }
};

// layouts.md 7. Every code is a float16 times a power of two, subnormal ones too.
template <int E, int M> struct TcfpxRows {
    using Code = Codes<half, E, M>;
    static constexpr int SHARING = 4 / Code::HIGH;  // blocks of 16 rows that share a word of upper bits
    const u32 *words;
    const half *s;
    u32 N, K;

    DEVICE static u32 row(u32 a, u32 i) { return 8 * i + a; }

    template <class X> DEVICE void decode(X type, u32 block, u32 a, u32 k, Pieces &pieces) const {
        const u64 blk = ((u64)block * (K / 16) + k / 16) * 4;
        const uint4 *uppers = (const uint4 *)words + blk / SHARING * 8 + a;
        const uint4 *lowers = (const uint4 *)(words + (u64)N * K / 32 * Code::HIGH) + blk * 8 + a;
        const u32 h = k % 16 / 8;  // the codes of h = 1 lie above those of h = 0
#pragma unroll
        for (u32 kk = 0; kk < 4; kk++) {
            const uint4 upper = uppers[kk / SHARING * 8], lower = lowers[kk * 8];
            const u32 high[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
            float scale[2];
#pragma unroll
            for (u32 b = 0; b < 2; b++) scale[b] = to_float(s[64 * block + row(a, 2 * kk + b)]) * (1 << Code::UP);
#pragma unroll
            for (u32 q = 0; q < 4; q++) {
                u32 left[4];
                Code::decode(high[q] << Code::HIGH * h, low[q] << 4 * h, kk % SHARING, left);
#pragma unroll
                for (u32 b = 0; b < 2; b++) {
                    const half first = {(u16)left[b]}, second = {(u16)(left[b] >> 16)};
                    pieces[2 * kk + b][q] = pair(type, to_float(first) * scale[b], to_float(second) * scale[b]);
                }
            }
        }
    }
};

// Decodes columns k to k + 7 of eight rows of block `first + at`, into the rows from 64 * at on of y [., K].
template <class X, class Rows> DEVICE void write_rows(const Rows &weight, X *y, u32 first, u32 at, u32 a, u32 k) {
    Pieces pieces;
    weight.decode(X{}, first + at, a, k, pieces);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const uint4 piece = {pieces[i][0], pieces[i][1], pieces[i][2], pieces[i][3]};
        *(uint4 *)(y + (u64)(64 * at + Rows::row(a, i)) * weight.K + k) = piece;
    }
}
