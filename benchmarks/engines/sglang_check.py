"""Run folders in SGLang and compare them with references: perplexity, greedy tokens, and who multiplies.

    python sglang_check.py ref.json -o checks.jsonl FOLDER[@KEY=VALUE...]...

Each folder has an engine in a process of its own, several at a time. Behind a folder stand arguments of SGLang's
engine, as `quantization=quantkit`, `tp_size=2` or `disable_cuda_graph=true`; `refused=TEXT` expects the start to end
with an error that has the text. `ref.json` is a dictionary: `windows` (lists of tokens by key), `folders` (name ->
`windows`: a key, `nll`: the loss of each window, `greedy`: the tokens after the first 64 of the first window, `margin`:
the lead of each token's logit), and `same` (name -> the folder with the same weights).

SGLang compiles kernels at the first use. All processes find them in $SGLANG_JIT_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MARK, LAYERS = "ROW ", "LAYERS "
PROMPT, GREEDY = 64, 32
#: Options that are not SGLang's.
OWN = ("refused",)
#: What a machine without a network, without FlashInfer and without a grammar's compiler needs.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "SGLANG_HOST_IP": "127.0.0.1",
    # Engines beside each other take memory unevenly.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "PYTHONUNBUFFERED": "1",
}
ENGINE: dict[str, Any] = {
    "dtype": "float16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 32768,
    "max_running_requests": 64,
    "random_seed": 0,
    "log_level": "info",
}


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    folder, *options = spec.split("@")
    return folder, {key: _value(value) for key, _, value in (option.partition("=") for option in options)}


def start(folder: str, options: dict[str, Any], **more: Any) -> Any:
    """Start SGLang's engine on a folder, and say how long that took."""
    from sglang.srt.entrypoints.engine import Engine

    asked = {key: value for key, value in options.items() if key not in OWN}
    return Engine(model_path=folder, **{**ENGINE, **more, **asked})


def check(spec: str, reference: dict[str, Any]) -> dict[str, Any]:
    """Run a folder's windows and its greedy tokens; return what differs from the reference."""
    folder, options = parse(spec)
    begun = time.perf_counter()
    graphs = {"cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs_prefill": 512, "chunked_prefill_size": 2048}
    engine = start(folder, options, **graphs)
    row: dict[str, Any] = {"load_s": round(time.perf_counter() - begun, 1)}
    name = reference.get("same", {}).get(Path(folder).name, Path(folder).name)
    wanted = reference["folders"].get(name, {})
    windows = reference["windows"][wanted["windows"]] if wanted else next(iter(reference["windows"].values()))
    losses = []
    for window in windows:
        answer = engine.generate(
            input_ids=window,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        read = [each[0] for each in answer["meta_info"]["input_token_logprobs"]][1:]
        assert len(read) == len(window) - 1, (len(read), len(window))
        losses.append(-sum(read) / len(read))
    row["perplexity"] = round(math.exp(sum(losses) / len(losses)), 5) if all(map(math.isfinite, losses)) else None
    options = {"temperature": 0, "max_new_tokens": GREEDY, "ignore_eos": True}
    # Alone and among others: decoding by graphs of several sizes.
    prompts = [window[:PROMPT] for window in windows[:4]]
    alone = engine.generate(input_ids=prompts[0], sampling_params=options)["output_ids"]
    among = engine.generate(input_ids=prompts, sampling_params=options)[0]["output_ids"]
    if wanted:
        row["reference"] = round(wanted["perplexity"], 5)
        row["largest_loss_difference"] = round(max(abs(a - b) for a, b in zip(losses, wanted["nll"], strict=True)), 6)
        for key, tokens in (("greedy", alone), ("greedy_of_four", among)):
            equal = next((i for i in range(GREEDY) if tokens[i] != wanted["greedy"][i]), GREEDY)
            row[key] = equal
            if equal < GREEDY:
                row[f"{key}_margin"] = wanted["margin"][equal]
    return row


class Names(ModuleType):
    """A module that has every name; its decorators change nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Names:
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not named else self

    def __getitem__(self, key: Any) -> Names:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


def report_layers() -> None:
    """Print the classes that multiply once a model is loaded: a plug-in of SGLang, called in each of its processes.

    SGLang's Llama imports a kernel of sm_100 in the language of CUTLASS, 240 MB, on all GPUs: names stand in for it.
    """
    if multiprocessing.parent_process() is None:
        return
    if importlib.util.find_spec("cutlass") is None:
        for name in ("", ".cute", ".cute.nvgpu", ".cute.runtime", ".utils"):
            Names(f"cutlass{name}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", _print_layers, HookType.AFTER
    )


def _print_layers(_: Any, runner: Any, *rest: Any, **more: Any) -> None:
    found: Counter[str] = Counter()
    for module in runner.model.modules():
        method = getattr(module, "quant_method", None)
        scheme = getattr(module, "scheme", None)
        if method is not None:
            kernel = type(scheme).__name__ if scheme is not None else ""
            found[f"{type(module).__name__}: {type(method).__name__} {kernel}".strip()] += 1
    print(LAYERS + json.dumps(found), flush=True)


def plugged(home: str) -> str:
    """Make `report_layers` a plug-in that SGLang finds: a folder for the search path."""
    found = Path(home) / "report_layers-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: report-layers\nVersion: 0\n")
    (found / "entry_points.txt").write_text("[sglang.srt.plugins]\nreport_layers = sglang_check:report_layers\n")
    return f"{home}:{Path(__file__).parent}"


class Run:
    """A process that measures one folder; its output goes to a log."""

    def __init__(self, command: list[str], spec: str, logs: Path, device: int | None, paths: str) -> None:
        self.spec, self.begun = spec, time.monotonic()
        self.log = logs / (re.sub(r"[^\w.=-]+", "_", Path(spec).name) + ".log")
        device_of = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
        paths = f"{paths}:{os.environ.get('PYTHONPATH', '')}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**ENVIRONMENT, **os.environ, **device_of, "PYTHONPATH": paths},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.begun, 1)

    def end(self) -> None:
        """End the process with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def rows(self) -> list[dict[str, Any]]:
        """Read what the process measured, or the lines of its error."""
        folder, options = parse(self.spec)
        text = self.log.read_text(errors="replace")
        rows = [json.loads(row) for row in re.findall(rf"^{MARK}(.*)$", text, re.M)]
        layers = re.findall(rf"{LAYERS}(\{{.*?\}})", text)
        wanted = options.get("refused")
        lines = [line.strip()[-400:] for line in text.splitlines() if re.search(r"\b\w*(Error|Exception)\b", line)]
        if wanted or not rows:
            found = next((line for line in lines if str(wanted) in line), None)
            rows = [{"ok": bool(wanted and found)}]
            rows[0]["error"] = found or lines[-4:] or text.splitlines()[-4:]
        told = {"folder": Path(folder).name, "options": self.spec.partition("@")[2]}
        return [{**told, "ok": True, **row, "run_s": self.seconds} | _layers(layers) for row in rows]


def _layers(found: list[str]) -> dict[str, Any]:
    return {"layers": json.loads(found[0])} if found else {}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def run_all(args: argparse.Namespace, commands: list[tuple[str, list[str]]], jobs: int, devices: int) -> bool:
    """Run processes, `jobs` at a time, spread over the GPUs; append their rows. Return whether all are as wanted."""
    args.logs.mkdir(parents=True, exist_ok=True)
    begun, waiting, running, good = time.monotonic(), [*commands], dict[int, Run](), True
    with tempfile.TemporaryDirectory() as home, args.out.open("a") as out:
        paths = plugged(home)
        while waiting or running:
            left = args.seconds - (time.monotonic() - begun)
            while waiting and len(running) < jobs and left > 0:
                spec, command = waiting.pop(0)
                place = min(set(range(jobs)) - set(running))
                device = None if parse(spec)[1].get("tp_size", 1) > 1 else place % devices
                running[place] = Run(command, spec, args.logs, device, paths)
            for place, run in [*running.items()]:
                if run.process.poll() is None and left > 0:
                    continue
                run.end()
                for row in run.rows():
                    good &= row["ok"]
                    for file in (out, sys.stdout):
                        print(json.dumps(row), file=file, flush=True)
                del running[place]
            if left <= 0 and waiting:
                print(json.dumps({"ok": False, "not_run": [spec for spec, _ in waiting]}), flush=True)
                return False
            time.sleep(0.2)
    return good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="FOLDER[@KEY=VALUE...]")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON lines to append to")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder of the engines' output [%(default)s]")
    parser.add_argument("--seconds", type=float, default=200, help="all ends after these [%(default)s]")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def leave() -> None:
    """End this process and SGLang's, which may take minutes in order."""
    sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time [%(default)s]")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs there are [%(default)s]")
    add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(MARK + json.dumps(check(args.folders[0], json.loads(args.reference.read_text()))), flush=True)
        leave()
    rest = [str(args.reference), "-o", str(args.out), "--child"]
    commands = [(spec, [__file__, *rest, spec]) for spec in args.folders]
    sys.exit(0 if run_all(args, commands, args.jobs, args.gpus) else 1)


if __name__ == "__main__":
    main()
