"""Say what the bundle gives on this machine: a line of JSON for each part, and exit code 1 if one fails."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

PARTS = [
    *("torch", "torchvision", "triton", "transformers", "numba", "cupy", "humming", "compressed_tensors", "xgrammar"),
    *("vllm", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator"),
    *("vllm.vllm_flash_attn._vllm_fa3_C", "vllm.entrypoints.llm", "quantkit", "quantkit.serving.vllm_quantization"),
]


def say(part: str, **found: Any) -> None:
    print(json.dumps({"part": part, **found}), flush=True)


def product() -> dict[str, Any]:
    """Multiply on the GPU, and compile a function for it."""
    import torch

    a = torch.randn(512, 512, device="cuda", dtype=torch.float16)
    off = ((a @ a).float() - a.float() @ a.float()).abs().max().item()
    begun = time.perf_counter()
    compiled = torch.compile(lambda x: torch.nn.functional.silu(x) * x + 1)
    same = torch.allclose(compiled(a), torch.nn.functional.silu(a) * a + 1, rtol=1e-2, atol=1e-2)
    seconds = round(time.perf_counter() - begun, 1)
    return {"gpu": torch.cuda.get_device_name(), "off": off, "compiled": same, "compile_s": seconds}


def main() -> None:
    failed = 0
    for part in PARTS:
        begun = time.perf_counter()
        try:
            version = str(getattr(importlib.import_module(part), "__version__", ""))
            say(part, version=version, seconds=round(time.perf_counter() - begun, 1))
        except BaseException as error:
            failed += 1
            say(part, error=f"{type(error).__name__}: {str(error)[:400]}")
    plugins = sorted(each.name for each in importlib.metadata.entry_points(group="vllm.general_plugins"))
    say("plug-ins", names=plugins)
    failed += "quantkit" not in plugins
    try:
        say("product", **product())
    except BaseException as error:
        failed += 1
        say("product", error=f"{type(error).__name__}: {str(error)[:400]}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
