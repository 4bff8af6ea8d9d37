"""How the naive kernels are launched, which is the same for every layout (kernels/naive.cuh)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check

#: Threads of a block, each with one of this many neighbouring outputs.
THREADS = 64


def instances(kernel: str, *variants: str) -> tuple[str, ...]:
    """Return the name expressions of a naive kernel: activations in, the same or float32 out, for each variant."""
    pairs = [(TYPES[x], y) for x in ACTIVATIONS for y in (TYPES[x], "float")]
    return tuple(_instance(kernel, *pair, variant) for pair in pairs for variant in variants or ("",))


def multiply(
    source: str,
    listed: Sequence[str],
    weight: Weight,
    x: Tensor,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None,
    out: Tensor | None,
    *,
    variant: str = "",
    sizes: Sequence[int] = (),
) -> Tensor:
    """Check the operands and launch the instance of `listed` for their dtypes; returns `[m, n]`, see `check`.

    `sizes` are what the kernel wants to know besides n and k.
    """
    out = check(weight, x, tensors, bias, out)
    kernel = _instance(f"{source}_naive", TYPES[x.dtype], TYPES[out.dtype], variant)
    parts = [tensors[suffix] for suffix in weight.tensors]
    grid = (x.shape[0], weight.n // THREADS)
    args = [*parts, x, bias, out, weight.n, weight.k, *sizes]
    loader.launch(loader.load(source, listed, x.device).functions[kernel], grid, (THREADS,), args)
    return out


def _instance(kernel: str, x: str, y: str, variant: str) -> str:
    return f"{kernel}<{', '.join(filter(None, (x, y, variant)))}>"
