"""Launch of the naive kernels, kernels/naive.cu: one thread for each output, the reference for
every faster kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.kernels import loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check

#: Threads of a block; each computes one output, its neighbour the next.
THREADS = 64


@dataclass(frozen=True)
class NaiveKernel:
    """The naive kernel `name` in kernels/naive.cu; `variant` are its template arguments after the
    dtypes.
    """

    name: str
    variant: str = ""
    source: ClassVar[str] = "naive"

    def instance(self, x: torch.dtype, out: torch.dtype) -> str:
        """Build the C++ name of the instance for activations and outputs of two dtypes."""
        return f"{self.name}<{', '.join(filter(None, (TYPES[x], TYPES[out], self.variant)))}>"

    @functools.cached_property
    def instances(self) -> tuple[str, ...]:
        """All instances: outputs have the dtype of the activations, or float32."""
        return tuple(self.instance(x, out) for x in ACTIVATIONS for out in (x, torch.float32))

    def multiply(
        self,
        weight: Weight,
        x: Tensor,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """Check the operands and launch; see `contract.check` for the errors and the result `[m,
        n]`.
        """
        out = check(weight, x, tensors, bias, out)
        packed = [tensors[suffix] for suffix in weight.tensors]
        arguments = [*packed, x, bias, out, weight.n, weight.k, *weight.group_argument]
        function = loader.load(self.source, self.instances, x.device).functions[
            self.instance(x.dtype, out.dtype)
        ]
        loader.launch(function, (x.shape[0], weight.n // THREADS), (THREADS,), arguments)
        return out
