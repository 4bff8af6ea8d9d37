// Decodes words of INT4 codes to left operands, for the MARLIN layouts and QUICK (layouts.md 3.2, 5.2, 8.2).
//
// Nibble 4e + 2b + h in the word of lane 4a + q is row 8b + a, column 8h + 2q + e of a 16 x 16 operand, so it belongs
// to register b + 2h. `zero0` and `zero1` are the zero points of rows a and 8 + a.
#pragma once

#include "ampere.cuh"

constexpr u32 SYMMETRIC_ZERO = 0x00080008;  // zero points of 8, as symmetric codes have

// Masks of the low and high nibbles of the bytes that become numbers. If the compiler knows the masks, it reloads one
// for each use, because an instruction takes only one immediate and the exponent is another. So a kernel adds a zero
// that the compiler does not know.
struct Masks {
    u32 low, high;
    DEVICE explicit Masks(u32 zero) : low(0x000f000f + zero), high(0x00f000f0 + zero) {}
};

// Addends for the numbers made of low and of high nibbles, which make the zero point zero.
struct Zero {
    u32 low, high;
};

// From the equal nibbles y and y + 4 of a word: -1024 - zero and -64 - zero; for bfloat16 -128 - zero.
DEVICE Zero zero_of(half, Masks mask, u32 word, u32 y) {
    u32 above = y ? word >> 4 * y - 4 : word << 4;
    return {word >> 4 * y & mask.low | 0xe400e400, above & mask.high | 0xd400d400};
}

DEVICE Zero zero_of(bfloat, Masks mask, u32 word, u32 y) {
    u32 both = word >> 4 * y & mask.low | 0xc300c300;
    return {both, both};
}

// A code in the low mantissa bits of 1024 makes 1024 + code; four bits higher, 1024 + 16 * code.
DEVICE void decode(half type, Masks mask, u32 word, Zero zero0, Zero zero1, u32 (&a)[4]) {
    const u32 magic = 0x64006400, sixteenth = 0x2c002c00;
    u32 rest = word >> 8;
    a[0] = add_pair(type, word & mask.low | magic, zero0.low);
    a[1] = add_pair(type, rest & mask.low | magic, zero1.low);
    a[2] = fma_pair(type, word & mask.high | magic, sixteenth, zero0.high);
    a[3] = fma_pair(type, rest & mask.high | magic, sixteenth, zero1.high);
}

// The same with 128, whose mantissa holds one code only.
DEVICE void decode(bfloat type, Masks mask, u32 word, Zero zero0, Zero zero1, u32 (&a)[4]) {
    const u32 one = 0x3f803f80, magic = 0x43004300;
    a[0] = fma_pair(type, word & mask.low | magic, one, zero0.low);
    a[1] = fma_pair(type, word >> 8 & mask.low | magic, one, zero1.low);
    a[2] = fma_pair(type, word >> 4 & mask.low | magic, one, zero0.high);
    a[3] = fma_pair(type, word >> 12 & mask.low | magic, one, zero1.high);
}
