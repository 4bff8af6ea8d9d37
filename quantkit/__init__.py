"""Low-bit checkpoints from Hugging Face causal LMs.

The names below are imported on first use. `import quantkit` changes nothing in the process; `register` makes packed
checkpoints known to transformers, and `load` calls it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.api import convert, eval_kld, eval_ppl, prune, push, quantize
    from quantkit.errors import QuantkitError
    from quantkit.evaluation.verify import verify
    from quantkit.inference.load import load
    from quantkit.inference.transformers_plugin import register
    from quantkit.pipeline.convert import pack
    from quantkit.pipeline.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "QuantkitError",
    "Recipe",
    "__version__",
    "convert",
    "eval_kld",
    "eval_ppl",
    "load",
    "pack",
    "prune",
    "push",
    "quantize",
    "register",
    "verify",
]

_HOME = {
    "QuantkitError": "quantkit.errors",
    "Recipe": "quantkit.pipeline.recipe",
    "convert": "quantkit.api",
    "eval_kld": "quantkit.api",
    "eval_ppl": "quantkit.api",
    "load": "quantkit.inference.load",
    "pack": "quantkit.pipeline.convert",
    "prune": "quantkit.api",
    "push": "quantkit.api",
    "quantize": "quantkit.api",
    "register": "quantkit.inference.transformers_plugin",
    "verify": "quantkit.evaluation.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
