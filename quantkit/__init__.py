"""Low-bit checkpoints from Hugging Face causal LMs.

The names below are loaded on first use, so that `import quantkit` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.api import prune, quantize
    from quantkit.pipeline import pack
    from quantkit.tensor import QuantizedTensor, Scheme
    from quantkit.verify import verify

__version__ = "0.1.0"
__all__ = ["QuantizedTensor", "Scheme", "__version__", "pack", "prune", "quantize", "verify"]

_HOME = {
    "QuantizedTensor": "quantkit.tensor",
    "Scheme": "quantkit.tensor",
    "pack": "quantkit.pipeline",
    "prune": "quantkit.api",
    "quantize": "quantkit.api",
    "verify": "quantkit.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


class _Package(ModuleType):
    """`quantkit.verify` is the function: loading the submodule of that name must not put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
