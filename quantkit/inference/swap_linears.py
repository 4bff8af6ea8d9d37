"""An ordinary transformers model with packed linears in the place of dense ones: how one is made, and of what.

All that can be known from headers is asked before a weight is read: whether each packed tensor has a place and each
place a tensor, and whether the GPUs have room. What depends on the data comes after: a weight whose layout has no
kernel is restated in one that has (LAYOUTS 11), on the device where it is, one at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import quantkit
from quantkit import kernels
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, KernelError, about
from quantkit.inference.packed_linear import PREFERRED, PackedLinear
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.gptq import OPTIONAL
from quantkit.models.meta_model import ignored, places, require_complete
from quantkit.reporting.report import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Stored name of a packed module -> the layer in the model.
Linears = dict[str, PackedLinear]


def swap(model: PreTrainedModel, src: Checkpoint) -> Linears:
    """Put empty packed linears (meta device) into a skeleton of the checkpoint's model, as its headers say.

    CheckpointError for a packed weight that no `nn.Linear` of its shape waits for, for a part of one that is missing,
    and if the model lacks a stored tensor or the folder a tensor of the model.
    """
    place = places(model)
    linears: Linears = {}
    for module in src.modules():
        (state, *_), merged = place(f"{module}.weight")
        path = state.removesuffix(".weight")
        owner, _, leaf = path.rpartition(".")
        dense = None if merged else dict(model.named_modules()).get(path)
        if dense is None or type(dense).forward is not nn.Linear.forward:
            raise CheckpointError(
                f"{src.path}: {module} is packed, and {type(model).__name__} in this transformers has no nn.Linear of "
                "that name: quantize the model again, with --skip for such weights"
            )
        linears[module] = _empty(src, module, dense)
        setattr(model.get_submodule(owner), leaf, linears[module])
        # A head that is packed for itself is tied to the embeddings no more.
        if model.all_tied_weights_keys.pop(f"{path}.weight", None) is not None:
            model.config.tie_word_embeddings = False
    _require_complete(model, src)
    return linears


def _empty(src: Checkpoint, module: str, dense: nn.Module) -> PackedLinear:
    """Return the packed form of a linear of the skeleton, without data."""
    assert src.layout is not None and isinstance(dense, nn.Linear)
    parts, scheme = src.parts(module), src.scheme(module)
    true, stored = src.true_size(module), src.size(module)
    if (dense.out_features, dense.in_features) != true:
        asked = [dense.out_features, dense.in_features]
        raise CheckpointError(f"{src.path}: {module} is packed from {list(true)}, config.json asks for {asked}")
    for suffix in src.layout.stored(scheme, *stored):
        if suffix not in parts and suffix not in OPTIONAL:
            raise CheckpointError(f"{src.path}: {module}.{suffix} is missing from the checkpoint: fetch it again")
    tensors = {
        suffix: torch.empty(src.shape(name), dtype=src.dtype(name), device="meta") for suffix, name in parts.items()
    }
    bias = dense.bias
    if bias is None and f"{module}.bias" in src.names():  # some programs write one, of zeros, whatever the model
        bias = torch.empty(true[0], dtype=dense.weight.dtype, device="meta")
    return PackedLinear(src.layout.NAME, scheme, stored, true, tensors, bias)


def _require_complete(model: PreTrainedModel, src: Checkpoint) -> None:
    states, place, old = model.state_dict(), places(model), ignored(model)
    found: set[str] = set()
    strangers = []
    for name in src.names():
        targets, _ = place(name)
        if all(target in states for target in targets):
            found.update(targets)
        elif not old(name):
            strangers.append(name)
    for a, b in model.all_tied_weights_keys.items():
        found |= {a, b} if found & {a, b} else set()
    absent = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    missing = [state for state in states if state not in found and not any(p.search(state) for p in absent)]
    require_complete(model, src, missing, strangers)


def require_kernels(device: torch.device) -> None:
    """Raise KernelError, with the way out, if kernels cannot be run on a CUDA device."""
    problem = kernels.missing(PREFERRED[0], device)
    if device.type == "cuda" and problem is not None:
        raise KernelError(f"packed weights cannot be multiplied on {device}: {problem}")


def require_room(needs: Mapping[torch.device, int], free: Callable[[torch.device], int], folder: Path) -> None:
    """Raise CheckpointError if weights of so many bytes exceed what `free` says of a device, and by how much."""
    for device, bytes_ in needs.items():
        room = free(device)
        if bytes_ > room:
            raise CheckpointError(
                f"{folder}: its weights take {size(bytes_)} on {device}, which has {size(room)} free, "
                f"{size(bytes_ - room)} too little: use another GPU, --device cpu, or device_map='auto'"
            )


def needs(model: PreTrainedModel, placed: Mapping[str, Any]) -> dict[torch.device, int]:
    """Return the bytes of weights on each GPU, where `placed` says of each state on which device it will be."""
    total: Counter[torch.device] = Counter()
    for state, place in placed.items():
        device = (
            torch.device("cuda", place) if type(place) is int else torch.device(place if place != "disk" else "cpu")
        )
        if device.type == "cuda" and state not in model.all_tied_weights_keys:
            tensor = model.get_parameter_or_buffer(state)
            total[torch.device("cuda", device.index or 0)] += tensor.numel() * tensor.element_size()
    return dict(total)


def free(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, for this process: what torch keeps for later counts."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def settle(linears: Linears) -> list[str]:
    """Give every packed linear on a GPU the layout of a kernel where its data allow it; return notices of the others.

    CheckpointError or LayoutError, naming it, for a weight that is damaged. On a CPU all stay as they are.
    """
    decoded: dict[str, list[str]] = {}
    for name, linear in linears.items():
        with about(name):
            why = linear.settle()
        if linear.device.type == "meta" and torch.cuda.is_available() and linear.layout not in kernels.MATMULS:
            why = f"offloaded weights stay in the layout of the file, and {kernels.none_for(linear.layout)}"
        if why is not None:
            decoded.setdefault(why, []).append(name)
    return [
        f"{names[0]}: decoded at each call, which is slow ({len(names)} such weights): {why}"
        for why, names in decoded.items()
    ]


def way(model: PreTrainedModel) -> str:
    """Return how the packed weights of a model are multiplied where it runs, to stand beside a figure."""
    kinds = Counter(
        f"by the {linear.layout} kernel" if linear.is_multiplied_on(model.device, model.dtype) else "decoded"
        for linear in model.modules()
        if isinstance(linear, PackedLinear)
    )
    said = [f"{count} weights {kind}" if len(kinds) > 1 else f"weights {kind}" for kind, count in kinds.items()]
    return f"{' and '.join(said) or 'weights dense'}, {dtype_name(model.dtype)}"


def stated_now(linears: Linears, src: Checkpoint) -> dict[str, Any]:
    """Return the `quantization_config` of the packed linears of a folder as they are now, to be saved with them.

    CheckpointError if they are in several layouts: a folder holds one.
    """
    layouts = list(dict.fromkeys(linear.layout for linear in linears.values()))
    if len(layouts) > 1:
        raise CheckpointError(
            f"{src.path}: its weights are packed in the layouts {' and '.join(layouts)} in memory, and a folder holds "
            "one: load it on a CPU and save that, or use quantkit pack"
        )
    (default, _), *_ = Counter(linear.scheme for linear in linears.values()).most_common(1)
    others = tuple((re.escape(name), linear.scheme) for name, linear in linears.items() if linear.scheme != default)
    padded = tuple(
        (name, (linear.out_features, linear.in_features))
        for name, linear in linears.items()
        if (linear.n, linear.k) != (linear.out_features, linear.in_features)
    )
    assert src.schemes is not None and src.stated is not None
    schemes = replace(src.schemes, default=default, overrides=others, padded=padded)
    recipe = src.stated.get("quantkit", {}).get("recipe_sha256")
    key = quantkit_key(layouts[0], schemes, quantkit.__version__, recipe)
    return {**LAYOUTS[layouts[0]].write_config(schemes), "quantkit": key}
