"""The weight of a packed linear for code that reads it as a tensor: decoded only when values are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class DecodedWeight(Tensor):
    """A tensor `[n, k]` of a dtype on a device, whose values `decode` computes for each operation on it.

    Shape, dtype and device cost nothing: T5 asks for the dtype before every product.
    """

    _decode: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, decode: Callable[[], Tensor]
    ) -> DecodedWeight:
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._decode = decode
        made._is_hf_initialized = True  # transformers leaves it as it is
        found: DecodedWeight = made
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(value: Any) -> Any:
            return value._decode() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._decode())
