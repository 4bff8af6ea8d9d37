"""Time GPTQ's solver on a GPU: one linear after the other, by phase, with the default settings.

Weights and activations are random, with a common direction so that inputs are correlated. `factor` is the factorisation
of the Hessian, `search` the choice of scales, `sweep` the columns, `losses` the guard's proxy losses.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantkit.algorithms.cholesky import factorize
from quantkit.algorithms.gptq import quantize
from quantkit.algorithms.hessian import row_losses
from quantkit.algorithms.options import Options
from quantkit.algorithms.rtn import quantize as round_to_nearest
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.algorithms.sweep import sweep
from quantkit.core.scheme import Scheme

SHAPES = {"4096x4096": (4096, 4096), "14336x4096": (14336, 4096), "4096x14336": (4096, 14336)}
SCHEMES = ("int4:g128", "int4:g128:asym", "fp6:channel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="rows x columns [all]")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="[all]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--out", type=Path, required=True, help="CSV to write")
    args = parser.parse_args()
    rows = [
        timed(*SHAPES[shape], scheme, args.repeats)
        for shape in args.shape or SHAPES
        for scheme in args.scheme or SCHEMES
    ]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def timed(n: int, k: int, label: str, repeats: int) -> dict[str, Any]:
    """Measure one weight `[n, k]`; seconds are medians."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2 * k, k, generator=generator, device=device)
    x += torch.randn(2 * k, 1, generator=generator, device=device)
    h, scheme, options = x.T @ x, Scheme.parse(label), Options()
    del x
    weight = torch.randn(n, k, generator=generator, device=device).to(torch.bfloat16)
    factor = factorize(h, options)
    errors = group_errors(h, factor.diagonal, scheme.groups(k), options.metric, torch.float32)
    grid = choose_scales(weight, scheme, options.clip, errors)
    plain, _ = round_to_nearest(weight, scheme)

    def search() -> None:
        choose_scales(
            weight,
            scheme,
            options.clip,
            group_errors(h, factor.diagonal, scheme.groups(k), options.metric, torch.float32),
        )

    steps: dict[str, Callable[[], Any]] = {
        "factor": lambda: factorize(h, options),
        "search": search,
        "sweep": lambda: sweep(weight, scheme, factor, options, grid),
        "losses": lambda: [row_losses(weight, tensor, h) for tensor in (plain, plain, None)],
        "all": lambda: quantize(weight, scheme, h, options),
    }
    found = {name: _median(step, repeats) for name, step in steps.items()}
    solution = quantize(weight, scheme, h, options)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    row = {"gpu": name, "torch": torch.__version__, "rows": n, "columns": k, "scheme": label}
    row |= {f"{name}_s": round(seconds, 5) for name, seconds in found.items()}
    row |= {"loss_of_rounding": round(float(solution.loss.sum() / solution.rtn_loss.sum()), 4)}
    print(row, flush=True)
    return row


def _median(step: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
