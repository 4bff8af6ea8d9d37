"""The CUDA sources with their template instances, and the kernels that they are of."""

from __future__ import annotations

from quantkit.kernels import gptq, routing
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.launcher import FAMILIES, NaiveKernel
from quantkit.kernels.portable import PortableKernel

Kernel = NaiveKernel | PortableKernel | HopperKernel


def instances_of(kernel: Kernel) -> tuple[str, ...]:
    """List all template instances of a kernel."""
    if isinstance(kernel, NaiveKernel):
        return kernel.instances
    return tuple(each for listed in kernel.instances_by_dtype.values() for each in listed)


#: The kernels for products, each once.
KERNELS: dict[Kernel, None] = {
    kernel: None
    for family in FAMILIES.values()
    for kernels in family.table.values()
    for kernel in kernels
    if kernel is not None
}
#: CUDA source -> all its template instances.
SOURCES: dict[str, tuple[str, ...]] = {**gptq.SOURCES, **routing.SOURCES}
for _kernel in KERNELS:
    SOURCES[_kernel.source] = (*SOURCES.get(_kernel.source, ()), *instances_of(_kernel))
