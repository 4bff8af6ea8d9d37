"""The committed sweeps of tiles (benchmarks/h200/*_tiles.csv): how far what is chosen lies behind what was fastest."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from quantkit.kernels.hopper import Tile

FOLDER = Path(__file__).parents[2] / "benchmarks" / "h200"


def behind(layout: str, choose: Callable[[int, int, int], Tile]) -> dict[tuple[int, int, int], float]:
    """Return for every (m, n, k) of a layout's sweep the time of what `choose(m, n, k)` takes over the least."""
    times: dict[tuple[int, int, int], dict[tuple[int, ...], float]] = defaultdict(dict)
    with (FOLDER / f"{layout}_tiles.csv").open() as file:
        for row in csv.DictReader(file):
            cell = int(row["M"]), int(row["N"]), int(row["K"])
            tile = ("tokens", "words", "warpgroups", "stages", "shared", "cluster")
            times[cell][tuple(int(row[name]) for name in tile)] = float(row["time_us"])

    def time(cell: tuple[int, int, int]) -> float:
        tile = choose(*cell)
        sizes = tile.tokens, tile.words, tile.warpgroups, tile.stages
        return times[cell][(*sizes, int(tile.shared), tile.cluster)]

    return {cell: time(cell) / min(found.values()) for cell, found in times.items()}
