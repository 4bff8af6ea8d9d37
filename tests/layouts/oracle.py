"""Slow packers, a loop for each index, written from the formulas of docs/layouts.md without code of the package.

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


def gptq_qzeros(zeros: Rows, offset: int) -> Rows:
    n_all, g_all = len(zeros), len(zeros[0])
    words = [[0] * (n_all // 8) for _ in range(g_all)]
    for n in range(n_all):
        for g in range(g_all):
            words[g][n // 8] |= (zeros[n][g] - offset) << 4 * (n % 8)
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


def quad(codes: list[int]) -> tuple[int, int]:
    """Choose the kept positions of four codes, where 8 is zero (docs/layouts.md 4.1)."""
    table = {
        (0, 1): (0, 1), (0, 2): (0, 2), (0, 3): (0, 3), (1, 2): (1, 2), (1, 3): (1, 3), (2, 3): (2, 3),
        (): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3),
    }  # fmt: skip
    return table[tuple(i for i in range(4) if codes[i] != 8)]


def sparse_marlin(codes: Rows) -> tuple[Rows, Rows]:
    """Pack `B_24` and `B_meta` (docs/layouts.md 4.4 and 5.2)."""
    n_all, k_all = len(codes), len(codes[0])
    words, meta = ([[0] * (2 * n_all) for _ in range(k_all // 32)] for _ in range(2))
    for n in range(n_all):
        for t in range(k_all // 4):
            places = quad(codes[n][4 * t : 4 * t + 4])
            for i, place in enumerate(places):
                kc = 2 * t + i
                h, q, e = (kc % 16) // 8, (kc % 8) // 2, kc % 2
                a, b, j = (n % 64) // 8, (n % 8) // 4, n % 4
                column = 128 * (n // 64) + 16 * a + 4 * q + j
                words[kc // 16][column] |= codes[n][4 * t + place] << 4 * (4 * e + 2 * b + h)
            c = t // 4
            column = 128 * (n // 64) + 64 * (n >> 1 & 1) + 8 * (n >> 3 & 7) + 4 * (n & 1) + 2 * (c & 1) + (n >> 2 & 1)
            meta[c // 2][column] |= (places[0] | places[1] << 2) << 4 * (t % 4)
    return words, meta


def sparse_marlin_scales(scales: Rows) -> Rows:
    n_all, g_all = len(scales), len(scales[0])
    if g_all == 1:
        return transposed(scales)
    out = [[0] * n_all for _ in range(g_all)]
    for g in range(g_all):
        for n in range(n_all):
            i, b, c = n // 8, (n % 8) // 4, n % 4
            out[g][8 * i + 2 * c + b] = scales[n][g]
    return out


def awq_words(matrix: Rows) -> Rows:
    """Pack codes `[n][k]` or zero points `[n][g]` (docs/layouts.md 2)."""
    n_all, k_all = len(matrix), len(matrix[0])
    words = [[0] * (n_all // 8) for _ in range(k_all)]
    for n in range(n_all):
        p = n % 8
        for k in range(k_all):
            words[k][n // 8] |= matrix[n][k] << 4 * (p // 2 + 4 * (p % 2))
    return words


def quick_words(codes: Rows) -> Rows:
    n_all, k_all = len(codes), len(codes[0])
    words = [[0] * (n_all // 2) for _ in range(k_all // 4)]
    for n in range(n_all):
        bx, ty, j, b, a = n // 128, (n % 128) // 64, (n % 64) // 16, (n % 16) // 8, n % 8
        for k in range(k_all):
            ks, r, q, e = (k % 32) // 16, (k % 16) // 8, (k % 8) // 2, k % 2
            place = ty * (n_all // 4) + (a // 4) * (n_all // 8) + 16 * bx + 4 * (a % 4) + q
            flat = 4 * n_all * (k // 32) + 8 * place + 4 * ks + j
            words[flat // (n_all // 2)][flat % (n_all // 2)] |= codes[n][k] << 4 * (4 * e + 2 * b + r)
    return words


def quick_place(n: int, n_all: int) -> int:
    """Compute the place x of output `n` among scales and zero points (docs/layouts.md 8.2)."""
    bx, ty, a = n // 128, (n % 128) // 64, n % 8
    return 8 * (ty * (n_all // 16) + (a // 4) * (n_all // 32) + 4 * bx + a % 4) + (n % 64) // 8


def quick_zeros(zeros: Rows) -> Rows:
    n_all, g_all = len(zeros), len(zeros[0])
    words = [[0] * (n_all // 4) for _ in range(g_all)]
    for n in range(n_all):
        x = quick_place(n, n_all)
        for g in range(g_all):
            words[g][x // 4] |= zeros[n][g] << 4 * (x % 4) | zeros[n][g] << 4 * (x % 4 + 4)
    return words


def quick_scales(scales: Rows) -> Rows:
    n_all, g_all = len(scales), len(scales[0])
    out = [[0] * (2 * n_all) for _ in range(g_all)]
    for n in range(n_all):
        x = quick_place(n, n_all)
        for g in range(g_all):
            out[g][2 * x] = out[g][2 * x + 1] = scales[n][g]
    return out


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


def tcfpx_words(codes: Rows, bits: int) -> Rows:
    """Pack the flat buffer of docs/layouts.md 7.2 and 7.3, cut into n rows."""
    n_all, k_all = len(codes), len(codes[0])
    buffer: list[int] = []
    above = bits
    for y in (1, 2, 4):
        if not bits & y:
            continue
        above -= y
        slots = 32 // y
        words = [0] * (n_all * k_all * y // 32)
        for m in range(n_all):
            for k in range(k_all):
                lane = 4 * (m % 8) + (k % 8) // 2
                el = 4 * ((k % 16) // 8) + 2 * ((m % 16) // 8) + k % 2
                blk = ((m // 64) * (k_all // 16) + k // 16) * 4 + (m % 64) // 16
                w, pos = divmod(8 * blk + el, slots)
                slot = slots // 4 * [2, 0, 3, 1][pos % 4] + pos // 4
                words[32 * w + lane] |= (codes[m][k] >> above & (1 << y) - 1) << (32 - y * (slot + 1))
        buffer += words
    width = k_all * bits // 32
    return [buffer[row * width : (row + 1) * width] for row in range(n_all)]


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
) -> dict[str, Rows]:
    """Pack all tensors of `layout` as rows of unsigned integers (scales and FP8 as their bits)."""
    n_all, k_all = len(codes), len(codes[0])
    if layout in ("gptq", "gptq-v2", "awq", "quick"):
        zeros = zeros or [[8] * len(scales[0]) for _ in range(n_all)]
    if layout == "awq":
        return {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": transposed(scales)}
    if layout == "quick":
        return {"qweight": quick_words(codes), "qzeros": quick_zeros(zeros), "scales": quick_scales(scales)}
    if layout in ("gptq", "gptq-v2"):
        return {
            "qweight": gptq_qweight(codes),
            "qzeros": gptq_qzeros(zeros, offset=1 if layout == "gptq" else 0),
            "scales": transposed(scales),
            "g_idx": [[k // group for k in range(k_all)]],
        }
    if layout == "marlin":
        return {"B": marlin_words(codes), "s": marlin_scales(scales)}
    if layout in ("marlin24", "marlin24-ct"):
        names = ("B_24", "B_meta", "s") if layout == "marlin24" else ("weight_packed", "meta", "scale_packed")
        return dict(zip(names, (*sparse_marlin(codes), sparse_marlin_scales(scales)), strict=True))
    if layout == "humming":
        return {"weight": streams(codes, bits), "weight_scale": scales}
    if layout == "tcfpx":
        return {"weight": tcfpx_words(codes, bits), "scales": [[row[0] for row in scales]]}
    if (ebits, mbits) == (2, 1):
        pairs = [[row[k] | row[k + 1] << 4 for k in range(0, k_all, 2)] for row in codes]
        fp4 = {"weight_packed": pairs, "weight_scale": scale_bytes(scales, group)}
        return fp4 | ({"weight_global_scale": [[0x43000000]]} if group == 16 else {})  # 128.0
    if mbits:
        return {"weight": carrier_bytes(codes, ebits, mbits), "weight_scale": scales}
    out = {"weight_packed": streams(codes, bits), "weight_scale": scales, "weight_shape": [[n_all, k_all]]}
    return out | ({"weight_zero_point": transposed(streams(transposed(zeros), bits))} if zeros else {})
