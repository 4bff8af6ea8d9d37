"""The kernels of a layout behind one function: `matmul` takes the fastest kernel for the device, or
the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError
from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check
from quantkit.kernels.hopper import HopperKernel, RoutedHopper
from quantkit.kernels.portable import PortableKernel
from quantkit.kernels.tiles import PortableTiles


@dataclass(frozen=True)
class NaiveKernel:
    """The kernel `name` in kernels/naive.cu, one thread for each output: the reference for every
    faster kernel.

    `variant` are its template arguments after the dtypes.
    """

    name: str
    variant: str = ""
    source: ClassVar[str] = "naive"
    #: Threads of a block; each computes one output, its neighbour the next.
    threads: ClassVar[int] = 64

    def instance(self, x: torch.dtype, out: torch.dtype) -> str:
        """Build the C++ name of the instance for activations and outputs of two dtypes."""
        return f"{self.name}<{', '.join(filter(None, (TYPES[x], TYPES[out], self.variant)))}>"

    @functools.cached_property
    def instances(self) -> tuple[str, ...]:
        """All instances: outputs have the dtype of the activations, or float32."""
        return tuple(self.instance(x, out) for x in ACTIVATIONS for out in (x, torch.float32))

    def launch(
        self,
        weight: Weight,
        x: Tensor,
        packed: Sequence[Tensor],
        bias: Tensor | None,
        out: Tensor,
        tile: None = None,
    ) -> None:
        """Write the product into `out`, for operands that are checked."""
        function = loader.load(self.source, self.instances, x.device)[
            self.instance(x.dtype, out.dtype)
        ]
        arguments = [*packed, x, bias, out, weight.n, weight.k, *weight.group_argument]
        driver.launch(function, (x.shape[0], weight.n // self.threads), (self.threads,), arguments)


class Kernels(NamedTuple):
    """The kernels for a weight; `hopper` is None for shapes or groups that only the portable kernel
    takes.

    `routed` and `routed_hopper` multiply with the weights of several experts (see `grouped`).
    """

    naive: NaiveKernel
    portable: PortableKernel
    hopper: HopperKernel | None
    routed: PortableKernel
    routed_hopper: RoutedHopper | None = None


def kernels_of(
    name: str,
    portable: PortableTiles,
    hopper: Mapping[Any, HopperKernel | None],
    routed: Mapping[Any, RoutedHopper] | None = None,
    variant: str = "",
) -> dict[Any, Kernels]:
    """Give the kernels of a layout the keys of its Hopper kernels; `variant` are template arguments
    of other kernels.
    """
    naive, source = NaiveKernel(f"{name}_naive", variant), f"{name}_portable"
    plain = PortableKernel(source, portable, variant)
    experts = PortableKernel(source, portable.of_experts(), variant, f"{name}_routed")
    return {
        key: Kernels(naive, plain, kernel, experts, (routed or {}).get(key))
        for key, kernel in hopper.items()
    }


class Launcher:
    """The kernels of one layout: a subclass in `weights` says which packed weights they take.

    `bits_read` counts the bits that are read for a weight, with scales in groups of 128; `load`
    prefers the layout with the fewest. If `sparse`, half of the weights are multiplied. `aliases`
    maps other names of packed tensors to the names in `weight`. `table` has the kernels by `key`.
    """

    bits_read: ClassVar[float]
    sparse: ClassVar[bool] = False
    aliases: ClassVar[Mapping[str, str]] = {}
    table: Mapping[Any, Kernels]

    def weight(self, scheme: Scheme, n: int, k: int) -> Weight:
        """Describe the packed weight; KernelError for a scheme that the kernels do not take."""
        raise NotImplementedError

    def key(self, scheme: Scheme, n: int, k: int) -> Any:
        """Say which kernels of the table multiply with a weight."""
        raise NotImplementedError

    def kernels(self, scheme: Scheme, n: int, k: int) -> Kernels:
        """Find the kernels for a weight."""
        return self.table[self.key(scheme, n, k)]

    @property
    def every(self) -> tuple[NaiveKernel | PortableKernel | HopperKernel, ...]:
        """The kernels for all weights."""
        found = [kernel for kernels in self.table.values() for kernel in kernels]
        return tuple(dict.fromkeys(kernel for kernel in found if kernel is not None))

    def matmul(
        self,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        n: int,
        k: int,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        naive: bool = False,
        portable: bool = False,
        tile: Any = None,
    ) -> Tensor:
        """Multiply activations `[m, k]` with a packed weight `[n, k]`; returns `[m, n]` of the
        dtype of `x`.

        The Hopper kernel is used where it can be, unless `portable`; `tile` overrides the choice of
        its tile. The `naive` kernel may write float32 to `out` too. Sums are float32, in an order
        that depends only on the shapes and the device. `workspace` explains the limits on streams
        and CUDA graphs. KernelError for operands that cannot be multiplied.
        """
        weight, named = self.weight(scheme, n, k), self.named(tensors)
        out = check(weight, x, named, bias, out)
        if out.dtype != x.dtype and not naive:
            wanted, asked = dtype_name(x.dtype), dtype_name(out.dtype)
            raise KernelError(
                f"the fast {weight.layout} kernels write {wanted} as their activations are, not "
                f"{asked}"
            )
        fastest = self.fastest(scheme, n, k, x.device, portable)
        kernel = self.kernels(scheme, n, k).naive if naive else fastest
        kernel.launch(weight, x, [named[suffix] for suffix in weight.tensors], bias, out, tile)
        return out

    def fastest(
        self, scheme: Scheme, n: int, k: int, device: torch.device, portable: bool = False
    ) -> HopperKernel | PortableKernel:
        """Choose the kernel for a weight `[n, k]` on a CUDA device: Hopper's where it can be,
        unless `portable`.
        """
        kernels = self.kernels(scheme, n, k)
        return (
            kernels.portable
            if portable or not loader.is_hopper(device)
            else kernels.hopper or kernels.portable
        )

    def named(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rename packed tensors to the names that `weight` has."""
        if not self.aliases:
            return tensors
        return {self.aliases.get(name, name): tensor for name, tensor in tensors.items()}
