"""From a stream of items to a published folder: pack, store, commit, report, and one rename at the
end.

An output folder appears complete or not at all. A run that fails leaves its resumable work and its
report so far.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from quantkit.algorithms.numerics import check_finite
from quantkit.checkpoint.origin import name_of, origin, source_hashes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import (
    REPORT,
    SEAL,
    added_up,
    digest,
    heading,
    load as load_report,
    peak_memory,
    phases,
    seal,
)
from quantkit.checkpoint.writer import QUEUED, CheckpointWriter, Commit, Item, Packed
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.threads import CPU, WorkQueue
from quantkit.engines.joined import output_config
from quantkit.errors import CheckpointError, Option, QuantkitError, Words, about
from quantkit.io import files
from quantkit.io.json_files import dump_json, without_folders
from quantkit.io.model_folder import RECIPE, has_chat_template
from quantkit.io.safetensors_files import read_header
from quantkit.io.staging import publish as publish_folder
from quantkit.layouts.schemes import Schemes, is_head
from quantkit.models.meta_model import auto_class, config_of
from quantkit.names import Json, JsonView
from quantkit.pipeline.inspection import OURS, THEIRS, TRIED, open_folder
from quantkit.planning.output import dense_totals
from quantkit.planning.survey import Job
from quantkit.progress import Clock, Progress
from quantkit.recipes.identity import difference, identity
from quantkit.recipes.recipe import Recipe
from quantkit.reporting.model_card import model_card
from quantkit.reporting.summary import short_repr, summary


class Measure(NamedTuple):
    """Hold the evaluation of a finished folder that is not published yet, and the tokens that it
    reads.
    """

    of: Callable[[Checkpoint], Json]
    tokens: int


def begin_report(job: Job, model: str | Path, revision: str | None) -> tuple[Json, list[str]]:
    """Begin the report of a quantized or pruned model. Returns the report, and notices about
    unreadable facts of the origin.
    """
    src, command = job.src, "prune" if job.recipe.only_prunes else "quantize"
    # The commit of a snapshot in the hub's cache is more precise than a branch.
    revision = src.path.name if src.path.parent.name == "snapshots" else revision
    base, unread = origin(src, model, revision)
    report = {**heading(command, name_of(model), revision, {}, base), **job.report()}
    if src.low_bit is not None:
        report["source"]["weights"] = f"{src.low_bit}, dequantized"
    return report, unread


def identify(
    writer: CheckpointWriter,
    report: Json,
    hashes: Callable[[], tuple[dict[str, str], list[str]]],
    progress: Progress,
) -> None:
    """Hash the source by `hashes`, and record the identity of the run, or compare it with the
    resumed run's.
    """
    record_source(report, hashes(), progress)
    writer.identify(identity(report), difference)


def record_source(
    report: Json, found: tuple[dict[str, str], list[str]], progress: Progress
) -> None:
    """Put the hashes of a source's files into the report, and a notice of each that was edited."""
    report["source"]["files"], edited = found
    report["notices"] += edited
    progress.note(*edited)


def write(
    items: Iterable[Item | Commit],
    writer: CheckpointWriter,
    report: JsonView,
    clock: Clock,
    queue: WorkQueue | None = None,
    begin: Sequence[Callable[[], object]] = (),
) -> list[Json]:
    """Pack and store every item, and commit where the loop asks for it; return the facts of every
    changed layer.

    The `queue`, by default a thread beside this one, writes tensors and journal; its first tasks
    are `begin`. A commit records the seconds of each phase since the last one, the phases of
    `clock` included. A failed run leaves `report`, with the layers so far, beside its resumable
    work (RELIABILITY 1.8). NumericError for a tensor that is not finite, even if it is only copied.
    """
    layers: list[Json] = []
    src = writer.like
    try:
        with queue or WorkQueue(CPU, True, QUEUED) as queue:
            with clock.phase("write"):
                for task in begin:
                    queue.put(task)
            for item in items:
                with clock.phase("write"):
                    if isinstance(item, Commit):
                        queue.put(partial(_commit, writer, item, clock.take(), layers))
                        queue.end_unit()
                        layers = []
                        continue
                    if isinstance(item.value, Tensor):
                        item = item._replace(value=_as_stored(src, item.name, item.value))
                    tensors = writer.pack(item)
                    codes = [item.value.codes] if isinstance(item.value, QuantizedTensor) else []
                    if (
                        codes and writer.layout is None
                    ):  # a scheme that is judged without being packed
                        tensors = {
                            name: src.as_stored(name, tensor) for name, tensor in tensors.items()
                        }
                    size = sum(tensor.nbytes for tensor in (*tensors.values(), *codes))
                    queue.put(partial(_store, writer, item, tensors, layers), size)
                    del item, tensors, codes  # before the next one is made
            with clock.phase("write"):
                queue.put(partial(_commit, writer, Commit({}), clock.take(), layers))
                queue.drain()
    except Exception as error:
        if writer.done:
            _leave_report(writer, report, error)
        raise
    return _layers(writer)


def copy_dense(writer: CheckpointWriter, names: Iterable[str]) -> None:
    """Copy dense tensors of the source that no commit has; NumericError for one that is not
    finite.
    """
    done = writer.items_done()
    for name in (name for name in names if name not in done):
        writer.add(Item(name, _as_stored(writer.like, name, writer.like.get(name))))


def _as_stored(src: Checkpoint, name: str, tensor: Tensor) -> Tensor:
    """Convert a dense tensor to its stored form. NumericError if it is not finite before or
    after.
    """
    with about(name):
        check_finite(tensor)
        stored = src.as_stored(name, tensor)
        if src.written_dtype is not None:
            check_finite(stored)
        return stored


def _store(
    writer: CheckpointWriter,
    item: Item,
    tensors: Mapping[str, Tensor],
    layers: list[Json],
) -> None:
    """Store an item as `tensors`, and add the facts of a changed layer."""
    writer.add(item, tensors)
    if item.facts or not isinstance(item.value, Tensor):
        layers.append(_layer(item, writer))


def _commit(
    writer: CheckpointWriter,
    commit: Commit,
    seconds: Mapping[str, float],
    layers: list[Json],
) -> None:
    late = {} if commit.late is None else commit.late()
    phases = added_up([commit.facts.get("phases", {}), seconds])
    writer.commit({**commit.facts, **late, "phases": phases, "layers": layers})


def _leave_report(writer: CheckpointWriter, report: JsonView, error: Exception) -> None:
    """Write the report of a failed run beside its resumable work."""
    failed = {**report, "failed": str(error) or type(error).__name__, "layers": _layers(writer)}
    with suppress(CheckpointError):  # the first error matters more
        files.write_atomic(writer.partial / REPORT, dump_json({**failed, SEAL: seal(failed)}))


def _layers(writer: CheckpointWriter) -> list[Json]:
    return [layer for line in writer.done for layer in line.get("facts", {}).get("layers", [])]


def _layer(item: Item, writer: CheckpointWriter) -> Json:
    q = item.value
    known: Json = {"name": item.name.removesuffix(".weight"), "shape": list(q.shape)}
    if isinstance(q, Tensor):
        known |= {"scheme": "2:4", "layout": None}
    else:
        known |= {"scheme": q.scheme.label, "layout": writer.layout.NAME if writer.layout else None}
        known["digest"] = q.digest if isinstance(q, Packed) else q.digest()
    return {
        **known,
        **{key: value for key, value in (item.facts or {}).items() if key not in known},
    }


def finish(
    writer: CheckpointWriter,
    out: Path,
    schemes: Schemes | None,
    report: Json,
    share: float | None,
    clock: Clock,
    overwrite: bool,
    recipe: Recipe | None = None,
    measure: Measure | None = None,
) -> Json:
    """Open the folder as its readers do, write config, report, recipe and model card, then publish
    it.

    `measure.of` is given the folder as a checkpoint, and returns the report's `evaluation`. A dense
    model has no `schemes`, and the config of its source. The layers state the true shapes of padded
    weights. `share` is the part of the decoder's weights that changed. A folder that a reader would
    open wrongly is not published; see `open_folder` for its CheckpointError. `clock` has run since
    the command began.
    """
    with clock.phase("write"):
        writer.arrange()
    src, partial, layout = writer.like, writer.partial, writer.layout
    true = {layer["name"]: layer.get("true_shape") for layer in report["layers"]}
    config = output_config(src, layout, schemes, true, report.get("recipe_sha256"))
    weights = sum(
        n * k for n, k in (layer.get("true_shape", layer["shape"]) for layer in report["layers"])
    )
    report["totals"] = {
        "quantized_weights": weights if layout else 0,
        "share": share,
        "bytes": sum((partial / name).stat().st_size for name in writer.hashes()),
        "source_bytes": sum(src.sizes().values()),
        "bits_per_weight": 8 * writer.packed_bytes / weights if weights and layout else None,
        **({} if layout is None else _dense(partial, writer.hashes(), report)),
    }
    if src.is_tied:  # the embeddings are the head
        report["dense"] = [name for name in report["dense"] if not is_head(name)]

    names = {
        src.path: src.path.name,
        **dict.fromkeys((partial, partial.resolve(), out.absolute()), out.name),
    }

    def sealed(written: dict[str, str]) -> dict[str, bytes]:
        report["files"] = written
        report.update(without_folders(report, names))
        return _report_and_card(report)

    def described() -> dict[str, bytes]:
        try:
            with clock.phase("open"):
                opening = open_folder(partial, copy.deepcopy(config), src)
            report["opened_by"] = list(opening.readers)
            report["not_opened_by"], report["not_tried"] = opening.refused, opening.untried
            if THEIRS in opening.refused:
                report["readers"] = [
                    reader for reader in report.get("readers", []) if reader != TRIED
                ]
            if not opening.readers:
                report["notices"].append(
                    f"the output could not be opened here: {opening.untried[OURS]}"
                )
            if opening.readers and src.config.get("is_encoder_decoder") is True:
                report["auto_class"] = auto_class(src, config_of(src)).__name__
            report["left_out"], report["chat_template"] = (
                list(writer.left_out),
                has_chat_template(partial),
            )
            if measure is not None:
                with clock.phase("evaluate"):
                    made = Checkpoint(partial, src.trusted, config=copy.deepcopy(config))
                    report["evaluation"] = measure.of(made)
            report["phases"], seconds = _times(writer, clock)
            report["totals"] |= {"peak_memory": peak_memory(), "seconds": seconds}
            return {} if recipe is None else {RECIPE: recipe.to_yaml().encode()}
        except QuantkitError as error:
            _leave_report(writer, report, error)
            raise

    writer.finish(config, described, sealed)
    publish_folder(partial, out, overwrite=overwrite)
    return report


def _report_and_card(report: Json) -> dict[str, bytes]:
    """Seal a report; return the files of the report and of the model card."""
    # The model card names the report's hash, so the report cannot have the card's. People edit the
    # card.
    report[SEAL] = seal(report)
    return {REPORT: dump_json(report), "README.md": model_card(report, digest(report)).encode()}


def rewrite_report(folder: Path, report: Json) -> None:
    """Replace the report of a finished folder, and the model card made of it."""
    for name, data in _report_and_card(report).items():
        files.write_atomic(folder / name, data)


def _dense(partial: Path, files_: Iterable[str], report: JsonView) -> Json:
    """Add up the bytes of the tensors that stay dense, from the headers of the shards."""
    stored = {
        name: (info.end - info.start, 8 * info.dtype.itemsize)
        for file in files_
        for name, info in read_header(partial / file)[0].items()
    }
    return dense_totals(
        stored, {layer["name"] for layer in report["layers"]}, report.get("dense", ())
    )


def _times(writer: CheckpointWriter, clock: Clock) -> tuple[dict[str, float], float]:
    """Return the seconds of each phase and in all, including the runs that this one continues.

    The phase `other` has the remaining time of this run, so the phases add up to the total.
    """
    claimed = added_up([phases(writer.done[writer.resumed :]), clock.take()])
    other = max(0.0, time.perf_counter() - clock.started - sum(claimed.values()))
    found = added_up([phases(writer.done[: writer.resumed]), claimed, {"other": other}])
    return found, sum(found.values())


def publish_complete(
    partial: Path, out: Path, recipe: Recipe, src: Checkpoint, overwrite: bool
) -> Json:
    """Publish the folder of a run that was stopped before its last step, if the source and the
    recipe match.
    """
    report = load_report(partial)
    if (
        report.get("recipe_sha256") != recipe.sha256()
        or report["source"].get("files") != source_hashes(src)[0]
    ):
        raise CheckpointError(
            "holds the result of another recipe or source",
            "remove it",
            Words("use", Option("overwrite", True)),
            subject=partial,
        )
    publish_folder(partial, out, overwrite=overwrite)
    return report


@dataclass(frozen=True, repr=False, eq=False)
class Result(Mapping[str, Any]):
    """The folder `path` of a run, and its `report`, the content of quantkit_report.json.

    A result is a mapping of the report too: `result["totals"]`. `notices` are the report's. Those
    of this run name options as keywords. Those of its source stay as the source's report has them.
    `print` shows the closing table of the command line.
    """

    path: Path
    report: dict[str, Any]
    notices: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The layout that was written; "dense" for a pruned model."""
        return str(self.report["layout"])

    @property
    def scheme(self) -> str:
        """The scheme of most linears, such as int4:g128."""
        return str(self.report["scheme"])

    @property
    def layers(self) -> list[Json]:
        """The facts of each linear that was changed: name, shape, scheme,
        relative_error and more.
        """
        return list(self.report["layers"])

    @property
    def bits_per_weight(self) -> float | None:
        """The stored bits per quantized weight, scales and zero points included; None for a pruned
        model.
        """
        return cast("float | None", self.report["totals"]["bits_per_weight"])

    @property
    def bytes(self) -> int:
        """The bytes of the weight files."""
        return int(self.report["totals"]["bytes"])

    @property
    def share(self) -> float | None:
        """The share of the decoder's weights that were changed; None if no blocks were found."""
        return cast("float | None", self.report["totals"]["share"])

    @property
    def seconds(self) -> float:
        """The duration of the run."""
        return float(self.report["totals"]["seconds"])

    def __getitem__(self, key: str) -> Any:
        return self.report[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.report)

    def __len__(self) -> int:
        return len(self.report)

    def __str__(self) -> str:
        return summary(self.report)

    def __repr__(self) -> str:
        return short_repr(
            self,
            path=str(self.path),
            layout=self.layout,
            scheme=self.scheme,
            linears=len(self.layers),
            bits_per_weight=self.bits_per_weight,
            bytes=self.bytes,
            share=self.share,
            seconds=round(self.seconds, 3),
            notices=list(self.notices),
        )
