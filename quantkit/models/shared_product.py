"""One product for several linears that are row slices of one weight and get the same input tensor.

At each call the input tensor decides. The first part that gets a tensor computes the product with
all rows, and caches it for the others. A part that gets another tensor computes a new product,
again with all rows, which is correct but slow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.kernels import driver


class CachedProduct(NamedTuple):
    """The product `y` with the tensor behind the weak reference `x`, for the parts that have not
    read it.

    `version` is the version of `x` when `y` was computed, see `_version`.
    """

    x: Callable[[], Tensor | None]
    version: tuple[int, ...]
    y: Tensor
    unread: frozenset[int]


class SharedProduct:
    """Base of a class that multiplies an input with all rows at once, by `multiply_all`, for
    `readers` parts.

    Its constructor calls `forget_products`.
    """

    readers: int
    cached: CachedProduct | None
    traced: tuple[Tensor, Tensor, tuple[int, ...]] | None

    def multiply_all(self, x: Tensor) -> Tensor:
        """Multiply activations with the rows of all parts."""
        raise NotImplementedError

    def product(self, x: Tensor, index: int) -> Tensor:
        """Return the product of all parts for the part `index`: look it up, or compute it and cache
        it for the rest.
        """
        return (
            self._traced_product(x, index)
            if torch.compiler.is_compiling()
            else self._cached_product(x, index)
        )

    def forget_products(self) -> None:
        """Drop the cached product."""
        self.cached = self.traced = None

    def _cached_product(self, x: Tensor, index: int) -> Tensor:
        cached, version = self.cached, _version(x)
        if (
            cached is not None
            and cached.x() is x
            and cached.version == version
            and index in cached.unread
        ):
            unread, y, source = cached.unread - {index}, cached.y, cached.x
        else:
            unread, y = frozenset(range(self.readers)) - {index}, self.multiply_all(x)
            source = weakref.ref(x, self._forget)  # an unread product is freed together with x
        self.cached = CachedProduct(source, version, y, unread) if unread else None
        return y

    def _forget(self, dead: object) -> None:
        if self.cached is not None and self.cached.x is dead:
            self.cached = None

    def _traced_product(self, x: Tensor, index: int) -> Tensor:
        """Do as `_cached_product` in code that torch.compile can trace: a traced tensor has one
        value.
        """
        traced = self.traced
        if traced is not None and traced[0] is x and index in traced[2]:
            y, unread = traced[1], tuple(i for i in traced[2] if i != index)
        else:
            y, unread = self.multiply_all(x), tuple(i for i in range(self.readers) if i != index)
        self.traced = (x, y, unread) if unread else None
        return y


def _version(x: Tensor) -> tuple[int, ...]:
    """Identify the values of a tensor: equal keys mean that a cached product with it is valid here
    and now.

    The key has torch's counter of in-place writes, which inference mode does not keep. On a GPU it
    has the stream and the CUDA graph capture too, because a captured product does not exist outside
    its graph.
    """
    version = -1 if x.is_inference() else x._version
    return (version, *driver.stream_state(x.device)[:2]) if x.is_cuda else (version,)
