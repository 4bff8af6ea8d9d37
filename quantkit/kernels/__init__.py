"""Matrix products with packed weights on a GPU: compile, load and launch the CUDA sources in the folder kernels/.

One module per layout (`marlin`, `marlin24`, `quick`, `tcfpx`) says which weights its kernels take, and their tiles.
`naive`, `portable` and `hopper` launch the three kinds of kernel, `loader` and `driver` compile and start them, and
`proof` compares products with the weight. Not in here: the CUDA code, and torch modules that use it (`inference`).
Begin with `launcher`; docs/kernels.md explains the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.kernels import gptq, loader, marlin, marlin24, naive, quick, tcfpx
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.launcher import Launcher
from quantkit.kernels.loader import toolchain
from quantkit.kernels.naive import NaiveKernel
from quantkit.kernels.portable import PortableKernel

__all__ = ["JUDGES", "LAUNCHERS", "MATMULS", "ONLY", "SOURCES", "missing", "none_for", "toolchain"]

LAUNCHERS: dict[str, Launcher] = {
    "marlin": marlin.LAUNCHER,
    "marlin24": marlin24.LAUNCHER,
    "marlin24-ct": marlin24.LAUNCHER,
    "tcfpx": tcfpx.LAUNCHER,
    "quick": quick.LAUNCHER,
}
#: layout name -> matmul(x, tensors, scheme, n, k, bias=None, out=None) -> [m, n] of the dtype of x
MATMULS: dict[str, Callable[..., Tensor]] = {layout: launcher.matmul for layout, launcher in LAUNCHERS.items()}
#: As `MATMULS`, by the naive kernel, which judges the other; `out` may also be float32.
JUDGES: dict[str, Callable[..., Tensor]] = {layout: launcher.naive for layout, launcher in LAUNCHERS.items()}


def _instances(kernels: Iterable[NaiveKernel | PortableKernel | HopperKernel]) -> tuple[str, ...]:
    return tuple(instance for kernel in kernels for instance in kernel.instances)


#: CUDA source -> all its template instances.
SOURCES = {
    **gptq.SOURCES,
    naive.SOURCE: _instances([marlin.NAIVE, marlin24.NAIVE, quick.NAIVE, *tcfpx.NAIVE.values()]),
    "marlin_portable": marlin.PORTABLE.instances,
    "marlin_hopper": _instances(marlin.HOPPER.values()),
    "marlin24_portable": marlin24.PORTABLE.instances,
    "marlin24_hopper": _instances(marlin24.HOPPER.values()),
    "tcfpx_portable": _instances(tcfpx.PORTABLE.values()),
    "tcfpx_hopper": _instances(tcfpx.HOPPER.values()),
    "quick_portable": quick.PORTABLE.instances,
    "quick_hopper": _instances(quick.HOPPER.values()),
}
#: CUDA source -> the only architectures that it compiles for.
ONLY = {source: ("sm_90a",) for source in SOURCES if source.endswith("_hopper")}


def none_for(layout: str) -> str:
    """Say that a layout has no kernel."""
    return f"no kernel of quantkit's own multiplies {layout}"


def missing(layout: str, device: torch.device) -> str | None:
    """Explain why the kernel of `layout` cannot run on `device`; None if it can."""
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
