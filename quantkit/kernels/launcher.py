"""The kernels of a layout with one signature: `naive` is the reference, `matmul` the fastest kernel
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.kernels import loader
from quantkit.kernels.contract import Weight, check, check_same_dtype
from quantkit.kernels.hopper import HopperKernel
from quantkit.kernels.hopper_routed import RoutedHopper
from quantkit.kernels.naive import NaiveKernel
from quantkit.kernels.portable import PortableInstances, PortableKernel


class Kernels(NamedTuple):
    """The kernels for a weight; `hopper` is None for shapes or groups that only the portable kernel
    takes.

    `routed` and `routed_hopper` multiply with the weights of several experts (see `grouped`).
    """

    naive: NaiveKernel
    portable: PortableKernel
    hopper: HopperKernel | None
    routed: PortableInstances
    routed_hopper: RoutedHopper | None = None


@dataclass(frozen=True)
class Launcher:
    """The kernels of one layout.

    `weight(scheme, n, k)` describes the packed weight; KernelError for a scheme that the layout's
    kernels do not take. `kernels(scheme, n, k)` are the kernels for a weight, and `every` has the
    kernels for all weights. `bits_read` counts the bits that are read for a weight, with scales in
    groups of 128; `load` prefers the layout with the fewest. If `sparse`, half of the weights are
    multiplied. `aliases` maps other names of packed tensors to the names in `weight`.
    """

    weight: Callable[[Scheme, int, int], Weight]
    kernels: Callable[[Scheme, int, int], Kernels]
    every: tuple[NaiveKernel | PortableInstances | HopperKernel, ...]
    bits_read: float
    sparse: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)

    def naive(
        self,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        n: int,
        k: int,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply activations `[m, k]` with a packed weight `[n, k]` by the naive kernel; returns
        `[m, n]`.

        The product has the dtype of `out`, which may be float32. KernelError for operands that
        cannot be multiplied.
        """
        weight = self.weight(scheme, n, k)
        return self.kernels(scheme, n, k).naive.multiply(weight, x, self.named(tensors), bias, out)

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
        portable: bool = False,
        tile: Any = None,
    ) -> Tensor:
        """Multiply activations `[m, k]` with a packed weight `[n, k]`; returns `[m, n]` of the
        dtype of `x`.

        The Hopper kernel is used where it can be, unless `portable`; `tile` overrides the choice of
        its tile. Sums are float32, in an order that depends only on the shapes and the device.
        `workspace` explains the limits on streams and CUDA graphs. KernelError for operands that
        cannot be multiplied.
        """
        weight = self.weight(scheme, n, k)
        kernel, named = self.fastest(scheme, n, k, x.device, portable), self.named(tensors)
        out = check(weight, x, named, bias, out)
        check_same_dtype(weight.layout, x, out)
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
