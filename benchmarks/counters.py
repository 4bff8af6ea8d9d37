"""Read the hardware counters of single products, and of cuBLAS beside them if asked.

Starts itself under Nsight Compute (`ncu`), which replays each product several times and flushes the caches before each
pass, so that weights come from memory as in a model. Clocks are not locked but printed. Compare these times with each
other only; quote those of bench_kernels.py.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import timing
from quantkit.io import files

#: Column -> counter. Names that this chip or this ncu lacks are left out, with a notice.
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "GHz": "sm__cycles_elapsed.avg.per_second",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_GBps": "dram__bytes.sum.per_second",
    "dram_read_MB": "dram__bytes_read.sum",
    "dram_write_MB": "dram__bytes_write.sum",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "wgmma_pct": "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed",
    "fp16_pct": "sm__inst_executed_pipe_fp16.avg.pct_of_peak_sustained_elapsed",
    "lsu_pct": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm_busy_pct": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "conflicts_read": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "conflicts_write": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
}
#: Of base units as ncu prints them.
SCALES = {"us": 1e-3, "GHz": 1e-9, "dram_GBps": 1e-9, "dram_read_MB": 1e-6, "dram_write_MB": 1e-6}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
SHOWN = ("us", "GHz", "dram_pct", "dram_GBps", "l2_pct", "tensor_pct", "issue_pct", "warps_pct", "conflicts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", nargs="+", default=["marlin"])
    parser.add_argument("--scheme", help="by default the layout's first of bench_kernels.py")
    parser.add_argument("--shape", nargs="+", default=["6144x4096"], help="NxK")
    parser.add_argument("--m", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--cublas", action="store_true", help="profile torch.mm on the dense weight too")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        multiply(args)
        return
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("ncu (Nsight Compute) is not on the PATH")
    rows = measure(ncu, [*sys.argv[1:], "--inside"])
    for row in rows:
        print(line(row))
    if args.csv:
        files.write_atomic(args.csv, timing.table(rows))


def multiply(args: argparse.Namespace) -> None:
    """Make each product once without the profiler, so that nothing is compiled later, and once with it."""
    import torch

    from benchmarks import bench_kernels
    from quantkit.core.quantized_tensor import Scheme
    from quantkit.kernels import MATMULS
    from quantkit.kernels.proof import activations
    from quantkit.layouts import LAYOUTS

    dtype = getattr(torch, args.dtype)
    cuda = torch.device("cuda")
    for layout, layer in product(args.layout, bench_kernels.layers([], args.shape)):
        scheme = Scheme.parse(args.scheme or bench_kernels.SCHEMES[layout][0])
        q = bench_kernels.random_record(scheme, layer.n, layer.k, cuda)
        dense = q.dequantize()
        ours = partial(MATMULS[layout], tensors=LAYOUTS[layout].pack(q), scheme=scheme, n=layer.n, k=layer.k)
        calls: dict[str, Callable[..., Any]] = {layout: ours}
        if args.cublas:
            w, wt = dense.to(dtype), dense.t().to(dtype).contiguous()
            calls |= {"cublas_w": partial(torch.mm, mat2=w.t()), "cublas_wt": partial(torch.mm, mat2=wt)}
        for m, (name, call) in product(args.m, calls.items()):
            x = activations(dense, m, dtype)
            out = torch.empty(m, layer.n, dtype=dtype, device=cuda)
            call(x, out=out)
            torch.cuda.synchronize()
            with torch.cuda.nvtx.range(f"{name} {scheme.label.replace(':', '_')} {layer.n}x{layer.k} M{m}"):
                torch.cuda.profiler.start()
                call(x, out=out)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()


def measure(ncu: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run this program under `ncu` and return a row for each kernel that it launched while profiled."""
    names = counters(subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ["--profile-from-start", "off", "--nvtx", "--cache-control", "all", "--clock-control", "none"]
        options += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(names.values())]
        program = [sys.executable, __file__, *arguments]
        done = subprocess.run([ncu, *options, "--log-file", str(log), *program], capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    rows = parse(text, names)
    if done.returncode or not rows:
        sys.exit(f"ncu ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}{text[-3000:]}")
    return rows


def counters(listed: str) -> dict[str, str]:
    """Map columns to the counters that `ncu --query-metrics` lists, with every reason for which warps stall."""
    known = {line.split()[0] for line in listed.splitlines() if line.strip()}
    names = dict(COUNTERS)
    if any(name.startswith("gpu__time_duration") for name in known):
        left_out = [n for n in COUNTERS.values() if not n.startswith("launch__") and n.split(".")[0] not in known]
        names = {column: name for column, name in COUNTERS.items() if name not in left_out}
        if left_out:
            print(f"not counted on this chip: {', '.join(left_out)}", file=sys.stderr)
    stalls = [match for match in map(STALL.fullmatch, sorted(known)) if match and "not_issued" not in match[1]]
    return names | {f"stall_{match[1]}": f"{match[0]}.ratio" for match in stalls}


def parse(text: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Parse a raw page of ncu in CSV into rows: the range of a kernel's launch, its name, its counters."""
    start = text.find('"ID"')
    found = []
    for row in csv.DictReader(io.StringIO(text[start:] if start >= 0 else "")):
        if not row["ID"]:
            continue  # the units
        ranges = [value for key, value in row.items() if "Push/Pop_Range" in str(key) and value]
        # The range's text stands between the name of its domain and its attributes.
        launched = next((match[1] for value in ranges if (match := re.search(r">:([^:]+)", value))), "")
        kernel = re.sub(r"\(.*", "", row["Kernel Name"])
        out: dict[str, Any] = {"product": launched, "kernel": kernel}
        for column, name in names.items():
            value = (row.get(name) or "").replace(",", "")
            out[column] = float(value) * SCALES.get(column, 1) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value) else ""
        found.append(out)
    return found


def line(row: dict[str, Any]) -> str:
    """Return the main figures of a row, and the stalled warps per issued instruction for each reason."""
    figures = [f"{column} {row[column]:.4g}" for column in SHOWN if isinstance(row.get(column), float)]
    stalls = {column[6:]: value for column, value in row.items() if column.startswith("stall_") and value != ""}
    # issued instructions are not stalled
    main = sorted(stalls.keys() - {"selected"}, key=lambda reason: (-stalls[reason], reason))
    waits = ", ".join(f"{reason} {stalls[reason]:.2f}" for reason in main[:5])
    return f"{row['product']} | {row['kernel'][:70]}\n    {', '.join(figures)}\n    waiting: {waits}"


if __name__ == "__main__":
    main()
