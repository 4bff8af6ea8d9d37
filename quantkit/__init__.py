"""Low-bit checkpoints from Hugging Face causal LMs.

The names below are imported on first use. `import quantkit` changes nothing in the process; `register` makes packed
checkpoints known to transformers, and `load` calls it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantkit.version import __version__

if TYPE_CHECKING:
    from quantkit.api import (
        compare,
        convert,
        distill,
        eval_code,
        eval_kld,
        eval_ppl,
        eval_rouge,
        eval_tasks,
        load,
        pack,
        plan,
        prune,
        push,
        quantize,
        verify,
    )
    from quantkit.errors import QuantkitError
    from quantkit.inference.transformers_plugin import register
    from quantkit.recipes.recipe import Recipe

__all__ = [
    "QuantkitError",
    "Recipe",
    "__version__",
    "compare",
    "convert",
    "distill",
    "eval_code",
    "eval_kld",
    "eval_ppl",
    "eval_rouge",
    "eval_tasks",
    "load",
    "pack",
    "plan",
    "prune",
    "push",
    "quantize",
    "register",
    "verify",
]

#: Name -> its module, in the order of docs/api.md.
_HOME = {
    "plan": "quantkit.api",
    "quantize": "quantkit.api",
    "prune": "quantkit.api",
    "pack": "quantkit.api",
    "convert": "quantkit.api",
    "distill": "quantkit.api",
    "verify": "quantkit.api",
    "eval_ppl": "quantkit.api",
    "eval_kld": "quantkit.api",
    "eval_tasks": "quantkit.api",
    "eval_code": "quantkit.api",
    "eval_rouge": "quantkit.api",
    "compare": "quantkit.api",
    "load": "quantkit.api",
    "push": "quantkit.api",
    "register": "quantkit.inference.transformers_plugin",
    "QuantkitError": "quantkit.errors",
    "Recipe": "quantkit.recipes.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
