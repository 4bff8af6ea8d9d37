"""The constants that choose between a packed product and a decoded weight follow from the times of the script."""

from __future__ import annotations

import pytest

from benchmarks import batches
from benchmarks.batches import SMALLER, strips_of, summary
from quantkit.kernels import decoded
from quantkit.kernels.decoded import strips


def row(m: int, packed: float, cublas: float, layer: str = "llama3-8b o", chosen: str = "hopper") -> dict[str, object]:
    names = ("packed_us", *(f"packed_{size}_us" for size in batches.SIZES), "decoded_us", "decoded_32MiB_us")
    about = {"layout": "tcfpx", "scheme": "fp6:channel", "layer": layer, "M": m, "N": 4096, "K": 4096}
    times = dict.fromkeys(names, packed) | {"cublas_us": cublas, "decode_GBps": 2500.0}
    return about | times | {"chosen": chosen, "vs_cublas": cublas / packed}


def test_the_share_is_that_of_many_tokens_and_the_worst_layer_is_named() -> None:
    rows = [row(512, 10.0, 20.0), row(4096, 100.0, 80.0), row(8192, 100.0, 95.0, "llama3-8b qkv", "cublas")]
    found = list(summary(rows))
    assert found[0].startswith("tcfpx fp6:channel M=512: chosen 2.000 of cuBLAS, worst 2.000 (llama3-8b o, hopper)")
    assert "worst 0.950 (llama3-8b qkv, cublas)" in found[2]
    assert found[3] == f"tcfpx fp6:channel: share={(0.8 * 0.95) ** 0.5:.3f}, decoding 2500 GB/s"
    rates = sorted(2e-6 * one["M"] * 4096**2 / one["cublas_us"] for one in rows)  # type: ignore[operator]
    assert found[4] == f"HOPPER: multiply={rates[1]:.0f}e12, decode=2500e9"


def test_smaller_strips_are_cut_inside_only() -> None:
    before = strips(8192, 8192)
    with strips_of(SMALLER):
        assert len(strips(8192, 8192)) == 2 * len(before) == 4
    assert strips(8192, 8192) == before
    with pytest.raises(RuntimeError), strips_of(SMALLER):
        raise RuntimeError
    assert decoded.BUFFER == 2 * SMALLER
