"""Compare recipes: each recipe quantizes a model, is judged, and makes a row of the tables.

A row is a journal of its own, with all of its measurements, and states the command that quantizes
alike. So a stopped run continues, several processes share the rows of a folder, and rows of several
machines can be merged as files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.origin import name_of
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import load as load_report
from quantkit.errors import (
    CheckpointError,
    Command,
    Option,
    QuantkitError,
    RecipeError,
    Words,
    about,
)
from quantkit.evaluation.divergence import token_values
from quantkit.evaluation.opened import Finished, open_checkpoint
from quantkit.evaluation.options import CompareOptions, TaskOptions, listed
from quantkit.evaluation.perplexity import Windows, cut, exponential, mean_loss, window_losses
from quantkit.evaluation.tasks import Exam, means
from quantkit.io import files
from quantkit.io.staging import check_staging, claimed
from quantkit.layouts import LAYOUTS
from quantkit.models.weights import device_of, load_dense_model
from quantkit.names import Json, JsonView
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.progress import Progress, Recorder
from quantkit.recipes.files import load_named_or_scheme, merge
from quantkit.recipes.options import LoadOptions, RunOptions
from quantkit.recipes.recipe import Recipe, from_mapping, without_paths
from quantkit.reporting.layer_errors import bits, weights
from quantkit.reporting.recipe_table import UNQUANTIZED, UNSTORED, Row, as_csv, as_markdown, page
from quantkit.reporting.summary import short_repr
from quantkit.text.sources import kind_of, load_evaluation_text, name_of_text
from quantkit.version import __version__


@dataclass(frozen=True, repr=False)
class Comparison:
    """The finished `rows` of a table, and its folder `path` with compare.csv, compare.md and the
    page compare.html.

    The keys of a row are the columns of the CSV: `bits` a quantized weight, `bytes` of all tensors,
    `text:NAME:ppl`, `text:NAME:kld` and the other fields of `Divergence`, `task:NAME:value`, the
    mean `tasks:value`, and the `command` that quantizes alike. `unfinished` are the titles of the
    other rows, and `failed` says why rows failed.
    """

    path: Path
    rows: list[Row]
    unfinished: list[str]
    failed: dict[str, str]

    def __repr__(self) -> str:
        return short_repr(
            self,
            path=str(self.path),
            rows=len(self.rows),
            unfinished=self.unfinished,
            failed=self.failed,
        )


def compare(
    model: str | Path,
    out: str | Path,
    asked: CompareOptions,
    settings: JsonView,
    progress: Progress,
) -> Comparison:
    """Quantize a model by each of several recipes, judge the results, and write one table into the
    folder `out`.

    `settings` maps keys of a recipe to values for all of them. Finished rows in `out` stay. Raises
    a QuantkitError, before any work, for what a row would refuse.
    """
    out = Path(out)
    with files.guarded(out):
        is_table = out.is_dir() and ((out / ROWS).is_dir() or not any(out.iterdir()))
        if out.exists() and not is_table:
            raise CheckpointError(
                "is there, and no table of quantkit compare", "name a new folder", subject=out
            )
    recipes = {name: merge(load_named_or_scheme(name), settings) for name in listed(asked.recipes)}
    sources, seeds = labelled(listed(asked.calib), "calib"), list(dict.fromkeys(asked.seeds))
    if not recipes or not sources or not seeds:
        raise RecipeError(
            "there is nothing to compare", "name a recipe, a calibration text and a seed"
        )
    entries = entries_of(recipes, sources, seeds)
    rows = Rows(model, out, asked, progress)
    mine = [entry for entry in entries if rows.lacks(entry)]
    rows.require(mine)
    files.make_folder(out / ROWS, parents=True)
    failed: dict[str, str] = {}

    def write() -> list[Row]:
        made = ((entry, rows.row(entry, entries[0])) for entry in entries)
        found = [
            {**row, "command": command(model, entry, sources, settings, asked)}
            for entry, row in made
            if row
        ]
        files.write_atomic(out / "compare.csv", as_csv(found).encode())
        files.write_atomic(out / "compare.md", as_markdown(found).encode())
        files.write_atomic(out / "compare.html", page(name_of(model), found).encode())
        return found

    for entry in progress.bar(mine, "rows", each="row"):
        try:
            if not rows.make(entry):
                progress.note(f"{entry.title}: another process makes this row")
        except QuantkitError as error:
            progress.warn(Words(entry.title, ":", error.typed))
            failed[entry.title] = str(error)
        write()
    unfinished = [entry.title for entry in entries if rows.lacks(entry)]
    if not unfinished:
        rows.clear(entries)
    return Comparison(out, write(), unfinished, failed)


def entries_of(
    recipes: Mapping[str, JsonView], calib: Mapping[str, str], seeds: Sequence[int]
) -> list[Entry]:
    """List the rows: the unquantized model, and each recipe with each text and seed if it needs
    text.

    A recipe whose scheme no layout holds has no layout; its values are judged.
    """
    found = [Entry(UNQUANTIZED)]
    for name, mapping in recipes.items():
        with about(name):
            plain = _storable(from_mapping(mapping))
        if not plain.calibrated:
            found.append(Entry(name, plain))
        for text, source in calib.items() if plain.calibrated else ():
            for seed in seeds:
                asked = from_mapping(
                    merge(mapping, {"calibration": {"data": source, "seed": seed}})
                )
                found.append(Entry(name, _storable(asked), text, seed))
    return found


def _storable(recipe: Recipe) -> Recipe:
    """Return a recipe, without a layout if none holds its schemes."""
    for layout in LAYOUTS.values():
        with suppress(QuantkitError):
            for scheme in recipe.schemes:
                layout.check_scheme(scheme)
            return recipe
    wide: Any = {"layout": None, "dense_dtype": "float32"}
    return replace(recipe, **wide)


def command(
    model: str | Path,
    entry: Entry,
    sources: Mapping[str, str],
    settings: JsonView,
    asked: CompareOptions,
) -> str:
    """Return the command that quantizes as a row did. For a scheme without a layout, return the
    command that makes the row.
    """
    if entry.recipe is None:
        return ""
    recipe, seed, is_stored = entry.recipe, entry.seed or 0, entry.recipe.layout is not None
    if not is_stored:
        words = [Option("recipes", entry.name), *([Option("seeds", seed)] if seed else [])]
    elif Path(entry.name).is_file() or ":" not in entry.name:
        words = [Option("recipe", entry.name)]
    else:
        form: Any = recipe.scheme
        words = [
            Option("format", form.format.name),
            Option("group_size", form.group_size or "channel"),
            Option("method", recipe.method),
            *([] if form.symmetric else [Option("asym", True)]),
            *([Option("prune", form.sparsity)] if form.sparsity else []),
        ]
    words += [] if entry.calib is None else [Option("calib", sources[entry.calib])]
    pairs = [
        *(
            pair
            for key, value in settings.items()
            if recipe.calibrated or key != "calibration"
            for pair in _pairs({key: value})
        ),
        *([f"calibration.seed={seed}"] if seed and is_stored else []),
    ]
    more = [
        *(Words("--set", shlex.quote(pair)) for pair in pairs),
        *([Option("revision", asked.revision)] if asked.revision else []),
        *([Option("trust_remote_code", True)] if asked.trust_remote_code else []),
    ]
    return str(
        Command(
            "quantize" if is_stored else "compare",
            model,
            Option("out", Words("OUT")),
            *words,
            *more,
        )
    )


def _pairs(settings: JsonView, before: str = "") -> Iterator[str]:
    """Yield settings as KEY=VALUE."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and before + key != "overrides":
            yield from _pairs(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value if isinstance(value, str) else json.dumps(value)}"


#: The folders of journals, and of models and locks, which a finished row removes.
ROWS, WORK = "rows", "work"


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
        return f"{self.name}, {self.calib}, seed {self.seed}" if self.calib else self.name


class Rows:
    """The rows of a folder, how they are made, and what judges them: texts, and tasks.

    QuantkitError for an unreadable text, and for a model that cannot be judged.
    """

    def __init__(
        self, model: str | Path, out: Path, asked: CompareOptions, progress: Progress
    ) -> None:
        self._model, self._out, self._progress = model, out, progress
        texts = labelled(listed(asked.text), "text").items()
        self._texts = {name: load_evaluation_text(source, "text")[0] for name, source in texts}
        self._protocol: Any = {"window": asked.window, "tokens": asked.tokens}
        shared = {key: getattr(asked, key) for key in ("data", "shots", "limit", "batch_size")}
        names = tuple(listed(asked.tasks))
        self._tasks = Exam(TaskOptions(tasks=names, **shared)) if names else None
        #: Measurement -> its name in a journal, which changes with everything that the result
        #: depends on.
        self._names = {
            ("text", label): f"text {_digest([files.hash_of(text.encode()), self._protocol])}"
            for label, text in self._texts.items()
        }
        run = {key: getattr(asked, key) for key in ("device", "revision", "trust_remote_code")}
        # A row is judged, and tells what stays dense.
        self._run = RunOptions(**run, min_share=0.0)
        self._opened = open_checkpoint(model, LoadOptions(**run), dequantize=True)
        self._opened.require_decoder_only()
        if self._tasks is not None:
            self._tasks.require(self._opened)
            # The size of batches changes answers only by rounding.
            lasting = {k: v for k, v in self._tasks.about.items() if k != "batch_size"}
            for name, task in self._tasks.asked.items():
                self._names["task", name] = f"task {name} {_digest([task, lasting])}"
        self._digests = {
            name: files.hash_of_file(path)
            for name, path in sorted(self._opened.src.sources().items())
        }
        self._reference = cache(partial(self._dense, self._opened.src))
        self._windows = cache(self._cut)
        self._noted: set[str] = set()

    def lacks(self, entry: Entry) -> bool:
        """Say whether a row is not finished."""
        journal = self._journal(entry)
        return not all(name in journal for name in ("made", *self._names.values()))

    def require(self, entries: Sequence[Entry]) -> None:
        """Plan each recipe with each text, to raise the errors of all rows before any work."""
        planned = {
            (entry.name, entry.calib): (entry, entry.recipe)
            for entry in entries
            if entry.recipe is not None
        }
        for entry, recipe in self._progress.bar([*planned.values()], "plan"):
            with about(entry.title):
                found = plan(self._model, recipe, self._run)
                if found.refusal is not None:
                    raise found.refusal

    def make(self, entry: Entry) -> bool:
        """Complete a row by quantizing and judging. False if another process works on it."""
        work = self._work(entry)
        files.make_folder(work, parents=True)
        with claimed(work) as is_ours:
            if not is_ours:
                return False
            journal, folder = self._journal(entry), work / "model"
            if not self.lacks(entry):  # a neighbour was quicker
                return True
            load, reference = self._reference, None
            if entry.recipe is None:
                journal.get("made", self._unquantized)
            else:
                for which in self._texts:
                    self._windows(which)  # a text that is too short is refused before the work
                journal.get("made", partial(self._made, entry, folder))
                load, reference = cache(partial(self._load, entry, folder)), self._reference()
            for (kind, which), name in self._names.items():
                if self._tasks is not None and kind == "task":
                    ask = partial(self._tasks.answer, which, load, self._opened, self._progress)
                else:
                    ask = partial(self._figures, which, load, reference)
                journal.get(name, ask)
            files.remove(folder)
            return True

    def clear(self, entries: Sequence[Entry]) -> None:
        """Remove the locks and models of finished rows, but not of rows that other
        processes make.
        """
        for entry in entries:
            files.remove(self._work(entry))
        files.remove_empty(self._out / WORK)

    def row(self, entry: Entry, unquantized: Entry) -> Row | None:
        """Return a row as columns, tasks in pairs with the unquantized model's if it has answered;
        None if it is not finished.
        """
        if self.lacks(entry):
            return None
        journal = self._journal(entry)
        values = {key: journal.value(name) for key, name in self._names.items()}
        known: Row = {
            "recipe": entry.name,
            **journal.value("made"),
            "calibration": entry.calib or "",
            "seed": entry.seed if entry.calib else "",
        }
        for label in self._texts:
            known |= {f"text:{label}:{key}": each for key, each in values["text", label].items()}
        if self._tasks is not None:
            answers = {which: each for (kind, which), each in values.items() if kind == "task"}
            known |= self._scores(
                self._tasks, answers, None if entry == unquantized else unquantized
            )
        return known

    def _scores(self, tasks: Exam, answers: JsonView, unquantized: Entry | None) -> Row:
        others = None
        if unquantized is not None:
            base, names = self._journal(unquantized), {w: self._names["task", w] for w in answers}
            if all(name in base for name in names.values()):
                others = {which: base.value(name) for which, name in names.items()}
        scores = tasks.scores(answers, others)
        firsts, mean = {each.task: asdict(each) for each in reversed(scores)}, means(scores)
        keys = ("stderr", "difference", "difference_low", "difference_high")
        found = {f"task:{w}:{key}": firsts[w][key] for w in answers for key in ("value", *keys)}
        return found | {"tasks:value": mean["mean"], **{f"tasks:{key}": mean[key] for key in keys}}

    def _figures(self, which: str, model: Callable[[], Any], reference: Any) -> Row:
        """Return perplexity and divergence on a text; of the reference itself the perplexity."""
        windows = self._windows(which)
        if reference is None:
            return {"ppl": exponential(mean_loss(window_losses(model(), windows, self._progress)))}
        found = token_values(reference, model(), windows, self._progress)
        return {"ppl": exponential(mean_loss(found.losses)), **found.figures()}

    def _journal(self, entry: Entry) -> Finished:
        run = self._identity(entry)
        return Finished(self._out / ROWS / f"{self._slug(entry, run)}.jsonl", run)

    def _identity(self, entry: Entry) -> Json:
        recipe = entry.recipe
        sources = recipe.calibration.sources if recipe and recipe.calibrated else ()
        return {
            "quantkit": __version__,
            "model": self._digests,
            "recipe": None if recipe is None else without_paths(recipe).to_mapping(),
            "calibration": [
                files.hash_of_file(Path(source))
                if kind_of(source) in ("plain text", "records")
                else source
                for source in sources
            ],
        }

    def _work(self, entry: Entry) -> Path:
        return self._out / WORK / self._slug(entry, self._identity(entry))

    def _slug(self, entry: Entry, run: JsonView) -> str:
        words = re.sub(r"[^\w.]+", "-", entry.title).strip("-")[:60]
        return f"{words}-{_digest(run)}"

    def _cut(self, which: str) -> Windows:
        text = self._texts[which]
        return cut([self._reference()], self._opened.tokenizer, text, **self._protocol)

    def _dense(self, src: Checkpoint) -> Any:
        """Load a model, decoded to float32 like every other, so that rows differ only in codes."""
        return load_dense_model(src, device=self._run.device)

    def _load(self, entry: Entry, folder: Path) -> Any:
        self._quantized(entry, folder)
        return self._dense(Checkpoint(folder, self._run.trust_remote_code))

    def _unquantized(self) -> Row:
        src = self._opened.src
        width = 8.0 * src.dtype_of_model.itemsize
        if src.low_bit is not None:
            width = 8 * src.source_bytes / sum(prod(src.shape(name)) for name in src.names())
        return {
            "precision": src.low_bit or f"{width:.0f} bits",
            "grouping": "",
            "method": "",
            "stored": "dense",
            "bits": width,
            "bytes": src.source_bytes,
            "seconds": 0.0,
            **self._machine(),
        }

    def _made(self, entry: Entry, folder: Path) -> Row:
        report, recipe = self._quantized(entry, folder), entry.recipe
        assert recipe is not None
        schemes = {layer["scheme"] for layer in report["layers"] if "scheme" in layer} or {
            report["scheme"]
        }
        form, _, grouping = ("mixed" if len(schemes) > 1 else schemes.pop()).partition(":")
        totals, stored = report["totals"], report["layout"]
        if recipe.layout is None:
            width, size, stored = *_as_if_stored(report, self._opened.src), UNSTORED
        else:
            width = totals["bits_per_weight"]
            size = round((width or 0.0) * totals["quantized_weights"] / 8) + totals["dense_bytes"]
        return {
            "precision": form,
            "grouping": grouping,
            "method": f"{recipe.method}+tune" if recipe.tune else recipe.method,
            "stored": stored,
            "bits": width,
            "calibration_tokens": report["calibration"].get("tokens"),
            "bytes": size,
            "seconds": round(totals["seconds"], 2),
            **self._machine(),
        }

    def _quantized(self, entry: Entry, folder: Path) -> Json:
        """Return the report of a row's folder, which is made if it is not there."""
        assert entry.recipe is not None
        if not folder.exists():
            begun, warned = check_staging(folder, resume=True) is not None, Recorder(self._progress)
            quantize(
                self._model,
                folder,
                entry.recipe,
                replace(self._run, resume=begun, progress=warned),
            )
            for line in warned.take():
                self._progress.warn(f"{entry.title}: {line}")
        report = load_report(folder)
        for line in report["notices"]:  # most are those of other rows too
            if line not in self._noted:
                self._progress.note(f"{entry.title}: {line}")
                self._noted.add(line)
        return report

    def _machine(self) -> Row:
        place = device_of(self._run.device)
        return {
            "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
            "quantkit": __version__,
        }


def _as_if_stored(report: JsonView, src: Checkpoint) -> tuple[float, int]:
    """Count the bits of a weight and the bytes of all, as if codes, float16 scales and zero points
    were packed.
    """
    layers = report["layers"]
    size = sum((bits(layer) or 0.0) * weights(layer) for layer in layers)
    packed = {f"{layer['name']}.weight" for layer in layers}
    dense = sum(src.nbytes(name) for name in src.names() if name not in packed)
    return size / sum(map(weights, layers)), int(size) // 8 + dense


def labelled(sources: Sequence[str], option: str) -> dict[str, str]:
    """Return the names of texts, given as SOURCE or NAME=SOURCE. RecipeError if two
    have one name.
    """
    found: dict[str, str] = {}
    for each in sources:
        name, equals, source = each.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", name):
            name, source = Path(name_of_text(each)).stem, each
        if name in found:
            raise RecipeError(
                f"two texts are called {name}", "name them, like NAME=FILE", subject=Option(option)
            )
        found[name] = source
    return found


def _digest(facts: Any) -> str:
    return files.hash_of(json.dumps(facts, sort_keys=True).encode()).rpartition(":")[2][:12]
