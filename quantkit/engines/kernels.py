"""Which kernel of an engine multiplies a packed weight on a GPU: a dated table, each row with its source.

A row says what was seen or published, for the schemes and shapes that it names. What no row covers is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.core.scheme import Scheme

#: GPU -> its compute capability: NVIDIA's list, https://developer.nvidia.com/cuda-gpus, 2026-11-23.
GPUS = {
    "t4": (7, 5),
    "a100": (8, 0),
    "a10": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "rtx5090": (12, 0),
}
#: Sources of the rows.
VLLM = "vLLM 0.26.0's own choice for tiny models, asked on a CPU as if this GPU were there, 2026-11-23"
TRANSFORMERS = "transformers 5.23 with compressed-tensors 0.20, tests/layouts/test_loads_elsewhere.py, 2026-11-23"
SGLANG_EXPERTS = "https://github.com/sgl-project/sglang/pull/17137, 2026-01-15"
HUMMING_KERNELS = "docs/layouts.md 9b, humming-kernels 0.1.19, 2026-11-23"
#: Layouts whose INT4 weights engines treat alike, and the group sizes that were tried (None: one scale per row).
INTEGER = ("compressed-tensors", "gptq", "awq")
TRIED_GROUPS = (128, 64, 32, None)


#: What transformers does with a weight for which it has no kernel.
DECODED = "the first call decodes the weight for good"


@dataclass(frozen=True)
class EngineKernel:
    """One row: an engine, the weights that the row is about, and the kernel; None if the engine has none.

    `capabilities` are those of the GPUs, None for any. `n_unit` and `k_unit` divide the shape of the joined weight.
    `why` says what the engine does without a kernel.
    """

    engine: str
    layouts: tuple[str, ...]
    kernel: str | None
    source: str
    capabilities: tuple[tuple[int, int], ...] | None = None
    is_float: bool = False
    groups: tuple[int | None, ...] = TRIED_GROUPS
    experts: bool = False
    n_unit: int = 1
    k_unit: int = 1
    why: str | None = None

    def covers(
        self, engine: str, layout: str, capability: tuple[int, int], scheme: Scheme, n: int, k: int, experts: bool
    ) -> bool:
        """Return whether this row is about an `[n, k]` weight of a layout and a scheme on such a GPU."""
        here = self.capabilities is None or capability in self.capabilities
        alike = (self.engine, self.is_float, self.experts) == (engine, scheme.format.is_float, experts)
        fits = scheme.group_size in self.groups and not n % self.n_unit and not k % self.k_unit
        return alike and here and fits and layout in self.layouts and scheme.sparsity is None


def _vllm(kernel: str | None, capabilities: tuple[tuple[int, int], ...], **about: Any) -> EngineKernel:
    return EngineKernel("vllm", about.pop("layouts", INTEGER), kernel, VLLM, capabilities, **about)


HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
#: GPUs that were asked about fewer schemes.
OTHERS = ((7, 5), (8, 6), (10, 0), (12, 0))
ALL = (HOPPER, AMPERE, ADA, *OTHERS)
#: The first row that covers a weight is the answer.
KERNELS = (
    _vllm("Machete", (HOPPER,), layouts=(*INTEGER, "gptq-v2"), groups=(128, 64, None), n_unit=128, k_unit=64),
    _vllm("Marlin", (HOPPER,), layouts=(*INTEGER, "gptq-v2")),
    _vllm("Marlin", (AMPERE, ADA)),
    _vllm("Marlin", OTHERS, layouts=("compressed-tensors",), groups=(128, 32, None)),
    _vllm("Marlin", OTHERS, layouts=("gptq", "awq"), groups=(128,)),
    _vllm(None, (HOPPER,), layouts=("awq",), groups=(None,), experts=True, why="its loader fails on them"),
    _vllm("Marlin for fused experts", (HOPPER,), experts=True),
    _vllm("Marlin for fused experts", (AMPERE, ADA, *OTHERS), groups=(128,), experts=True),
    _vllm("Humming for FP8", ALL, layouts=("compressed-tensors",), is_float=True, groups=(None,)),
    _vllm("Humming", ALL, layouts=("humming",), is_float=True, groups=(None,)),
    EngineKernel("sglang", ("compressed-tensors",), "Marlin for fused experts", SGLANG_EXPERTS, experts=True),
    EngineKernel("sglang", ("humming",), "Humming", HUMMING_KERNELS, is_float=True, groups=(None,)),
    EngineKernel("transformers", ("compressed-tensors",), None, TRANSFORMERS, why=DECODED),
    EngineKernel(
        "transformers", ("compressed-tensors",), None, TRANSFORMERS, is_float=True, groups=(None,), why=DECODED
    ),
)
