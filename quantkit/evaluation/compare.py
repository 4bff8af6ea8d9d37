"""Compare recipes: the rows that are asked for, the command of each, and the tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.origin import name_of
from quantkit.errors import (
    CheckpointError,
    Command,
    Option,
    QuantkitError,
    RecipeError,
    Words,
    about,
)
from quantkit.evaluation.recipe_rows import ROWS, Entry, Judges, Rows
from quantkit.evaluation.tasks import Exam
from quantkit.io import files
from quantkit.layouts import LAYOUTS
from quantkit.progress import Listener, Progress, reporter
from quantkit.recipes.files import load_named_or_scheme, merge
from quantkit.recipes.recipe import Recipe, from_mapping
from quantkit.reporting.recipe_table import UNQUANTIZED, Row, as_csv, as_markdown, page
from quantkit.reporting.summary import ShortRepr
from quantkit.text.sources import PACKAGED, name_of_text


@dataclass(frozen=True, repr=False)
class Comparison(ShortRepr):
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

    def _shown(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "rows": len(self.rows),
            "unfinished": self.unfinished,
            "failed": self.failed,
        }


def compare(
    model: str | Path,
    out: str | Path,
    *,
    recipes: str | Iterable[str],
    calib: str | Iterable[str] = PACKAGED,
    seeds: Iterable[int] = (0,),
    settings: Mapping[str, Any] | None = None,
    text: str | Iterable[str] = "wikitext2",
    window: int | None = None,
    tokens: int | None = None,
    tasks: str | Iterable[str] = (),
    data: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | Listener | None = None,
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
    progress, out = reporter(progress), Path(out)
    _require_folder(out)
    asked = {name: merge(load_named_or_scheme(name), settings or {}) for name in _listed(recipes)}
    sources, texts = labelled(_listed(calib), "calib"), labelled(_listed(text), "text")
    seeds = list(dict.fromkeys(seeds))
    if not asked or not sources or not seeds:
        raise RecipeError(
            "there is nothing to compare", "name a recipe, a calibration text and a seed"
        )
    entries = entries_of(asked, sources, seeds)
    exam = None
    if names := _listed(tasks):
        exam = Exam(names, data, shots=shots, limit=limit, batch_size=batch_size)
    judges = Judges(texts, {"window": window, "tokens": tokens}, exam)
    run: Any = {"device": device, "revision": revision, "trust_remote_code": trust_remote_code}
    rows = Rows(model, out, judges, progress, run)
    mine = [entry for entry in entries if rows.lacks(entry)]
    rows.require(mine)
    files.make_folder(out / ROWS, parents=True)
    failed: dict[str, str] = {}

    def write() -> list[Row]:
        made = ((entry, rows.row(entry, rows.finished(entries[0]))) for entry in entries)
        found = [
            {**row, "command": command(model, entry, sources, settings or {}, run)}
            for entry, row in made
            if row
        ]
        files.write_atomic(out / "compare.csv", as_csv(found).encode())
        files.write_atomic(out / "compare.md", as_markdown(found).encode())
        files.write_atomic(out / "compare.html", page(name_of(model), found).encode())
        return found

    for entry in progress.bar(mine, "rows", len(mine), each="row"):
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
    recipes: Mapping[str, Mapping[str, Any]], calib: Mapping[str, str], seeds: Sequence[int]
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


def _storable(recipe: Recipe) -> Recipe:
    """Return a recipe, without a layout if none holds its schemes."""

    def holds(name: str) -> bool:
        try:
            for scheme in recipe.schemes:
                LAYOUTS[name].check_scheme(scheme)
        except QuantkitError:
            return False
        return True

    if any(map(holds, LAYOUTS)):
        return recipe
    wide: Any = {"layout": None, "dense_dtype": "float32"}
    return replace(recipe, **wide)


def command(
    model: str | Path,
    entry: Entry,
    sources: Mapping[str, str],
    settings: Mapping[str, Any],
    run: Mapping[str, Any],
) -> str:
    """Return the command that quantizes as a row did. For a scheme without a layout, return the
    command that makes the row.
    """
    if entry.recipe is None:
        return ""
    recipe, seed = entry.recipe, entry.seed or 0
    pairs = list(
        _pairs(
            {
                key: value
                for key, value in settings.items()
                if recipe.calibrated or key != "calibration"
            }
        )
    )
    words: list[Words] = []
    if recipe.layout is None:
        words.append(Option("recipes", entry.name))
        words += [Option("seeds", seed)] if seed else []
    elif Path(entry.name).is_file() or ":" not in entry.name:
        words.append(Option("recipe", entry.name))
    else:
        form: Any = recipe.scheme
        words += [
            Option("format", form.format.name),
            Option("group_size", form.group_size or "channel"),
        ]
        words += [
            Option("method", recipe.method),
            *([] if form.symmetric else [Option("asym", True)]),
        ]
        words += [Option("prune", form.sparsity)] if form.sparsity else []
    words += [] if entry.calib is None else [Option("calib", sources[entry.calib])]
    pairs += [f"calibration.seed={seed}"] if seed and recipe.layout is not None else []
    words += [Words("--set", shlex.quote(pair)) for pair in pairs]
    words += [Option(name, run[name]) for name in ("revision", "trust_remote_code") if run[name]]
    made = "compare" if recipe.layout is None else "quantize"
    return str(Command(made, model, Option("out", Words("OUT")), *words))


def _pairs(settings: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield settings as KEY=VALUE."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and before + key != "overrides":
            yield from _pairs(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value if isinstance(value, str) else json.dumps(value)}"


def _listed(names: str | Iterable[str]) -> list[str]:
    found = names.split(",") if isinstance(names, str) else names
    return list(dict.fromkeys(name.strip() for name in found if name.strip()))


def _require_folder(out: Path) -> None:
    """Raise CheckpointError if a folder cannot be that of a table."""
    with files.guarded(out):
        if out.exists() and not (
            out.is_dir() and ((out / ROWS).is_dir() or not any(out.iterdir()))
        ):
            raise CheckpointError(
                "is there, and no table of quantkit compare", "name a new folder", subject=out
            )
