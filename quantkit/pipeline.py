"""The whole job: plan, one of two loops, one writer.

There are only two kinds of work. `streamed` needs no activations and walks the shards, one tensor in memory;
`calibrated` (in `calibrate`) walks the blocks. Both are generators of items, `_write` consumes them: it packs, commits
to the journal, and collects what the report says. An output folder appears complete, by one rename, or not at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantkit import rtn, storage
from quantkit.calibrate import calibrated
from quantkit.checkpoint import Checkpoint, Commit, Item, resolve
from quantkit.data import calibration
from quantkit.errors import CheckpointError, RecipeError, about
from quantkit.layouts import LAYOUTS, family
from quantkit.layouts.config import Schemes
from quantkit.models import Model, tokenizer
from quantkit.output import finish, publish_complete, recorded_facts, require_unchanged, write
from quantkit.plan import Plan, plan_pack, plan_quantize
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.report import heading, phases
from quantkit.report import load as load_report
from quantkit.solve import rounded
from quantkit.tensor import Scheme, dtype_name
from quantkit.writer import CheckpointWriter

#: Streamed work is committed to the journal in steps of about this many source bytes.
COMMIT_BYTES = 2 * 2**30


class _Job(NamedTuple):
    """A source, its skeleton, the scheme of each of its linears (None: left dense), and what will come of it."""

    src: Checkpoint
    model: Model
    chosen: dict[str, Scheme | None]
    plan: Plan


def plan(
    model: str | Path,
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    revision: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    act_budget: int | None = None,
) -> Plan:
    """Return what `quantize` would write, from config and headers alone; misfits are listed in it, not raised."""
    src = _dense_source(model, revision, trust_remote_code)
    return _survey(src, recipe, out, device, trust_remote_code, act_budget).plan


def _survey(
    src: Checkpoint,
    recipe: Recipe,
    out: str | Path | None,
    device: str,
    trust_remote_code: bool,
    act_budget: int | None,
) -> _Job:
    skeleton = Model(src, device=device, trust_remote_code=trust_remote_code)
    chosen = {module: skeleton.scheme_of(module, recipe) for module in skeleton.linears}
    planned = plan_quantize(
        src,
        skeleton.linears,
        recipe,
        schemes=chosen,
        tied=skeleton.tied,
        out=None if out is None else Path(out),
        device=skeleton.device.type,
        act_budget=act_budget,
    )
    planned = replace(planned, remarks=(*planned.remarks, *skeleton.notices, *_without_effect(recipe, skeleton)))
    return _Job(src, skeleton, chosen, planned)


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    revision: str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    act_budget: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quantize a Hugging Face causal LM (folder or hub id) into a new folder `out`; return its report.

    `act_budget` is the bytes of calibration activations held in RAM before they go to disk. Raises QuantkitError for
    anything that cannot be done; an interrupted run leaves `out.partial-*`, which `resume` continues.
    """
    progress = progress or Progress(quiet=True)
    started = time.perf_counter()
    src = _dense_source(model, revision, trust_remote_code)
    job = _survey(src, recipe, out, device, trust_remote_code, act_budget)
    job.plan.require()
    for notice in job.plan.notices:
        progress.note(notice)
    schemes = _schemes(job, recipe)
    with storage.staging(Path(out), resume=resume, overwrite=overwrite, source=src.path) as partial:
        if storage.is_complete(partial):
            return publish_complete(partial, Path(out), recipe, src, overwrite)
        writer = CheckpointWriter(partial, like=src, layout=LAYOUTS[recipe.layout])
        sequences, facts = _sequences(job, recipe)
        report = {
            **heading("quantize", _name_of(model), _revision(src, revision), src.hashes()),
            "recipe": recipe.to_mapping(),
            "recipe_sha256": recipe.sha256(),
            "device": job.model.device_name,
            "compute_dtype": dtype_name(job.model.dtype),
            "layout": recipe.layout,
            "scheme": recipe.scheme.label,
            "calibration": facts,
            "dense": [module for module, scheme in job.chosen.items() if scheme is None],
            "notices": list(job.plan.remarks),
            "layout_notices": list(job.plan.layout_remarks),
        }
        writer.identify(_identity(report))
        if resume and not writer.done:
            progress.note("there is nothing to resume: the run begins at its start")
        if recipe.calibrated and not writer.done:  # found in the last block, it would have cost the whole run
            for name in progress.bar(src.names(), "check", len(src.names())):
                with about(name):
                    rtn.check_finite(src.get(name))
        if recipe.calibrated:
            items = calibrated(
                src, recipe, job.model, sequences, partial, writer.done, progress=progress, act_budget=act_budget
            )
        else:
            items = streamed(src, recipe, job.chosen, writer.items_done(), progress)
        report["layers"] = write(items, writer, src, report)
        report["phases"] = phases(writer.done)
        return finish(writer, src, partial, Path(out), schemes, report, started, overwrite, recipe)


def pack(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    expect: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Rewrite a quantized checkpoint in another layout, bit for bit, into a new folder `out`; return its report.

    `expect` is the layout that the source must be in (`convert A-to-B`). Only config.json and the safetensors files are
    read, one tensor in memory at a time. LayoutError lists every weight that the layout cannot hold; CheckpointError if
    a weight's codes are not those that its report recorded.
    """
    progress = progress or Progress(quiet=True)
    started = time.perf_counter()
    src = Checkpoint(Path(checkpoint))
    if src.layout is None or src.schemes is None:
        raise CheckpointError(f"{checkpoint}: holds no quantized weights: use quantkit quantize first")
    if expect is not None and family(src.layout.NAME) != family(expect):
        raise CheckpointError(
            f"{checkpoint}: is in the {src.layout.NAME} layout, not {expect}: say {src.layout.NAME}-to-{layout}"
        )
    planned = plan_pack(src, LAYOUTS[layout], out=Path(out))
    planned.require()
    for notice in planned.notices:
        progress.note(notice)
    before = load_report(src.path)
    recorded = {layer["name"]: layer for layer in before.get("layers", [])}
    with storage.staging(Path(out), overwrite=overwrite, source=src.path) as partial:
        writer = CheckpointWriter(partial, like=src, layout=LAYOUTS[layout])
        sources = src.hashes()
        carried = ("recipe", "recipe_sha256", "calibration", "device", "compute_dtype")
        report = {
            **{key: before[key] for key in carried if key in before},
            **heading("pack", _name_of(checkpoint), None, sources, before.get("base")),
            "layout": layout,
            "scheme": src.schemes.default.label,
            "dense": list(src.schemes.ignore),
            "notices": list(dict.fromkeys([*before.get("notices", []), *planned.remarks])),
            "layout_notices": list(planned.layout_remarks),
        }
        items = (recorded_facts(item, recorded) for item in progress.bar(src.items(), "pack", len(src.logical())))
        report["layers"] = write(items, writer, src, report)
        require_unchanged(sources, before)
        return finish(writer, src, partial, Path(out), src.schemes, report, started, overwrite)


def streamed(
    src: Checkpoint, recipe: Recipe, chosen: Mapping[str, Scheme | None], done: set[str], progress: Progress
) -> Iterator[Item | Commit]:
    """Yield every tensor of a dense checkpoint once, its linears rounded to nearest; one weight in memory at a time."""
    names = [name for name in src.names() if name not in done]
    pending = 0
    for name in progress.bar(names, "quantize", len(names)):
        scheme = chosen.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        tensor = src.get(name)
        pending += tensor.nbytes
        yield Item(name, tensor) if scheme is None else rounded(name.removesuffix(".weight"), tensor, scheme, recipe)
        if pending >= COMMIT_BYTES:
            yield Commit({})
            pending = 0


def _dense_source(model: str | Path, revision: str | None, trust_remote_code: bool) -> Checkpoint:
    src = Checkpoint(resolve(str(model), revision), trust_remote_code)
    if src.layout is not None:
        raise CheckpointError(f"{model}: is quantized already ({src.layout.NAME}): use quantkit pack or convert")
    return src


def _without_effect(recipe: Recipe, model: Model) -> list[str]:
    """Return a line for every wish of the recipe that this model cannot follow."""
    found = recipe.unmatched({name for linear, path in model.paths.items() for name in (linear, path)})
    if recipe.calibrated and recipe.calibration.max_length > model.max_length:
        asked = recipe.calibration.max_length
        found.append(f"calibration sequences end at the model's {model.max_length} positions, {asked} were asked for")
    return found


def _schemes(job: _Job, recipe: Recipe) -> Schemes:
    """Return the checkpoint's schemes, with every exception under its exact name.

    A few families call a linear otherwise in the model than in the checkpoint; public readers go by the model's name.
    """
    if not any(job.chosen.values()):
        raise RecipeError("every linear is skipped: nothing to quantize, loosen --skip")
    named = [(name, scheme) for m, scheme in job.chosen.items() for name in dict.fromkeys((m, job.model.paths[m]))]
    overrides = tuple((re.escape(name), s) for name, s in named if s is not None and s != recipe.scheme)
    return Schemes(recipe.scheme, overrides, ignore=tuple(name for name, s in named if s is None))


def _name_of(model: str | Path) -> str:
    """Return a hub id as it is, of a folder its last name."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _revision(src: Checkpoint, asked: str | None) -> str | None:
    """Return the commit of a snapshot in the hub's cache, which says more than the branch that was asked for."""
    return src.path.name if src.path.parent.name == "snapshots" else asked


def _sequences(job: _Job, recipe: Recipe) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the calibration sequences and what is to be reported of them; nothing if the recipe needs none."""
    if not recipe.calibrated:
        return [], {}
    calib = recipe.calibration
    text = calibration(
        calib.data,
        tokenizer(job.src.path),
        samples=calib.samples,
        max_length=min(calib.max_length, job.model.max_length),
        seed=calib.seed,
        lengths=calib.lengths,
    )
    return text.sequences, text.facts


def _identity(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the bytes of a run: a run that is resumed must have the same."""
    same = {key: report[key] for key in ("quantkit", "recipe_sha256", "device", "compute_dtype")}
    same |= {name: report["environment"][name] for name in ("torch", "transformers")}
    return {**same, "source": report["source"]["files"], "calibration": report["calibration"].get("sha256")}
