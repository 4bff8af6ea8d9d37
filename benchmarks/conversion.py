"""Measure how fast a folder is converted, hashes included, beside `cp` and `sync` of the same bytes in the same run.

Prints one JSON object: for each pair of layouts gigabytes a second of the larger side, the share of `cp` + `sync`, and
the growth of resident memory to its peak in megabytes, medians over `--repeats`. Sources are read cold: their pages are
dropped from the page cache first. Each conversion runs in a process of its own, imports not counted.

`--before PATH` measures another checkout of quantkit too, in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import quantkit

#: Scheme options of `quantize` -> layouts that are converted from compressed-tensors and back.
SCHEMES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "int4:g128": ({"format": "int4"}, ("gptq", "marlin")),
    "int4:g128:asym": ({"format": "int4", "asym": True}, ("gptq-v2", "awq", "quick")),
    "int4:g128:24": ({"format": "int4", "prune": "2:4", "prune_method": "magnitude"}, ("marlin24", "marlin24-ct")),
    "fp6:channel": ({"format": "fp6"}, ("humming", "tcfpx")),
    "fp5:channel": ({"format": "fp5"}, ("humming", "tcfpx")),
}
HUB = "compressed-tensors"
#: Kind of folder -> sizes of a Llama's blocks: large weights, and five hundred small ones.
FOLDERS = {
    "large": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 32},
    "small": {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 72, "num_attention_heads": 8},
}
CONVERT = """
import json, sys, time
import torch
import quantkit
from transformers import LlamaForCausalLM  # what opening the output imports
torch.set_num_threads(1)  # as the command line does
pack = quantkit.pack


def resident(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))


before, start = resident("VmRSS"), time.perf_counter()
pack(sys.argv[1], sys.argv[2], sys.argv[3])
print(json.dumps({"seconds": time.perf_counter() - start, "peak_mb": resident("VmHWM") - before}))
"""


def dense_folder(folder: Path, sizes: dict[str, int]) -> Path:
    """Write a Llama of random float16 weights, without a tokenizer."""
    config = LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"], vocab_size=256, dtype="float16")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file({name: torch.rand(shape).half() - 0.5 for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def drop_pages(folder: Path) -> None:
    """Make the files durable and forget their pages, so that the next reader asks the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copied(source: Path, out: Path) -> dict[str, float]:
    """Return the seconds of `cp -r` and `sync`."""
    drop_pages(source)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    subprocess.run(["sync", *out.iterdir(), out], check=True)
    return {"seconds": time.perf_counter() - start}


def converted(tree: Path, source: Path, out: Path, layout: str) -> dict[str, float]:
    """Return the seconds and the peak memory of one conversion by the checkout `tree`."""
    drop_pages(source)
    run = [sys.executable, "-c", CONVERT, str(source), str(out), layout]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(run, check=True, capture_output=True, text=True, env=env)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(work: Path, kind: str, label: str, trees: dict[str, Path], repeats: int) -> dict[str, Any]:
    """Return the figures of all conversions of one kind of folder in one scheme."""
    options, layouts = SCHEMES[label]
    hub = work / "hub"
    quantkit.quantize(work / kind, hub, method="rtn", clip="none", layout=HUB, **options)
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(repeats):
        for layout in layouts:
            copy = copied(hub, work / "copy")
            shutil.rmtree(work / "copy")
            for name, tree in trees.items():
                there, back = work / "there", work / "back"
                for pair, source, out, target in (
                    (f"{HUB}-to-{layout}", hub, there, layout),
                    (f"{layout}-to-{HUB}", there, back, HUB),
                ):
                    found = converted(tree, source, out, target)
                    larger = max(size(source), size(out))
                    found["gb_s"] = larger / 1e9 / found["seconds"]
                    found["of_cp_and_sync"] = found["gb_s"] / (size(hub) / 1e9 / copy["seconds"])
                    found["cp_and_sync_gb_s"] = size(hub) / 1e9 / copy["seconds"]
                    runs.setdefault((f"{pair} {label}", name), []).append(found)
                    print(pair, label, name, {k: round(v, 2) for k, v in found.items()}, file=sys.stderr, flush=True)
                shutil.rmtree(there)
                shutil.rmtree(back)
    shutil.rmtree(hub)
    figures: dict[str, Any] = {}
    for (pair, name), found in runs.items():
        medians = {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
        figures.setdefault(pair, {})[name] = medians
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, action="append", default=[], help="another checkout, measured in turns")
    parser.add_argument("--scheme", choices=SCHEMES, action="append")
    parser.add_argument("--folder", choices=FOLDERS, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    args = parser.parse_args()
    trees = {"now": Path(__file__).resolve().parents[1]} | {path.name: path for path in args.before}
    result: dict[str, Any] = {"cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        work = Path(folder)
        for kind in args.folder or FOLDERS:
            dense_folder(work / kind, FOLDERS[kind])
            result[kind] = {}
            for label in args.scheme or SCHEMES:
                result[kind] |= measure(work, kind, label, trees, args.repeats)
            shutil.rmtree(work / kind)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
