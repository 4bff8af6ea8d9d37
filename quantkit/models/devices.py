"""The device and the dtype that a model is computed with."""

from __future__ import annotations

import os

import torch

from quantkit.errors import Option, RecipeError, Words


def device_of(name: str) -> torch.device:
    """Return the device called `auto`, `cpu`, `cuda` or `cuda:1`; RecipeError if this machine does not have it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}", "use auto, cpu or cuda") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise RecipeError(f"device {name} cannot be used here", Words("use", Option("device", "cpu")))
    if device.type == "cuda":
        # cuBLAS reads this when it starts; without a fixed workspace equal runs may differ in the last bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def compute_dtype(model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the compute dtype for a model's dtype: float32 on a CPU, bfloat16 if it has AMX, the model's on a GPU."""
    if device.type == "cuda":
        return model
    return torch.bfloat16 if model == torch.bfloat16 and is_fast_in_bfloat16(device) else torch.float32


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Return True if products in bfloat16 are faster than in float32: on a GPU, and on a CPU with AMX."""
    # ATEN_CPU_CAPABILITY may turn off the instructions that a product in bfloat16 needs.
    return device.type == "cuda" or (torch.backends.cpu.get_cpu_capability() == "AVX512" and _has_amx())


def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
