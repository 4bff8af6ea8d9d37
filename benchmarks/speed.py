"""Measure RTN and MARLIN packing of one large weight on a CPU, and the phases of a GPTQ run.

Prints one JSON object. The weight's figures come from a fresh process. Its peak memory is the growth of the resident
size after import, the source weight included.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from quantkit.algorithms import rtn
from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts import LAYOUTS
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping

N, K = 14336, 4096


def weight() -> dict[str, float]:
    """Time RTN and MARLIN packing of a float16 weight `[14336, 4096]`, group 128, five times; report medians."""
    rtn.quantize(torch.randn(256, K).half(), Scheme(INT4, 128))  # loads what the first call loads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    w = torch.empty(N, K, dtype=torch.float16)
    generator = torch.Generator().manual_seed(0)
    for rows in w.split(1024):
        rows.copy_(torch.randn(len(rows), K, generator=generator) * 0.02)
    rounds = []
    for _ in range(5):
        started = time.perf_counter()
        q, _ = rtn.quantize(w, Scheme(INT4, 128))
        middle = time.perf_counter()
        packed = LAYOUTS["marlin"].pack(q)
        rounds.append((middle - started, time.perf_counter() - middle))
        del q, packed
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "rtn_seconds": statistics.median(r for r, _ in rounds),
        "pack_seconds": statistics.median(p for _, p in rounds),
        "total_seconds": statistics.median(r + p for r, p in rounds),
        "peak_over_fp16_bytes": peak / w.nbytes,
    }


def gptq(model: Path, calib: str, samples: int, length: int) -> dict[str, object]:
    """Run the default INT4 recipe and return its seconds by phase, and the share that is not running the model."""
    recipe = from_mapping({"calibration": {"data": calib, "samples": samples, "max_length": length}})
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        report = quantize(model, Path(folder) / "out", recipe, run=RunOptions(device="cpu"))
        total = time.perf_counter() - started
    phases = report["phases"]
    model_time = phases["forward"] + phases["hessian"]
    return {"seconds": total, "phases": phases, "share_of_solve_pack_io": (total - model_time) / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="also run GPTQ on this model")
    parser.add_argument("--calib", help="calibration text for it")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--weight-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.weight_only:
        print(json.dumps(weight()))
        return
    fresh = subprocess.run([sys.executable, __file__, "--weight-only"], check=True, capture_output=True, text=True)
    result: dict[str, object] = {"threads": torch.get_num_threads(), f"rtn_marlin_{N}x{K}": json.loads(fresh.stdout)}
    if args.model:
        result["gptq"] = gptq(args.model, args.calib, args.samples, args.max_length)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
