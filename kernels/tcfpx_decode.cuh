// Decodes codes of two bit planes (layouts.md 7) to 16-bit floats by shifts and masks, two in a register.
//
// The bits of a code become a float's sign, low exponent bits and high mantissa bits. So every code, subnormal ones
// too, becomes its value times a fixed power of two. A lane's word of the 4-bit plane holds its eight codes of a 16 x
// 16 block, one in each half for a register. A word of the other plane holds the upper bits of 4 / HIGH blocks. A test
// without a GPU compiles this with an ordinary C++ compiler.
#pragma once

#include "common.cuh"

template <class X> constexpr int MANTISSA = 10;
template <> constexpr int MANTISSA<bfloat> = 7;
template <class X> constexpr int EXPONENT_BIAS = 15;
template <> constexpr int EXPONENT_BIAS<bfloat> = 127;

// Shifts left, or right by a negative number of bits. The caller masks out bits that cross into the other half.
DEVICE u32 shift_left(u32 word, int bits) { return bits < 0 ? word >> -bits : word << bits; }

// The bits of `a` where `mask` is set, else those of `b`, in one instruction instead of the compiler's two.
DEVICE u32 select(u32 mask, u32 a, u32 b) {
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
    static constexpr int BOTTOM = MANTISSA<X> - M;                         // position of the lowest bit of a code
    static constexpr int UP = EXPONENT_BIAS<X> - ((1 << (E - 1)) - 1);  // a value is 2^UP times the decoded float
    static constexpr u32 FOUR = 0x000f000fu << BOTTOM;
    static constexpr u32 ABOVE = 0x80008000 | (HIGH == 2 ? 0x00100010u << BOTTOM : 0);
    // Whether a half holds the fields of two registers, the second 8 bits below the first.
    static constexpr bool PAIRED = BOTTOM >= 8;

    // The upper bits of register 2h in their position, those of register 2h + 1 8 bits below, and garbage elsewhere.
    DEVICE static u32 above(u32 high, int h) {
        if (HIGH == 1) return shift_left(high, h);
        return select(PAIRED ? 0x88888888 : 0x80808080, shift_left(high, 2 * h), shift_left(high, 2 * h + BOTTOM - 10));
    }

    // Register b + 2h gets the codes of row 8b + a and columns 8h + 2q + {0, 1} for lane 4a + q. `slot` is the number
    // of the block among those that share the word of upper bits.
    DEVICE static void decode(u32 high, u32 low, int slot, u32 (&left)[4]) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            if constexpr (PAIRED) {
                const u32 upper = shift_left(above(high, h), 2 * HIGH * slot);
                const u32 both = select(FOUR | FOUR >> 8, shift_left(low, 4 * h + BOTTOM - 12), upper);
                left[2 * h] = both & (FOUR | ABOVE);
                left[2 * h + 1] = both << 8 & (FOUR | ABOVE);
            } else {
                const u32 upper = above(shift_left(high, 2 * HIGH * slot), h);
#pragma unroll
                for (int b = 0; b < 2; b++)
                    left[b + 2 * h] = (shift_left(low, 4 * h + 8 * b + BOTTOM - 12) & FOUR) | (upper << 8 * b & ABOVE);
            }
    }
};
