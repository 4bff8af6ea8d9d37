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
from quantkit.errors import CheckpointError, QuantkitError, RecipeError, VerificationError
from quantkit.evaluation.comparison import measurement
from quantkit.evaluation.divergence import Divergence, kld
from quantkit.evaluation.perplexity import Perplexity, perplexity
from quantkit.evaluation.verify import EDITED, UNLISTED, verify, verify_files
from quantkit.evaluation.windows import default_window
from quantkit.inference.load import load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.layouts import compatibility
from quantkit.models.text_sources import load_evaluation_text
from quantkit.models.tokenizer import load_tokenizer
from quantkit.names import Clip, Method, Metric, Rule
from quantkit.pipeline import quantize as pipeline
from quantkit.pipeline import recipe as recipes
from quantkit.pipeline.convert import pack
from quantkit.pipeline.push import Pushed, reach, upload
from quantkit.pipeline.recipe import Pruning, Recipe
from quantkit.pipeline.run_options import RunKeywords, RunOptions
from quantkit.progress import Progress
from quantkit.reporting.report import REPORT
from quantkit.reporting.report import load as load_report

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


class PublishKeywords(TypedDict, total=False):
    """The keywords that measure an output and upload it."""

    eval: str | None
    push_to: str | None
    public: bool


class _Calibrating(RunKeywords, PublishKeywords, total=False):
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
    run, publishing, recipe_options = _split(options)
    return _published(model, out, build_recipe(recipe, **recipe_options), publishing, run)


def prune(model: str | Path, out: str | Path, **options: Unpack[PruneKeywords]) -> dict[str, Any]:
    """Prune a Hugging Face causal LM 2:4 into a new folder `out` that is as dense as its source; return its report.

    `method` is sparsegpt, wanda or magnitude. Everything else is as for `quantize`.
    """
    run, publishing, pruning_options = _split(options)
    return _published(model, out, build_pruning(**pruning_options), publishing, run)


def produce(
    model: str | Path, out: str | Path, recipe: Recipe | Pruning, *, eval: str | None = None, **run: Unpack[RunKeywords]
) -> dict[str, Any]:
    """Quantize by a Recipe, or prune by a Pruning, and return the report. `eval` is a text to measure on."""
    if eval is None:
        return pipeline.quantize(model, out, recipe, **run)
    asked, progress = RunOptions(**run), run.get("progress") or Progress(quiet=True)
    measure = measurement(
        eval,
        model,
        revision=asked.revision,
        device=asked.device,
        trust_remote_code=asked.trust_remote_code,
        progress=progress,
    )
    report = pipeline.quantize(model, out, recipe, measure, **run)
    if "evaluation" not in report:
        progress.warn(f"{out} was finished by the interrupted run and is not evaluated: use quantkit eval ppl")
    return report


def push(
    folder: str | Path,
    repository: str,
    *,
    public: bool = False,
    device: str = "auto",
    endpoint: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Verify a folder that quantkit wrote and upload it to the hub as `repository`, which is ORG/NAME.

    A new repository is private unless `public`. Files that are there already are not sent again, and other contents
    are not replaced. `endpoint` and `token` default to those of huggingface_hub. Raises a QuantkitError if the folder
    is not what was written, or the hub refuses.
    """
    progress = progress or Progress(quiet=True)
    target = reach(repository, public=public, endpoint=endpoint, token=token)
    folder = Path(folder)
    src = Checkpoint(folder, trust_remote_code=True)  # only headers are read here
    if src.layout is None:
        failures, notices = verify_files(folder)
    else:
        found = verify(folder, progress=progress, device=device)
        failures, notices = list(found.failures), list(found.notices)
    recorded = load_report(folder)
    if not recorded.get("files"):
        raise CheckpointError(f"{folder}: has no {REPORT}: give a folder that quantkit wrote")
    if failures:
        more = f" ({len(failures)} failures)" if len(failures) > 1 else ""
        raise VerificationError(f"{folder} is not what was written{more}: {failures[0]}: quantkit verify lists all")
    for notice in notices:
        progress.note(notice)
    names = [*recorded["files"], *(name for name in UNLISTED if (folder / name).is_file())]
    done = upload(folder, names, EDITED, target, progress)
    for name in done.kept:
        progress.note(f"{name}: the repository has another one, which was kept")
    if public and done.private:
        progress.warn(f"{repository} stays private: make it public in its settings on the hub")
    return done


def _published(
    model: str | Path, out: str | Path, recipe: Recipe | Pruning, publishing: PublishKeywords, run: RunKeywords
) -> dict[str, Any]:
    repository, public = publishing.get("push_to"), publishing.get("public", False)
    if repository is not None:
        reach(repository, public=public).require_empty()
    report = produce(model, out, recipe, eval=publishing.get("eval"), **run)
    if repository is not None:
        push(out, repository, public=public, device=run.get("device", "auto"), progress=run.get("progress"))
    return report


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


def _split(options: Mapping[str, Any]) -> tuple[RunKeywords, PublishKeywords, dict[str, Any]]:
    """Separate the options of a run, those that publish its output, and those of its recipe."""
    kinds = {field.name for field in fields(RunOptions)}, PublishKeywords.__annotations__.keys()
    run, publishing = ({name: value for name, value in options.items() if name in kind} for kind in kinds)
    rest = {name: value for name, value in options.items() if name not in {*run, *publishing}}
    return cast(RunKeywords, run), cast(PublishKeywords, publishing), rest


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
    window = window or default_window(model)
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
    window = window or min(default_window(model), default_window(reference))
    words = load_tokenizer(ref.path)
    found = kld(model, reference, words, text, window=window, stride=stride, bos=bos, data=what, progress=progress)
    return replace(found, weights=describe_weights(model))
