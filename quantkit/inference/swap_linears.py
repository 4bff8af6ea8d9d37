"""Replaces the dense linears of a transformers model by packed linears.

Everything in the headers is checked before any weight is read: each packed tensor has a place, each
place has a tensor, and the GPUs have enough memory. Recasts depend on the data and follow after
loading: a weight whose layout has no kernel is recast (layouts.md 11) on its own device, one weight
at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantkit import kernels
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import Scheme
from quantkit.core.units import format_bytes
from quantkit.engines.joined import quantization_config
from quantkit.errors import (
    CheckpointError,
    Command,
    KernelError,
    LayoutError,
    Option,
    Setting,
    Words,
    about,
)
from quantkit.inference.packed_linear import PackedEmbedding, PackedLinear
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Layout, half
from quantkit.layouts.schemes import ORIGINAL, is_embedding, is_head
from quantkit.models.meta_model import float32_states
from quantkit.models.modules import is_linear, is_table, reads_weight, size_of
from quantkit.models.outline import Outline
from quantkit.models.outside import undeclared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The share of the free memory that weights may take which are decoded once.
KEPT = 0.75
#: Packed layers of a model by the stored name of their module.
Linears = dict[str, PackedLinear]


def swap(outline: Outline) -> Linears:
    """Replace linears of an outlined model by packed linears on the meta device.

    CheckpointError if a packed weight has no linear of its shape or lacks a tensor, or if model and
    folder differ in tensors or shapes.
    """
    model, src = outline.module, outline.src
    modules, paths = dict(model.named_modules()), dict[str, str]()
    wide = float32_states(model, model.dtype)
    linears: Linears = {}
    if any(map(is_embedding, src.modules())):
        outline.require_tied()
    for module in src.modules():
        (state, *_), pattern = outline.names.place(f"{module}.weight")
        path = state.removesuffix(".weight")
        dense = None if pattern else modules.get(path)
        if dense is None and not undeclared(outline.names, src, [f"{module}.weight"]):
            continue  # a packed draft layer
        if dense is None or not (is_linear(dense) or is_table(dense)):
            raise CheckpointError(
                f"{module} is packed, and {type(model).__name__} in this transformers has no "
                "linear of that name",
                Words("quantize the model again, with", Setting("skip"), "for such weights"),
                subject=src.path,
            )
        linears[module] = packed = _packed_skeleton(src, module, dense)
        if wide.search(state):
            packed.dense_dtype = torch.float32
        model.set_submodule(path, packed)
        if path in outline.held:
            outline.held[path].linear = packed
        if isinstance(packed, PackedEmbedding):
            linears |= _share(outline, module, path)
        # A head with a packed weight of its own is no longer tied to the embeddings.
        if model.all_tied_weights_keys.pop(state, None) is not None:
            model.config.tie_word_embeddings = False
        paths[module] = path
    outline.take_parts(paths)
    outline.require_complete()
    return linears


def _share(outline: Outline, module: str, path: str) -> Linears:
    """Replace what the model ties to the embeddings `module` at `path` by layers of the same packed
    tensors, which transformers ties in the place of the weights. A head that is stored by itself
    stays, and is no longer tied.
    """
    model, stored = outline.module, outline.states.stored
    ties, shared = model.all_tied_weights_keys, Linears()
    for state in [a for a, b in ties.items() if b == f"{path}.weight"]:
        del ties[state]
        if stored.get(state) != stored.get(f"{path}.weight"):
            model.config.tie_word_embeddings = False
            continue
        user = state.removesuffix(".weight")
        packed = _packed_skeleton(outline.src, module, model.get_submodule(user))
        model.set_submodule(user, packed)
        ties |= {f"{user}.{suffix}": f"{path}.{suffix}" for suffix in packed.suffixes}
        shared[user] = packed
    return shared


def _packed_skeleton(src: Checkpoint, module: str, dense: nn.Module) -> PackedLinear:
    """Make the packed layer, on the meta device, that replaces a linear or an embedding of the
    skeleton.
    """
    assert src.layout is not None
    parts, scheme = src.parts(module), src.scheme(module)
    asked, true, stored = size_of(dense), src.true_size(module), src.size(module)
    if (
        asked != true
        and not src.is_padded(module)
        and _are_stored_alike(src.layout, scheme, asked, stored)
    ):
        true = stored = asked  # headers may know k only roughly
    if asked != true:
        raise CheckpointError(
            f"{module} is packed from {list(true)}, config.json asks for {list(asked)}",
            subject=src.path,
        )
    if isinstance(dense, nn.Embedding) and not src.layout.GATHERS:
        raise CheckpointError(
            f"{module} is packed, and {src.layout.TITLE} has no place for embeddings",
            ORIGINAL,
            subject=src.path,
        )
    for suffix in src.layout.stored(scheme, *stored):
        if suffix not in parts and suffix not in src.layout.OPTIONAL:
            raise CheckpointError(
                f"{module}.{suffix} is missing from the checkpoint",
                "fetch it again",
                subject=src.path,
            )
    tensors = {
        suffix: torch.empty(src.shape(name), dtype=src.dtype(name), device="meta")
        for suffix, name in parts.items()
    }
    bias: Any = getattr(dense, "bias", None)
    if bias is None and f"{module}.bias" in src:  # some programs always write one, of zeros
        bias = torch.empty(true[0], dtype=dense.get_parameter("weight").dtype, device="meta")
    if isinstance(dense, nn.Embedding):
        return PackedEmbedding(dense, src.layout.NAME, scheme, stored, true, tensors)
    packed = PackedLinear(src.layout.NAME, scheme, stored, true, tensors, bias)
    packed.dense_dtype = dense.get_parameter("weight").dtype
    return packed


def _are_stored_alike(
    layout: Layout, scheme: Scheme, one: tuple[int, int], other: tuple[int, int]
) -> bool:
    with suppress(LayoutError):
        return layout.stored(scheme, *one) == layout.stored(scheme, *other)
    return False


def show_weights(model: nn.Module) -> None:
    """Let code of a loaded model that reads the weight of a packed linear get it decoded, in every
    layout, and let the model state its dtype.
    """
    for owner in model.modules():
        for leaf, linear in owner.named_children():
            if isinstance(linear, PackedLinear):
                linear.reads_weight = reads_weight(owner, leaf)
            if isinstance(linear, PackedEmbedding):
                linear.show_dtype()


def require_kernels(device: torch.device) -> None:
    """Raise KernelError if the device is a GPU that cannot run the kernels."""
    problem = kernels.unusable(device)
    if device.type == "cuda" and problem is not None:
        raise KernelError(f"packed weights cannot be multiplied on {device}", problem)


def require_memory(
    needs: Mapping[torch.device, int], free: Callable[[torch.device], float], folder: Path
) -> None:
    """Raise CheckpointError if `needs`, in bytes, exceeds the `free` bytes of a device."""
    for device, needed in needs.items():
        available = free(device)
        if needed > available:
            raise CheckpointError(
                f"its weights take {format_bytes(needed)} on {device}, which has "
                f"{format_bytes(int(available))} free, "
                f"{format_bytes(int(needed - available))} too little",
                "free some memory, or use another machine"
                if device.type == "cpu"
                else Words("use another GPU,", Option("device", "cpu"), ", or device_map='auto'"),
                subject=folder,
            )


def memory_needs(model: PreTrainedModel, placed: Mapping[str, Any]) -> dict[torch.device, int]:
    """Add up the bytes of weights on each device; `placed` maps each state name to its device, or
    to "disk".
    """
    total: Counter[torch.device] = Counter()
    for state, place in placed.items():
        if place == "disk" or state in model.all_tied_weights_keys:
            continue
        device = torch.device("cuda", place) if type(place) is int else torch.device(place)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)
        tensor = model.get_parameter_or_buffer(state)
        total[device] += tensor.numel() * tensor.element_size()
    return dict(total)


def repack_for_kernels(linears: Linears) -> tuple[list[str], str | None]:
    """Repack each packed linear on a GPU for a kernel; returns a notice for each reason why some
    cannot be repacked.

    An output head that no kernel multiplies is decoded once, and the second value says so.

    CheckpointError or LayoutError for a damaged weight, for scales outside float16, or for FP8
    values outside the format. Weights on a CPU are not changed.
    """
    decoded: dict[str, list[str]] = {}
    once: str | None = None
    for name, linear in linears.items():
        with about(name):
            why = linear.prepare_kernel()
            if why is not None and is_head(name):
                linear.keep_decoded(linear.dense_dtype)
                once = f"{name} is decoded once, to {dtype_name(linear.dense_dtype)}: {why}"
                continue
            for tensor in linear.packed().values() if linear.device.type == "cpu" else ():
                if tensor.dtype in (torch.bfloat16, torch.float32):  # scales of another program
                    half(tensor)
                elif tensor.dtype == torch.float8_e4m3fn:  # has more values than FP6 and FP5
                    linear.record()
        if (
            linear.device.type == "meta"
            and not isinstance(linear, PackedEmbedding)
            and torch.cuda.is_available()
            and linear.layout not in kernels.MATMULS
        ):
            why = (
                "offloaded weights stay in the layout of the file, and "
                f"{kernels.none_for(linear.layout)}"
            )
        if why is not None:
            decoded.setdefault(why, []).append(name)
    return [
        Words(f"{names[0]}: decoded at each call, which is slow ({len(names)} such weights):", why)
        for why, names in decoded.items()
    ], once


def keep_decoded(linears: Linears, free: float) -> tuple[str | None, str | None]:
    """Decode weights on a CPU once, as many as a share of the `free` bytes holds.

    Returns a notice about them, and a notice about the others, which are decoded at each call.
    """
    total, kept, left = 0, list[str](), dict[str, int]()
    for name, linear in linears.items():
        if isinstance(linear, PackedEmbedding):
            continue
        nbytes = linear.out_features * linear.in_features * linear.dense_dtype.itemsize
        if linear.device.type == "cpu" and total + nbytes <= KEPT * free:
            with about(name):
                linear.keep_decoded(linear.dense_dtype)
            total += nbytes
            kept.append(dtype_name(linear.dense_dtype))
        elif linear.device.type == "cpu":
            left[name] = nbytes
    once = (
        f"{len(kept)} weights are decoded once, to {' and '.join(sorted({*kept}))}: they take "
        f"{format_bytes(total)} of memory"
    )
    if not left:  # the free bytes may be unknown, which is infinity
        return once if kept else None, None
    again = (
        f"{next(iter(left))}: decoded at each call, which is slow ({len(left)} such weights): "
        f"decoded once they would take {format_bytes(sum(left.values()))}, and "
        f"{format_bytes(int(free - total))} are free"
    )
    return once if kept else None, again


def describe_weights(model: PreTrainedModel) -> str:
    """Describe how the weights of a model are multiplied on its device, to print beside
    a result.
    """
    kinds = Counter(
        f"by the {linear.layout} kernel"
        if model.dtype in ACTIVATIONS
        and kernels.unusable(model.device) is None
        and linear.has_kernel()
        else "decoded"
        for linear in model.modules()
        if isinstance(linear, PackedLinear) and not isinstance(linear, PackedEmbedding)
    )
    words = [
        f"{count} weights {kind}" if len(kinds) > 1 else f"weights {kind}"
        for kind, count in kinds.items()
    ]
    return f"{' and '.join(words) or 'weights dense'}, {dtype_name(model.dtype)}"


def config_in_memory(linears: Linears, src: Checkpoint) -> dict[str, Any]:
    """Build the `quantization_config` to save with packed linears that were repacked after loading.

    CheckpointError if they have several layouts, because a folder holds one.
    """
    layouts = list(dict.fromkeys(linear.layout for linear in linears.values()))
    if len(layouts) > 1:
        raise CheckpointError(
            f"its weights are packed in the layouts {' and '.join(layouts)} in memory, and a "
            "folder holds one",
            "load it on a CPU and save that",
            Words("use", Command("pack")),
            subject=src.path,
        )
    (default, _), *_ = Counter(linear.scheme for linear in linears.values()).most_common(1)
    others = tuple(
        (re.escape(name), linear.scheme)
        for name, linear in linears.items()
        if linear.scheme != default
    )
    padded = tuple(
        (name, (linear.out_features, linear.in_features))
        for name, linear in linears.items()
        if (linear.n, linear.k) != (linear.out_features, linear.in_features)
    )
    assert src.schemes is not None and src.stated is not None
    schemes = replace(src.schemes, default=default, overrides=others, padded=padded)
    return quantization_config(
        LAYOUTS[layouts[0]],
        schemes,
        linears,
        recipe_sha256=src.stated.get("quantkit", {}).get("recipe_sha256"),
    )
