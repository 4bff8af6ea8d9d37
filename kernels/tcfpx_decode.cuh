// Codes of two planes (LAYOUTS 7) to floats of 16 bits by shifts and masks alone, two of them a register.
//
// A code's bits are put where a float has its sign, the low bits of its exponent and the high ones of its mantissa: so
// every code, also the subnormal, is its value by a power of two. A lane's word of the 4-bit plane holds its eight
// codes of a 16 x 16 block, one in each half for a register; a word of the other plane holds the upper bits of 4 / HIGH
// blocks. An ordinary C++ compiler takes this too, in a test that needs no GPU.
#pragma once

#include "common.cuh"

template <class X>
constexpr int MANTISSA = 10;
template <>
constexpr int MANTISSA<bfloat> = 7;
template <class X>
constexpr int EXPONENT_BIAS = 15;
template <>
constexpr int EXPONENT_BIAS<bfloat> = 127;

// To the left by so many bits. What crosses to another half is masked out by whoever asks.
DEVICE u32 moved(u32 word, int bits) { return bits < 0 ? word >> -bits : word << bits; }

// The bits of `a` where `mask` is set, else those of `b`. One instruction, of which the compiler would make two.
DEVICE u32 pick(u32 mask, u32 a, u32 b) {
#ifdef __CUDACC__
    u32 both;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(both) : "r"(mask), "r"(a), "r"(b));
    return both;
#else
    return (a & mask) | (b & ~mask);
#endif
}

template <class X, int E, int M>
struct Codes {
    static constexpr int HIGH = E + M - 3;                                 // bits of a code in the first plane
    static constexpr int BOTTOM = MANTISSA<X> - M;                         // where the lowest bit of a code goes
    static constexpr int UP = EXPONENT_BIAS<X> - ((1 << (E - 1)) - 1);  // a value is 2^UP times such a float
    static constexpr u32 FOUR = 0x000f000fu << BOTTOM;
    static constexpr u32 ABOVE = 0x80008000 | (HIGH == 2 ? 0x00100010u << BOTTOM : 0);
    // There is room in a half for the fields of two registers, the second 8 bits below the first.
    static constexpr bool PAIRED = BOTTOM >= 8;

    // The upper bits of register 2h in their place, those of register 2h + 1 8 bits below, and garbage.
    DEVICE static u32 above(u32 high, int h) {
        if (HIGH == 1) return moved(high, h);
        return pick(PAIRED ? 0x88888888 : 0x80808080, moved(high, 2 * h), moved(high, 2 * h + BOTTOM - 10));
    }

    // Register b + 2h: the codes of row 8b + a and columns 8h + 2q + {0, 1} for lane 4a + q. Of those that share the
    // word of upper bits, the block is the one at `slot`.
    DEVICE static void decode(u32 high, u32 low, int slot, u32 (&left)[4]) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            if constexpr (PAIRED) {
                const u32 upper = moved(above(high, h), 2 * HIGH * slot);
                const u32 both = pick(FOUR | FOUR >> 8, moved(low, 4 * h + BOTTOM - 12), upper);
                left[2 * h] = both & (FOUR | ABOVE);
                left[2 * h + 1] = both << 8 & (FOUR | ABOVE);
            } else {
                const u32 upper = above(moved(high, 2 * HIGH * slot), h);
#pragma unroll
                for (int b = 0; b < 2; b++)
                    left[b + 2 * h] = (moved(low, 4 * h + 8 * b + BOTTOM - 12) & FOUR) | (upper << 8 * b & ABOVE);
            }
    }
};
