"""What timings of kernels mean: beside cuBLAS of the same run, beside the floor, beside other kernels' figures.

Pure arithmetic on figures that `bench` measures. The floor of a kernel is the time to move its bytes at the speed of a
copy, or to multiply at the speed of a large dense product, whichever is longer. Kernels that were timed elsewhere are
compared by their speedup over the cuBLAS of their own run, which takes clocks and cards out.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from quantkit.errors import CheckpointError, RecipeError
from quantkit.io import files

#: Model -> its linears as `[n, k]`: the layers of the published figures.
MODELS = {
    "llama3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "llama2-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "large": {"": (73728, 18432)},
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)

#: (kernel, n, k, m) -> its speedup over cuBLAS.
Peers = dict[tuple[str, int, int, int], float]


@dataclass(frozen=True)
class Layer:
    """A weight `[n, k]` to be timed, and what it is called."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Device:
    """Where cells were measured: programs, bytes/s of a copy (read and written) and FLOP/s of a dense product."""

    gpu: str
    torch: str
    cuda: str
    nvrtc: str
    dtype: str
    copy: float
    rate: float


@dataclass(frozen=True)
class Cell:
    """One timing: `layer` by `m` tokens. Times in microseconds, `bytes` those of the packed weight.

    `cublas_w` is cuBLAS with the weight as `[n, k]`, `cublas_wt` as `[k, n]`. `flops` are those that the layout leaves
    to do, half for a compressed 2:4 weight. `error` is relative, against float32; `calls` in a graph go round `copies`
    of the weight, and the times are medians of `rounds`.
    """

    layer: Layer
    m: int
    layout: str
    scheme: str
    kernel: str
    us: float
    cublas_w: float
    cublas_wt: float
    bytes: int
    floor: float
    error: float
    copies: int
    calls: int
    rounds: int

    @property
    def cublas(self) -> float:
        """The faster order."""
        return min(self.cublas_w, self.cublas_wt)

    @property
    def speedup(self) -> float:
        return self.cublas / self.us

    def row(self, device: Device) -> dict[str, Any]:
        """Return the figures under the names of a CSV; those that published figures have too are called the same."""
        n, k = self.layer.n, self.layer.k
        return {
            "layer": self.layer.name,
            "K": k,
            "N": n,
            "M": self.m,
            "kernel": self.kernel,
            "layout": self.layout,
            "scheme": self.scheme,
            "dtype": device.dtype,
            "time_us": self.us,
            "floor_us": self.floor,
            "pct_of_floor": 100 * self.floor / self.us,
            "cublas_us": self.cublas,
            "cublas_w_us": self.cublas_w,
            "cublas_wt_us": self.cublas_wt,
            "speedup_vs_cublas": self.speedup,
            "floor_speedup": self.cublas / self.floor,
            "weight_GBps": self.bytes / self.us / 1e3,
            "pct_of_copy_bandwidth": 100 * self.bytes / self.us * 1e6 / device.copy,
            "tflops": 2 * self.m * n * k / self.us / 1e6,
            "relative_error": self.error,
            "copies": self.copies,
            "calls": self.calls,
            "rounds": self.rounds,
            "copy_GBps": device.copy / 1e9,
            "matrix_tflops": device.rate / 1e12,
            "gpu": device.gpu,
            "torch": device.torch,
            "cuda": device.cuda,
            "nvrtc": device.nvrtc,
        }


def layers(models: Sequence[str], shapes: Sequence[str]) -> list[Layer]:
    """Return the layers of models by name and of shapes such as `6144x4096` (n x k), each once.

    RecipeError for anything that is not written so.
    """
    found: dict[tuple[int, int], Layer] = {}
    for model in models:
        if model not in MODELS:
            raise RecipeError(f"unknown model {model!r}: use one of {', '.join(MODELS)}, or --shape NxK")
        for name, (n, k) in MODELS[model].items():
            found.setdefault((n, k), Layer(f"{model} {name}".strip(), n, k))
    known = {layer: f"{model} {name}".strip() for model, parts in MODELS.items() for name, layer in parts.items()}
    for text in shapes:
        sizes = re.fullmatch(r"([1-9]\d{0,6})[xX]([1-9]\d{0,6})", text)
        if sizes is None:
            raise RecipeError(f"{text!r} is no shape: write out features by in features, like 6144x4096")
        n, k = int(sizes[1]), int(sizes[2])
        found.setdefault((n, k), Layer(known.get((n, k), f"{n}x{k}"), n, k))
    return list(found.values())


def floor(size: int, flops: float, copy: float, rate: float) -> float:
    """Return the microseconds below which no kernel comes that moves `size` bytes and does `flops`."""
    return 1e6 * max(size / copy, flops / rate)


def table(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return rows as a CSV, floats to six digits."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)
    return text.getvalue().encode()


def read_peers(path: Path, names: Sequence[str]) -> Peers:
    """Return the speedups of the kernels `names` in a CSV with columns K, N, M, kernel, speedup_vs_cublas.

    Of several figures for one cell the best is taken. CheckpointError for a file that is no such CSV, RecipeError,
    with the names that there are, for none and for one that is not among them.
    """
    found: Peers = {}
    with files.open_regular(path) as file:
        text = file.read()
    try:
        for row in csv.DictReader(io.StringIO(text.decode(), newline="")):
            if not row["speedup_vs_cublas"]:
                continue  # a plain read has none
            key = (row["kernel"], int(row["N"]), int(row["K"]), int(row["M"]))
            speedup = float(row["speedup_vs_cublas"])
            if not 0 < speedup < math.inf:
                raise ValueError
            found[key] = max(speedup, found.get(key, 0.0))
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise CheckpointError(
            f"{path}: no CSV of speeds: it needs the columns kernel, K, N, M and speedup_vs_cublas, and numbers in "
            "all but the first"
        ) from error
    known = sorted({kernel for kernel, *_ in found})
    for name in names or ("",):
        if name not in known:
            asked = f"no kernel {name!r} in {path}" if name else f"which kernels of {path} to compare with is not said"
            raise RecipeError(f"{asked}: use --peer with one of {', '.join(known) or 'none, it is empty'}")
    return {key: speedup for key, speedup in found.items() if key[0] in names}


def compare(cells: Iterable[Cell], peers: Peers) -> dict[str, Any]:
    """Return how cells stand beside the best of `peers` for the same n, k and m, by speedup over cuBLAS.

    `compared` and `missing` are counts (missing: the peers have no figure), `mean` the geometric mean of our speedup
    over theirs (None for nothing compared), `slower` the cells that are behind, the worst first.
    """
    best: dict[tuple[int, int, int], tuple[float, str]] = {}
    for (kernel, n, k, m), speedup in peers.items():
        best[n, k, m] = max((speedup, kernel), best.get((n, k, m), (0.0, "")))
    ratios: list[float] = []
    slower: list[dict[str, Any]] = []
    missing = 0
    for cell in cells:
        found = best.get((cell.layer.n, cell.layer.k, cell.m))
        if found is None:
            missing += 1
            continue
        speedup, kernel = found
        ratios.append(cell.speedup / speedup)
        if ratios[-1] < 1:
            slower.append(
                {
                    "layout": cell.layout,
                    "scheme": cell.scheme,
                    "layer": cell.layer.name,
                    "M": cell.m,
                    "speedup_vs_cublas": cell.speedup,
                    "peer": kernel,
                    "peer_speedup": speedup,
                    "ratio": ratios[-1],
                }
            )
    slower.sort(key=lambda row: row["ratio"])
    mean = geometric_mean(ratios) if ratios else None
    return {"compared": len(ratios), "missing": missing, "mean": mean, "slower": slower}


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the layers of each model whose layers were all timed, for each layout and M.

    A row has `layout`, `scheme`, `model`, `M`, `speedup_vs_cublas` and `floor_speedup`.
    """
    found: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        model = row["layer"].split(" ")[0]
        found.setdefault((row["layout"], row["scheme"], model, row["M"]), []).append(row)
    return [
        {"layout": layout, "scheme": scheme, "model": model, "M": m}
        | {key: geometric_mean([row[key] for row in part]) for key in ("speedup_vs_cublas", "floor_speedup")}
        for (layout, scheme, model, m), part in found.items()
        if len(part) == len(MODELS.get(model, ())) > 1
    ]


def panels(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
    """Return what a plot shows: layout and scheme -> shape -> (M, speedup over cuBLAS, the floor's) by M.

    The figures of a row may be text, as a CSV has them.
    """
    found: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    for row in rows:
        lines = found.setdefault(f"{row['layout']} {row['scheme']} ({row['kernel']})", {})
        point = (int(row["M"]), float(row["speedup_vs_cublas"]), float(row["floor_speedup"]))
        shape = f"{row['N']}x{row['K']}"
        lines.setdefault(shape if row["layer"] == shape else f"{row['layer']} {shape}", []).append(point)
    return {title: {shape: sorted(line) for shape, line in lines.items()} for title, lines in found.items()}
