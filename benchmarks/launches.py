"""Time what Python and torch need for an eager product with a packed weight, without the GPU's own time.

    python benchmarks/launches.py --csv benchmarks/gpu/launches.csv

The weights are so small that the GPU is faster than the host, so the time of a call is the host's. Each figure is the
median of rounds of calls that follow each other. In rows `varied` each call has another number of tokens.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.bench_kernels import SCHEMES, random_record
from quantkit.core.quantized_tensor import Scheme
from quantkit.inference.packed_linear import PackedLinear
from quantkit.inference.products import KernelWeight, prepare
from quantkit.layouts import LAYOUTS

N, K, CALLS, ROUNDS = 512, 512, 200, 15
TOKENS = (1, 16, 64, "varied")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True, help="CSV file to write")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(), args.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["gpu", "stream", "layout", "tokens", "operator_us", "packed_linear_us", "linear_us"])
        for stream in ("default", "other"):
            with torch.cuda.stream(torch.cuda.Stream() if stream == "other" else torch.cuda.default_stream()):
                for layout in ("marlin", "marlin24", "tcfpx", "quick"):
                    for row in rows(layout, device):
                        writer.writerow([torch.cuda.get_device_name(device), stream, layout, *row])
                        print(stream, layout, *row, flush=True)


def rows(layout: str, device: torch.device) -> list[list[object]]:
    label = SCHEMES[layout][0]
    q = random_record(Scheme.parse(label), N, K, device)
    with torch.inference_mode(False):  # as an engine loads weights
        tensors = {name: tensor.clone() for name, tensor in LAYOUTS[layout].pack(q).items()}
        packed = PackedLinear(layout, q.scheme, (N, K), (N, K), tensors)
        dense = q.dequantize(torch.float16)
    handle = prepare(KernelWeight(layout, q.scheme, (N, K), tensors), N, torch.float16)
    given = [*tensors.values()]
    most = torch.randn(512, K, dtype=torch.float16, device=device)
    operator = torch.ops.quantkit.multiply.default
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: operator(x, given, [], handle, N),
        packed,
        lambda x: torch.nn.functional.linear(x, dense),
    ]
    found: list[list[object]] = []
    for tokens in TOKENS:
        counts = [random.Random(i).randrange(1, 513) if isinstance(tokens, str) else tokens for i in range(CALLS)]
        inputs = [most[:m] for m in counts]
        found.append([tokens, *(round(microseconds(call, inputs), 2) for call in calls)])
    return found


def microseconds(call: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> float:
    """Return the median time of a call, after one round that is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for x in inputs:
            call(x)
        times.append((time.perf_counter() - start) / len(inputs))
    return median(times[1:]) * 1e6


if __name__ == "__main__":
    main()
