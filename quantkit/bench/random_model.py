"""A model without weights: what its config.json says of shapes, what it would weigh packed, and one full of noise.

Speed and memory depend on shapes alone, so no model need be downloaded to be measured. Noise is packed where it is
used, one layer at a time: a packed model is never dense as a whole, and one of 70 billion weights in FP6 fits on one
GPU.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantkit.bench import kernels
from quantkit.checkpoint.reader import CONFIG
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.errors import KernelError, LayoutError, RecipeError, about
from quantkit.inference import fused_linear, swap_linears
from quantkit.inference.packed_linear import PackedLinear
from quantkit.io import config_checks, files, json_files
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.schemes import Schemes
from quantkit.models.meta_model import skeleton
from quantkit.pipeline.memory_estimate import CUDA_DEVICE
from quantkit.pipeline.recipe import matches
from quantkit.progress import Progress
from quantkit.reporting.report import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
#: Model -> its config.json, as far as speed depends on it.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0},
    "llama2-70b": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"vocab_size": 32000, "max_position_embeddings": 4096},
}
#: What the model without packed weights is called where others have a layout.
DENSE = "dense"

#: Masks of such lengths need no copy before attention.
UNIT = 8
#: Bytes for each weight of the largest linear while it is made and packed.
SCRATCH = 32
#: Outputs of the widest linear that are alive together, for each token of a prompt.
ALIVE = 6

#: Path of a linear in a model -> `(n, k)`.
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Outline:
    """A model without weights: its config.json, and the layout and schemes if that says that it is packed."""

    name: str
    path: Path
    config: dict[str, Any]
    layout: str | None = None
    schemes: Schemes | None = None


@dataclass(frozen=True)
class Variant:
    """What the linears of a model are: path in the model -> scheme in a layout, or dense where there is none."""

    layout: str
    schemes: Mapping[str, Scheme]

    @property
    def scheme(self) -> str:
        """The labels of all schemes, the commonest first; of a dense model ""."""
        return ", ".join(label for label, _ in Counter(s.label for s in self.schemes.values()).most_common())


@dataclass(frozen=True)
class Load:
    """How a model is used: prompts of `prompt` tokens, then `new` ones each, in several batch sizes, in a dtype.

    `eager` leaves the small operations of a step as they are, see `turns.fused`.
    """

    batches: tuple[int, ...]
    prompt: int
    new: int
    dtype: torch.dtype
    eager: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes on paper: of all weights, and of those that a step reads (of untied embeddings it looks up few rows)."""

    weights: int
    read: int


def read(model: str) -> Outline:
    """Return a model of `CONFIGS` by name, or that of a config.json or a folder with one; weights are not looked at.

    RecipeError for what is neither, CheckpointError for a config.json that is damaged or hostile.
    """
    if model in CONFIGS:
        return Outline(model, Path(model), CONFIGS[model])
    path = Path(model)
    with files.guarded(path):
        file = path / CONFIG if path.is_dir() else path
        if not model or not file.is_file():
            raise RecipeError(f"unknown model {model!r}: use {', '.join(CONFIGS)}, or a {CONFIG} or a folder with one")
    config = json_files.load_json(file)
    config_checks.check_config(config, file)
    found = Outline(file.resolve().parent.name, file, config)
    if config.get("quantization_config") is None:
        return found
    layout, schemes = read_config(config["quantization_config"], file)
    return replace(found, layout=layout.NAME, schemes=schemes)


def variants(model: Outline, layouts: Sequence[str], schemes: Sequence[Scheme], skip: Sequence[str]) -> list[Variant]:
    """Return the dense model and its packed forms: each layout in each scheme, or in its usual one if none is asked.

    A model that is packed already is measured as it is, unless a layout or a scheme is asked. The output head stays
    dense, and what its config or `skip` (regular expressions) leaves so. LayoutError, with the layouts and schemes that
    do, for one that does not hold all linears; RecipeError for a pattern that is none and for no linears at all.
    """
    built = skeleton(model, torch.float16, False)
    linears, every = linears_of(built, model, skip), [p for p, m in built.named_modules() if isinstance(m, nn.Linear)]
    for pattern in skip:
        if not any(matches(pattern, path) for path in every):
            raise RecipeError(f"--skip {pattern!r} matches no linear of {model.name}, such as {every[:1]}: check it")
    if not linears:
        raise RecipeError(f"{model.name}: no nn.Linear is left to be packed: use fewer --skip, or another model")
    found = [Variant(DENSE, {})]
    if model.layout is not None and model.schemes is not None and not (layouts or schemes):
        found.append(Variant(model.layout, {path: model.schemes.of(path) for path in linears}))
    else:
        for layout in layouts or kernels.default_layouts():
            for scheme in schemes or (Scheme.parse(kernels.SCHEMES[layout][0]),):
                found.append(Variant(layout, dict.fromkeys(linears, scheme)))
    for variant in found:
        broken = {path: _broken(variant.layout, scheme, *linears[path]) for path, scheme in variant.schemes.items()}
        wrong = {path: rule for path, rule in broken.items() if rule is not None}
        for path, rule in wrong.items():
            (n, k), label = linears[path], variant.schemes[path].label
            raise LayoutError(
                f"{path} is {n}x{k}, which {variant.layout} does not hold in {label}: {rule}: "
                f"{_ways_out(linears, wrong, schemes)}"
            )
    return found


def linears_of(built: PreTrainedModel, model: Outline | None = None, skip: Sequence[str] = ()) -> Shapes:
    """Return path -> `(n, k)` of every linear but the output head, without those that a config or `skip` leaves dense.

    RecipeError for a regular expression that is none.
    """
    ignored = model.schemes.ignore if model is not None and model.schemes is not None else ()
    left = [name.removeprefix("re:") if name.startswith("re:") else re.escape(name) for name in ignored]
    try:
        for pattern in (*left, *skip):
            re.compile(pattern)
    except re.error as error:
        raise RecipeError(f"{error.pattern!r} is no regular expression ({error}): mend --skip") from error
    head = built.get_output_embeddings()
    return {
        path: (module.out_features, module.in_features)
        for path, module in built.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module is not head
        and not any(matches(pattern, path) for pattern in (*left, *skip))
    }


def _broken(layout: str, scheme: Scheme, n: int, k: int) -> str | None:
    """Return the rule that a weight breaks in a layout, None if it fits."""
    try:
        LAYOUTS[layout].check(scheme, n, k)
        scheme.groups(k)
    except LayoutError as error:
        return str(error).split(": ")[0]
    return None


def _ways_out(linears: Shapes, wrong: Collection[str], schemes: Sequence[Scheme]) -> str:
    """Return options for linears of which some fit nowhere as asked; of layouts and schemes those that hold all."""
    shapes = set(linears.values())
    ways = [
        f"--layout {layout} --scheme {scheme.label}"
        for layout in kernels.default_layouts()
        for scheme in dict.fromkeys([*map(Scheme.parse, kernels.SCHEMES[layout]), *schemes])
        if all(_broken(layout, scheme, n, k) is None for n, k in shapes)
    ]
    if len(wrong) < len(linears):
        leaves = dict.fromkeys(re.escape(path.rpartition(".")[2]) for path in wrong)
        ways.append(f"--skip '{'|'.join(leaves)}' to leave {len(wrong)} of {len(linears)} dense")
    return f"use {', or '.join(ways)}" if ways else "no kernel's layout holds its linears, use another model"


def sizes(built: PreTrainedModel, variant: Variant) -> Sizes:
    """Return the bytes of a variant of a model on the meta device; of packed weights those that the layout stores."""
    tied = built.all_tied_weights_keys
    total = 0
    for name, parameter in built.named_parameters():
        scheme = variant.schemes.get(name.removesuffix(".weight"))
        if scheme is not None:
            n, k = parameter.shape
            total += sum(t.itemsize * math.prod(shape) for t, shape in _stored(variant.layout, scheme, n, k))
        elif name not in tied:
            total += parameter.nbytes
    return Sizes(total, total - (0 if tied else built.get_input_embeddings().get_parameter("weight").nbytes))


def _stored(layout: str, scheme: Scheme, n: int, k: int) -> Collection[tuple[torch.dtype, tuple[int, ...]]]:
    return LAYOUTS[layout].stored(scheme, n, k).values()


def places(prompt: int, new: int) -> int:
    """Return the places of a cache for prompts and new tokens."""
    return -(-(prompt + new) // UNIT) * UNIT


def working(built: PreTrainedModel, load: Load, batch: int) -> int:
    """Return the bytes that a batch takes beside the weights, an estimate that leans upwards: cache and activations."""
    text: Any = built.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 2 * text.num_hidden_layers * heads * width * places(load.prompt, load.new)
    widest = max(max(shape) for shape in linears_of(built).values())
    return int(batch * load.dtype.itemsize * (cache + ALIVE * widest * load.prompt + ALIVE * text.vocab_size))


def share_room(
    name: str, built: PreTrainedModel, variants: Sequence[Variant], load: Load, free: int
) -> tuple[list[tuple[Variant, tuple[int, ...]]], list[str]]:
    """Return the variants with the batches that fit into `free` bytes, and a notice if not all of the dense one do.

    KernelError, with how much is missing, for a packed one that does not fit in all batches.
    """
    largest = max(math.prod(shape) for shape in linears_of(built).values())
    jobs: list[tuple[Variant, tuple[int, ...]]] = []
    notices: list[str] = []
    for variant in variants:
        weights = sizes(built, variant).weights + CUDA_DEVICE
        scratch = SCRATCH * largest if variant.schemes else 0
        needs = {batch: weights + max(scratch, working(built, load, batch)) for batch in load.batches}
        over = [batch for batch, need in needs.items() if need > free]
        if over:
            need = needs[over[0]]
            said = (
                f"{name} as {variant.layout} {variant.scheme or dtype_name(load.dtype)} takes about {size(need)} at "
                f"batch {over[0]}, the GPU has {size(free)} free, {size(need - free)} too little"
            )
            if variant.schemes:
                raise KernelError(f"{said}: use smaller --batch or --prompt-tokens, fewer bits, or another GPU")
            notices.append(f"{said}: the dense model is left out at batch {', '.join(map(str, over))}")
        if len(over) < len(needs):
            jobs.append((variant, tuple(batch for batch in needs if batch not in over)))
    return jobs, notices


def build(
    model: Outline, variant: Variant, dtype: torch.dtype, device: torch.device, progress: Progress
) -> tuple[PreTrainedModel, list[str]]:
    """Return a variant with random weights on a device, and notices of weights that no kernel multiplies there.

    Linears of one shape and scheme have one weight, each its own copy. Outputs are as large as inputs, so that nothing
    overflows in whatever depth.
    """
    built = skeleton(model, dtype, False)
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
                tensors = LAYOUTS[variant.layout].pack(noise(scheme, n, k, device))
            linear = first[key] = PackedLinear(variant.layout, scheme, (n, k), (n, k), tensors, bias)
            notices += swap_linears.repack_for_kernels({path: linear})
        owner, _, leaf = path.rpartition(".")
        setattr(built.get_submodule(owner), leaf, linear)
    _fill(built, device)
    fused_linear.fuse_linears(built)
    return built, notices


def noise(scheme: Scheme, n: int, k: int, device: torch.device) -> QuantizedTensor:
    """Return `bench.record` with scales that make products about as large as activations."""
    q = kernels.record(scheme, n, k, device)
    typical = 0.01 * pstdev(scheme.format.values) * math.sqrt(k)
    return QuantizedTensor(scheme, q.codes, (q.scales.float() / typical).half(), q.zeros)


def _fill(model: PreTrainedModel, device: torch.device) -> None:
    """Give all parameters without data random values on a device, and bring the buffers there; ties stay ties."""
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
