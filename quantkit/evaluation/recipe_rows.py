"""Recipes side by side: each recipe quantizes a model, is judged, and makes a row of the table.

Each row has a journal with all of its measurements. So a stopped run continues, several processes
share the rows of a folder, and rows of several machines can be merged as files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import load as load_report
from quantkit.core.scheme import Scheme
from quantkit.errors import about
from quantkit.evaluation.divergence import token_values
from quantkit.evaluation.finished import Finished
from quantkit.evaluation.opened import Opened, open_writer
from quantkit.evaluation.perplexity import exponential
from quantkit.evaluation.tasks import Exam, means
from quantkit.evaluation.windows import Windows, cut
from quantkit.io import files
from quantkit.io.files import hash_of, hash_of_file
from quantkit.io.staging import check_staging, claimed
from quantkit.models.devices import device_of
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.progress import Progress, Recorder
from quantkit.recipes.recipe import Recipe, without_paths
from quantkit.reporting.recipe_table import UNSTORED, Row
from quantkit.text.sources import PACKAGED, kind_of, load_evaluation_text
from quantkit.version import __version__

#: The folders of journals, and of models and locks, which a finished row removes.
ROWS, WORK = "rows", "work"
#: Calibration sequences of a plan whose text was read already: the least number for every stage.
FEW = 16


@dataclass(frozen=True)
class Entry:
    """A row to make: a recipe with its calibration text and seed; of the unquantized model none of
    them.
    """

    name: str
    recipe: Recipe | None = None
    calib: str | None = None
    seed: int | None = None

    @property
    def title(self) -> str:
        """The row in words."""
        parts = [
            self.name,
            *([self.calib] if self.calib else []),
            *([f"seed {self.seed}"] if self.calib else []),
        ]
        return ", ".join(parts)


class Judges:
    """The judges of a row: texts and tasks. QuantkitError for an unreadable text."""

    def __init__(
        self, texts: Mapping[str, str], protocol: Mapping[str, Any], tasks: Exam | None
    ) -> None:
        self.texts = {
            label: load_evaluation_text(source, "text")[0] for label, source in texts.items()
        }
        self.protocol, self._tasks = protocol, tasks
        #: Measurement -> its name in a journal, which changes with everything that the result
        #: depends on.
        self._names = {
            ("text", label): f"text {_digest([hash_of(text.encode()), protocol])}"
            for label, text in self.texts.items()
        }
        for name, asked in tasks.asked.items() if tasks else ():
            digest = _digest([asked, _lasting(tasks.about)])
            self._names["task", name] = f"task {name} {digest}"

    def require(self, opened: Opened) -> None:
        """Raise QuantkitError for a model that cannot be judged so."""
        opened.require_decoder_only()
        if self._tasks is not None:
            self._tasks.require(opened)

    def lacks(self, finished: Finished) -> bool:
        """Say whether something of a row is not measured."""
        return not all(name in finished for name in ("made", *self._names.values()))

    def judge(
        self,
        finished: Finished,
        opened: Opened,
        model: Callable[[], Any],
        windows: Callable[[str], Windows],
        reference: Any,
        progress: Progress,
    ) -> None:
        """Measure the unfinished parts. The divergence is from `reference`."""
        for (kind, which), name in self._names.items():
            compute: Callable[[], Any]
            if self._tasks is not None and kind == "task":
                compute = partial(self._tasks.answer, which, model, opened.tokenizer, progress)
            else:
                compute = partial(_text_figures, reference, model, windows(which), progress)
            finished.get(name, compute)

    def columns(self, finished: Finished, base: Finished) -> Row:
        """Return the columns of a finished row, tasks in pairs with the unquantized model's if it
        has answered.
        """
        values = {key: finished.value(name) for key, name in self._names.items()}
        found = {
            f"{kind}:{which}:{key}": each
            for (kind, which) in values
            if kind == "text"
            for key, each in values[kind, which].items()
        }
        if self._tasks is None:
            return found
        return found | self._answered(self._tasks, values, finished, base)

    def _answered(
        self, tasks: Exam, values: Mapping[tuple[str, str], Any], finished: Finished, base: Finished
    ) -> Row:
        names = {which: name for (kind, which), name in self._names.items() if kind == "task"}
        is_paired = finished is not base and all(name in base for name in names.values())
        others = {which: base.value(name) for which, name in names.items()} if is_paired else None
        scores = tasks.scores({which: values["task", which] for which in names}, others)
        firsts, mean = {each.task: asdict(each) for each in reversed(scores)}, means(scores)
        rest = ("stderr", "difference", "difference_low", "difference_high")
        found = {
            f"task:{name}:{key}": firsts[name][key] for name in names for key in ("value", *rest)
        }
        return found | {"tasks:value": mean["mean"], **{f"tasks:{key}": mean[key] for key in rest}}


class Rows:
    """The rows of a folder, and how they are made. `run` has device, revision and
    trust_remote_code.
    """

    def __init__(
        self,
        model: str | Path,
        out: Path,
        judges: Judges,
        progress: Progress,
        run: Mapping[str, Any],
    ) -> None:
        self._model, self._out, self._judges, self._progress = model, out, judges, progress
        self._run: Any = {**run, "min_share": 0.0}  # the report of a row lists the dense linears
        self._opened = open_writer(
            model, run["revision"], run["trust_remote_code"], dequantize=True
        )
        judges.require(self._opened)
        self._digests = {
            name: hash_of_file(path) for name, path in sorted(self._opened.src.sources().items())
        }
        self._reference, self._windows = (
            cache(partial(self._dense, self._opened.src)),
            cache(self._cut),
        )
        self._noted: set[str] = set()

    def finished(self, entry: Entry) -> Finished:
        """Open the journal of a row."""
        run = self._identity(entry)
        return Finished(self._out / ROWS / f"{self._slug(entry, run)}.jsonl", run)

    def lacks(self, entry: Entry) -> bool:
        """Say whether a row is not finished."""
        return self._judges.lacks(self.finished(entry))

    def require(self, entries: Sequence[Entry]) -> None:
        """Plan each recipe and read each text once, to raise the errors of all rows before any
        work.
        """
        planned: dict[tuple[str, Any], tuple[Entry, Recipe]] = {}
        for entry in entries:
            names, texts = {name for name, _ in planned}, {text for _, text in planned}
            if entry.recipe is None or (entry.name in names and entry.calib in texts):
                continue
            recipe = entry.recipe
            if entry.calib in texts:
                few = replace(
                    recipe.calibration, data=PACKAGED, samples=min(FEW, recipe.calibration.samples)
                )
                recipe = replace(recipe, calibration=replace(few, text_column=None, split=None))
            planned[entry.name, entry.calib] = entry, recipe
        for entry, recipe in self._progress.bar(list(planned.values()), "plan", len(planned)):
            with about(entry.title):
                found = plan(self._model, recipe, **self._run)
                if found.refusal is not None:
                    raise found.refusal

    def make(self, entry: Entry) -> bool:
        """Complete a row by quantizing and judging. False if another process works on it."""
        if not self.lacks(entry):  # a neighbour was quicker
            return True
        work = self._work(entry)
        files.make_folder(work, parents=True)
        files.make_folder(self._out / ROWS, parents=True)
        with claimed(work) as is_ours:
            if not is_ours:
                return False
            finished, folder = self.finished(entry), work / "model"
            if not self._judges.lacks(finished):
                return True
            load, reference = self._reference, None
            if entry.recipe is None:
                finished.get("made", self._unquantized)
            else:
                for which in self._judges.texts:
                    self._windows(which)  # a text that is too short is refused before the work
                finished.get("made", partial(self._made, entry, folder))
                load, reference = cache(partial(self._load, entry, folder)), self._reference()
            self._judges.judge(
                finished, self._opened, load, self._windows, reference, self._progress
            )
            files.remove(folder)
            return True

    def clear(self, entries: Sequence[Entry]) -> None:
        """Remove the locks and models of finished rows, but not of rows that other
        processes make.
        """
        for entry in entries:
            files.remove(self._work(entry))
        files.remove_empty(self._out / WORK)

    def row(self, entry: Entry, base: Finished) -> Row | None:
        """Return a row as columns, None if it is not finished."""
        finished = base if entry.recipe is None else self.finished(entry)
        if self._judges.lacks(finished):
            return None
        known: Row = {"recipe": entry.name, **finished.value("made")}
        known |= {
            "calibration": entry.calib or "",
            "seed": "" if entry.calib is None else entry.seed,
        }
        return {**known, **self._judges.columns(finished, base)}

    def _identity(self, entry: Entry) -> dict[str, Any]:
        recipe = entry.recipe
        data = () if recipe is None or not recipe.calibrated else recipe.calibration.data
        sources = [data] if isinstance(data, str) else list(data)
        return {
            "quantkit": __version__,
            "model": self._digests,
            "recipe": None if recipe is None else without_paths(recipe).to_mapping(),
            "calibration": [_digest_of_source(source) for source in sources],
        }

    def _work(self, entry: Entry) -> Path:
        return self._out / WORK / self._slug(entry, self._identity(entry))

    def _slug(self, entry: Entry, run: Mapping[str, Any]) -> str:
        words = re.sub(r"[^\w.]+", "-", entry.title).strip("-")[:60]
        return f"{words}-{_digest(run)}"

    def _cut(self, which: str) -> Windows:
        return cut(
            [self._reference()],
            self._opened.tokenizer,
            self._judges.texts[which],
            **self._judges.protocol,
        )

    def _dense(self, src: Checkpoint) -> Any:
        """Load a model decoded to float32, like all models here, so that rows differ only in their
        codes.
        """
        return load_dense_model(
            src, device=self._run["device"], trust_remote_code=self._run["trust_remote_code"]
        )

    def _load(self, entry: Entry, folder: Path) -> Any:
        self._quantized(entry, folder)
        return self._dense(Checkpoint(folder, self._run["trust_remote_code"]))

    def _unquantized(self) -> Row:
        src = self._opened.src
        bits = 8.0 * src.dtype_of_model.itemsize
        if src.low_bit is not None:
            bits = 8 * src.source_bytes / sum(prod(src.shape(name)) for name in src.names())
        precision = src.low_bit or f"{bits:.0f} bits"
        facts = {
            "precision": precision,
            "grouping": "",
            "method": "",
            "stored": "dense",
            "bits": bits,
        }
        return {**facts, "bytes": src.source_bytes, "seconds": 0.0, **self._machine()}

    def _made(self, entry: Entry, folder: Path) -> Row:
        report, recipe = self._quantized(entry, folder), entry.recipe
        assert recipe is not None
        schemes = {layer["scheme"] for layer in report["layers"] if "scheme" in layer} or {
            report["scheme"]
        }
        form, _, grouping = ("mixed" if len(schemes) > 1 else schemes.pop()).partition(":")
        totals, stored = report["totals"], report["layout"]
        bits = totals["bits_per_weight"]
        size = round(bits * totals["quantized_weights"] / 8) + totals["dense_bytes"] if bits else 0
        if recipe.layout is None:
            bits, size, stored = *_as_if_stored(report, self._opened.src), UNSTORED
        refined = f"{recipe.method}+tune" if recipe.tune else recipe.method
        facts = {
            "precision": form,
            "grouping": grouping,
            "method": refined,
            "stored": stored,
            "bits": bits,
        }
        facts["calibration_tokens"] = report["calibration"].get("tokens")
        return {**facts, "bytes": size, "seconds": round(totals["seconds"], 2), **self._machine()}

    def _quantized(self, entry: Entry, folder: Path) -> dict[str, Any]:
        """Return the report of a row's folder, which is made if it is not there."""
        assert entry.recipe is not None
        if not folder.exists():
            begun, told = check_staging(folder, resume=True) is not None, Recorder(self._progress)
            quantize(self._model, folder, entry.recipe, resume=begun, progress=told, **self._run)
            for line in told.take():
                self._progress.warn(f"{entry.title}: {line}")
        report = load_report(folder)
        for line in report["notices"]:  # most serve other rows too
            if line not in self._noted:
                self._progress.note(f"{entry.title}: {line}")
                self._noted.add(line)
        return report

    def _machine(self) -> Row:
        place = device_of(self._run["device"])
        return {
            "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
            "quantkit": __version__,
        }


def _as_if_stored(report: Mapping[str, Any], src: Checkpoint) -> tuple[float, int]:
    """Count the bits of a weight and the bytes of all, as if codes, float16 scales and zero points
    were packed.
    """
    bits = weights = 0
    dense = {name: src.nbytes(name) for name in src.names()}
    for layer in report["layers"]:
        scheme, (n, k) = Scheme.parse(layer["scheme"]), layer["shape"]
        points = 0 if scheme.symmetric else scheme.format.bits
        bits += n * (k * scheme.format.bits + scheme.groups(k) * (16 + points))
        weights += n * k
        dense.pop(f"{layer['name']}.weight", None)
    return bits / weights, bits // 8 + sum(dense.values())


def _text_figures(
    reference: Any, model: Callable[[], Any], windows: Windows, progress: Progress
) -> Row:
    """Return perplexity and divergence; for the reference itself only the perplexity."""
    if reference is None:
        return {"ppl": exponential(token_values(model(), [], windows, progress)[0].nll())}
    values = token_values(reference, [model()], windows, progress)[1]
    return {"ppl": exponential(values.nll()), **values.figures()}


def _lasting(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the size of batches, which changes answers only by rounding."""
    return {key: value for key, value in facts.items() if key != "batch_size"}


def _digest_of_source(source: str) -> str:
    path = Path(source)
    return hash_of_file(path) if kind_of(source) in ("plain text", "records") else source


def _digest(facts: Any) -> str:
    return hash_of(json.dumps(facts, sort_keys=True).encode()).rpartition(":")[2][:12]
