"""Check an installed vLLM on folders of every kind, many engines at a time; one line of JSON for each check.

    python check.py FOLDERS -o RESULTS.jsonl [--gpus 2] [--jobs 12] [--seconds 280] [--only REGEX]

FOLDERS is what `folders.py` wrote. Most checks are `quantkit verify FOLDER --engine vllm`. What users do with a model
that runs (LoRA, speculation, offload and so on) is compared with a plain engine: tokens of a greedy continuation,
log-probabilities of the prompts. Compiled with CUDA graphs, as `vllm serve` does, unless a check is named "eager".
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINE = {
    **{"max_model_len": 512, "gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 256 << 20, "dtype": "float16"},
    **{"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}},
}
OURS, EAGER, TWO = {"quantization": "quantkit"}, {"enforce_eager": True}, {"tensor_parallel_size": 2}
_PLAIN = [
    *("marlin", "marlin24", "marlin24-ct", "tcfpx", "tcfpx-fp5", "quick", "marlin-channel", "mixed", "padded"),
    *("padded-tcfpx", "biases", "joined", "joined-fp6", "tied", "mixtral", "qwen3_moe", "qwen3_moe-fp6"),
]
_OURS = [
    *("ct", "ct-asym", "gptq", "gptq-v2", "awq", "humming", "mixtral-ct", "tied-packed", "tied-weight"),
    *("ends", "ends-biases"),
]
_THEIRS = ["ct", "ct-asym", "gptq", "awq", "humming", "ct-int8", "nvfp4", "mxfp4", "mixtral-ct", "qwen3_moe-ct", "ends"]
_PAIRS = ["marlin", "quick", "tcfpx", "marlin24", "biases", "joined", "mixtral", "qwen3_moe-fp6"]
#: Checks by `verify`: their name (the folder's first), and further arguments of the engine.
PROOFS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN},
    **{f"{name} ours": OURS for name in _OURS},
    **{f"{name} theirs": {} for name in _THEIRS},
    **{f"{name} eager": EAGER for name in ("marlin", "tcfpx", "quick", "marlin24", "qwen3_moe")},
    **{f"{name} bfloat16": {"dtype": "bfloat16"} for name in ("marlin", "tcfpx", "quick")},
    **{f"{name} two": TWO for name in _PAIRS},
    "mxfp4 by marlin": {"linear_backend": "marlin"},  # by itself vLLM rounds activations on sm_90
    "ends two": {**TWO, **OURS},
    "qwen3_moe experts on two": {**TWO, "enable_expert_parallel": True},
    "marlin pipeline of two": {"pipeline_parallel_size": 2},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": "tcfpx", "num_speculative_tokens": 3}
#: Checks beside a plain engine: name -> (folder, arguments, name of the check that it is compared with).
USES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "plain": ("marlin", {}, None),
    "theirs": ("ct", {}, "plain"),
    "n-grams": ("marlin", {"speculative_config": NGRAM}, "plain"),
    "draft model": ("marlin", {"speculative_config": DRAFT}, "plain"),
    "prefix caching": ("marlin", {"enable_prefix_caching": True}, "plain"),
    "chunked prefill": ("marlin", {"max_num_batched_tokens": 64, "max_num_seqs": 8}, "plain"),
    "offload": ("marlin", {"cpu_offload_gb": 0.0005}, "plain"),
    "prefetch": ("marlin", {"offload_backend": "prefetch", "offload_group_size": 2}, "plain"),
    "sleep": ("marlin", {"enable_sleep_mode": True}, "plain"),
    "lora theirs": ("ct", {"enable_lora": True, "max_lora_rank": 8}, None),
    "lora": ("marlin", {"enable_lora": True, "max_lora_rank": 8}, "lora theirs"),
    "lora fp6": ("tcfpx", {"enable_lora": True, "max_lora_rank": 8}, None),
    "lora two": ("marlin", {"enable_lora": True, "max_lora_rank": 8, **TWO}, "lora theirs"),
    "fp8 cache theirs": ("ct", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, None),
    "fp8 cache": ("marlin", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "fp8 cache theirs"),
    "fp8 cache fp6": ("tcfpx", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, None),
}
PROMPTS, LENGTH, NEW = 8, 96, 48
MARK = "CHECKED "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=12, help="engines at a time [%(default)s]")
    parser.add_argument("--seconds", type=float, default=280, help="of all checks [%(default)s]")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--use", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.use:
        use(args.folders, args.use)
        return
    names = [name for name in [*USES, *PROOFS] if re.search(args.only, name)]
    pairs = [name for name in names if _is_of_two(name)]
    # Checks on two GPUs take longest: first, with the ones that others are compared with.
    waiting = [*(pairs if args.gpus > 1 else []), *(name for name in names if name not in pairs)]
    running: dict[str, tuple[subprocess.Popen[bytes], Path, float]] = {}
    found: dict[str, dict[str, Any]] = {}
    logs, begun, turn = args.out.parent / "logs", time.monotonic(), itertools.cycle(map(str, range(args.gpus)))
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        left = args.seconds - (time.monotonic() - begun)
        while waiting and len(running) < args.jobs and left > 30:
            name = waiting.pop(0)
            log = logs / f"{name.replace(' ', '_')}.log"
            devices = ",".join(map(str, range(args.gpus))) if name in pairs else next(turn)
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command(args.folders, name),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": devices},
                    start_new_session=True,
                )
            running[name] = process, log, time.monotonic()
        for name, (process, log, since) in list(running.items()):
            if process.poll() is None and left > 0:
                continue
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            del running[name]
            found[name] = {"seconds": round(time.monotonic() - since, 1), **answer(log, process.wait())}
            print(name, found[name].get("error") or "ran", flush=True)
        if left <= 30 and waiting:
            found |= {name: {"error": "no time was left"} for name in waiting}
            waiting = []
        time.sleep(0.2)
    with args.out.open("a") as file:
        for name, result in found.items():
            line = {"check": name, **judged(name, result, found)}
            file.write(json.dumps(line) + "\n")
            print(json.dumps(line)[:300], flush=True)


def _is_of_two(name: str) -> bool:
    arguments = PROOFS.get(name) or USES.get(name, ("", {}, None))[1]
    return bool({"tensor_parallel_size", "pipeline_parallel_size"} & arguments.keys())


def command(folders: Path, name: str) -> list[str]:
    if name in USES:
        return [sys.executable, __file__, str(folders), "-o", os.devnull, "--use", name]
    engine = ["--engine", "vllm", "--engine-args", json.dumps(ENGINE | PROOFS[name])]
    return [sys.executable, "-m", "quantkit", "verify", str(folders / name.split()[0]), *engine, "--json", "-v"]


def answer(log: Path, code: int) -> dict[str, Any]:
    """Read what a check said: the object of `verify`, or of `use`."""
    text = log.read_text(errors="replace")
    if (at := text.rfind(MARK)) >= 0:
        return {"code": code, **json.loads(text[at + len(MARK) :].splitlines()[0])}
    if (at := ("\n" + text).rfind("\n{\n")) >= 0:
        whole = json.JSONDecoder().raw_decode(text, at)[0]
        return {"code": code, **{key: whole[key] for key in ("engine", "failures") if whole.get(key)}}
    lines = text.splitlines()
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b|[Ee]rror:", line)] or lines
    return {"code": code, "error": " | ".join(errors[-3:])[-700:]}


def judged(name: str, result: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare a use with its plain engine; what `verify` says stays as it is."""
    if name in PROOFS:
        result["ok"] = result.get("code") == 0
        return result
    raw = {"tokens", "logprobs"}
    line = {key: value for key, value in result.items() if key not in raw}
    line["ok"] = "tokens" in result and all(map(math.isfinite, result["logprobs"]))
    other = found.get(USES[name][2] or "", {})
    if "tokens" in result and "tokens" in other:
        same = [a == b for a, b in zip(result["tokens"], other["tokens"], strict=True)]
        line |= {"beside": USES[name][2], "same_tokens": sum(same), "of": len(same)}
        if off := [abs(a - b) for a, b in zip(result["logprobs"], other["logprobs"], strict=False)]:
            line |= {"mean_nats": round(sum(off) / len(off), 5), "largest_nats": round(max(off), 4)}
    return line


def use(folders: Path, name: str) -> None:
    """Start the engine, use it as the check says, and print the tokens and the prompts' log-probabilities."""
    import random

    import vllm
    from vllm.lora.request import LoRARequest

    folder, arguments, _ = USES[name]
    if "speculative_config" in arguments and "model" in arguments["speculative_config"]:
        draft = str(folders / arguments["speculative_config"]["model"])
        arguments = {"speculative_config": {**arguments["speculative_config"], "model": draft}}
    fixed = {"model": str(folders / folder), "seed": 0, "enable_prefix_caching": False}
    engine = vllm.LLM(**{**fixed, **ENGINE, **arguments})
    draws = random.Random(0)
    piece = [[draws.randrange(32, 127) for _ in range(LENGTH // 4)] for _ in range(PROMPTS)]
    prompts = [{"prompt_token_ids": tokens * 4} for tokens in piece]  # repeats, for n-grams and caches
    adapter = LoRARequest("adapter", 1, str(folders / "adapter")) if "enable_lora" in arguments else None
    greedy = {"temperature": 0.0, "ignore_eos": True}

    def run(**sampling: Any) -> list[Any]:
        return engine.generate(prompts, vllm.SamplingParams(**greedy, **sampling), use_tqdm=False, lora_request=adapter)

    if "enable_prefix_caching" in arguments:
        run(max_tokens=1)
    if "enable_sleep_mode" in arguments:
        run(max_tokens=NEW)
        engine.sleep(1)
        engine.wake_up()
    tokens = [token for each in run(max_tokens=NEW) for token in each.outputs[0].token_ids]
    scored = [] if "speculative_config" in arguments else run(max_tokens=1, prompt_logprobs=0)
    logprobs = [
        place[token].logprob
        for prompt, each in zip(prompts, scored, strict=False)
        for token, place in zip(prompt["prompt_token_ids"][1:], each.prompt_logprobs[1:], strict=True)
    ]
    print(MARK + json.dumps({"version": vllm.__version__, "tokens": tokens, "logprobs": logprobs}), flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
