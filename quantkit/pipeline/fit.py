"""A folder that fits a size: a scheme for each linear by its loss increase, never worse than a
uniform scheme that fits.

The work is done in OUT's partial folder, whose journal has the loss increases. It holds the folders
of the mix, of the uniform scheme of least predicted loss, and of other formats within REACH of it.
They are judged on held-out text. The best folder becomes OUT, with a recipe that makes the same
bytes without this search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.calibration import divergence
from quantkit.calibration.loop import new_run
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.checkpoint.report import load as load_report, peak_memory
from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import Scheme, is_sparse
from quantkit.core.ranks import ranks
from quantkit.core.units import format_bytes, format_range
from quantkit.engines.readers import Folder, refusal
from quantkit.engines.tables import TARGETS
from quantkit.errors import CheckpointError, Option, QuantkitError, RecipeError, Setting, Words
from quantkit.io import files
from quantkit.io.staging import (
    JOURNAL,
    append_journal,
    check_staging,
    is_complete,
    publish,
    read_journal,
    staging,
)
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import key_of
from quantkit.names import Json
from quantkit.pipeline import quantize as pipeline
from quantkit.pipeline.publish import Measure, rewrite_report
from quantkit.planning import survey as surveys
from quantkit.planning.fit import (
    Choice,
    Group,
    LossIncrease,
    Space,
    expected_increase,
    groups_of,
    recipe_of,
    schemes_of,
)
from quantkit.planning.needs import calibrated_memory
from quantkit.planning.output import bytes_of
from quantkit.planning.plan import Plan
from quantkit.progress import QUIET, Clock, Progress
from quantkit.recipes.identity import DATE, date_of
from quantkit.recipes.options import AUTO, DENSE, FitOptions, PlanOptions, RunOptions
from quantkit.recipes.recipe import Recipe
from quantkit.text.sequences import Calibration
from quantkit.text.sources import PACKAGED, load_documents
from quantkit.version import __version__

MIXED = "mixed"
#: Uniform schemes of other formats are made up to this multiple of the least predicted loss:
#: docs/algorithms.md 17.
REACH = 1.5
#: The most held-out sequences that judge, the most on which loss increases are measured, and the
#: most tokens of each.
HELD_OUT, LONGEST = 16, 512
#: Nats of KL divergence for each expected squared error of the weights, as measured:
#: docs/algorithms.md 17.
DIVERGENCE = 8.0
#: The most bytes that the search adds to the report: of any model, and of each group.
ADDED, ADDED_BY_GROUP = 32 * 2**10, 256
#: How often the programme is solved again, because config and recipe take more bytes than was
#: expected.
ATTEMPTS = 8


class _Found(NamedTuple):
    """A choice whose folder fits: MIXED or the label of its scheme, its plan, and the sum of its
    loss increase.
    """

    name: str
    space: Space
    choice: Choice
    job: surveys.Job
    increase: float

    @property
    def folder(self) -> str:
        """The folder's name among the files of the run."""
        return self.name.replace(":", "-")


@dataclass(frozen=True)
class _Search:
    """Hold a source, as `job` plans it with the recipe, options, `notices`, and the spaces of all
    layouts that fit.
    """

    job: surveys.Job
    asked: FitOptions
    run: RunOptions
    notices: Sequence[str]
    spaces: Sequence[Space] = ()

    @property
    def free(self) -> dict[str, tuple[str, ...]]:
        """The linears of each group whose scheme is chosen, by the group's name."""
        groups = [group for space in self.spaces for group in space.groups]
        return {group.name: group.linears for group in groups if not group.is_fixed}

    def planned(self, space: Space, choice: Choice) -> tuple[surveys.Job, int, int]:
        """Plan the folder of a choice; also return its most bytes, and by how many it is above the
        target.
        """
        made = recipe_of(self.job.recipe, space, choice)
        job = surveys.job_of(self.job.src, self.job.model, made, None, self.run)
        total = job.plan.total + ADDED + ADDED_BY_GROUP * len(space.groups)
        return job, total, space.size(choice) - self.budget(space, total - space.size(choice))

    def budget(self, space: Space, overhead: int) -> int:
        """Return the most bytes of all linears, if the rest of the folder takes `overhead`."""
        bits, size = self.asked.target_bits, self.asked.target_size
        return (size or 0) - overhead if bits is None else space.budget(bits)

    def uniform(self, increase: LossIncrease, reach: float = 1.0) -> list[_Found]:
        """Find the uniform scheme of least loss that fits, and the best schemes of other formats
        within `reach` times that loss.
        """
        found: dict[str, _Found] = {}
        every = [
            _Found(n, s, c, self.job, s.increase(c, increase))
            for s in self.spaces
            for n, c in s.uniform.items()
        ]
        for each in sorted(every, key=lambda each: each.increase):
            if found and each.increase > reach * next(iter(found.values())).increase:
                break
            space, kind = each.space, each.name.partition(":")[0]
            if kind not in found and space.size(each.choice) <= self.budget(space, space.overhead):
                job, _, excess = self.planned(space, each.choice)
                found |= {kind: each._replace(job=job)} if excess <= 0 else {}
        return list(found.values())

    def mix(self, increase: LossIncrease) -> _Found | None:
        """Find the choice of least loss that fits and that the reader opens."""
        found = [each for space in self.spaces for each in self._mix_of(space, increase)]
        return min(found, key=lambda each: each.increase, default=None)

    def some(self, increase: LossIncrease) -> _Found:
        """Find a choice that fits; RecipeError if the reader opens none."""
        for found in (self.mix(increase), *self.uniform(increase)):
            if found is not None:
                return found
        raise RecipeError(
            f"no uniform scheme fits, and {self.asked.target} opens no folder with several schemes",
            Words("use another", Setting("layout")),
            Words("raise the target"),
        )

    def _mix_of(self, space: Space, increase: LossIncrease) -> Iterator[_Found]:
        budget, planned = self.budget(space, space.overhead), self.job.plan
        share = 1.0 if planned.share is None else planned.share
        most_dense = (share - self.run.min_share) * sum(planned.output.decoder.values())
        for _ in range(ATTEMPTS):
            if (choice := space.choose(increase, budget, most_dense)) is None:
                return
            job, _, excess = self.planned(space, choice)
            if excess <= 0:
                found = _Found(MIXED, space, choice, job, space.increase(choice, increase))
                yield from [found] if self.opens(job.plan.output.folder) else []
                return
            budget = min(budget, space.size(choice)) - excess

    def opens(self, folder: Folder | None) -> bool:
        """Whether the program that was asked for opens a folder."""
        return self.asked.target is None or (
            folder is not None and refusal(folder, TARGETS[self.asked.target]) is None
        )

    def curve(self, increase: LossIncrease, mixes: bool) -> list[Json]:
        """List size and loss of each possible folder, the smallest first, and whether it fits."""
        bits, size = self.asked.target_bits, self.asked.target_size
        rows = [row for space in self.spaces for row in space.curve(increase, mixes)]
        found = [
            {**row, "fits": row["bits"] <= bits if bits else row["bytes"] <= (size or 0)}
            for row in rows
        ]
        return sorted(found, key=lambda row: (row["bytes"], row["scheme"]))


def plan(
    model: str | Path,
    recipe: Recipe,
    run: RunOptions,
    fitted: FitOptions,
    asked: PlanOptions,
    *,
    out: str | Path | None = None,
    announce: surveys.Announce = lambda text: None,
) -> Plan:
    """Plan a run of `quantize`.

    With a target, the plan is that of the best uniform scheme that fits, with the curve of all
    schemes. Nothing is measured: the loss in the curve is the squared error of normally distributed
    weights.
    """
    target = fitted.target if asked.gpu is not None or not fitted.is_asked else None
    others: Any = {**vars(asked), "out": out, "target": target, "announce": announce}
    if not fitted.is_asked:
        return surveys.plan(model, recipe, run, **others)
    try:
        search = _search(model, recipe, fitted, replace(run, progress=QUIET), asked.gpu_memory)
    except RecipeError as error:
        made = surveys.plan(model, recipe, run, **others)
        return replace(made, verdict=replace(made.verdict, refusal=error))
    expected = partial(expected_increase, search.job.recipe)
    found = search.uniform(expected)
    best = found[0] if found else search.some(expected)
    curve = [
        {**row, "harm": row["harm"] / best.space.weights}
        for row in search.curve(expected, mixes=False)
    ]
    made = surveys.plan(model, best.job.recipe, run, evaluated=_measured(recipe), **others)
    made = _with_sensitivities(made, search)
    if made.needs.duration is not None:
        searching = _of_search(made.needs.duration)
        made = replace(made, needs=replace(made.needs, duration=searching))
    return replace(
        made,
        fit={"best_uniform": found[0].name if found else None, "curve": curve},
        verdict=made.verdict.with_remarks(*search.notices),
    )


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    asked: FitOptions,
    run: RunOptions = RunOptions(),
    measure: Measure | None = None,
) -> Json:
    """Quantize a model into a folder that fits the target of `asked`, if there is one; return its
    report.

    Overrides and skips of the recipe are pins. RecipeError if nothing fits, or for a recipe that
    prunes. Everything else is as for `pipeline.quantize.quantize`.
    """
    if not asked.is_asked:
        if asked.target is not None:
            raise RecipeError(
                Words(Option("target"), "chooses among schemes that fit a size"),
                Words("add", Option("target_size")),
            )
        return pipeline.quantize(model, out, recipe, run, measure)
    out = Path(out)
    if ranks().count > 1:
        raise RecipeError(
            f"{ranks().count} processes were started, and one fits a size", "start one"
        )
    search = _search(model, recipe, asked, run)
    smallest = search.some(lambda group, label: group.bytes[label])
    job = smallest.job._replace(plan=_with_sensitivities(smallest.job.plan, search))
    more = 2 * min(HELD_OUT, job.recipe.calibration.samples)
    before = check_staging(out, resume=run.resume, overwrite=run.overwrite, source=job.src.home)
    date = date_of(before) if before is not None and run.resume else None
    job = surveys.require_runnable(job, None, run, more=more, date=date)
    notice = run.progress.note
    notice(*search.notices)
    if not run.progress.quiet and not run.resume:
        duration, why = surveys.estimate_duration(job, run, notice, _measured(recipe))
        found = [] if duration is None else [format_range(*_of_search(duration))]
        notice(*why, *(f"{each} for the whole search, by a probe of one block" for each in found))
    with staging(
        out, resume=run.resume, overwrite=run.overwrite, source=job.src.home, notice=notice
    ) as work:
        if not is_complete(work):
            _make(search, job.text, work, model, measure)
        publish(work, out, overwrite=run.overwrite)
    if 0 < (asked.target_size or 0) < (size := sum(path.stat().st_size for path in out.iterdir())):
        raise CheckpointError(
            f"takes {size} bytes, more than the target: a bug, please report it", subject=out
        )
    return load_report(out)


def _measured(recipe: Recipe) -> int:
    """Return the most tokens that measure loss increases, and that judge."""
    return HELD_OUT * min(LONGEST, recipe.calibration.max_length)


def _of_search(duration: tuple[float, float]) -> tuple[float, float]:
    """Estimate the seconds of a search, given those of one folder: it makes two to four."""
    return 2 * duration[0], 4 * duration[1]


def _make(
    search: _Search, text: Calibration, work: Path, model: str | Path, measure: Measure | None
) -> None:
    """Make the folders in `work`, judge them, and leave the files of the best one there."""
    asked, job, journal = search.asked, search.job, work / JOURNAL
    identity = {
        "version": __version__,
        "target": [asked.target_size, asked.target_bits, asked.allowed, asked.target],
        "recipe": job.recipe.sha256(),
        "text": text.facts.get("sha256"),
        "device": job.model.device_name,
        "source": [[*each] for each in job.src.sizes().items()],
        DATE: text.facts.get(DATE),
    }
    lines = read_journal(journal)
    if not lines:
        append_journal(journal, identity)
    elif differs := [key for key in identity if lines[0].get(key) != identity[key]]:
        raise CheckpointError(
            f"{work} was begun with other settings ({', '.join(differs)})",
            "give the former ones",
            Words("use", Option("overwrite", True)),
        )
    done = {key: value for line in lines for key, value in line.items()}
    if "chosen" not in done:
        done["chosen"] = _decide(search, text, work, model, measure, done.get("harms"))
        append_journal(journal, {"chosen": done["chosen"]})
    folders = [path for path in work.iterdir() if path.is_dir()]
    if work / done["chosen"] in folders:
        for path in sorted(
            (work / done["chosen"]).iterdir(), key=lambda path: (path.name == CONFIG, path.name)
        ):
            files.rename(path, work / path.name)
    for folder in folders:
        files.remove(folder)


def _decide(
    search: _Search,
    text: Calibration,
    work: Path,
    model: str | Path,
    measure: Measure | None,
    known: dict[str, float] | None,
) -> str:
    """Measure loss increases, make the folders of the mix and of uniform schemes, and return the
    name of the best one.
    """
    job, options, free = search.job, search.run, search.free
    progress, clock = options.progress, Clock(job.model.device)
    begin = partial(
        new_run, job.recipe, work=work, progress=progress, act_budget=options.act_budget
    )

    def make(each: _Found) -> Checkpoint:
        progress.note(f"{each.name}: {each.space.bits(each.space.size(each.choice))} bits/weight")
        if not (work / each.folder).exists():
            with clock.phase(each.name):
                begun = any(work.glob(f"{each.folder}.partial-*"))
                pipeline.quantize(
                    model,
                    work / each.folder,
                    each.job.recipe,
                    replace(options, overwrite=False, resume=begun),
                    text=text if each.job.recipe.calibrated else None,
                    estimated=False,
                )
        return Checkpoint(work / each.folder, options.trust_remote_code)

    expected = partial(expected_increase, job.recipe)
    first = next(iter(search.uniform(expected)), None) or search.some(expected)._replace(
        name="expected"
    )
    folders = {first.name: make(first)}
    with clock.phase("held-out text"), progress.loop():
        held, source = _held_out(search, text, progress)
        judging, others = held[::2], held[1::2] or held
    with clock.phase("sensitivities"), progress.loop():
        if known is None:
            found = divergence.loss_increases(
                begin(model=job.model, sequences=others), folders[first.name]
            )
            reached = {
                name: [found[m] for m in linears if m in found] for name, linears in free.items()
            }
            known = {name: sum(each) for name, each in reached.items() if each}
            append_journal(work / JOURNAL, {"harms": known})
    reachable = known

    def increase(group: Group, label: str) -> float:
        """Scale the loss increase in the first folder by the expected errors of both schemes."""
        found = reachable.get(group.name)
        return (
            found * expected(group, label) / expected(group, first.choice[group.name])
            if found
            else 0.0
        )

    with clock.phase("programme"):
        search = replace(
            search, spaces=[space.with_fixed(known, first.choice) for space in search.spaces]
        )
        mix = search.mix(increase)
        uniform = search.uniform(increase, REACH)
    first = first._replace(increase=first.space.increase(first.choice, increase))
    made = {each.name: each for each in (*uniform, first)}
    if mix is not None and mix.job.recipe not in [each.job.recipe for each in made.values()]:
        made[MIXED] = mix
    folders |= {name: make(each) for name, each in made.items() if name not in folders}
    with clock.phase("divergence"), progress.loop():
        judged = divergence.divergences(begin(model=job.model, sequences=judging), folders)
    best = min(made.values(), key=lambda each: judged[each.name])
    report = load_report(work / best.folder)
    report["fit"] = {
        **{
            key: getattr(search.asked, key)
            for key in ("target_size", "target_bits", "allowed", "target")
        },
        "chosen": "uniform" if best.name in best.space.uniform else MIXED,
        "best_uniform": uniform[0].name if uniform else None,
        "kld": judged,
        "predicted": {name: each.increase for name, each in made.items()},
        "held_out": {"source": source, "sequences": len(judging), "tokens": sum(map(len, judging))},
        "harm": {
            group.name: increase(group, best.choice[group.name])
            for group in best.space.groups
            if group.name in free
        },
        "curve": search.curve(increase, mixes=True),
        "seconds": clock.take(),
    }
    _add_search(report, best.name)
    report["notices"] += search.notices
    if unknown := sorted(free.keys() - known):
        report["notices"].append(
            f"{unknown[0]} has the usual scheme: no text reaches it ({len(unknown)} such groups)"
        )
    if measure is not None:
        report["evaluation"] = measure.of(folders[best.name])
    rewrite_report(work / best.folder, report)
    return best.folder


def _add_search(report: Json, chosen: str) -> None:
    """Add the time and the memory of the search to those of the `chosen` folder."""
    seconds = {name: each for name, each in report["fit"]["seconds"].items() if name != chosen}
    report["phases"] |= seconds
    totals = report["totals"]
    totals["seconds"] += sum(seconds.values())
    totals["peak_memory"] = {
        part: max(size, totals["peak_memory"].get(part, 0)) for part, size in peak_memory().items()
    }


def _search(
    model: str | Path,
    recipe: Recipe,
    asked: FitOptions,
    run: RunOptions,
    gpu_memory: int | None = None,
) -> _Search:
    """Collect the choices in each layout. RecipeError if nothing fits the target."""
    recipe, notices = _with_rest(recipe)
    if recipe.layout is None or any(map(is_sparse, recipe.schemes)):
        raise RecipeError("a size is fitted by dense schemes", Words("drop", Setting("prune")))
    form = recipe.scheme
    if (
        asked.allowed is None and isinstance(form, Scheme) and form.format != INT4
    ):  # the default of a recipe
        name = form.format.name
        raise RecipeError(
            f"a target chooses among formats, and {name} is one",
            Words("add", Option("allowed", name)),
        )
    schemes = schemes_of(asked.allowed, recipe)
    job = surveys.survey(surveys.dense_source(model, run, recipe), recipe, None, run, gpu_memory)
    notices = notices if job.recipe.calibration.tokens is None else []
    search = _Search(job, asked, run, notices)
    usual = (
        []
        if recipe.layout_stated
        else [scheme.format.layout for scheme in schemes if scheme is not None]
    )
    refused: list[QuantkitError] = []
    smallest: list[tuple[int, float]] = []
    spaces: list[Space] = []
    for name in dict.fromkeys([search.job.plan.layout, *usual]):
        try:
            space = _space(search, name, schemes)
        except RecipeError as error:
            refused.append(error)
            continue
        least = {
            group.name: min(group.bytes, key=lambda each: (group.bytes[each], each))
            for group in space.groups
        }
        (job, total, excess), size = search.planned(space, least), space.size(least)
        if (unopened := surveys.refusal(job)) is not None:
            refused.append(unopened)
            continue
        if excess <= 0:
            spaces.append(replace(space, overhead=total - size))
        smallest.append((total, space.bits(size)))
    if not smallest:
        raise refused[0]
    if not spaces:
        raise _too_small(asked, min(smallest), recipe)
    search = replace(search, spaces=spaces)
    return replace(search, notices=[*notices, *_expected_loss(search)])


def _expected_loss(search: _Search) -> list[str]:
    """Warn of a target that leaves fewer than four bits a weight that no pin fixes, with the
    expected divergence.
    """
    expected = partial(expected_increase, search.job.recipe)
    found = []
    for space in search.spaces:
        choice = space.choose(expected, search.budget(space, space.overhead))
        free = [group for group in space.groups if not group.is_fixed]
        if choice is not None and free:
            loss = space.increase(choice, expected) / space.weights
            size = sum(group.bytes[choice[group.name]] for group in free)
            found.append((loss, 8 * size / sum(group.weights for group in free)))
    loss, bits = min(found, default=(0.0, 4.0))
    if bits >= 4:
        return []
    rows = search.curve(expected, mixes=False)
    wider = next((row for row in rows if row["bits"] >= 4 and not row["fits"]), None)
    by_size = search.asked.target_size is not None
    ways = ["more bits lose less"]
    if wider is not None:
        key = "bytes" if by_size else "bits"
        way = Option("target_size" if by_size else "target_bits", wider[key])
        less = DIVERGENCE * wider["harm"] / search.spaces[0].weights
        ways = [way, f"fits {wider['scheme']}, with about {less:.2f} nats"]
    nats = f"{DIVERGENCE * loss:.2f} nats from the unquantized model"
    if not search.job.recipe.calibrated:
        nats += " by gptq, and several times that by rounding"
    rule = f"the target leaves {bits:.2f} bits a weight: expect a KL divergence of about"
    return [Words(f"{rule} {nats}:", *ways)]


def _with_rest(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Leave documents of the packaged text to judge by, with a notice if the others calibrate: no
    other text is here.
    """
    calib, most = recipe.calibration, len(load_documents(PACKAGED).texts) - 2 * HELD_OUT
    if calib.data != PACKAGED or calib.lengths != "own" or calib.samples <= most:
        return recipe, []
    found = (
        f"{most} of {calib.samples} sequences calibrate, and the rest of the text that comes with "
        "quantkit judges"
    )
    return replace(recipe, calibration=replace(calib, samples=most)), [
        found
    ] if recipe.calibrated else []


def _with_sensitivities(plan: Plan, search: _Search) -> Plan:
    """Add the memory of the pass that measures loss increases."""
    job, gpu = search.job, plan.needs.memory.gpu_memory
    others = calibrated_memory(
        job.src,
        job.model.linears,
        job.recipe,
        job.model.device.type if gpu is None else "cuda",
        search.run.act_budget,
        gpu,
        sensitivities=True,
    ).others
    memory = replace(plan.needs.memory, others=others)
    return replace(plan, needs=replace(plan.needs, memory=memory))


def _too_small(asked: FitOptions, least: tuple[int, float], recipe: Recipe) -> RecipeError:
    """Say which size is possible."""
    size, bits, keyed = least[0], ceil(1000 * least[1]) / 1000, recipe.keyed
    if asked.target_size is not None:
        rule = (
            f"{asked.target_size} bytes are too few: the smallest folder takes {size} "
            f"({format_bytes(size)})"
        )
    else:
        rule = f"{asked.target_bits:g} bits are too few: the smallest schemes take {bits:g}"
    way = Option("target_bits", bits) if asked.target_size is None else Option("target_size", size)
    pins = [
        Words("drop", Setting(keyed[pattern]) if pattern in keyed else Setting("override", pattern))
        for pattern, _ in recipe.overrides[:1]
    ]
    auto = Words("let it choose for embeddings too with", Setting("embeddings", AUTO))
    pins += [auto] if recipe.embeddings == DENSE else []
    return RecipeError(rule, Words("use", way), *pins, Words("allow more with", Option("allowed")))


def _space(search: _Search, name: str, schemes: Sequence[Scheme | None]) -> Space:
    """Find the groups of a layout, with the schemes that the layout holds and the reader opens."""
    src, model, goals, recipe = (
        search.job.src,
        search.job.model,
        search.job.goals,
        search.job.recipe,
    )
    stored = set(src.names())
    ends = {
        m: shape
        for m, shape in model.sizes.items()
        if m in dict(model.ends).values()
        and getattr(recipe, key_of(m) or "method") == AUTO
        and (m in model.linears or LAYOUTS[name].GATHERS)
    }
    linears = ends | {
        m: shape
        for m, shape in model.linears.items()
        if f"{m}.weight" in stored
        and m not in (*model.tied, *ends)
        and (m not in model.kept_dense or goals[m] is not None)
    }
    free = [m for m in linears if m not in ends and goals[m] is not None]
    is_half = (src.written_dtype or src.dtype_of_model) == torch.float16

    def opened(scheme: Scheme, dense: Sequence[str] = (), end: Sequence[str] = ()) -> bool:
        chosen = {m: (scheme, linears[m]) for m in (*free, *end) if m not in dense}
        others = [m for m in model.linears if m not in chosen]
        return search.opens(Folder(name, chosen, others, False, src.config, is_half))

    held = [
        each
        for each in schemes
        if each is not None and LAYOUTS[name].holds(each.format) and opened(each)
    ]
    if not held:
        raise RecipeError(
            f"{search.asked.target or 'quantkit'} opens none of the allowed schemes in the layout "
            f"{name}",
            Words("allow others with", Option("allowed")),
            Words("use another", Setting("layout")),
        )
    some: list[Scheme | None] = [
        *held,
        *([None] if None in schemes and opened(held[0], free[:1]) else []),
    ]
    return Space(
        name,
        groups_of(
            linears,
            goals,
            lambda m: bytes_of({m: src.form_written(f"{m}.weight")}),
            some,
            LAYOUTS[name],
            recipe,
            {m: [*(each for each in held if opened(each, end=[m])), None] for m in ends},
        ),
    )


def _held_out(search: _Search, text: Calibration, progress: Progress) -> tuple[list[Tensor], str]:
    """Cut held-out text from the calibration source, or from the packaged text if the source has
    too little.
    """
    most = 2 * min(HELD_OUT, len(text.sequences))
    held, source = text.more, text.facts["source"]
    if len(held) < most // 2:
        progress.note(
            "the calibration text holds too few other documents: the text that comes with quantkit "
            "judges"
        )
        asked = replace(
            search.job.recipe.calibration,
            data=PACKAGED,
            samples=len(load_documents(PACKAGED).texts),
            lengths="own",
            text_column=None,
            split=None,
        )
        found = surveys.calibration_text(search.job, asked, replace(search.run, progress=QUIET))
        held, source = found.sequences, found.facts["source"]
    used = {tuple(s.tolist()) for s in text.sequences}
    return [s[:LONGEST] for s in held if tuple(s.tolist()) not in used][:most], source
