// Words of INT4 codes as left operands of integers, which MARLIN's layouts and QUICK share (LAYOUTS 3.2, 5.2, 8.2).
//
// In a word of lane 4a + q, nibble 4e + 2b + h is row 8b + a, column 8h + 2q + e of a 16 x 16 operand: its register
// b + 2h. Zero points of rows a and 8 + a come as `zero`, in the low nibbles of both halves of a word.
#pragma once

#include "ampere.cuh"

static const u32 EIGHTS = 0x00080008;  // the zero point of symmetric codes

// The low and the high nibbles of the two bytes that become numbers. A compiler that knows the masks loads a constant
// anew for each use, since an instruction that has the mask and the exponent takes but one of them as an immediate; a
// kernel hides them by adding a zero that only it knows.
struct Masks {
    u32 low, high;
    DEVICE explicit Masks(u32 zero) : low(0x000f000f + zero), high(0x00f000f0 + zero) {}
};

// What is added to the numbers made of low and of high nibbles, so that the zero point becomes zero.
struct Zero {
    u32 low, high;
};

// Of nibbles y and y + 4 of a word, which are the same: -1024 - zero, -64 - zero; -128 - zero.
DEVICE Zero zero_of(half, Masks mask, u32 word, u32 y) {
    u32 above = y ? word >> 4 * y - 4 : word << 4;
    return {word >> 4 * y & mask.low | 0xe400e400, above & mask.high | 0xd400d400};
}

DEVICE Zero zero_of(bfloat, Masks mask, u32 word, u32 y) {
    u32 both = word >> 4 * y & mask.low | 0xc300c300;
    return {both, both};
}

// A code in the low bits of the mantissa of 1024 is added to it; four bits higher, its sixteenfold is.
DEVICE void decode(half type, Masks mask, u32 word, Zero zero0, Zero zero1, u32 (&a)[4]) {
    const u32 magic = 0x64006400, sixteenth = 0x2c002c00;
    u32 rest = word >> 8;
    asm("add.f16x2 %0, %1, %2;" : "=r"(a[0]) : "r"(word & mask.low | magic), "r"(zero0.low));
    asm("add.f16x2 %0, %1, %2;" : "=r"(a[1]) : "r"(rest & mask.low | magic), "r"(zero1.low));
    a[2] = fma_pair(type, word & mask.high | magic, sixteenth, zero0.high);
    a[3] = fma_pair(type, rest & mask.high | magic, sixteenth, zero1.high);
}

// The same with 128, whose mantissa has room for one code.
DEVICE void decode(bfloat type, Masks mask, u32 word, Zero zero0, Zero zero1, u32 (&a)[4]) {
    const u32 one = 0x3f803f80, magic = 0x43004300;
    a[0] = fma_pair(type, word & mask.low | magic, one, zero0.low);
    a[1] = fma_pair(type, word >> 8 & mask.low | magic, one, zero1.low);
    a[2] = fma_pair(type, word >> 4 & mask.low | magic, one, zero0.high);
    a[3] = fma_pair(type, word >> 12 & mask.low | magic, one, zero1.high);
}
