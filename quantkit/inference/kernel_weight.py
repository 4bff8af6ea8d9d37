"""A weight packed for a kernel: the layouts with a kernel that can hold it, and the best of them
for its data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from quantkit import kernels
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import Target, recast, target


class KernelWeight(NamedTuple):
    """The packed tensors of a weight, by suffix, in a layout with a kernel; `shape` is `[n, k]`
    with its padding.
    """

    layout: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: dict[str, Tensor]


def places(layout: str, scheme: Scheme, n: int, k: int) -> Iterator[tuple[str, Target]]:
    """Yield the layouts with a kernel that may hold an `[n, k]` weight: its own first, then the
    best first.
    """
    own = (layout,) if layout in kernels.MATMULS else ()
    for name in dict.fromkeys((*own, *kernels.preferred())):
        if (place := target(LAYOUTS[name], scheme, n, k, pad=True)) is not None:
            yield name, place


@functools.cache  # a model has thousands of experts
def places_of_experts(layout: str, scheme: Scheme, n: int, k: int) -> list[tuple[str, Target]]:
    """List the `places` that hold every weight of a scheme, independent of its data, the best
    first.
    """
    return [
        (name, place)
        for name, place in places(layout, scheme, n, k)
        if (place[0].symmetric, place[0].sparsity) == (scheme.symmetric, scheme.sparsity)
    ]


def pack_for_kernel(q: QuantizedTensor, layout: str, is_expert: bool = False) -> KernelWeight:
    """Pack a record of a weight in `layout` for the first of its `places` that its data allow;
    values stay the same.

    Experts of one scheme and shape get the same place, independent of their data. LayoutError, with
    the reason, if no kernel takes the weight.
    """
    why = f"no kernel takes {q.scheme.label}"
    for name, place in (places_of_experts if is_expert else places)(layout, q.scheme, *q.shape):
        try:
            moved = recast(q, *place)
            return KernelWeight(name, moved.scheme, moved.shape, LAYOUTS[name].pack(moved))
        except LayoutError as error:
            why = error.rule
    raise LayoutError(why)
