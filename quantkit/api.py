"""The functions that `import quantkit` and the command line share.

An option of the command line and a keyword of `quantize` are one field of `recipes.schema`. So they
have the same name and the same default (ALGORITHMS 0). The public functions of `import quantkit`.
`keywords` makes their signatures, and spells their errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from typing_extensions import Unpack

from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.ranks import ranks
from quantkit.errors import (
    Command,
    Option,
    QuantkitError,
    RecipeError,
    Words,
    in_python,
)
from quantkit.evaluation.compare import compare as compare_recipes
from quantkit.evaluation.comparison import measurement
from quantkit.evaluation.divergence import Divergence, kld
from quantkit.evaluation.engine_check import verify_in_engine
from quantkit.evaluation.opened import require_running_text
from quantkit.evaluation.perplexity import Perplexity, perplexity
from quantkit.evaluation.tasks import eval_tasks as measure_tasks
from quantkit.evaluation.verification import Verification
from quantkit.inference.load import load as load_model, load_for_evaluation
from quantkit.inference.swap_linears import describe_weights
from quantkit.keys import Key, keys_of
from quantkit.keywords import api_function
from quantkit.layouts import compatibility
from quantkit.pipeline import fit
from quantkit.pipeline.convert import pack as pack_folder
from quantkit.pipeline.publish import Result
from quantkit.planning.plan import Plan
from quantkit.progress import Listener, Progress, reporter
from quantkit.recipes.files import load_named, merge
from quantkit.recipes.keywords import FitKeywords, PruningKeywords, RecipeKeywords, Settings
from quantkit.recipes.options import FitOptions, RunKeywords, RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping, pruning_from_mapping
from quantkit.recipes.schema import pruning_keys
from quantkit.text.sources import load_evaluation_text
from quantkit.text.tokenizer import load_tokenizer

#: Keywords that only `plan` has.
PLANNING = ("gpu_memory", "gpu", "probe")


class PublishKeywords(TypedDict, total=False):
    """The keywords that measure an output."""

    eval: str | Path | None


class ToldSettings(Settings, total=False):
    """The options of a run, and the listener of its steps."""

    progress: Progress | Listener | None


class QuantizeKeywords(RecipeKeywords, FitKeywords, PublishKeywords, ToldSettings, total=False):
    """The keywords of `quantize`. None leaves the recipe's value."""


class PruneKeywords(PruningKeywords, PublishKeywords, ToldSettings, total=False):
    """The keywords of `prune`. None leaves the default."""


class PlanKeywords(RecipeKeywords, FitKeywords, ToldSettings, total=False):
    """The keywords of `plan`: the keywords of `quantize` that decide its output, and some about
    another machine.
    """

    gpu_memory: int | None
    gpu: str | None
    probe: bool


class PackKeywords(TypedDict, total=False):
    """The keywords of `pack` and `convert`."""

    pad: bool
    requantize: bool
    requantize_scales: bool
    max_shard_size: int
    overwrite: bool
    progress: Progress | Listener | None


@api_function(RunOptions, probe=True)
def plan(
    model: str | Path,
    *,
    out: str | Path | None = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan the files, memory and time of `quantize`, without computing anything.

    The keywords are those of `quantize`. The plan has the exact bytes of every file, an estimate of
    the memory, and every weight that does not fit. Its `refusal` is the error that `quantize` would
    raise, or None. `gpu_memory` has the bytes of a GPU that is not here. `target` and `gpu` name a
    program and a GPU: the plan then lists its kernels. Unless `probe` is False, the first blocks of
    a long run are measured to estimate its `duration`.

    Example:

    ```python
    import quantkit

    planned = quantkit.plan("model", format="int4", layout="marlin", method="rtn", skip="lm_head")
    print(planned.total, "bytes,", planned.bits_per_weight, "bits per weight")
    if planned.refusal is not None:
        raise planned.refusal
    ```
    """
    run, _, fitted, recipe_options = _split(options)
    asked = {
        "probe": True,
        **{name: recipe_options.pop(name) for name in PLANNING if name in recipe_options},
    }
    found = fit.plan(
        model, build_recipe(recipe, **recipe_options), fitted=fitted, out=out, **asked, **run
    )
    return found.to_python()


@api_function(RunOptions, public=False)
def quantize(
    model: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Result:
    """Quantize a Hugging Face causal LM (folder, hub id or GGUF file) into a new folder `out`.

    `recipe` is the path or shipped name of a recipe, its mapping, or a Recipe. `options` change
    single values of it. An interrupted run, or one whose `progress` raised, leaves `out.partial-*`,
    which `resume` continues. If the caller has joined a process group of torch.distributed, its
    ranks share a calibrated run. Raises a QuantkitError for anything that cannot be done.

    Example:

    ```python
    import quantkit

    made = quantkit.quantize(
        "model",
        "model-int4",
        format="int4",
        calib="calibration.txt",
        samples=32,
        max_length=128,
        skip=["lm_head", ".*layers.0.*k_proj"],
        min_share=0.5,
        progress=lambda event: print(event.label, event.done, "of", event.total),
    )
    print(made)  # the closing table
    print(made.bits_per_weight, made.bytes, made["totals"]["quantized_weights"])
    worst = max(made.layers, key=lambda layer: layer["relative_error"])
    print(worst["name"], worst["relative_error"])
    ```
    """
    run, publishing, fitted, recipe_options = _split(options)
    return _published(model, out, build_recipe(recipe, **recipe_options), publishing, run, fitted)


@api_function(RunOptions, public=False)
def prune(model: str | Path, out: str | Path, **options: Unpack[PruneKeywords]) -> Result:
    """Prune a Hugging Face causal LM 2:4 into a new folder `out` that is as dense as its source.

    `method` is sparsegpt, wanda or magnitude. Everything else is as for `quantize`.

    Example:

    ```python
    import quantkit

    thin = quantkit.prune("model", "model-24", method="magnitude")
    sparse = {"prune": "2:4", "prune_method": "magnitude", "method": "rtn"}
    quantkit.quantize(thin.path, "model-24-int4", **sparse)
    ```
    """
    run, publishing, _, pruning_options = _split(options)
    return _published(model, out, build_pruning(**pruning_options), publishing, run)


def produce(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    eval: str | None = None,
    fitted: FitOptions | None = None,
    **run: Unpack[RunKeywords],
) -> dict[str, Any]:
    """Quantize or prune by a recipe, and return the report. `eval` is a text to measure on,
    `fitted` has a target.
    """
    fitted = fitted or FitOptions()
    if eval is None:
        return fit.quantize(model, out, recipe, fitted, **run)
    report = fit.quantize(
        model, out, recipe, fitted, measurement(eval, model, RunOptions(**run)), **run
    )
    if "evaluation" not in report:
        rule = f"{out} was finished by the interrupted run and is not evaluated: use"
        (run.get("progress") or Progress(quiet=True)).warn(Words(rule, Command("eval ppl")))
    return report


def _published(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    publishing: PublishKeywords,
    run: RunKeywords,
    fitted: FitOptions | None = None,
) -> Result:
    with ranks().together():
        text = publishing.get("eval")
        report = produce(
            model, out, recipe, eval=None if text is None else str(text), fitted=fitted, **run
        )
        return _result(out, report)


@api_function(pack_folder)
def pack(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    expect: str | None = None,
    **options: Unpack[PackKeywords],
) -> Result:
    """Rewrite a quantized checkpoint in another layout, bit for bit, into a new folder `out`.

    `expect` is the layout that the source must have. If the layout does not hold a weight's scheme,
    the weight is recast: the same values in a scheme that it holds (LAYOUTS 11). Only config.json
    and the weight files are read, a few weights at a time. LayoutError lists every weight whose
    shape or scheme the layout cannot hold, or names a weight whose data it cannot hold.
    CheckpointError if a weight's codes differ from its report.

    Example:

    ```python
    import quantkit

    packed = quantkit.pack("model-24-int4", "model-24-gptq", "gptq")
    print(packed.notices)
    ```
    """
    return _result(out, pack_folder(checkpoint, out, layout, expect=expect, **_packing(options)))


@api_function(pack_folder)
def convert(
    pair: str, checkpoint: str | Path, out: str | Path, **options: Unpack[PackKeywords]
) -> Result:
    """Rewrite a quantized checkpoint from layout A to layout B, bit for bit, into a new folder
    `out`.

    `pair` is "A-to-B", such as "gptq-to-marlin". Everything else is as for `pack`. Raises a
    CheckpointError if the checkpoint is not in layout A.

    Example:

    ```python
    import quantkit

    quantkit.convert("gptq-to-marlin24", "model-24-gptq", "model-marlin24", overwrite=True)
    ```
    """
    source, target = compatibility.parse(pair)
    try:
        return _result(
            out, pack_folder(checkpoint, out, target, expect=source, **_packing(options))
        )
    except QuantkitError as error:  # a hint at another target names the options of `pack`
        error.rule = _as_pairs(error.rule, source)
        error.ways_out = tuple(_as_pairs(way, source) for way in error.ways_out)
        raise


@api_function()
def verify(
    folder: str | Path,
    against: str | Path | None = None,
    progress: Progress | Listener | None = None,
    device: str = "auto",
    unsealed: bool = False,
    engine: Literal["vllm"] | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> Verification:
    """Check every file and every packed weight of a quantized checkpoint, one weight in memory at a
    time.

    `against` is a checkpoint to compare with, dense tensors included. `device` "auto" takes a GPU
    if it can run the kernels. Codes without a report, without digests in their weight files and
    without `against` are a failure, unless `unsealed`. The installed `engine` opens the folder,
    with `engine_args` for `vllm.LLM`, and must compute the log-probabilities of the decoded model,
    up to rounding.

    CheckpointError if `folder` or `against` is no readable quantized checkpoint; a file that
    changed since it was written is a failure instead. KernelError if a kernel fails, or if a GPU
    asked for by name cannot run kernels.

    Example:

    ```python
    import quantkit

    proof = quantkit.verify("model-marlin24", against="model-24-gptq", device="cpu")
    assert proof.ok, proof.failures
    print(proof.note)
    ```
    """
    against = None if against is None else Path(against)
    found = verify_in_engine(
        Path(folder), engine, engine_args or {}, against, reporter(progress), device, unsealed
    )
    return replace(found, failures=_spelled(found.failures), notices=_spelled(found.notices))


#: Load a model with packed linears: see `inference.load`.
load = api_function()(load_model)


def _as_pairs(text: str, source: str) -> str:
    """Name another target as `convert` does, A-to-B, instead of by the layout that `pack` takes."""
    if isinstance(text, Option):
        return (
            Command("convert", f"{source}-to-{text.values[0]}") if text.name == "layout" else text
        )
    return Words(*(_as_pairs(part, source) for part in text.parts)) if type(text) is Words else text


def _result(out: str | Path, report: dict[str, Any]) -> Result:
    notices = [*report.get("notices", ()), *report.get("layout_notices", ())]
    return Result(Path(out), report, _spelled(notices))


def _spelled(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(in_python, lines))


def _packing(options: PackKeywords) -> dict[str, Any]:
    return {**options, "progress": reporter(options.get("progress"))}


def _split(
    options: Mapping[str, Any],
) -> tuple[RunKeywords, PublishKeywords, FitOptions, dict[str, Any]]:
    """Separate options of a run, of publishing, of a target size and of the recipe."""
    kinds = [{field.name for field in fields(kind)} for kind in (RunOptions, FitOptions)]
    kinds.append({*PublishKeywords.__annotations__})
    run, fitted, publishing = (
        {name: value for name, value in options.items() if name in kind} for kind in kinds
    )
    rest = {
        name: value for name, value in options.items() if name not in {*run, *fitted, *publishing}
    }
    run["progress"] = reporter(run.get("progress"))
    return cast(RunKeywords, run), cast(PublishKeywords, publishing), FitOptions(**fitted), rest


def build_pruning(
    *,
    skip: str | Iterable[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    """Make a recipe that prunes. `skip` adds to lm_head. Raises a RecipeError for a wrong option or
    value.
    """
    mapping = merge(placed(options, pruning_keys(Recipe)), settings or {})
    return pruning_from_mapping(
        {**mapping, "skip": [*mapping.get("skip", Recipe.skip), *_patterns(skip)]}
    )


def _patterns(skip: str | Iterable[str] | None) -> list[str]:
    """List the patterns; a string is a single pattern."""
    return [skip] if isinstance(skip, str) else list(skip or ())


def placed(options: Mapping[str, Any], keys: Iterable[Key]) -> dict[str, Any]:
    """Place options by keyword under their keys of a recipe. Raises a RecipeError for an unknown
    one.
    """
    known = {key.keyword: key for key in keys if key.level != "key"}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise RecipeError(f"unknown option {name!r}", f"known are {', '.join(known)}")
        if value is None:
            continue
        if name == "calib":
            value = str(value) if isinstance(value, str | Path) else list(map(str, value))
            if not value:
                continue
        *section, last = known[name].path
        (found.setdefault(section[0], {}) if section else found)[last] = (
            not value if known[name].negated else value
        )
    return found


def build_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    skip: str | Iterable[str] | None = None,
    override: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    """Make a Recipe of `recipe`, or of the format's defaults, with options by name in place of its
    values.

    An option that is None changes nothing. `settings` maps keys of a recipe to values. `skip` adds
    to the recipe's list. `override` goes before the recipe's own: the first match wins. Raises a
    RecipeError for an unknown recipe, option or value.
    """
    base = _mapping(recipe)
    merged = merge(merge(base, placed(options, keys_of(Recipe))), settings or {})
    if skip:
        merged["skip"] = [*merged.get("skip", Recipe.skip), *_patterns(skip)]
    if override:
        before = merged.get("overrides") or {}
        merged["overrides"] = {
            **override,
            **{key: before[key] for key in before if key not in override},
        }
    return from_mapping(merged)


def _mapping(recipe: str | Path | Mapping[str, Any] | Recipe | None) -> Mapping[str, Any]:
    if recipe is None:
        return {}
    if isinstance(recipe, Recipe):
        mapping = recipe.to_mapping()
        if not recipe.size_stated:
            del mapping["scheme"]["group_size"]
        if not recipe.layout_stated:
            mapping.pop("layout", None)
        return mapping
    if isinstance(recipe, Mapping):
        return recipe
    return load_named(recipe)


@api_function()
def eval_ppl(
    checkpoint: str | Path,
    *,
    data: str | Path = "wikitext2",
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    tokens: int | None = None,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | Listener | None = None,
) -> Perplexity:
    """Measure the perplexity of a dense or quantized checkpoint.

    On a GPU, kernels multiply packed weights in the model's dtype. On a CPU, weights are decoded
    one at a time. A dense model computes in float32. `data` is the name of a data set or a file.
    Only its first `tokens` tokens are read, in whole windows. `window` and `stride` are in tokens:
    `window` defaults to the model's longest context, at most 2048 and no longer than the text, and
    `stride` to the window. The BOS token precedes every window if the tokenizer adds it to a text
    by itself; `bos` True or False overrides that. `check` is as for
    `load`. Raises a QuantkitError for a checkpoint, text or window that cannot be evaluated.

    Example:

    ```python
    import quantkit

    before = quantkit.eval_ppl("model", data="evaluation.txt", window=128)
    after = quantkit.eval_ppl("model-int4", data="evaluation.txt", window=128)
    print(before.perplexity, after.perplexity)
    ```
    """
    progress = reporter(progress)
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code)
    require_running_text(src, trust_remote_code)
    text, what = load_evaluation_text(str(data))
    options: Any = {
        "device": device,
        "trust_remote_code": trust_remote_code,
        "check": check,
        "progress": progress,
    }
    model = load_for_evaluation(src, **options)
    protocol: Any = {"window": window, "stride": stride, "bos": bos, "tokens": tokens}
    found = perplexity(
        model, load_tokenizer(src.path), text, data=what, progress=progress, **protocol
    )
    return replace(found, weights=describe_weights(model))


@api_function()
def eval_kld(
    checkpoint: str | Path,
    against: str | Path,
    *,
    data: str | Path = "wikitext2",
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    tokens: int | None = None,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | Listener | None = None,
) -> Divergence:
    """Measure the KL divergence of a checkpoint's next-token distributions from those of the model
    `against`.

    The result has the mean with its 95 % interval, the tails and the share of tokens with the same
    first choice. Both models are in memory together, and the tokenizer is that of `against`.
    Everything else is as for `eval_ppl`.

    Example:

    ```python
    import quantkit

    found = quantkit.eval_kld("model-int4", "model", data="evaluation.txt", window=128)
    print(found.kld, found.kld_p99, found.top1)
    ```
    """
    progress = reporter(progress)
    src = Checkpoint(resolve(str(checkpoint)), trust_remote_code)
    ref = Checkpoint(resolve(str(against), revision), trust_remote_code)
    require_running_text(ref, trust_remote_code)
    text, what = load_evaluation_text(str(data))
    options: Any = {
        "device": device,
        "trust_remote_code": trust_remote_code,
        "check": check,
        "progress": progress,
    }
    model, reference = load_for_evaluation(src, **options), load_for_evaluation(ref, **options)
    protocol: Any = {"window": window, "stride": stride, "bos": bos, "tokens": tokens}
    protocol |= {"data": what, "progress": progress}
    found = kld(model, reference, load_tokenizer(ref.path), text, **protocol)
    return replace(found, weights=describe_weights(model))


#: Compare recipes: see `evaluation.compare`.
compare = api_function()(compare_recipes)

#: Measure answers to tasks: see `evaluation.tasks`.
eval_tasks = api_function()(measure_tasks)
