"""Time every tile of a layout's Hopper kernel over nine layer shapes and eight token counts.

The times in quantkit/kernels/hopper_tiles.csv are fitted to these figures, and tests compare the choices with them.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_kernels import MODELS, TOKENS, flops, random_record
from benchmarks.timing import copies, floor, medians, prepared
from quantkit.core.quantized_tensor import Scheme
from quantkit.kernels import LAUNCHERS
from quantkit.kernels.proof import activations, mismatch, reference
from quantkit.kernels.tiles import HopperTile, grid_size
from quantkit.layouts import LAYOUTS

RESULTS = Path(__file__).parent / "gpu"
SCHEMES = {
    "marlin": ["int4:g128"],
    "marlin24": ["int4:g128:24"],
    "quick": ["int4:g128:asym"],
    "tcfpx": ["fp6:channel", "fp5:channel"],
}
SIZES = ("tokens", "words", "warpgroups", "stages", "shared", "cluster")
#: Of an H200: bytes/s of a copy, FLOP/s of a large product.
COPY, RATE = 4.24e12, 740e12
SMS = 132


def sweep(layout: str, out: Path) -> None:
    """Time every tile that could be chosen, and cuBLAS beside it; products are checked against float32."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["N", "K", "M", "scheme", *SIZES, "blocks", "time_us", "scale", "cublas_us", "floor_us"])
        for label in SCHEMES[layout]:
            for n, k in (shape for model in MODELS.values() for shape in model.values()):
                for row in _cells(layout, Scheme.parse(label), n, k):
                    writer.writerow([n, k, *row])
                    file.flush()


def _cells(layout: str, scheme: Scheme, n: int, k: int) -> list[list[Any]]:
    where = torch.device("cuda")
    l2 = torch.cuda.get_device_properties(where).L2_cache_size
    q = random_record(scheme, n, k, where)
    dense, one = q.dequantize(), LAYOUTS[layout].pack(q)
    size = sum(tensor.nbytes for tensor in one.values())
    packed = [{name: part.clone() for name, part in one.items()} for _ in range(copies(size, l2))]
    weights = [dense.half() for _ in range(copies(2 * n * k, l2))]
    rows = []
    for m in TOKENS:
        x = activations(dense, m, torch.float16)
        wanted = reference(x, dense).half()
        y, out = torch.empty_like(wanted), torch.empty_like(wanted)
        least = floor(size + x.nbytes + y.nbytes, flops(layout, n, k, m), COPY, RATE)

        def cublas(i: int, x: torch.Tensor = x, y: torch.Tensor = y) -> object:
            return torch.mm(x, weights[i % len(weights)].t(), out=y)

        (us_cublas,) = medians([prepared(cublas, least, len(weights))])
        kernel = LAUNCHERS[layout].kernels(scheme, n, k).hopper
        assert kernel is not None, "all layers fill the tiles"
        for tile in kernel.choice.candidates(torch.float16, m, n, k, SMS):

            def ours(i: int, x: torch.Tensor = x, out: torch.Tensor = out, tile: HopperTile = tile) -> object:
                target = out.fill_(math.nan) if i < 0 else out
                return LAUNCHERS[layout].matmul(x, packed[i % len(packed)], scheme, n, k, out=target, tile=tile)

            ours(-1)
            assert mismatch(out, wanted) is None, (layout, scheme.label, n, k, m, tile)
            (us,) = medians([prepared(ours, least, len(packed))])
            sizes = [int(getattr(tile, name)) for name in SIZES]
            blocks = grid_size(tile, m, n, k, SMS)
            rows.append([m, scheme.label, *sizes, blocks, round(us, 3), 1, round(us_cublas, 3), round(least, 3)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout", choices=SCHEMES)
    parser.add_argument("--csv", type=Path, help="where the sweep goes; by default beside the committed ones")
    args = parser.parse_args()
    sweep(args.layout, args.csv or RESULTS / f"{args.layout}_tiles.csv")


if __name__ == "__main__":
    main()
