"""Places in the tree of a model's modules."""

from __future__ import annotations

from torch import nn


def is_free(model: nn.Module, path: str) -> bool:
    """Return True if `add_module` can add a module at a path: no attribute of a module on the way
    has its name.
    """
    for part in path.split("."):
        if part not in model._modules:
            return not hasattr(model, part)
        model = model.get_submodule(part)
    return False


def add_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a path that `is_free`, inside empty modules where the model has none."""
    *owners, leaf = path.split(".")
    for part in owners:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model.add_module(leaf, module)
