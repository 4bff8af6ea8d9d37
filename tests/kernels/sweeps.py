"""The committed sweeps of tiles (benchmarks/gpu/*_tiles.csv): time of the chosen tile over the fastest."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from quantkit.kernels.tiles import HopperTile, grid_size

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
SIZES = ("tokens", "words", "warpgroups", "stages", "shared", "cluster")
H200 = 132


def behind(layout: str, label: str, choose: Callable[[int, int, int], HopperTile]) -> dict[tuple[int, int, int], float]:
    """Map every (m, n, k) in the sweep of a scheme to the time of the chosen tile over the least time.

    `choose(m, n, k)` is the launcher's choice. Its tile must have been timed on the grid that it is launched on. Rows
    come from several runs, and `scale` corrects the clocks of earlier ones.
    """
    times: dict[tuple[int, int, int], dict[tuple[int, ...], float]] = defaultdict(dict)
    with (FOLDER / f"{layout}_tiles.csv").open() as file:
        for row in csv.DictReader(file):
            if row["scheme"] == label:
                cell = int(row["M"]), int(row["N"]), int(row["K"])
                times[cell][tuple(int(row[name]) for name in (*SIZES, "blocks"))] = float(row["time_us"]) * float(
                    row["scale"]
                )

    def time(cell: tuple[int, int, int]) -> float:
        tile = choose(*cell)
        return times[cell][(*(int(getattr(tile, name)) for name in SIZES), grid_size(tile, *cell, H200))]

    return {cell: time(cell) / min(found.values()) for cell, found in times.items()}
