"""Low-bit checkpoints from Hugging Face causal LMs.

The names below are imported on first use. `import quantkit` changes nothing in the process;
`register` makes packed checkpoints known to transformers, and `load` calls it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantkit.version import __version__

if TYPE_CHECKING:
    from quantkit.api import (
        compare,
        convert,
        eval_kld,
        eval_ppl,
        eval_tasks,
        load,
        pack,
        plan,
        prune,
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
    "eval_kld",
    "eval_ppl",
    "eval_tasks",
    "load",
    "pack",
    "plan",
    "prune",
    "quantize",
    "register",
    "verify",
]

#: Name -> its module, for names that are not in `api`.
_HOME = {
    "QuantkitError": "quantkit.errors",
    "Recipe": "quantkit.recipes.recipe",
    "register": "quantkit.inference.transformers_plugin",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "quantkit.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
