"""The whole job: plan, one of two loops, one writer.

There are only two kinds of work. `streamed` needs no activations and walks the shards, one tensor in memory;
`calibrated` (in `calibrate`) walks the blocks. Both are generators of items, `_write` consumes them: it packs, commits
to the journal, and collects what the report says. An output folder appears complete, by one rename, or not at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import quantkit
from quantkit import rtn, storage
from quantkit.calibrate import calibrated
from quantkit.checkpoint import Checkpoint, CheckpointWriter, Commit, Item, resolve
from quantkit.data import calibration
from quantkit.errors import CheckpointError, RecipeError, about
from quantkit.headers import RECIPE, dump_json
from quantkit.layouts import LAYOUTS, family, quantkit_key
from quantkit.layouts.config import Schemes
from quantkit.models import Model, tokenizer
from quantkit.plan import Plan, plan_pack, plan_quantize
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.report import REPORT, heading, model_card, peak_memory, phases
from quantkit.report import load as load_report
from quantkit.solve import rounded
from quantkit.tensor import QuantizedTensor, Scheme, dtype_name

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
            return _publish_complete(partial, Path(out), recipe, src, overwrite)
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
        report["layers"] = _write(items, writer, src, report)
        report["phases"] = phases(writer.done)
        return _finish(writer, src, partial, Path(out), schemes, report, started, overwrite, recipe)


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
        items = (_recorded(item, recorded) for item in progress.bar(src.items(), "pack", len(src.logical())))
        report["layers"] = _write(items, writer, src, report)
        _unchanged(sources, before)
        return _finish(writer, src, partial, Path(out), src.schemes, report, started, overwrite)


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


def _recorded(item: Item, recorded: Mapping[str, Mapping[str, Any]]) -> Item:
    """Give an unpacked weight the facts of its quantization; refuse codes that are not the ones recorded then."""
    before = recorded.get(item.name.removesuffix(".weight"), {})
    if isinstance(item.value, QuantizedTensor) and before.get("digest") not in (None, item.value.digest()):
        raise CheckpointError(
            f"{item.name}: codes or scales differ from what {REPORT} recorded: the file is damaged, quantize again"
        )
    return Item(item.name, item.value, dict(before))


def _unchanged(sources: Mapping[str, str], before: Mapping[str, Any]) -> None:
    """Refuse weight files that are not those of the report beside them: dense tensors have no digest of their own."""
    for name, digest in sources.items():
        if name.endswith(".safetensors") and before.get("files", {}).get(name, digest) != digest:
            raise CheckpointError(
                f"{name}: SHA-256 is not the one that {REPORT} lists, the file was changed: restore it, or remove the "
                "report if that was meant"
            )


def _write(
    items: Iterable[Item | Commit], writer: CheckpointWriter, src: Checkpoint, report: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Pack and store every item, committing where the loop says so; return the facts of every quantized layer.

    A run that fails leaves `report` and the layers so far beside what can be resumed (RELIABILITY 1.8). NumericError
    also for a tensor that is only copied and not finite.
    """
    layers: list[dict[str, Any]] = []
    try:
        for item in items:
            if isinstance(item, Commit):
                writer.commit({**item.facts, "layers": layers})
                layers = []
                continue
            if isinstance(item.value, QuantizedTensor):
                layers.append(_layer(item, writer))
            else:
                with about(item.name):
                    rtn.check_finite(item.value)
            writer.add(item)
        writer.commit({"layers": layers})
    except Exception as error:
        if writer.done:
            failed = {**report, "failed": str(error) or type(error).__name__, "layers": _layers(writer)}
            with suppress(CheckpointError):  # the reason that brought us here matters more
                storage.write_atomic(writer.partial / REPORT, dump_json(failed))
        raise
    missing = set(src.logical()) - writer.items_done()
    if missing:
        raise CheckpointError(f"{min(missing)}: was not written ({len(missing)} tensors): a bug, please report it")
    return _layers(writer)


def _layers(writer: CheckpointWriter) -> list[dict[str, Any]]:
    return [layer for line in writer.done for layer in line.get("facts", {}).get("layers", [])]


def _layer(item: Item, writer: CheckpointWriter) -> dict[str, Any]:
    q = item.value
    assert isinstance(q, QuantizedTensor)
    known = {
        "name": item.name.removesuffix(".weight"),
        "shape": list(q.shape),
        "scheme": q.scheme.label,
        "layout": writer.layout.NAME if writer.layout else None,
        "digest": q.digest(),
    }
    return {**known, **{key: value for key, value in (item.facts or {}).items() if key not in known}}


def _finish(
    writer: CheckpointWriter,
    src: Checkpoint,
    partial: Path,
    out: Path,
    schemes: Schemes,
    report: dict[str, Any],
    started: float,
    overwrite: bool,
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Write what describes the tensors (config, report, recipe, model card), then publish the folder."""
    layout = writer.layout
    assert layout is not None
    config = {key: value for key, value in src.config.items() if key != "quantization_config"}
    config["quantization_config"] = {
        **layout.write_config(schemes),
        "quantkit": quantkit_key(layout.NAME, schemes, quantkit.__version__, report.get("recipe_sha256")),
    }
    weights = sum(n * k for n, k in (layer["shape"] for layer in report["layers"]))
    report["totals"] = {
        "quantized_weights": weights,
        "bytes": writer.bytes_written,
        "source_bytes": sum(path.stat().st_size for path in src.files()),
        "bits_per_weight": 8 * writer.packed_bytes / weights if weights else None,
        "peak_memory": peak_memory(),
        "seconds": time.perf_counter() - started,
    }

    def sealed(written: dict[str, str]) -> dict[str, bytes]:
        # The model card is for people to edit, so it is not part of what verify holds the folder to.
        report["files"] = {name: digest for name, digest in written.items() if name != "README.md"}
        return {REPORT: dump_json(report)}

    extra = {"README.md": model_card(report).encode()}
    if recipe is not None:
        extra[RECIPE] = recipe.to_yaml().encode()
    writer.finish(config, extra, sealed)
    storage.publish(partial, out, overwrite=overwrite)
    return report


def _publish_complete(partial: Path, out: Path, recipe: Recipe, src: Checkpoint, overwrite: bool) -> dict[str, Any]:
    """Publish what a run that was stopped in its last instant left, if it is what is asked for now."""
    report = load_report(partial)
    if report.get("recipe_sha256") != recipe.sha256() or report["source"].get("files") != src.hashes():
        raise CheckpointError(f"{partial}: holds the result of another recipe or source: remove it, or use --overwrite")
    storage.publish(partial, out, overwrite=overwrite)
    return report


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
