"""Where loops that a CPU runs as machine code are to be used: for large tensors, if numba is there to compile them."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

#: Bytes from which on they are worth their loading; of a sixteenth, once they are loaded, their use.
LARGE = 2**20
_MODULE = "quantkit.core.cpu_loops"
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def compiled_for(tensor: Tensor) -> Any:
    """Return the module of compiled loops, or None where torch does as well: on a GPU, and for small tensors."""
    least = LARGE // 16 if _MODULE in sys.modules else LARGE
    return _compiled() if tensor.device.type == "cpu" and tensor.nbytes >= least else None


def unsigned(tensor: Tensor, bits: int) -> NDArray[Any]:
    """Return the memory of a contiguous tensor as flat unsigned integers of `bits`, of which it must be whole ones."""
    assert tensor.is_contiguous()  # else this would be a copy
    return tensor.numpy().reshape(-1).view(_UNSIGNED[bits])


def uint64(value: int) -> Any:
    """Return an integer that loops take for one of 64 bits without a sign."""
    return np.uint64(value)


def uint32(value: int) -> Any:
    """Return an integer that loops take for one of 32 bits without a sign."""
    return np.uint32(value)


@cache
def _compiled() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError:  # numba has no version for this Python or this machine
        return None
