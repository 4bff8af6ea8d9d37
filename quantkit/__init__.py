"""Low-bit checkpoints from Hugging Face causal LMs.

The names below are loaded on first use, so that `import quantkit` costs nothing. It makes packed checkpoints known to
transformers as well: at once if that is imported already, else when its table of quantizers is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.api import prune, quantize
    from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
    from quantkit.evaluation.verify import verify
    from quantkit.inference.load import load
    from quantkit.pipeline.quantize import pack

__version__ = "0.1.0"
__all__ = ["QuantizedTensor", "Scheme", "__version__", "load", "pack", "prune", "quantize", "verify"]

_HOME = {
    "QuantizedTensor": "quantkit.core.quantized_tensor",
    "Scheme": "quantkit.core.quantized_tensor",
    "load": "quantkit.inference.load",
    "pack": "quantkit.pipeline.quantize",
    "prune": "quantkit.api",
    "quantize": "quantkit.api",
    "verify": "quantkit.evaluation.verify",
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

#: The module of transformers that holds its quantizers.
_TABLE = "transformers.quantizers.auto"


class _WhenImported:
    """Imports `quantkit.hf`, which registers our quantizer, behind transformers' table; importing that is not ours."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def then_register(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                import_module("quantkit.inference.transformers_plugin")

            spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


if _TABLE in sys.modules:
    import_module("quantkit.inference.transformers_plugin")
else:
    sys.meta_path.insert(0, _WhenImported())
