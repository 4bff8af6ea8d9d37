"""What `import quantkit` and the command line share: options by name laid over a recipe, and evaluations of a folder.

A flag of the command line and a keyword of `quantkit.quantize` are one row of `KEYS`, so they have the same name and
the same default (ALGORITHMS 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import Checkpoint, resolve
from quantkit.errors import RecipeError
from quantkit.evaluation.perplexity import Divergence, Perplexity, kld, perplexity
from quantkit.inference.load import opened
from quantkit.inference.swap_linears import way
from quantkit.models.block_runner import tokenizer
from quantkit.models.calibration_data import evaluation_text
from quantkit.pipeline import quantize as pipeline
from quantkit.pipeline import recipe as recipes
from quantkit.pipeline.recipe import Pruning, Recipe
from quantkit.progress import Progress

#: option -> where its value stands in a recipe's mapping. `asym`, `skip` and `override` are treated by hand.
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
    "seed": ("calibration", "seed"),
    "layout": ("layout",),
    "pad": ("pad",),
}
#: Published perplexities have windows of 2048 tokens, or all that the model can take.
LONGEST_WINDOW = 2048


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    revision: str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    act_budget: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Quantize a Hugging Face causal LM (folder or hub id) into a new folder `out`; return its report.

    `recipe` is the path or shipped name of a recipe, its mapping, or a Recipe. `options` are laid over it: `format`,
    `group_size` (columns, or "channel"), `asym`, `method`, `clip`, `metric`, `damp`, `damp_kind`, `act_order`,
    `on_unsolvable`, `signed`, `refit`, `descent` (passes), `prune` ("2:4"), `prune_method`, `true_sequential`, `calib`,
    `samples`, `max_length`, `lengths`, `seed`, `layout`, `pad` (shapes that do not fit, with zeros), `skip` (regular
    expressions), `override` (regular expression -> scheme such as "int4:g64"). `act_budget` is in bytes. Raises
    QuantkitError for anything that cannot be done.
    """
    return pipeline.quantize(
        model,
        out,
        build_recipe(recipe, **options),
        revision=revision,
        device=device,
        resume=resume,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        act_budget=act_budget,
        progress=progress,
    )


def prune(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    act_budget: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Prune a Hugging Face causal LM 2:4 into a new folder `out` that is as dense as its source; return its report.

    `options`: `method` (sparsegpt, wanda or magnitude), `damp`, `damp_kind`, `act_order`, `true_sequential`, `calib`,
    `samples`, `max_length`, `lengths`, `seed`, `skip` (regular expressions). Everything else is as for `quantize`.
    """
    return pipeline.prune(
        model,
        out,
        build_pruning(**options),
        revision=revision,
        device=device,
        resume=resume,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        act_budget=act_budget,
        progress=progress,
    )


def build_pruning(*, skip: Iterable[str] = (), **options: Any) -> Pruning:
    """Return what `prune` does by default with options laid over it; `skip` adds to lm_head."""
    mapping = recipes.merge({}, _flags(options))
    return recipes.pruning({**mapping, "skip": [*Recipe.skip, *skip]})


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under their keys of a recipe; RecipeError for an unknown one."""
    flags: dict[str, Any] = {}
    for name, value in options.items():
        if name not in KEYS:
            raise RecipeError(f"unknown option {name!r}: known are {', '.join([*KEYS, 'asym', 'skip', 'override'])}")
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
    """Return `recipe` (default: the format's defaults) with options laid over it; options that are None change nothing.

    `skip` adds to the recipe's list, and `override` goes before the recipe's, since the first match wins. RecipeError
    for an unknown recipe, option or value.
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
    """Return name -> file of the recipes that come with quantkit."""
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
    """Return the perplexity of a dense or quantized checkpoint.

    Packed weights are multiplied by their kernels on a GPU, in the model's dtype, and decoded one at a time on a CPU; a
    dense model is computed with in float32. `window` is by default the model's longest context, at most 2048 tokens;
    `stride` is by default the window.
    """
    text, what = evaluation_text(data)
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code)
    model = opened(src, device=device, trust_remote_code=trust_remote_code, progress=progress)
    window = window or _window(model)
    words = tokenizer(src.path)
    found = perplexity(model, words, text, window=window, stride=stride, bos=bos, data=what, progress=progress)
    return replace(found, weights=way(model))


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
    """Return how far the next-token distributions of a checkpoint are from those of the model `against`.

    Both are in memory together, and computed with as for `eval_ppl`; windows as there, tokens by the tokenizer of
    `against`.
    """
    text, what = evaluation_text(data)
    src = Checkpoint(resolve(str(checkpoint)), trust_remote_code)
    ref = Checkpoint(resolve(str(against), revision), trust_remote_code)
    model = opened(src, device=device, trust_remote_code=trust_remote_code, progress=progress)
    reference = opened(ref, device=device, trust_remote_code=trust_remote_code, progress=progress)
    window = window or min(_window(model), _window(reference))
    words = tokenizer(ref.path)
    found = kld(model, reference, words, text, window=window, stride=stride, bos=bos, data=what, progress=progress)
    return replace(found, weights=way(model))


def _window(model: Any) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)
