"""Small packed models, and what tests compare of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.inference.packed_linear import FusedLinear, PackedLinear, sibling_linears
from quantkit.layouts import LAYOUTS
from quantkit.models.weights import load_dense_model
from tests.layouts.samples import record, tame

KERNELS = [
    *(("marlin", "int4:g128"), ("marlin", "int4:channel"), ("marlin24", "int4:g128:24")),
    *(("marlin24-ct", "int4:channel:24"), ("tcfpx", "fp6:channel"), ("tcfpx", "fp5-e2m2:channel")),
    *(("quick", "int4:g32"), ("quick", "int4:g64:asym")),
]
OTHERS = [
    *(("compressed-tensors", "int4:g64:asym"), ("compressed-tensors", "fp6:channel"), ("gptq", "int4:g128")),
    *(("gptq-v2", "int4:g64:asym"), ("awq", "int4:g64:asym"), ("humming", "fp5:channel")),
]
IDS = torch.tensor([[5, 99, 31, 7, 256, 64, 12, 200, 1, 2, 3, 4]])
Folders = Callable[[str, str], Path]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(model.device)).logits.cpu()


def decoded(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return logits(load_dense_model(Checkpoint(path), dtype=dtype))


def layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """Compile without a graph break; the list gets the names of quantkit's operators in each graph."""
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if "quantkit" in str(node.target))
        return graph

    return torch.compile(function, fullgraph=True, dynamic=True, backend=record), seen


def gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values(label: str, n: int = 128, k: int = 256) -> QuantizedTensor:
    return tame(record(Scheme.parse(label), n, k, lowest_zero=1), torch.float16)


def packed(layout: str, q: QuantizedTensor, true: tuple[int, int] | None = None, bias: bool = True) -> PackedLinear:
    n = (true or q.shape)[0]
    return PackedLinear(
        layout, q.scheme, q.shape, true or q.shape, LAYOUTS[layout].pack(q), gauss(n, seed=1) if bias else None
    )


def same(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(bits), b.view(bits))


NS = (256, 128, 384)


def records(label: str, ns: Sequence[int] = NS, k: int = 256) -> list[QuantizedTensor]:
    return [tame(record(Scheme.parse(label), n, k, seed=i), torch.float16) for i, n in enumerate(ns)]


class Attention(nn.Module):
    """Three sibling linears that get one tensor, as in a model."""

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = parts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * 1
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def attention(layout: str = "marlin", label: str = "int4:g128", bias: bool = True) -> tuple[Attention, Attention]:
    """Make the same sibling linears twice: separate and fused."""
    separate = Attention([packed(layout, q, bias=bias) for q in records(label)])
    fused = copy.deepcopy(separate)
    (siblings,) = sibling_linears(fused)
    assert FusedLinear(siblings).fuse() and list(sibling_linears(fused)) == []
    return separate, fused
