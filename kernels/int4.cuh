// Words of INT4 codes as left operands of integers: what the layouts of the MARLIN family share (LAYOUTS 3.2, 5.2, 8.2).
//
// In a word of lane 4a + q, nibble 4e + 2b + h is row 8b + a, column 8h + 2q + e of a 16 x 16 operand: its register
// b + 2h. Zero points of rows a and 8 + a come as `zero`, in the low nibbles of both halves of a word.
#pragma once

#include "ampere.cuh"

static const u32 EIGHTS = 0x00080008;  // the zero point of symmetric codes

// A code in the low bits of the mantissa of 1024 is added to it; four bits higher, its sixteenfold is.
DEVICE void decode(half type, u32 word, u32 zero0, u32 zero1, u32 (&a)[4]) {
    const u32 one = 0x3c003c00, sixteenth = 0x2c002c00;
    const u32 low = 0x000f000f, high = 0x00f000f0, magic = 0x64006400;
    const u32 low_zero = 0xe400e400, high_zero = 0xd400d400;  // -1024, -64: the zero point is subtracted with them
    u32 rest = word >> 8;
    a[0] = fma_pair(type, word & low | magic, one, low_zero | zero0);
    a[2] = fma_pair(type, word & high | magic, sixteenth, high_zero | zero0 << 4);
    a[1] = fma_pair(type, rest & low | magic, one, low_zero | zero1);
    a[3] = fma_pair(type, rest & high | magic, sixteenth, high_zero | zero1 << 4);
}

// The same with 128, whose mantissa has room for one code.
DEVICE void decode(bfloat type, u32 word, u32 zero0, u32 zero1, u32 (&a)[4]) {
    const u32 one = 0x3f803f80, low = 0x000f000f, magic = 0x43004300, minus = 0xc300c300;
    a[0] = fma_pair(type, word & low | magic, one, minus | zero0);
    a[2] = fma_pair(type, word >> 4 & low | magic, one, minus | zero0);
    a[1] = fma_pair(type, word >> 8 & low | magic, one, minus | zero1);
    a[3] = fma_pair(type, word >> 12 & low | magic, one, minus | zero1);
}
