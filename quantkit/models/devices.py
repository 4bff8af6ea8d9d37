"""The device and the dtype that a model is computed with."""

from __future__ import annotations

import os

import torch

from quantkit.core.memory_limits import unused_memory
from quantkit.errors import Option, RecipeError, Words

_MIB = 2**20
#: Bytes that the CUDA runtime and its libraries add on the device.
CUDA_DEVICE = 800 * _MIB
#: Bytes of Python, torch, transformers and datasets imported, and the skeleton of the model
#: (measured: 540 MB); those that a torch built for CUDA adds where nothing is computed on a GPU
#: (measured: 360 MB of its libraries), and where something is; what gradients and optimizers
#: import, and what the heap keeps of small matrices.
_PROGRAM, _CUDA_BUILD, _CUDA_HOST, _TRAINING = 600 * _MIB, 400 * _MIB, 1700 * _MIB, 100 * _MIB


def program_bytes(cuda: bool, training: bool = False) -> int:
    """Compute the bytes of RAM of Python and its libraries in a run on a GPU or a CPU."""
    libraries = _CUDA_HOST if cuda else _CUDA_BUILD if torch.version.cuda else 0
    return _PROGRAM + libraries + (_TRAINING if training else 0)


def device_of(name: str) -> torch.device:
    """Return the device called `auto`, `cpu`, `cuda` or `cuda:1`; RecipeError if this machine does
    not have it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}", "use auto, cpu or cuda") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise RecipeError(
            f"device {name} cannot be used here", Words("use", Option("device", "cpu"))
        )
    if device.type == "cuda":
        # cuBLAS reads this when it starts; without a fixed workspace equal runs may differ in the
        # last bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def free_gpu_memory(device: torch.device) -> int:
    """Count the bytes of a GPU that this process can allocate, torch's own cache included."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def free_bytes(device: torch.device) -> float:
    """Count the bytes that this process can take on a GPU, or with swap on a CPU."""
    return unused_memory(swap=True) if device.type == "cpu" else free_gpu_memory(device)


def compute_dtype(model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the compute dtype for a model's dtype: float32 on a CPU, bfloat16 if it has AMX, the
    model's on a GPU.
    """
    if device.type == "cuda":
        return model
    return (
        torch.bfloat16 if model == torch.bfloat16 and is_fast_in_bfloat16(device) else torch.float32
    )


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Return True if products in bfloat16 are faster than in float32: on a GPU, and on a CPU with
    AMX.
    """
    # ATEN_CPU_CAPABILITY may turn off the instructions that a product in bfloat16 needs.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return device.type == "cuda" or (
        torch.backends.cpu.get_cpu_capability() == "AVX512" and bool(has_amx())
    )
