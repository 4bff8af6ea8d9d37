"""Time GPTQ's solver on single weights, by phase, with the default settings.

Weights and activations are random, with a common direction so that inputs are correlated. `factor` is the factorisation
of the Hessian, `search` the choice of scales, `sweep` the columns, `descent` one pass over the codes of the sweep,
`losses` the guard's proxy losses. Prints a table and writes a CSV; the last column is the loss divided by that of RTN.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench_kernels, timing
from benchmarks.floors import median_seconds
from quantkit.algorithms import coordinate_descent
from quantkit.algorithms.gptq import quantize
from quantkit.algorithms.hessian import factorize, row_losses
from quantkit.algorithms.rtn import quantize as round_to_nearest
from quantkit.algorithms.scale_search import choose_scales, group_errors
from quantkit.algorithms.sweep import sweep
from quantkit.cli.show import table
from quantkit.core.quantized_tensor import Scheme
from quantkit.models.weights import device_of
from quantkit.recipes.recipe import from_mapping, written

#: Weights of Llama 3 8B.
SHAPES = ("4096x4096", "14336x4096", "4096x14336")
SCHEMES = ("int4:g128", "int4:g128:asym", "fp6:channel")


def measure(n: int, k: int, scheme: Scheme, device: torch.device, rounds: int) -> dict[str, Any]:
    """Time a weight `[n, k]`: median seconds of each phase."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2 * k, k, generator=generator, device=device)
    x += torch.randn(2 * k, 1, generator=generator, device=device)
    h, options = x.T @ x, from_mapping({"scheme": written(scheme)}).gptq
    del x
    weight = torch.randn(n, k, generator=generator, device=device).to(torch.bfloat16)
    factor = factorize(h, options)

    def errors() -> Any:
        return group_errors(h, factor.diagonal, scheme.groups(k), options.metric, torch.float32)

    grid = choose_scales(weight, scheme, options.clip, errors(), options.signed)
    plain, _ = round_to_nearest(weight, scheme)
    swept = sweep(weight, scheme, factor, options, grid)
    steps: dict[str, Callable[[], object]] = {
        "factor": lambda: factorize(h, options),
        "search": lambda: choose_scales(weight, scheme, options.clip, errors(), options.signed),
        "sweep": lambda: sweep(weight, scheme, factor, options, grid),
        "descent": lambda: coordinate_descent.descend(weight, swept, h),
        "losses": lambda: [row_losses(weight, tensor, h) for tensor in (plain, plain, None)],
        "all": lambda: quantize(weight, scheme, h, options),
    }
    found = {f"{name}_s": median_seconds(step, device, rounds) for name, step in steps.items()}
    solution = quantize(weight, scheme, h, options)
    return {
        "gpu": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
        "rows": n,
        "columns": k,
        "scheme": scheme.label,
        **found,
        "loss_of_rounding": float(solution.loss.sum() / solution.rtn_loss.sum()),
    }


def main() -> None:
    """Read the arguments, print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NxK", help="output by input features")
    parser.add_argument("--scheme", nargs="+", default=SCHEMES, help="like int4:g128")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of a CPU [all]")
    parser.add_argument("--rounds", type=int, default=5, help="calls whose median counts [5]")
    parser.add_argument("--csv", type=Path, help="file to write")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = device_of(args.device)
    weights = bench_kernels.layers((), args.shape)
    rows = [
        measure(weight.n, weight.k, Scheme.parse(label), device, args.rounds)
        for weight in weights
        for label in args.scheme
    ]
    keys = list(rows[0])[2:]
    print(table(keys, ([f"{x:.4f}" if isinstance(x, float) else x for x in map(row.get, keys)] for row in rows)))
    if args.csv:
        args.csv.write_bytes(timing.table(rows))


if __name__ == "__main__":
    main()
