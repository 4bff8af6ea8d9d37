"""The CUDA sources with their template instances, and the kernels that they are of."""

from __future__ import annotations

from quantkit.kernels import gptq, routing
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.launcher import FAMILIES, NaiveKernel
from quantkit.kernels.portable import PortableKernel

#: The kernels for products, each once.
KERNELS: dict[NaiveKernel | PortableKernel | HopperKernel, None] = {
    kernel: None
    for family in FAMILIES.values()
    for kernels in family.table.values()
    for kernel in kernels
    if kernel is not None
}
#: CUDA source -> all its template instances.
SOURCES: dict[str, tuple[str, ...]] = {**gptq.SOURCES, **routing.SOURCES}
for _kernel in KERNELS:
    SOURCES[_kernel.source] = (*SOURCES.get(_kernel.source, ()), *_kernel.instances)
