"""Compare timings of kernels with cuBLAS of the same run and with the floor.

Pure arithmetic on measured times. The floor of a kernel is the time to move its bytes at the speed
of a copy, or to multiply at the speed of a large dense product, whichever is longer.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from quantkit.bench.workloads import MODELS
from quantkit.errors import RecipeError


@dataclass(frozen=True)
class Layer:
    """A named weight `[n, k]` to be timed."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Device:
    """The GPU and programs of a run, bytes/s of a copy (read and written) and FLOP/s of a dense
    product.
    """

    gpu: str
    torch: str
    cuda: str
    nvrtc: str
    dtype: str
    copy: float
    rate: float


def row_of(
    layer: Layer,
    m: int,
    device: Device,
    *,
    layout: str,
    scheme: str,
    path: str,
    times: tuple[float, float, float],
    floor_us: float,
    weight_bytes: int,
    **more: float,
) -> dict[str, Any]:
    """Build the row of a CSV, one timing of `layer` by `m` tokens.

    Columns that published figures have too carry their names. `times` are the microseconds of the
    kernel, and of cuBLAS with the weight as `[n, k]` and as `[k, n]`. `path` names the kernel:
    hopper or portable. `more` are the relative error, and how often the product was timed.
    """
    time_us, *cublas = times
    return {
        "layer": layer.name,
        "K": layer.k,
        "N": layer.n,
        "M": m,
        "kernel": "matmul",
        "path": path,
        "layout": layout,
        "scheme": scheme,
        "dtype": device.dtype,
        "time_us": time_us,
        "floor_us": floor_us,
        "pct_of_floor": 100 * floor_us / time_us,
        "cublas_us": min(cublas),
        "cublas_w_us": cublas[0],
        "cublas_wt_us": cublas[1],
        "speedup_vs_cublas": min(cublas) / time_us,
        "floor_speedup": min(cublas) / floor_us,
        "weight_GBps": weight_bytes / time_us / 1e3,
        "pct_of_copy_bandwidth": 100 * weight_bytes / time_us * 1e6 / device.copy,
        "tflops": 2 * m * layer.n * layer.k / time_us / 1e6,
        **more,
        "copy_GBps": device.copy / 1e9,
        "matrix_tflops": device.rate / 1e12,
        "gpu": device.gpu,
        "torch": device.torch,
        "cuda": device.cuda,
        "nvrtc": device.nvrtc,
    }


def layers(models: Sequence[str], shapes: Sequence[str]) -> list[Layer]:
    """List the layers of models by name and of shapes such as `6144x4096` (n x k), each once.

    RecipeError for an unknown model or a malformed shape.
    """
    found: dict[tuple[int, int], Layer] = {}
    for model in models:
        if model not in MODELS:
            raise RecipeError(
                f"unknown model {model!r}", f"use one of {', '.join(MODELS)}", "--shape NxK"
            )
        for name, (n, k) in MODELS[model].items():
            found.setdefault((n, k), Layer(f"{model} {name}".strip(), n, k))
    known = {
        layer: f"{model} {name}".strip()
        for model, parts in MODELS.items()
        for name, layer in parts.items()
    }
    for text in shapes:
        sizes = re.fullmatch(r"([1-9]\d{0,6})[xX]([1-9]\d{0,6})", text)
        if sizes is None:
            raise RecipeError(
                f"{text!r} is no shape", "write out features by in features, like 6144x4096"
            )
        n, k = int(sizes[1]), int(sizes[2])
        found.setdefault((n, k), Layer(known.get((n, k), f"{n}x{k}"), n, k))
    return list(found.values())


def floor(size: int, flops: float, copy: float, rate: float) -> float:
    """Compute the least microseconds of a kernel that moves `size` bytes and does `flops`."""
    return 1e6 * max(size / copy, flops / rate)


def table(rows: Sequence[dict[str, Any]]) -> bytes:
    """Write rows as a CSV, floats to six digits."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows
    )
    return text.getvalue().encode()


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute geometric means over the layers of each model, for each layout and M, if all its
    layers were timed.

    A row has `layout`, `scheme`, `model`, `M`, `speedup_vs_cublas` and `floor_speedup`.
    """
    found: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        model = row["layer"].split(" ")[0]
        found.setdefault((row["layout"], row["scheme"], model, row["M"]), []).append(row)
    return [
        {"layout": layout, "scheme": scheme, "model": model, "M": m}
        | {
            key: geometric_mean([row[key] for row in part])
            for key in ("speedup_vs_cublas", "floor_speedup")
        }
        for (layout, scheme, model, m), part in found.items()
        if len(part) == len(MODELS.get(model, ())) > 1
    ]
