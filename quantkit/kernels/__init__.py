"""Matrix products with packed weights on a GPU: compile, load and launch the CUDA sources in the
folder kernels/.

Begin with `launcher`, which has the kernels of each layout and the packed weights that they take.
`tiles` has their tiles; docs/kernels.md explains the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import loader
from quantkit.kernels.contract import Weight, check_sizes
from quantkit.kernels.launcher import FAMILIES, Launcher
from quantkit.names import KERNELS

LAUNCHERS: dict[str, Launcher] = {layout: FAMILIES[family] for layout, family in KERNELS.items()}
#: layout name -> matmul(x, tensors, scheme, n, k, bias=None, out=None) -> [m, n] of the dtype of x
MATMULS: dict[str, Callable[..., Tensor]] = {
    layout: launcher.matmul for layout, launcher in LAUNCHERS.items()
}
#: Like `MATMULS`, with the naive kernel as a reference; `out` may also be float32.
JUDGES: dict[str, Callable[..., Tensor]] = {
    layout: partial(launcher.matmul, naive=True) for layout, launcher in LAUNCHERS.items()
}


def preferred() -> list[str]:
    """List the layouts with a kernel that a weight can be recast to, fewest bits per
    weight first.
    """
    return sorted(FAMILIES, key=lambda layout: FAMILIES[layout].bits_read)


def none_for(layout: str) -> str:
    """Say that a layout has no kernel."""
    return f"no kernel of quantkit's own multiplies {layout}"


@cache
def weight_of(layout: str, scheme: Scheme, n: int, k: int) -> Weight:
    """Describe the tensors that a layout's kernels take; KernelError if they do not take such
    weights.
    """
    if layout not in LAUNCHERS:
        raise KernelError(none_for(layout))
    weight = LAUNCHERS[layout].weight(scheme, n, k)
    check_sizes(weight)
    return weight


def missing(layout: str, device: torch.device) -> str | None:
    """Explain why the kernel of `layout` cannot run on `device`; None if it can."""
    return unusable(device) if layout in MATMULS else none_for(layout)


def unusable(device: torch.device) -> str | None:
    """Explain why no kernel can run on `device`; None if they can."""
    if device.type != "cuda":
        return (
            "the kernel needs a CUDA GPU"
            if torch.cuda.is_available()
            else "torch sees no CUDA GPU here"
        )
    problem = loader.toolchain()["problem"]
    if problem is not None:
        return f"CuPy does not load ({problem}): {loader.install()}"
    try:
        loader.arch_of(device)
    except KernelError as error:
        return error.typed
    return None
