"""Measure the seconds until each layout's first product: kernels not compiled, cached, and four processes at once.

Each start is a fresh process. It imports, makes its operands, and then multiplies one token with each layout. Every
number of tokens of bench_kernels.py follows, in both dtypes, which may need more kernels of the same source. Prints,
and writes as CSV, one row for each layout and start. `wait_s` is the wait of a user for the first product. All cores
compile, so `compile_thread_s`, the sum over threads, is larger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import timing
from quantkit.io import files

N = K = 4096
#: How a start is called, how many processes it has, and whether the cache was filled before.
STARTS = (("first", 1, False), ("cached", 1, True), ("four at once", 4, False), ("four at once, cached", 4, True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(products(float(args.start))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for start, processes, filled in STARTS:
            cache = Path(work) / str(processes)
            assert cache.exists() == filled
            for number, found in enumerate(together(processes, cache)):
                rows += [{"start": start, "process": number, **row} for row in found]
    for row in rows:
        print(", ".join(f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if args.csv:
        files.write_atomic(args.csv, timing.table(rows))


def together(processes: int, cache: Path) -> list[list[dict[str, Any]]]:
    """Start several processes at once and return the rows of each."""
    environment = {**os.environ, "QUANTKIT_CACHE": str(cache)}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--start", str(time.time())], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(processes)
    ]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit("a start failed, see above")
    return [json.loads(text) for text in said]


def products(began: float) -> list[dict[str, Any]]:
    """Return a row for each layout. The time `began` is that of this process' start."""
    import torch

    from benchmarks import bench_kernels
    from quantkit.core.quantized_tensor import Scheme
    from quantkit.kernels import loader

    imported = time.time() - began
    start = time.perf_counter()
    torch.zeros(1, device="cuda")
    cuda, start = time.perf_counter() - start, time.perf_counter()
    loader.toolchain()
    cupy = time.perf_counter() - start
    once = {"import_s": imported, "cuda_s": cuda, "cupy_s": cupy, "gpu": torch.cuda.get_device_name()}
    compiled: list[float] = []
    compiling = loader.compile

    def timed(*rest: Any) -> loader.Binary:
        began = time.perf_counter()
        binary = compiling(*rest)
        compiled.append(time.perf_counter() - began)
        return binary

    loader.compile = timed
    schemes = {layout: Scheme.parse(labels[0]) for layout, labels in bench_kernels.SCHEMES.items()}
    return [{"layout": layout, **_products(layout, scheme, compiled), **once} for layout, scheme in schemes.items()]


def _products(layout: str, scheme: Any, compiled: list[float]) -> dict[str, Any]:
    """Time the first product of a layout, and then one with every number of tokens and dtype."""
    import torch

    from benchmarks import bench_kernels
    from quantkit.kernels import MATMULS
    from quantkit.kernels.contract import ACTIVATIONS
    from quantkit.layouts import LAYOUTS

    q = bench_kernels.random_record(scheme, N, K, torch.device("cuda"))
    tensors = LAYOUTS[layout].pack(q)
    inputs = [torch.ones(m, K, dtype=dtype, device="cuda") for dtype in ACTIVATIONS for m in bench_kernels.TOKENS]
    torch.cuda.synchronize()

    def multiply(some: list[torch.Tensor]) -> tuple[float, float, int]:
        compiled.clear()
        start = time.perf_counter()
        for x in some:
            MATMULS[layout](x, tensors, scheme, N, K)
        torch.cuda.synchronize()
        return time.perf_counter() - start, sum(compiled), len(compiled)

    wait, compiling, _ = multiply(inputs[:1])
    launch, _, _ = multiply(inputs[:1])
    rest, compiling_rest, count = multiply(inputs[1:])
    return {
        "wait_s": wait,
        "compile_thread_s": compiling,
        "launch_s": launch,
        "rest_s": rest,
        "rest_compile_thread_s": compiling_rest,
        "rest_compilations": count,
    }


if __name__ == "__main__":
    main()
