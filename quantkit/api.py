"""The functions that `import quantkit` and the command line share.

An option of the command line and a keyword of a function are one field of a dataclass
(`keys.key`). So they have the same name and the same default (ALGORITHMS 0). The public functions
are those of `import quantkit`: `keywords` makes their signatures, and spells their errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.core.ranks import ranks
from quantkit.errors import Command, Option, QuantkitError, RecipeError, Setting, Words, in_python
from quantkit.evaluation import compare as comparing, divergence, perplexity, tasks as asking
from quantkit.evaluation.compare import Comparison
from quantkit.evaluation.divergence import Divergence, measurement
from quantkit.evaluation.options import CompareOptions, TaskOptions, TextOptions, VerifyOptions
from quantkit.evaluation.perplexity import Perplexity
from quantkit.evaluation.tasks import TaskScores
from quantkit.evaluation.verify import Verification, verify as verify_folder
from quantkit.inference.load import load as load_model
from quantkit.keys import OPTIONS, Key, built, keys_of
from quantkit.keywords import api_function
from quantkit.layouts import recast
from quantkit.pipeline import fit
from quantkit.pipeline.convert import pack as pack_folder
from quantkit.pipeline.publish import Result
from quantkit.planning.plan import Plan
from quantkit.progress import Listener, Progress, reporter
from quantkit.recipes.files import load_named, merge
from quantkit.recipes.options import (
    FitOptions,
    LoadOptions,
    PackOptions,
    PlanOptions,
    RunOptions,
)
from quantkit.recipes.recipe import Recipe, from_mapping, pruning_from_mapping
from quantkit.recipes.schema import pruning_keys

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from quantkit.recipes.keywords import (
        CompareKeywords,
        PackKeywords,
        PlanKeywords,
        PruneKeywords,
        QuantizeKeywords,
        TaskKeywords,
        TextKeywords,
        VerifyKeywords,
    )


@api_function(FitOptions, PlanOptions, RunOptions, keys=keys_of(Recipe))
def plan(
    model: str | Path,
    *,
    out: str | Path | None = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    progress: Progress | Listener | None = None,
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
    (run, fitted, asked), rest = built(options, RunOptions, FitOptions, PlanOptions)
    run = replace(run, progress=reporter(progress))
    found = fit.plan(model, build_recipe(recipe, **rest), run, fitted, asked, out=out)
    return found.to_python()


@api_function(FitOptions, RunOptions, keys=keys_of(Recipe))
def quantize(
    model: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    eval: str | Path | None = None,
    progress: Progress | Listener | None = None,
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
        samples=16,
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
    (run, fitted), rest = built(options, RunOptions, FitOptions)
    run = replace(run, progress=reporter(progress))
    with ranks().together():
        return _result(out, produce(model, out, build_recipe(recipe, **rest), run, eval, fitted))


@api_function(RunOptions, keys=pruning_keys(Recipe))
def prune(
    model: str | Path,
    out: str | Path,
    *,
    eval: str | Path | None = None,
    progress: Progress | Listener | None = None,
    **options: Unpack[PruneKeywords],
) -> Result:
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
    (run,), rest = built(options, RunOptions)
    run = replace(run, progress=reporter(progress))
    with ranks().together():
        return _result(out, produce(model, out, build_pruning(**rest), run, eval))


def produce(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    run: RunOptions,
    eval: str | Path | None = None,
    fitted: FitOptions = FitOptions(),
) -> dict[str, Any]:
    """Quantize or prune by a recipe, and return the report. `eval` is a text to measure on,
    `fitted` has a target.
    """
    measure = None if eval is None else measurement(str(eval), model, run)
    report = fit.quantize(model, out, recipe, fitted, run, measure)
    if measure is not None and "evaluation" not in report:
        run.progress.warn(
            Words(
                f"{out} was finished by the interrupted run and is not evaluated: use",
                Command("eval ppl"),
            )
        )
    return report


@api_function(PackOptions)
def pack(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    expect: str | None = None,
    progress: Progress | Listener | None = None,
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
    running: Any = {**vars(PackOptions(**options)), "progress": reporter(progress)}
    return _result(out, pack_folder(checkpoint, out, layout, expect=expect, **running))


@api_function(PackOptions)
def convert(
    pair: str,
    checkpoint: str | Path,
    out: str | Path,
    *,
    progress: Progress | Listener | None = None,
    **options: Unpack[PackKeywords],
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
    source, target = recast.parse(pair)
    running: Any = {**vars(PackOptions(**options)), "progress": reporter(progress)}
    try:
        return _result(out, pack_folder(checkpoint, out, target, expect=source, **running))
    except QuantkitError as error:  # a hint at another target names the options of `pack`
        error.rule = _as_pairs(error.rule, source)
        error.ways_out = tuple(_as_pairs(way, source) for way in error.ways_out)
        raise


@api_function(VerifyOptions)
def verify(
    folder: str | Path,
    against: str | Path | None = None,
    progress: Progress | Listener | None = None,
    **options: Unpack[VerifyKeywords],
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
    (asked,), _ = built(options, VerifyOptions)
    found = verify_folder(Path(folder), against, asked, reporter(progress))
    return replace(found, failures=_spelled(found.failures), notices=_spelled(found.notices))


@api_function(TextOptions, LoadOptions)
def eval_ppl(
    checkpoint: str | Path,
    *,
    progress: Progress | Listener | None = None,
    **options: Unpack[TextKeywords],
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
    (asked, load), _ = built(options, TextOptions, LoadOptions)
    return perplexity.evaluate(checkpoint, asked, load, reporter(progress))


@api_function(TextOptions, LoadOptions)
def eval_kld(
    checkpoint: str | Path,
    against: str | Path,
    *,
    progress: Progress | Listener | None = None,
    **options: Unpack[TextKeywords],
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
    (asked, load), _ = built(options, TextOptions, LoadOptions)
    return divergence.evaluate(checkpoint, against, asked, load, reporter(progress))


@api_function(TaskOptions, LoadOptions)
def eval_tasks(
    checkpoint: str | Path,
    *,
    tasks: str | Iterable[str],
    progress: Progress | Listener | None = None,
    **options: Unpack[TaskKeywords],
) -> TaskScores:
    """Let a checkpoint answer the questions of lm-eval's tasks, and compare it with another one in
    pairs.

    `tasks` are names of lm-eval's, also of its groups and tags, or `zeroshot` for ten usual ones.
    Questions come from the hub, or from the folder `data`: TASK/validation.jsonl or
    TASK/test.jsonl, and TASK/train.jsonl for examples. The first `limit` questions of each task are
    asked, with `shots` examples before them, by default as many as the task says. `chat_template`
    puts all into the model's template. `against` is a checkpoint that answers the same questions;
    both are never in memory together. `journal` is a file that keeps finished tasks, from which the
    same call continues. Needs the package lm-eval. Raises a QuantkitError, before any weight is
    read, for tasks, data or a model that cannot be evaluated.

    Example:

    ```python
    import quantkit

    found = quantkit.eval_tasks("model-int4", tasks="piqa", data="tasks", against="model", limit=4)
    print(found.scores[0].value, found.scores[0].stderr, found.scores[0].difference)
    ```
    """
    (asked, load), _ = built({"tasks": tasks, **options}, TaskOptions, LoadOptions)
    return asking.evaluate(checkpoint, asked, load, reporter(progress))


@api_function(CompareOptions)
def compare(
    model: str | Path,
    out: str | Path,
    *,
    recipes: str | Iterable[str],
    settings: Mapping[str, Any] | None = None,
    progress: Progress | Listener | None = None,
    **options: Unpack[CompareKeywords],
) -> Comparison:
    """Quantize a model by each of several recipes, judge the results, and write one table into the
    folder `out`.

    `recipes` are shipped names, YAML files, or schemes with a method like `fp6:g64:gptq`, as a list
    or with commas between them; `settings` maps keys to values for all of them. Those that need
    text run with each source of `calib` and each of `seeds`. Sources and texts may be named:
    NAME=FILE.

    A row has perplexity and KL divergence on each `text`, and answers to `tasks`, if there are any
    (with `data`, `shots` and `limit`, see `eval_tasks`). All models are decoded to float32, so that
    rows differ only in their codes. A scheme that no layout stores is judged without being packed.

    Finished rows stay in `out`: the same call continues, also with more recipes or texts, and
    several processes share the rows. Errors of a row are raised before any work, as a
    QuantkitError.

    Example:

    ```python
    import quantkit

    options = {"text": "evaluation.txt", "window": 128, "tokens": 1024, "device": "cpu"}
    found = quantkit.compare("model", "table", recipes=["int4:g64:rtn", "fp6:g64:rtn"], **options)
    for row in found.rows:
        print(row["recipe"], row["bits"], row["text:evaluation:ppl"])
    ```
    """
    (asked,), _ = built({"recipes": recipes, **options}, CompareOptions)
    return comparing.compare(model, out, asked, settings or {}, reporter(progress))


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
        # What has no option of its own was typed as `--set KEY=VALUE`.
        known[name].read(value, named=Setting(name) if known[name].level in OPTIONS else "")
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
    merged = merge(merge(_mapping(recipe), placed(options, keys_of(Recipe))), settings or {})
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
    if isinstance(recipe, Recipe):
        mapping = recipe.to_mapping()
        if not recipe.size_stated:
            del mapping["scheme"]["group_size"]
        if not recipe.layout_stated:
            mapping.pop("layout", None)
        return mapping
    if recipe is None or isinstance(recipe, Mapping):
        return recipe or {}
    return load_named(recipe)
