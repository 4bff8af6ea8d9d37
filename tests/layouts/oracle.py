"""Slow packers, one loop an index, written from the formulas of docs/layouts.md and sharing no code with the library.

Codes, zeros and scales come as nested lists `[n][k]` and `[n][g]`; words are Python integers.
"""

from __future__ import annotations

import math
import struct

Rows = list[list[int]]


def gptq_qweight(codes: Rows) -> Rows:
    n_all, k_all = len(codes), len(codes[0])
    words = [[0] * n_all for _ in range(k_all // 8)]
    for n in range(n_all):
        for k in range(k_all):
            words[k // 8][n] |= codes[n][k] << 4 * (k % 8)
    return words


def gptq_qzeros(zeros: Rows, less: int) -> Rows:
    n_all, g_all = len(zeros), len(zeros[0])
    words = [[0] * (n_all // 8) for _ in range(g_all)]
    for n in range(n_all):
        for g in range(g_all):
            words[g][n // 8] |= (zeros[n][g] - less) << 4 * (n % 8)
    return words


def marlin_words(codes: Rows) -> Rows:
    n_all, k_all = len(codes), len(codes[0])
    words = [[0] * (2 * n_all) for _ in range(k_all // 16)]
    for n in range(n_all):
        for k in range(k_all):
            h, q, e = (k % 16) // 8, (k % 8) // 2, k % 2
            j, b, a = (n % 64) // 16, (n % 16) // 8, n % 8
            column = 128 * (n // 64) + 16 * a + 4 * q + j
            words[k // 16][column] |= codes[n][k] << 4 * (4 * e + 2 * b + h)
    return words


def marlin_scales(scales: Rows) -> Rows:
    n_all, g_all = len(scales), len(scales[0])
    out = [[0] * n_all for _ in range(g_all)]
    for g in range(g_all):
        for n in range(n_all):
            if g_all > 1:
                m, y, x = n // 64, (n % 64) // 8, n % 8
                out[g][64 * m + 8 * x + y] = scales[n][g]
            else:
                m, c, i, e = n // 32, (n % 32) // 8, (n % 8) // 2, n % 2
                out[g][32 * m + 8 * i + 2 * c + e] = scales[n][g]
    return out


def transposed(scales: Rows) -> Rows:
    return [[scales[n][g] for n in range(len(scales))] for g in range(len(scales[0]))]


def ct_words(codes: Rows) -> Rows:
    n_all, k_all = len(codes), len(codes[0])
    words = [[0] * math.ceil(k_all / 8) for _ in range(n_all)]
    for n in range(n_all):
        for k in range(k_all):
            words[n][k // 8] |= codes[n][k] << 4 * (k % 8)
    return words


def ct_zeros(zeros: Rows) -> Rows:
    n_all, g_all = len(zeros), len(zeros[0])
    words = [[0] * g_all for _ in range(math.ceil(n_all / 8))]
    for n in range(n_all):
        for g in range(g_all):
            words[n // 8][g] |= zeros[n][g] << 4 * (n % 8)
    return words


def humming_words(codes: Rows, bits: int) -> Rows:
    rows = []
    for row in codes:
        stream = sum(code << (k * bits) for k, code in enumerate(row))
        rows.append([(stream >> (32 * w)) & 0xFFFFFFFF for w in range(len(row) * bits // 32)])
    return rows


def e3_value(code: int, mbits: int) -> float:
    """The value of a code with three exponent bits (LAYOUTS 6.1, bias 3)."""
    sign, exponent, fraction = code >> (3 + mbits), (code >> mbits) & 7, code & ((1 << mbits) - 1)
    if exponent == 0:
        magnitude = fraction * 2.0 ** (1 - 3 - mbits)
    else:
        magnitude = (1 + fraction / 2**mbits) * 2.0 ** (exponent - 3)
    return math.copysign(magnitude, -1.0 if sign else 1.0)


def e4m3_value(byte: int) -> float:
    """The value of an FP8 E4M3 byte (bias 7, 0x7f and 0xff are NaN)."""
    sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    magnitude = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return math.copysign(magnitude, -1.0 if sign else 1.0)


def carrier_bytes(codes: Rows, mbits: int) -> Rows:
    by_bits = {struct.pack("<d", e4m3_value(byte)): byte for byte in range(256)}
    return [[by_bits[struct.pack("<d", e3_value(code, mbits))] for code in row] for row in codes]


def packed(layout: str, codes: Rows, scales: Rows, zeros: Rows | None, mbits: int, group: int) -> dict[str, Rows]:
    """Everything that `layout` stores, as rows of unsigned integers (scales and FP8 as their bits)."""
    n_all, k_all = len(codes), len(codes[0])
    if layout in ("gptq", "gptq-v2"):
        zeros = zeros or [[8] * len(scales[0]) for _ in range(n_all)]
        return {
            "qweight": gptq_qweight(codes),
            "qzeros": gptq_qzeros(zeros, less=1 if layout == "gptq" else 0),
            "scales": transposed(scales),
            "g_idx": [[k // group for k in range(k_all)]],
        }
    if layout == "marlin":
        return {"B": marlin_words(codes), "s": marlin_scales(scales)}
    if layout == "humming":
        return {"weight": humming_words(codes, 4 + mbits), "weight_scale": scales}
    if mbits:
        return {"weight": carrier_bytes(codes, mbits), "weight_scale": scales}
    out = {"weight_packed": ct_words(codes), "weight_scale": scales, "weight_shape": [[n_all, k_all]]}
    return out | ({"weight_zero_point": ct_zeros(zeros)} if zeros else {})
