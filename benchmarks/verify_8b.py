"""Time `quantkit verify` of eight billion weights, and check that one flipped bit fails it.

Writes a folder in the shapes of Llama 3 8B with random codes, layer by layer, and runs the command in a fresh process
without compiled kernels. A second run has one bit flipped in a weight's codes and one in another's scales. Prints one
JSON object: seconds in all and by part (`start` is the time of the process before and after), and the failures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import quantkit
from benchmarks import bench_kernels
from quantkit.checkpoint.report import REPORT
from quantkit.checkpoint.writer import SHARD_BYTES, is_full
from quantkit.core.quantized_tensor import Scheme
from quantkit.io import files
from quantkit.io.json_files import dump_json
from quantkit.io.model_folder import INDEX
from quantkit.io.safetensors_files import SafetensorsWriter, read_header
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.schemes import Schemes
from quantkit.names import VERIFICATION

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LAYERS = 32
LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
#: Tensors outside the layers, which `verify` hashes with the rest of their files.
DENSE = {"model.embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096), "model.norm.weight": (4096,)}


def write_model(out: Path, layout: str, scheme: Scheme, layers: int) -> None:
    """Write a folder of random packed weights with report and config, one layer in memory, into the folder `out`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    file: SafetensorsWriter | None = None

    def add(name: str, tensor: torch.Tensor) -> None:
        nonlocal file
        if file is not None and is_full(file.size, name, tensor.nbytes, SHARD_BYTES):
            shards[file.path.name] = file.close()
            file = None
        if file is None:
            file = SafetensorsWriter(out / f"model-{len(shards) + 1:05}.safetensors")
        file.add(name, tensor)
        weight_map[name] = file.path.name

    named = []
    with ThreadPoolExecutor(4) as pool:
        for i in range(layers):
            digests = []
            for linear, (n, k) in LINEARS.items():
                q = bench_kernels.random_record(scheme, n, k, device, seed=len(named))
                module = f"model.layers.{i}.{linear}"
                named.append({"name": module, "shape": [n, k], "scheme": scheme.label, "layout": layout})
                digests.append((named[-1], pool.submit(q.digest)))
                for suffix, tensor in LAYOUTS[layout].pack(q).items():
                    add(f"{module}.{suffix}", tensor)
            for layer, digest in digests:
                layer["digest"] = digest.result()
    for name, shape in DENSE.items():
        add(name, torch.zeros(shape, dtype=torch.bfloat16))
    assert file is not None
    shards[file.path.name] = file.close()
    schemes = Schemes(scheme, ignore=("lm_head",))
    quantization = LAYOUTS[layout].write_config(schemes) | {
        "quantkit": quantkit_key(layout, schemes, quantkit.__version__, None)
    }
    config = {**CONFIG, "num_hidden_layers": layers, "quantization_config": quantization}
    (out / "config.json").write_bytes(dump_json(config))
    (out / INDEX).write_bytes(dump_json({"metadata": {}, "weight_map": weight_map}))
    shards |= {name: files.hash_of_file(out / name) for name in ("config.json", INDEX)}
    (out / REPORT).write_bytes(dump_json({"quantkit": quantkit.__version__, "files": shards, "layers": named}))


def verified(folder: Path, cache: Path) -> tuple[float, int, dict[str, Any]]:
    """Return the seconds, the exit code and the outcome of `quantkit verify` in a fresh process."""
    argv = [sys.executable, "-m", "quantkit", "verify", "-q", str(folder)]
    started = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "QUANTKIT_CACHE": str(cache)})
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 3):
        sys.exit(f"verify ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads((folder / VERIFICATION).read_text())
    print(f"{seconds:.1f} s, {found['seconds']}", done.stdout.splitlines()[-1], sep="\n", file=sys.stderr)
    return seconds, done.returncode, found


def flip(folder: Path, name: str, bit: int) -> None:
    """Flip one bit of a stored tensor."""
    for path in folder.glob("*.safetensors"):
        if (info := read_header(path)[0].get(name)) is not None:
            with path.open("r+b") as file:
                file.seek(info.start + bit // 8)
                byte = file.read(1)[0] ^ 1 << bit % 8
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="marlin", choices=list(bench_kernels.SCHEMES))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--work", type=Path, help="folder for six gigabytes")
    parser.add_argument("-o", "--out", type=Path, help="write the JSON here too")
    args = parser.parse_args()
    scheme = Scheme.parse(bench_kernels.SCHEMES[args.layout][0])
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder, cache = Path(work) / "model", Path(work) / "cache"
        folder.mkdir()
        started = time.perf_counter()
        write_model(folder, args.layout, scheme, args.layers)
        written = time.perf_counter() - started
        print(f"written in {written:.1f} s", file=sys.stderr)
        seconds, code, found = verified(folder, cache)
        marker = LAYOUTS[args.layout].TENSORS
        broken = [f"model.layers.{args.layers // 2}.mlp.up_proj", f"model.layers.{args.layers - 1}.self_attn.k_proj"]
        for module, suffix in zip(broken, (marker[0], marker[-1]), strict=True):
            flip(folder, f"{module}.{suffix}", bit=12345)
        again, code_after, after = verified(folder, cache)
    result = {
        "layout": args.layout,
        "scheme": scheme.label,
        "linears": found["linears"],
        "weights": found["weights"],
        "gpu": found["device"],
        "torch": torch.__version__,
        "seconds_to_write": round(written, 2),
        "ok": found["ok"] and code == 0,
        "note": found["note"],
        "seconds": round(seconds, 2),
        "parts": {**found["seconds"], "start": round(seconds - sum(found["seconds"].values()), 3)},
        "flipped": {
            "bits": dict(zip(broken, (marker[0], marker[-1]), strict=True)),
            "exit_code": code_after,
            "failures": after["failures"],
            "seconds": round(again, 2),
            "parts": after["seconds"],
        },
    }
    if args.out:
        files.write_atomic(args.out, dump_json(result))
    print(json.dumps(result, indent=1))
    failed = {row["module"] for row in after["rows"] if row["problem"]}
    if not result["ok"] or code_after != 3 or failed != set(broken):
        sys.exit("verify did not say what it must")


if __name__ == "__main__":
    main()
