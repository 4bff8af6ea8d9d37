"""The keys of a recipe, each declared once. This module imports no torch, so that `--help` is
quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from quantkit import errors
from quantkit.algorithms.options import Options
from quantkit.keys import Count, Key, Positive, key, keys_of, section
from quantkit.names import FORMATS, LAYOUTS, Clip, Method, Metric, Rule
from quantkit.recipes.options import Calib

if TYPE_CHECKING:
    from quantkit.core.quantized_tensor import Goal, Scheme


@dataclass(frozen=True)
class SchemeKeys:
    """The scheme of each weight in a recipe's words; makes a `Scheme`."""

    format: str = key(
        "Number format",
        default="int4",
        level="shown",
        section="Basic",
        choices=FORMATS,
        table="quantkit.core.formats:FORMATS",
        more="FP6 has the form E3M2 and FP5 E3M1, if the name does not say otherwise. NVFP4 and "
        "MXFP4 are for weights only.",
        when="More bits lose less, INT4 is usual. At its bits in groups of 32, NVFP4 loses as much "
        "or less ([results](results.md#fp4)).",
    )
    group_size: Positive | Literal["channel"] | None = key(
        "Weights of a row that share a scale, or channel for the whole row",
        default=None,
        usual="int: 128, 64 or 32, fp: channel, nvfp4: 16, mxfp4: 32",
        level="shown",
        section="Basic",
        typed='int | Literal["channel"] | None',
        more="Integers take the widest of 128, 64 and 32 that divides every width, with a notice.",
        when="64 or 32 for accuracy, at 0.125 or 0.375 more bits.",
    )
    symmetric: bool = key(
        "Zero points, or none",
        default=True,
        usual="sym",
        level="shown",
        section="Basic",
        keyword="asym",
        negated=True,
        more="Integers only.",
        when="`false` for `awq` and `quick`, or for accuracy. MARLIN needs `true`.",
    )
    sparsity: Literal["2:4"] | None = key(
        "Keep two of each four weights, integers only",
        default=None,
        usual="all",
        level="shown",
        section="Basic",
        keyword="prune",
        may_lack=True,
        more='Quoted in a file: `"2:4"`.',
        when="For Sparse-MARLIN. Perplexity rises much without fine-tuning.",
    )


@dataclass(frozen=True, kw_only=True)
class RecipeKeys:
    """Everything that decides the bytes of a quantized or pruned checkpoint, besides its source, in
    a file's order.
    """

    scheme: Goal = section("The form of each weight.", SchemeKeys)
    prune: Rule | None = key(
        "Which two of four weights stay",
        default=None,
        usual="gptq: sparsegpt, rtn: magnitude",
        keyword="prune_method",
        may_lack=True,
        more="Only with `scheme.sparsity`.",
        when="`magnitude` keeps a mask that the weights already have.",
    )
    method: Method | Rule = key(
        "How codes are chosen",
        usual="gptq",
        level="shown",
        section="Basic",
        form=Method,
        pruning=Rule,
        more="`gptq` lets later columns make up for rounding errors, and needs text. `rtn` rounds "
        "each weight to nearest.",
        when="`rtn` for speed.",
    )
    clip: Clip = key(
        "Search for scales, or take that of the largest weight",
        usual="fp rtn: none, else search",
        when="`none` to reproduce published rounding.",
    )
    metric: Metric = key(
        "The error that the search minimises",
        usual="gptq: block, rtn: mse",
        more="`mse` is the weight's own. `diag` is weighted by each channel's activations, `block` "
        "by their correlations in the group; both need text.",
        when="`block` with `rtn`, if there is text.",
    )
    signed: bool = key(
        "Scales with a sign, for symmetric integers; false for W4A8",
        default=False,
        usual="gptq of symmetric integers: on, else off",
        more="The extreme weight of a group then gets the code −8 exactly.",
        when="`false` for W4A8 in vLLM (`VLLM_MARLIN_INPUT_DTYPE=int8`), which reads negative "
        "scales as positive, and for an engine that refuses them. `true` for accuracy with `rtn`.",
    )
    gptq: Options = section("Damping, column order and what follows the sweep.", Options)
    output_aware: bool = key(
        "Weigh the error of tune by gradients of the model's likelihood",
        default=False,
        may_lack=True,
        more="Needs `tune`. See [algorithms.md](algorithms.md) 8.2. For models whose blocks pass "
        "on nothing but a hidden state.",
        when="`true` for accuracy, if a forward and a backward pass over 65,536 tokens are "
        "affordable.",
    )
    tune: Count = key(
        "Steps by gradient that tune the codes and scales of each block after gptq",
        default=0,
        may_lack=True,
        more="See [algorithms.md](algorithms.md) 8.1. Needs 8 calibration sequences or more.",
        when="200 for accuracy, if time allows: a step costs as much as training on 4 sequences.",
    )
    tune_scales: Count = key(
        "Steps by gradient that tune the scales of the whole model behind everything else",
        default=0,
        may_lack=True,
        more="See [algorithms.md](algorithms.md) 8.3. The device holds the model twice.",
        when="300 for 2 or 3 bits, if the device holds the model.",
    )
    true_sequential: bool = key(
        "Calibrate each linear behind those of its block that are done already",
        default=True,
        pruning=True,
        when="Rarely: `false` saves time only where memory is short (algorithms.md 12).",
    )
    calibration: Calib = section(
        "The text that calibrates.", Calib, heading="Calibration", pruning=True
    )
    layout: str | None = key(
        "Layout to write",
        usual="fp6/fp5: humming, else compressed-tensors",
        level="shown",
        section="Basic",
        form=str,
        choices=LAYOUTS,
        table="quantkit.layouts:LAYOUTS",
        more="Where it is not given and the usual one opens in no program, another is taken, with "
        "a notice.",
        when="To match the engine. `pack` changes it later without loss.",
    )
    dense_dtype: Literal["bfloat16", "float16"] | None = key(
        "Store dense tensors in this dtype",
        default=None,
        usual="the source's",
        level="option",
        section="Output",
        may_lack=True,
        pruning=True,
        more="Linears are quantized or pruned from the source's own values.",
        when="`bfloat16` for a float32 source: embeddings, head and norms take half the space.",
    )
    pad: bool = key(
        "Fill weights up with zeros to shapes that the layout holds",
        default=False,
        section="Output",
        when="If `plan` says that a shape does not fit.",
    )
    fused_alike: bool = key(
        "Treat q, k and v, gate and up, experts of a layer as the widest of them",
        default=False,
        section="Output",
        may_lack=True,
        more="Engines join these linears. The widest treatment is dense if one is, else the scheme "
        "with most bits.",
        when="If `plan` says that a group mixes treatments.",
    )
    skip: tuple[str, ...] = key(
        "Linears left dense, besides lm_head",
        default=("lm_head",),
        level="shown",
        section="Basic",
        typed="str | Iterable[str] | None",
        pruning=True,
        more="Regular expressions, each of a whole module name or its end after a dot.",
        when="For sensitive layers. A list in a file replaces the default, so repeat `lm_head`.",
    )
    overrides: tuple[tuple[str, Scheme], ...] = key(
        "A scheme for some: '.*down_proj=int4:g64'",
        default=(),
        level="shown",
        section="Basic",
        keyword="override",
        form=dict[str, str] | None,
        typed="Mapping[str, str] | None",
        more="In a file a mapping from regular expression to scheme. The first match wins.",
        when="To give some linears more bits.",
    )
    embeddings: str = key(
        "Scheme of the embeddings, like int8:channel",
        default="dense",
        level="option",
        section="Basic",
        metavar="SCHEME",
        may_lack=True,
        more="`auto` lets a target size choose. Rounded row by row, or solved by the head's inputs "
        "if the head is tied to them, which then has the same packed weight. `compressed-tensors` "
        "and `humming` hold them.",
        when="To save what they take, half of a small model, for readers that open them "
        "([layouts.md](layouts.md) 9).",
    )
    head: str = key(
        "Scheme of the output head, like int6:g64",
        default="dense",
        level="option",
        section="Basic",
        metavar="SCHEME",
        may_lack=True,
        more="`auto` lets a target size choose. It takes the default `lm_head` out of `skip`.",
        when="As `embeddings`, for a head that is not tied to them.",
    )


def pruning_keys(declared: type = RecipeKeys) -> list[Key]:
    """List the keys of `prune`, with the values that they have there."""
    return [
        each
        if each.pruning is True
        else replace(
            each,
            type=each.pruning,
            help="Which two of four weights stay",
            usual="sparsegpt",
            more="",
        )
        for each in keys_of(declared)
        if each.pruning
    ]


# Messages name these as `--set KEY=VALUE`.
errors.KEYS.update({each.keyword: each.name for each in keys_of(RecipeKeys) if each.level == "all"})
