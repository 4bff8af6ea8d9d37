"""Slow packers of what no published vector has, written from docs/layouts.md without code of the package.

Codes, zeros and scales come as nested lists `[n][k]` and `[n][g]`; words are Python integers.
"""

from __future__ import annotations

import math
import struct

Rows = list[list[int]]


def transposed(scales: Rows) -> Rows:
    return [[scales[n][g] for n in range(len(scales))] for g in range(len(scales[0]))]


def streams(codes: Rows, bits: int) -> Rows:
    """Pack each row as one little-endian stream of bits, the rest of its last word 0."""
    rows = []
    for row in codes:
        stream = sum(code << (k * bits) for k, code in enumerate(row))
        rows.append([(stream >> (32 * w)) & 0xFFFFFFFF for w in range(math.ceil(len(row) * bits / 32))])
    return rows


def fpx_value(code: int, ebits: int, mbits: int) -> float:
    """Decode a code (docs/layouts.md 6.1)."""
    bias = 2 ** (ebits - 1) - 1
    sign, exponent, fraction = code >> (ebits + mbits), (code >> mbits) & (2**ebits - 1), code & ((1 << mbits) - 1)
    if exponent == 0:
        magnitude = fraction * 2.0 ** (1 - bias - mbits)
    else:
        magnitude = (1 + fraction / 2**mbits) * 2.0 ** (exponent - bias)
    return math.copysign(magnitude, -1.0 if sign else 1.0)


def e4m3_value(byte: int) -> float:
    """Decode an FP8 E4M3 byte (bias 7, 0x7f and 0xff are NaN)."""
    sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    magnitude = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return math.copysign(magnitude, -1.0 if sign else 1.0)


def carrier_bytes(codes: Rows, ebits: int, mbits: int) -> Rows:
    by_bits = {struct.pack("<d", e4m3_value(byte)): byte for byte in range(256)}
    return [[by_bits[struct.pack("<d", fpx_value(code, ebits, mbits))] for code in row] for row in codes]


def scale_bytes(scales: Rows, group: int) -> Rows:
    """Find the byte of each float16 scale: E4M3 of 128 times its value in groups of 16, an exponent in groups of 32."""
    if group == 16:
        by_bits = {struct.pack("<e", e4m3_value(byte) / 128): byte for byte in range(256)}
    else:
        by_bits = {struct.pack("<e", 2.0 ** (byte - 127)): byte for byte in range(127 - 24, 127 + 16)}
    return [[by_bits[struct.pack("<H", scale)] for scale in row] for row in scales]


def packed(
    layout: str, codes: Rows, scales: Rows, zeros: Rows | None, bits: int, ebits: int, mbits: int, group: int
) -> dict[str, Rows] | None:
    """Pack all tensors of `layout` as rows of unsigned integers; None where published vectors state the bytes."""
    if layout == "humming":
        return {"weight": streams(codes, bits), "weight_scale": scales}
    if layout != "compressed-tensors":
        return None
    if (ebits, mbits) == (2, 1):
        pairs = [[row[k] | row[k + 1] << 4 for k in range(0, len(row), 2)] for row in codes]
        fp4 = {"weight_packed": pairs, "weight_scale": scale_bytes(scales, group)}
        return fp4 | ({"weight_global_scale": [[0x43000000]]} if group == 16 else {})  # 128.0
    if mbits:
        return {"weight": carrier_bytes(codes, ebits, mbits), "weight_scale": scales}
    shape = [[len(codes), len(codes[0])]]
    out = {"weight_packed": streams(codes, bits), "weight_scale": scales, "weight_shape": shape}
    return out | ({"weight_zero_point": transposed(streams(transposed(zeros), bits))} if zeros else {})
