"""The functions that `import quantkit` and the command line share.

A flag of the command line and a keyword of `quantize` are one row of `KEYS`. So they have the same name and the same
default (ALGORITHMS 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from typing_extensions import Unpack

from quantkit.checkpoint.reader import Checkpoint, resolve
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluation.divergence import Divergence, kld
from quantkit.evaluation.perplexity import Perplexity, perplexity
from quantkit.inference.load import load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.layouts import compatibility
from quantkit.models.text_sources import load_evaluation_text
from quantkit.models.tokenizer import load_tokenizer
from quantkit.names import Clip, Method, Metric, Rule
from quantkit.pipeline import quantize as pipeline
from quantkit.pipeline import recipe as recipes
from quantkit.pipeline.convert import pack
from quantkit.pipeline.recipe import Pruning, Recipe
from quantkit.pipeline.run_options import RunKeywords, RunOptions
from quantkit.progress import Progress

#: option -> its place in a recipe's mapping. `build_recipe` places `asym`, `skip` and `override`.
KEYS: dict[str, tuple[str, ...]] = {
    "format": ("scheme", "format"),
    "group_size": ("scheme", "group_size"),
    "prune": ("scheme", "sparsity"),
    "prune_method": ("prune",),
    "method": ("method",),
    "clip": ("clip",),
    "metric": ("metric",),
    "damp": ("gptq", "damp"),
    "damp_kind": ("gptq", "damp_kind"),
    "act_order": ("gptq", "act_order"),
    "on_unsolvable": ("gptq", "on_unsolvable"),
    "signed": ("signed",),
    "refit": ("gptq", "refit"),
    "descent": ("gptq", "descent"),
    "true_sequential": ("true_sequential",),
    "calib": ("calibration", "data"),
    "samples": ("calibration", "samples"),
    "max_length": ("calibration", "max_length"),
    "lengths": ("calibration", "lengths"),
    "text_column": ("calibration", "text_column"),
    "split": ("calibration", "split"),
    "moe_calibration": ("calibration", "moe"),
    "seed": ("calibration", "seed"),
    "layout": ("layout",),
    "pad": ("pad",),
    "fused_alike": ("fused_alike",),
}
#: Published perplexities have windows of 2048 tokens, or the model's longest context if that is shorter.
LONGEST_WINDOW = 2048


class _Calibrating(RunKeywords, total=False):
    damp: float | None
    damp_kind: Literal["own", "mean"] | None
    act_order: Literal["static", "off"] | None
    true_sequential: bool | None
    calib: str | Iterable[str] | None
    text_column: str | None
    split: str | None
    samples: int | None
    max_length: int | None
    lengths: Literal["own", "fixed"] | None
    moe_calibration: Literal["routed", "all"] | None
    seed: int | None
    skip: Iterable[str]


class QuantizeKeywords(_Calibrating, total=False):
    """The keywords of `quantize`. None leaves the recipe's value."""

    format: str | None
    group_size: int | Literal["channel"] | None
    asym: bool | None
    method: Method | None
    clip: Clip | None
    metric: Metric | None
    on_unsolvable: Literal["stop", "rtn"] | None
    signed: bool | None
    refit: bool | None
    descent: int | None
    prune: Literal["2:4"] | None
    prune_method: Rule | None
    layout: str | None
    pad: bool | None
    fused_alike: bool | None
    override: Mapping[str, str] | None


class PruneKeywords(_Calibrating, total=False):
    """The keywords of `prune`. None leaves the default."""

    method: Rule | None


class PackKeywords(TypedDict, total=False):
    """The keywords of `convert`: those of `pack`."""

    pad: bool
    requantize: bool
    requantize_scales: bool
    max_shard_size: int
    overwrite: bool
    progress: Progress | None


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    **options: Unpack[QuantizeKeywords],
) -> dict[str, Any]:
    """Quantize a Hugging Face causal LM (folder or hub id) into a new folder `out`; return its report.

    `recipe` is the path or shipped name of a recipe, its mapping, or a Recipe. `options` change single values of it.
    An interrupted run leaves `out.partial-*`, which `resume` continues. Raises a QuantkitError for anything that cannot
    be done.
    """
    run, recipe_options = _split(options)
    return pipeline.quantize(model, out, build_recipe(recipe, **recipe_options), **run)


def prune(model: str | Path, out: str | Path, **options: Unpack[PruneKeywords]) -> dict[str, Any]:
    """Prune a Hugging Face causal LM 2:4 into a new folder `out` that is as dense as its source; return its report.

    `method` is sparsegpt, wanda or magnitude. Everything else is as for `quantize`.
    """
    run, pruning_options = _split(options)
    return pipeline.prune(model, out, build_pruning(**pruning_options), **run)


def convert(pair: str, checkpoint: str | Path, out: str | Path, **options: Unpack[PackKeywords]) -> dict[str, Any]:
    """Rewrite a quantized checkpoint from layout A to layout B, bit for bit; return the report of the new folder `out`.

    `pair` is "A-to-B", such as "gptq-to-marlin". Everything else is as for `pack`. Raises a CheckpointError if the
    checkpoint is not in layout A.
    """
    source, target = compatibility.parse(pair)
    try:
        return pack(checkpoint, out, target, expect=source, **options)
    except QuantkitError as error:  # a hint at another target names the options of `pack`
        raise type(error)(str(error).replace("--layout ", f"convert {source}-to-")) from error


def _split(options: Mapping[str, Any]) -> tuple[RunKeywords, dict[str, Any]]:
    """Separate the options of a run from those of its recipe."""
    names = {field.name for field in fields(RunOptions)}
    run = {name: value for name, value in options.items() if name in names}
    return cast(RunKeywords, run), {name: value for name, value in options.items() if name not in names}


def build_pruning(*, skip: Iterable[str] = (), **options: Any) -> Pruning:
    """Make a Pruning of options by name. `skip` adds to lm_head. Raises a RecipeError for a wrong option or value."""
    mapping = recipes.merge({}, _flags(options))
    return recipes.pruning_from_mapping({**mapping, "skip": [*Recipe.skip, *skip]})


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Place options under their keys of a recipe. Raises a RecipeError for an unknown one."""
    flags: dict[str, Any] = {}
    for name, value in options.items():
        if name not in KEYS:
            raise RecipeError(f"unknown option {name!r}: known are {', '.join([*KEYS, 'asym', 'skip', 'override'])}")
        if name == "calib" and value is not None and not isinstance(value, str):
            value = list(value) or None
        *section, key = KEYS[name]
        (flags.setdefault(section[0], {}) if section else flags)[key] = value
    return flags


def build_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    asym: bool | None = None,
    skip: Iterable[str] = (),
    override: Mapping[str, str] | None = None,
    **options: Any,
) -> Recipe:
    """Make a Recipe of `recipe`, or of the format's defaults, with options by name in place of its values.

    An option that is None changes nothing. `skip` adds to the recipe's list. `override` goes before the recipe's own:
    the first match wins. Raises a RecipeError for an unknown recipe, option or value.
    """
    base = _mapping(recipe)
    flags = _flags(options)
    if asym is not None:
        flags.setdefault("scheme", {})["symmetric"] = not asym
    if skip:
        flags["skip"] = [*base.get("skip", Recipe.skip), *skip]
    merged = recipes.merge(base, flags)
    if override:
        before = merged.get("overrides") or {}
        merged["overrides"] = {**override, **{key: before[key] for key in before if key not in override}}
    return recipes.from_mapping(merged)


def shipped_recipes() -> dict[str, Path]:
    """Find the recipes that come with quantkit, as name -> file."""
    packaged = Path(__file__).parent / "configs"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _mapping(recipe: str | Path | Mapping[str, Any] | Recipe | None) -> Mapping[str, Any]:
    if recipe is None:
        return {}
    if isinstance(recipe, Recipe):
        return recipe.to_mapping()
    if isinstance(recipe, Mapping):
        return recipe
    shipped = shipped_recipes()
    if not Path(recipe).is_file() and str(recipe) not in shipped:
        raise RecipeError(f"{recipe}: no such recipe: give a YAML file or one of {', '.join(shipped)}")
    return recipes.load(Path(recipe) if Path(recipe).is_file() else shipped[str(recipe)])


def eval_ppl(
    checkpoint: str | Path,
    *,
    data: str = "wikitext2",
    window: int | None = None,
    stride: int | None = None,
    bos: bool = False,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Perplexity:
    """Measure the perplexity of a dense or quantized checkpoint.

    On a GPU, kernels multiply packed weights in the model's dtype. On a CPU, weights are decoded one at a time. A dense
    model computes in float32. `data` is the name of a data set or a file. `window` and `stride` are in tokens:
    `window` defaults to the model's longest context, at most 2048, and `stride` to the window. With `bos`, the BOS
    token precedes every window. Raises a QuantkitError for a checkpoint, text or window that cannot be evaluated.
    """
    text, what = load_evaluation_text(data)
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code)
    model = load_for_evaluation(src, device=device, trust_remote_code=trust_remote_code, progress=progress)
    window = window or _window(model)
    words = load_tokenizer(src.path)
    found = perplexity(model, words, text, window=window, stride=stride, bos=bos, data=what, progress=progress)
    return replace(found, weights=describe_weights(model))


def eval_kld(
    checkpoint: str | Path,
    against: str | Path,
    *,
    data: str = "wikitext2",
    window: int | None = None,
    stride: int | None = None,
    bos: bool = False,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Divergence:
    """Measure the KL divergence of a checkpoint's next-token distributions from those of the model `against`.

    Both models are in memory together, and the tokenizer is that of `against`. Everything else is as for `eval_ppl`.
    """
    text, what = load_evaluation_text(data)
    src = Checkpoint(resolve(str(checkpoint)), trust_remote_code)
    ref = Checkpoint(resolve(str(against), revision), trust_remote_code)
    model = load_for_evaluation(src, device=device, trust_remote_code=trust_remote_code, progress=progress)
    reference = load_for_evaluation(ref, device=device, trust_remote_code=trust_remote_code, progress=progress)
    window = window or min(_window(model), _window(reference))
    words = load_tokenizer(ref.path)
    found = kld(model, reference, words, text, window=window, stride=stride, bos=bos, data=what, progress=progress)
    return replace(found, weights=describe_weights(model))


def _window(model: Any) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)
