"""Let vLLM believe that this machine has one sm_90 GPU, so that its Python code configures, builds and loads models.

`pretend()` comes before vLLM is imported:

- vLLM's compiled extensions are empty modules; their operators can be named, and only questions at import are answered;
- Triton's NVIDIA driver counts as active, and compiles nothing;
- vLLM's platform answers with the given compute capability, name and memory;
- model classes are inspected in this process, because another one would not pretend.

Everything else is vLLM's own code. Nothing can be multiplied. Made for 0.26.0, and used with all since.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

COMPILED = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_qutlass_C",
    "_flashmla_C",
    "_flashmla_extension_C",
    "cumem_allocator",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
# What the compiled extension answers on sm_90 to the questions that vLLM asks while it is imported.
ANSWERS = {
    "cutlass_scaled_mm_supports_fp8": True,
    "cutlass_scaled_mm_supports_block_fp8": True,
    "cutlass_group_gemm_supported": True,
    "cutlass_scaled_mm_supports_fp4": False,
    "cutlass_sparse_scaled_mm_supported": True,
}
NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_vllm_fa2_C", "_vllm_fa3_C")
_kept: list[Any] = []


class Operator:
    """An operator of a compiled extension that is not here: it can be named and passed on, not called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Operator(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} needs a GPU and vLLM's compiled extensions")


class Stream:
    """A CUDA stream or event that nothing is ever put on: some models make one when they are built."""

    def __init__(self, *args, **kwargs):
        pass


class Namespace:
    """`torch.ops.NAME` with every operator."""

    def __init__(self, name, real):
        self._name, self._real = name, real

    def __getattr__(self, name):
        return getattr(self._real, name, None) or Operator(f"{self._name}.{name}")


def pretend(capability=(9, 0), name="NVIDIA H200", memory_gib=141):
    import torch

    for short in COMPILED:
        full = "vllm." + short
        sys.modules[full] = types.ModuleType(full)
        sys.modules[full].__spec__ = importlib.machinery.ModuleSpec(full, None)
    torch.cuda.Stream = torch.cuda.Event = Stream
    ops = torch.library.Library("_C", "FRAGMENT")
    for op, answer in ANSWERS.items():
        ops.define(f"{op}(int capability) -> bool")
        ops.impl(op, lambda capability, answer=answer: answer, "CompositeExplicitAutograd")
    vision = torch.library.Library("torchvision", "FRAGMENT")  # torchvision's compiled part is built for CUDA
    vision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.extend((ops, vision))  # the definitions go when these objects go

    from triton.backends import backends

    for vendor, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda active=(vendor == "nvidia"): active)

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedCuda(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*capability)

        @classmethod
        def has_device_capability(cls, wanted, device_id=0):
            return tuple(capability) >= (wanted if isinstance(wanted, tuple) else divmod(wanted, 10))

        @classmethod
        def get_device_name(cls, device_id=0):
            return name

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return memory_gib * 2**30

        @classmethod
        def device_count(cls):
            return 1

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

    vllm.platforms._current_platform = PretendedCuda()
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda function: function()  # a new process would not pretend
    import vllm._custom_ops  # describes to torch those operators that exist: none

    for space in NAMESPACES:
        setattr(torch.ops, space, Namespace(space, getattr(torch.ops, space)))
