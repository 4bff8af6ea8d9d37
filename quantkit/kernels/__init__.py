"""Which layouts a CUDA kernel of ours multiplies, and whether it can be run here.

`MATMULS` is the table from a layout's name to its fastest kernel, `JUDGES` to the naive one, which every other is
compared with (ARCHITECTURE 7 and 8). The other layouts are multiplied by other programs: `verify` proves their bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import (
    loader,
    marlin,
    marlin24,
    marlin24_hopper,
    marlin24_portable,
    marlin_hopper,
    marlin_portable,
    quick,
    quick_hopper,
    quick_portable,
    tcfpx,
    tcfpx_hopper,
    tcfpx_portable,
)
from quantkit.kernels.loader import toolchain

__all__ = ["JUDGES", "MATMULS", "ONLY", "SOURCES", "missing", "none_for", "toolchain"]

#: layout name -> matmul(x, tensors, scheme, n, k, bias=None, out=None) -> [m, n] of the dtype of x, or of `out`
MATMULS: dict[str, Callable[..., Tensor]] = {
    "marlin": marlin.matmul,
    "marlin24": marlin24.matmul,
    "marlin24-ct": marlin24.matmul,
    "tcfpx": tcfpx.matmul,
    "quick": quick.matmul,
}

#: As `MATMULS`; a float32 `out` is allowed.
JUDGES: dict[str, Callable[..., Tensor]] = {
    "marlin": marlin.naive,
    "marlin24": marlin24.naive,
    "marlin24-ct": marlin24.naive,
    "tcfpx": tcfpx.naive,
    "quick": quick.naive,
}

#: CUDA source -> every instance in it.
SOURCES = {
    "marlin": marlin.INSTANCES,
    "marlin_hopper": marlin_hopper.INSTANCES,
    "marlin_portable": marlin_portable.INSTANCES,
    "marlin24": marlin24.INSTANCES,
    "marlin24_hopper": marlin24_hopper.INSTANCES,
    "marlin24_portable": marlin24_portable.INSTANCES,
    "tcfpx": tcfpx.INSTANCES,
    "tcfpx_hopper": tcfpx_hopper.INSTANCES,
    "tcfpx_portable": tcfpx_portable.INSTANCES,
    "quick": quick.INSTANCES,
    "quick_hopper": quick_hopper.INSTANCES,
    "quick_portable": quick_portable.INSTANCES,
}

#: Sources with instructions that only some architectures have.
ONLY = dict.fromkeys(("marlin_hopper", "marlin24_hopper", "quick_hopper", "tcfpx_hopper"), ("sm_90a",))


def none_for(layout: str) -> str:
    """Return how it is said that a layout has no kernel."""
    return f"no kernel of quantkit's own multiplies {layout}"


def missing(layout: str, device: torch.device) -> str | None:
    """Return why the kernel of `layout` cannot be run on `device`, None if it can."""
    if layout not in MATMULS:
        return none_for(layout)
    if device.type != "cuda":
        return "the kernel needs a CUDA GPU" if torch.cuda.is_available() else "torch sees no CUDA GPU here"
    problem = toolchain()["problem"]
    if problem is not None:
        return f"CuPy does not load ({problem}): {loader.install()}"
    try:
        loader.arch_of(device)
    except KernelError as error:
        return str(error)
    return None
