// Rounding to the values of a format's codes, for the kernels of GPTQ.
#pragma once

#include "common.cuh"

// Values of codes, in steps of the scale: the nearest, ties to the even code, saturating.
struct Integers {
    float low, high;
    DEVICE float nearest(float x, float) const { return fminf(fmaxf(rintf(x), low), high); }
    DEVICE float lowest(float) const { return low; }
    DEVICE float highest(float) const { return high; }
};

struct IntegersWithZero {
    float low, high;
    DEVICE float nearest(float x, float zero) const { return rintf(fminf(fmaxf(x + zero, low), high)) - zero; }
    DEVICE float lowest(float zero) const { return low - zero; }
    DEVICE float highest(float zero) const { return high - zero; }
};

// `low` is the smallest normal value, `high` the largest value, `mantissa` two to the power of the mantissa's bits.
struct Floats {
    float low, high, mantissa;
    DEVICE float nearest(float x, float) const {
        x = fminf(fmaxf(x, -high), high);
        float step = fmaxf(__uint_as_float(__float_as_uint(x) & 0x7f800000u), low) / mantissa;
        return rintf(x / step) * step;
    }
    DEVICE float lowest(float) const { return -high; }
    DEVICE float highest(float) const { return high; }
};

// No rounding: a column's entries stay as they are, or are removed.
struct Exact {
    float unused;
    DEVICE float nearest(float x, float) const { return x; }
};
