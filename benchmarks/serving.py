"""Measure vLLM's decoding speed on folders of one shape: dense, in public layouts, and in those of quantkit's kernels.

`make` writes a folder with random weights, whose linears of one shape share a weight; a dense one is its config.json
alone, which vLLM fills itself. `time` starts the engine once for each folder, in a process of its own, and appends rows
to a CSV. A step is (seconds with 129 new tokens - seconds with 1) / 128, each the median of three runs, prompts of 32
tokens, float16: scheduler and sampler are included. The engine has a process of its own, as in a server, and schedules
a step while the GPU runs the one before. Folders may have engine arguments behind them, as
`FOLDER@linear_backend=marlin@tensor_parallel_size=2`; `@compile` has torch.compile too, not CUDA graphs alone.
`--together` loads all folders at once, which saves minutes; they must fit on the GPU (`@gpu_memory_utilization=0.1`).

`load` sends requests of 256 tokens to the engine at random times (Poisson arrivals, the same for each folder), each for
128 new tokens, and appends a row for each rate: TTFT is the time from a request to its first token, TPOT the time of
each further token of it. It needs no HTTP server: requests go to the engine behind it.

Compare rows of one run on one card only.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

LENGTH, NEW, RUNS = 32, 128, 3
HEAD, TABLE = "lm_head", "model.embed_tokens"
#: Tokens of a prompt under load, and the most requests at a time.
PROMPT, SEATS = 256, 256
MARK, READY = "ROW ", "READY TO MEASURE"
COLUMNS = ("folder", "options", "layers", "batch", "step_ms", "tokens_per_s", "prompt_ms", "load_s", "gpu", "vllm")
LOAD_COLUMNS = (
    "folder", "options", "rate", "requests", "ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s",
    "gpu", "vllm",
)  # fmt: skip
#: What vLLM may not do on a machine without a network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # A function of ours in the engine's process, to name the classes that multiply.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


#: Mixtures of experts: their configs, without what all models have.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48, "vocab_size": 151936},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1000000.0},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 8192},
    },
    "mixtral-8x7b": {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "head_dim": 128},
        **{"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "rope_theta": 1000000.0},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "sliding_window": None},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="write a folder of random weights")
    maker.add_argument("out", type=Path)
    maker.add_argument("layout", help="a layout of quantkit, or dense")
    maker.add_argument("scheme", nargs="?", help="as int4:g128")
    shapes = f"a shape of bench_generate.py, {' or '.join(MIXTURES)} [%(default)s]"
    maker.add_argument("--shape", default="llama3-8b", help=shapes)
    maker.add_argument("--blocks", type=int, help="fewer blocks than the shape has")
    maker.add_argument("--head", help="scheme of the output head, dense without it")
    maker.add_argument("--embeddings", help="scheme of the embeddings, dense without it")
    timer = commands.add_parser("time", help="measure folders")
    timer.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    timer.add_argument("--together", action="store_true", help="load all folders on the GPU before any is measured")
    timer.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    loader = commands.add_parser("load", help="send requests to folders")
    loader.add_argument("--rate", type=float, nargs="+", default=[1, 5, 10, 20], help="requests a second %(default)s")
    loader.add_argument("--seconds", type=float, default=20, help="how long they come at each rate [%(default)s]")
    for command in (timer, loader):
        command.add_argument("folders", nargs="+", metavar="FOLDER[@KEY=VALUE]")
        command.add_argument("--timeout", type=float, default=300, help="seconds of a folder [%(default)s]")
        command.add_argument("--logs", type=Path, help="folder for the engines' output")
        command.add_argument("-o", "--out", type=Path, required=True, help="CSV to append to")
        command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command == "make":
        make(args.out, args.layout, args.scheme, args.shape, args.blocks, {HEAD: args.head, TABLE: args.embeddings})
    elif not args.child:
        at_once = args.command == "time" and args.together
        sys.exit(0 if (run_together(args) if at_once else all([run(args, spec) for spec in args.folders])) else 1)
    elif args.command == "time":
        measure(args.folders[0], args.batch, args.wait)
    else:
        asyncio.run(serve(args.folders[0], args.rate, args.seconds))


def make(
    out: Path, layout: str, label: str | None, shape: str, blocks: int | None, ends: dict[str, str | None]
) -> None:
    """Write a folder of the shape of a Llama or of a mixture of experts, packed in a layout.

    `ends` has the schemes of the output head and of the embeddings, None for dense ones.
    """
    import torch
    from safetensors.torch import save_file

    from benchmarks.random_model import CONFIGS, DENSE, random_weight
    from quantkit.core.quantized_tensor import Scheme
    from quantkit.engines.joined import quantization_config
    from quantkit.layouts import LAYOUTS
    from quantkit.layouts.schemes import Schemes

    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **{**CONFIGS, **MIXTURES}[shape]}
    blocks = config["num_hidden_layers"] = blocks or config["num_hidden_layers"]
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.setdefault("head_dim", width // config["num_attention_heads"])
    config |= {"dtype": "float16", "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    config |= {"attention_bias": False, "mlp_bias": False}
    queries, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {f"self_attn.{name}_proj": (n, width) for name, n in zip("qkv", (queries, kv, kv), strict=True)}
    shapes["self_attn.o_proj"] = width, queries
    mlp, leaves, inner = "mlp.", ("gate_proj", "up_proj", "down_proj"), config.get("moe_intermediate_size", inner)
    experts = config.get("num_experts", config.get("num_local_experts", 0))
    if config["architectures"] == ["MixtralForCausalLM"]:
        mlp, leaves = "block_sparse_moe.", ("w1", "w3", "w2")
    for place in [f"experts.{number}." for number in range(experts)] or [""]:
        for leaf, size in zip(leaves, ((inner, width), (inner, width), (width, inner)), strict=True):
            shapes[mlp + place + leaf] = size
    vectors = {"input_layernorm": width, "post_attention_layernorm": width}
    if config.get("model_type") == "qwen3_moe":
        vectors |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    out.mkdir(parents=True)
    if layout != DENSE:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        scheme, form = Scheme.parse(label or "int4:g128"), LAYOUTS[layout]
        modules = [f"model.layers.{block}.{name}" for block in range(blocks) for name in shapes]
        routers = [f"model.layers.{block}.{mlp}gate" for block in range(blocks) if experts]
        schemes = {name: Scheme.parse(each) for name, each in ends.items() if each}
        dense = (*(name for name in [HEAD] if name not in schemes), *routers)
        stated = Schemes(scheme, tuple((re.escape(name), each) for name, each in schemes.items()), dense)
        config["quantization_config"] = quantization_config(form, stated, [*modules, *schemes], None)
        packed = {size: form.pack(random_weight(scheme, *size, device)) for size in set(shapes.values())}
        index: dict[str, str] = {}

        def put(file: str, tensors: dict[str, torch.Tensor]) -> None:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, out / file, {"format": "pt"}
            )
            index.update(dict.fromkeys(tensors, file))

        draws = torch.Generator(device).manual_seed(0)

        def drawn(n: int) -> torch.Tensor:
            return (torch.randn(n, width, device=device, generator=draws) * width**-0.5).half()

        for block in range(blocks):
            start = f"model.layers.{block}."
            weights = {
                f"{start}{name}.{key}": t.clone() for name, n_k in shapes.items() for key, t in packed[n_k].items()
            }
            norms = {f"{start}{name}.weight": torch.ones(n, dtype=torch.float16) for name, n in vectors.items()}
            router = {f"{start}{mlp}gate.weight": 3 * drawn(experts)} if experts else {}
            put(f"model-{block:05}.safetensors", {**weights, **norms, **router})
        rest = {} if TABLE in schemes else {f"{TABLE}.weight": drawn(vocabulary) * width**0.5}
        rest |= {} if HEAD in schemes else {f"{HEAD}.weight": drawn(vocabulary)}
        for name, each in schemes.items():
            tensors = form.pack(random_weight(each, vocabulary, width, device))
            rest |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        put("model-rest.safetensors", {**rest, "model.norm.weight": torch.ones(width, dtype=torch.float16)})
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (out / "config.json").write_text(json.dumps(config, indent=1))


def run(args: argparse.Namespace, spec: str) -> bool:
    """Measure a folder in a process of its own and append its rows; return whether it ran."""
    process, log = started(args, spec, [])
    return reported(args, spec, log, ended(process, args.timeout))


def run_together(args: argparse.Namespace) -> bool:
    """Load all folders at once, which takes most of the time, and measure one after the other."""
    engines = {spec: started(args, spec, ["--wait"]) for spec in args.folders}
    end = time.monotonic() + args.timeout
    loading = set(engines)
    while loading and time.monotonic() < end:
        time.sleep(0.2)
        loading = {
            spec for spec in loading if engines[spec][0].poll() is None and READY not in text_of(engines[spec][1])
        }
    for spec in loading:
        os.killpg(engines[spec][0].pid, signal.SIGKILL)
    for process, _ in engines.values():
        if process.stdin is not None and process.poll() is None:
            process.stdin.write(b"\n")
            process.stdin.flush()
        ended(process, args.timeout)
    return all([reported(args, spec, log, process.returncode) for spec, (process, log) in engines.items()])


def ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a process, kill it after so many seconds, and give its exit code."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def started(args: argparse.Namespace, spec: str, more: list[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start the process of a folder, and give it and the file that it writes."""
    timed = args.command == "time"
    settings = ["--batch", *args.batch] if timed else ["--seconds", args.seconds, "--rate", *args.rate]
    command = [sys.executable, __file__, args.command, spec, "--child", "-o", args.out, *more, *settings]
    log = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        [str(each) for each in command],
        env={**ENVIRONMENT, **os.environ},
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return process, log


def text_of(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1 << 28, 0).decode(errors="replace")


def reported(args: argparse.Namespace, spec: str, log: IO[bytes], code: int) -> bool:
    """Append the rows that a process printed, and print them; return whether it measured everything."""
    timed, text = args.command == "time", text_of(log)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
        name = f"{Path(spec.partition('@')[0]).name}@{spec.partition('@')[2]}".replace("/", "_")
        (args.logs / f"{name}.log").write_text(text)
    rows = [json.loads(line[len(MARK) :]) for line in text.splitlines() if line.startswith(MARK)]
    new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS if timed else LOAD_COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(json.dumps(row), flush=True)
    if len(rows) == len(args.batch if timed else args.rate):
        return True
    errors = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
    print(f"FAILED: {spec} (exit code {code}): {' | '.join(errors[-3:])}", flush=True)
    return False


def engine_arguments(spec: str, seats: int, tokens: int, captured: list[int]) -> dict[str, Any]:
    """Give the engine's arguments for a folder and what stands behind it, for so many requests and tokens at a time."""
    folder, *options = spec.split("@")
    asked = {key: _value(value) for key, _, value in (option.partition("=") for option in options if "=" in option)}
    engine: dict[str, Any] = {
        "model": folder,
        "dtype": "float16",
        "max_model_len": 512,
        "max_num_seqs": seats,
        "max_num_batched_tokens": tokens,
        "gpu_memory_utilization": 0.6,
        "kv_cache_memory_bytes": 8 << 30,
        "seed": 0,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": captured},
    }
    if "compile" not in options:
        engine["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if not any(Path(folder).glob("*.safetensors")):
        engine["load_format"] = "dummy"
    return {**engine, **asked}


def measure(spec: str, batches: list[int], wait: bool) -> None:
    """Start the engine on a folder, and print a row for each batch size."""
    folder, *options = spec.split("@")
    import torch
    import vllm

    begun = time.perf_counter()
    model = vllm.LLM(**engine_arguments(spec, max(batches), max(2048, LENGTH * max(batches)), batches))
    load = round(time.perf_counter() - begun, 1)
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    draws = torch.Generator().manual_seed(1)
    layers = ";".join(sorted(model.apply_model(served)[0]))
    if wait:
        print(READY, flush=True)
        sys.stdin.readline()

    def seconds(prompts: list[dict[str, Any]], new: int) -> float:
        sampling = vllm.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun

    for batch in batches:
        drawn = torch.randint(10, vocabulary, (batch, LENGTH), generator=draws).tolist()
        prompts = [{"prompt_token_ids": tokens} for tokens in drawn]
        seconds(prompts, 8)
        short = statistics.median(seconds(prompts, 1) for _ in range(RUNS))
        step = (statistics.median(seconds(prompts, 1 + NEW) for _ in range(RUNS)) - short) / NEW
        row = {
            "folder": Path(folder).name,
            "options": "@".join(options),
            "layers": layers,
            "batch": batch,
            "step_ms": round(1e3 * step, 3),
            "tokens_per_s": round(batch / step, 1),
            "prompt_ms": round(1e3 * short, 2),
            "load_s": load,
            "gpu": torch.cuda.get_device_name(),
            "vllm": vllm.__version__,
        }
        print(MARK + json.dumps(row), flush=True)
    leave()


async def serve(spec: str, rates: list[float], seconds: float) -> None:
    """Start the engine on a folder, and print a row for each rate of requests."""
    import torch
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    folder, *options = spec.split("@")
    captured = [1, 2, 4, *range(8, SEATS + 1, 8)]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec, SEATS, 2048, captured)))
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    sampling = vllm.SamplingParams(
        max_tokens=NEW, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    draws = random.Random(0)

    async def request(name: str, delay: float) -> tuple[float, float, float]:
        prompt = {"prompt_token_ids": [draws.randrange(10, vocabulary) for _ in range(PROMPT)]}
        await asyncio.sleep(delay)
        times = [time.perf_counter()]
        async for _ in engine.generate(prompt, sampling, name):
            times.append(time.perf_counter())
        return times[1] - times[0], (times[-1] - times[1]) / (NEW - 1), times[-1]

    for at, rate in enumerate([0.0, *rates]):  # the first time only warms up
        gaps = [draws.expovariate(rate) if rate else 0.0 for _ in range(max(8, round(rate * seconds)))]
        begun = time.perf_counter()
        found = await asyncio.gather(
            *[request(f"{at}-{i}", delay) for i, delay in enumerate(itertools.accumulate(gaps))]
        )
        first, each = ([1e3 * one[part] for one in found] for part in (0, 1))
        row = {
            "folder": Path(folder).name,
            "options": "@".join(options),
            "rate": rate,
            "requests": len(found),
            "ttft_ms": round(statistics.median(first), 2),
            "ttft_p99_ms": round(_p99(first), 2),
            "tpot_ms": round(statistics.median(each), 3),
            "tpot_p99_ms": round(_p99(each), 3),
            "tokens_per_s": round(NEW * len(found) / (max(one[2] for one in found) - begun), 1),
            "gpu": torch.cuda.get_device_name(),
            "vllm": vllm.__version__,
        }
        if rate:
            print(MARK + json.dumps(row), flush=True)
    leave()


def leave() -> None:
    """End this process and the engine's, which may take minutes in order."""
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def served(model: Any) -> set[str]:
    """Name the classes that multiply in the linears of a loaded model."""
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "input_size"):
            kernel = getattr(getattr(module, "scheme", None), "kernel", None)
            found.add(type(method).__name__ + (f"/{type(kernel).__name__}" if kernel is not None else ""))
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
