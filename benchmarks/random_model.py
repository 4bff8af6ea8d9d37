"""Models with random weights, from a config.json alone: their shapes, their size when packed, and
the built model.

Speed and memory depend on shapes alone, so nothing is downloaded. Random weights are packed on the
GPU one layer at a time, so a packed model is never dense as a whole.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.bench_kernels import SCHEMES, random_record
from quantkit.checkpoint.reader import CONFIG
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.core.units import format_bytes
from quantkit.errors import KernelError, LayoutError, RecipeError, about
from quantkit.inference import packed_linear, swap_linears
from quantkit.inference.packed_linear import PackedLinear
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.recast import broken_rule
from quantkit.layouts.schemes import Schemes, compiled
from quantkit.models.meta_model import skeleton
from quantkit.models.weights import CUDA_DEVICE
from quantkit.names import KERNELS
from quantkit.progress import Progress
from quantkit.recipes.recipe import matches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
}
#: Model -> the entries of its config.json that affect speed.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0},
    "llama2-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    | {"vocab_size": 32000, "max_position_embeddings": 4096},
}
#: Prompts of one batch.
BATCHES = (1, 4, 16, 64)
#: Name of the unpacked model in place of a layout.
DENSE = "dense"

#: Attention needs no copy of masks whose length is a multiple of this.
MASK_UNIT = 8
#: Bytes for each weight of the largest linear during its packing.
SCRATCH = 32
#: Outputs of the widest linear in memory at the same time, for each token of a prompt.
OUTPUTS = 6

#: Path of a linear in a model -> `(n, k)`.
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Outline:
    """A model without weights: its config.json, and the layout and schemes if it is
    packed already.
    """

    name: str
    path: Path
    config: dict[str, Any]
    layout: str | None = None
    schemes: Schemes | None = None
    trusted: bool = False


@dataclass(frozen=True)
class Variant:
    """A form of a model: path of a linear -> its scheme in a layout; linears without a scheme are
    dense.
    """

    layout: str
    schemes: Mapping[str, Scheme]

    @property
    def scheme(self) -> str:
        """The labels of all schemes, the most frequent first; empty for a dense model."""
        return ", ".join(label for label, _ in Counter(s.label for s in self.schemes.values()).most_common())


@dataclass(frozen=True)
class Workload:
    """The use of a model: prompts of `prompt` tokens, then `new` tokens each, in several batch
    sizes, in a dtype.

    Only the first `timed` steps are timed (None: all), because each reads the whole cache. `eager`
    turns off the fusion of small operations, see `decode_graphs.fused`.
    """

    batches: tuple[int, ...]
    prompt: int
    new: int
    dtype: torch.dtype
    eager: bool = False
    timed: int | None = None


@dataclass(frozen=True)
class Sizes:
    """Expected bytes of all weights, and of those that a step reads: all but untied embeddings."""

    weights: int
    read: int


def read(model: str) -> Outline:
    """Read the outline of a model: a name in `CONFIGS`, a config.json, or a folder with one.
    Weights are ignored.

    RecipeError for any other name.
    """
    if model in CONFIGS:
        return Outline(model, Path(model), CONFIGS[model])
    file = Path(model) / CONFIG if Path(model).is_dir() else Path(model)
    if not file.is_file():
        raise RecipeError(f"unknown model {model!r}", f"use {', '.join(CONFIGS)}, or a {CONFIG} or a folder with one")
    config = json.loads(file.read_text())
    found = Outline(file.resolve().parent.name, file, config)
    if config.get("quantization_config") is None:
        return found
    layout, schemes = read_config(config["quantization_config"], file)
    return replace(found, layout=layout.NAME, schemes=schemes)


def variants(model: Outline, layouts: Sequence[str], schemes: Sequence[Scheme], skip: Sequence[str]) -> list[Variant]:
    """List the dense model and its packed forms: each layout in each scheme, by default in the
    layout's usual one.

    A model that is packed already keeps its form, unless a layout or a scheme is given. The output
    head stays dense, and so do linears that the config ignores or `skip` (regular expressions)
    matches. LayoutError if a layout does not hold all linears. RecipeError for
    an invalid pattern, and if no linear is left.
    """
    built = skeleton(model, torch.float16)
    linears, every = (
        linears_of(built, model, skip),
        [p for p, m in built.named_modules() if isinstance(m, nn.Linear)],
    )
    for pattern in skip:
        if not any(matches(pattern, path) for path in every):
            raise RecipeError(
                f"--skip {pattern!r} matches no linear of {model.name}, such as {every[:1]}",
                "check it",
            )
    if not linears:
        raise RecipeError(
            "no nn.Linear is left to be packed",
            "use fewer --skip, or another model",
            subject=model.name,
        )
    found = [Variant(DENSE, {})]
    if model.layout is not None and model.schemes is not None and not (layouts or schemes):
        found.append(Variant(model.layout, {path: model.schemes.of(path) for path in linears}))
    else:
        for layout in layouts or SCHEMES:
            for scheme in schemes or (Scheme.parse(SCHEMES[KERNELS[layout]][0]),):
                found.append(Variant(layout, dict.fromkeys(linears, scheme)))
    for variant in found:
        for path, scheme in variant.schemes.items():
            n, k = linears[path]
            rule = broken_rule(LAYOUTS[variant.layout], scheme, n, k)
            if rule is not None:
                raise LayoutError(
                    f"{path} is {n}x{k}, which {variant.layout} does not hold in {scheme.label}: {rule}: "
                    "use another layout or scheme, or --skip"
                )
    return found


def linears_of(built: PreTrainedModel, model: Outline | None = None, skip: Sequence[str] = ()) -> Shapes:
    """Map the path of every linear to `(n, k)`, except the output head and those that a config or
    `skip` leaves dense.

    RecipeError for an invalid regular expression.
    """
    ignored = model.schemes.ignore if model is not None and model.schemes is not None else ()
    left = [name.removeprefix("re:") if name.startswith("re:") else re.escape(name) for name in ignored]
    try:
        for pattern in (*left, *skip):
            compiled(pattern)
    except ValueError as error:
        raise RecipeError(f"{pattern!r} is no regular expression ({error})", "mend --skip") from error
    head = built.get_output_embeddings()
    return {
        path: (module.out_features, module.in_features)
        for path, module in built.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module is not head
        and not any(matches(pattern, path) for pattern in (*left, *skip))
    }


def sizes(built: PreTrainedModel, variant: Variant) -> Sizes:
    """Compute the bytes of a variant of a model on the meta device; packed weights count as the
    layout stores them.
    """
    tied = built.all_tied_weights_keys
    total = 0
    for name, parameter in built.named_parameters():
        scheme = variant.schemes.get(name.removesuffix(".weight"))
        if scheme is not None:
            n, k = parameter.shape
            stored = LAYOUTS[variant.layout].stored(scheme, n, k).values()
            total += sum(dtype.itemsize * math.prod(shape) for dtype, shape in stored)
        elif name not in tied:
            total += parameter.nbytes
    return Sizes(total, total - (0 if tied else built.get_input_embeddings().get_parameter("weight").nbytes))


def cache_length(prompt: int, new: int) -> int:
    """Compute the positions of a cache for prompts and new tokens."""
    return -(-(prompt + new) // MASK_UNIT) * MASK_UNIT


def working_bytes(built: PreTrainedModel, load: Workload, batch: int) -> int:
    """Estimate the bytes of a batch beside the weights, rather too high: cache and activations."""
    text: Any = built.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 2 * text.num_hidden_layers * heads * width * cache_length(load.prompt, load.new)
    widest = max(max(shape) for shape in linears_of(built).values())
    return int(batch * load.dtype.itemsize * (cache + OUTPUTS * widest * load.prompt + OUTPUTS * text.vocab_size))


def fit_batches(
    name: str, built: PreTrainedModel, variants: Sequence[Variant], load: Workload, free: int
) -> tuple[list[tuple[Variant, tuple[int, ...]]], list[str]]:
    """Select for each variant the batches that fit into `free` bytes; notices name those of the
    dense one that do not.

    KernelError, with the missing bytes, for a packed variant that does not fit in all batches.
    """
    largest = max(math.prod(shape) for shape in linears_of(built).values())
    jobs: list[tuple[Variant, tuple[int, ...]]] = []
    notices: list[str] = []
    for variant in variants:
        weights = sizes(built, variant).weights + CUDA_DEVICE
        scratch = SCRATCH * largest if variant.schemes else 0
        needs = {batch: weights + max(scratch, working_bytes(built, load, batch)) for batch in load.batches}
        over = [batch for batch, need in needs.items() if need > free]
        if over:
            need = needs[over[0]]
            said = (
                f"{name} as {variant.layout} {variant.scheme or dtype_name(load.dtype)} takes "
                "about "
                f"{format_bytes(need)} at batch {over[0]}, the GPU has {format_bytes(free)} free, "
                f"{format_bytes(need - free)} too little"
            )
            if variant.schemes:
                raise KernelError(
                    "use smaller --batch or --prompt-tokens, fewer bits, or another GPU",
                    subject=said,
                )
            notices.append(f"{said}: the dense model is left out at batch {', '.join(map(str, over))}")
        if len(over) < len(needs):
            jobs.append((variant, tuple(batch for batch in needs if batch not in over)))
    return jobs, notices


def build(
    model: Outline, variant: Variant, dtype: torch.dtype, device: torch.device, progress: Progress
) -> tuple[PreTrainedModel, list[str]]:
    """Build a variant with random weights on a device; returns it, and notices of weights that no
    kernel multiplies.

    Linears of one shape and scheme get copies of one weight. Outputs are about as large as inputs,
    so that no depth overflows.
    """
    built = skeleton(model, dtype)
    first: dict[tuple[Any, ...], PackedLinear] = {}
    notices: list[str] = []
    for path, scheme in progress.bar(list(variant.schemes.items()), "packing") if variant.schemes else ():
        dense = built.get_submodule(path)
        assert isinstance(dense, nn.Linear)
        n, k, biased = dense.out_features, dense.in_features, dense.bias is not None
        key = (n, k, biased, scheme)
        if key in first:
            linear = copy.deepcopy(first[key])
        else:
            bias = torch.zeros(n, dtype=dtype, device=device) if biased else None
            with about(path):
                tensors = LAYOUTS[variant.layout].pack(random_weight(scheme, n, k, device))
            linear = first[key] = PackedLinear(variant.layout, scheme, (n, k), (n, k), tensors, bias)
            found, once = swap_linears.repack_for_kernels({path: linear})
            notices += [*found, *filter(None, [once])]
        owner, _, leaf = path.rpartition(".")
        setattr(built.get_submodule(owner), leaf, linear)
    _fill(built, device)
    packed_linear.fuse_linears(built)
    return built, notices


def random_weight(scheme: Scheme, n: int, k: int, device: torch.device) -> QuantizedTensor:
    """Make a `bench_kernels.random_record` with scales that keep products about as large as
    activations.
    """
    q = random_record(scheme, n, k, device)
    typical = 0.01 * pstdev(scheme.format.values) * math.sqrt(k)
    return QuantizedTensor(scheme, q.codes, (q.scales.float() / typical).half(), q.zeros)


def _fill(model: PreTrainedModel, device: torch.device) -> None:
    """Fill all parameters without data with random values on a device, and move the buffers; ties
    are preserved.
    """
    random = torch.Generator(device).manual_seed(0)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta" or f"{path}.{name}" in model.all_tied_weights_keys:
                continue
            made = torch.empty_like(parameter, device=device)
            if parameter.ndim > 1:
                made.normal_(0, parameter.shape[-1] ** -0.5, generator=random)
            else:
                made.fill_(name == "weight")
            module._parameters[name] = nn.Parameter(made, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for target, origin in model.all_tied_weights_keys.items():
        owner, _, leaf = target.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = model.get_parameter(origin)
