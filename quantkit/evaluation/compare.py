"""Compare recipes: the rows that are asked for, the command of each, and the tables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from quantkit.evaluation.compare_rows import ROWS, Entry, Rows, labelled
from quantkit.evaluation.options import CompareOptions, listed
from quantkit.io import files
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress
from quantkit.recipes.files import load_named_or_scheme, merge
from quantkit.recipes.recipe import Recipe, from_mapping
from quantkit.reporting.recipe_table import UNQUANTIZED, Row, as_csv, as_markdown, page
from quantkit.reporting.summary import ShortRepr


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
    asked: CompareOptions,
    settings: Mapping[str, Any],
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
    settings: Mapping[str, Any],
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
    name = "quantize" if is_stored else "compare"
    return str(Command(name, model, Option("out", Words("OUT")), *words, *more))


def _pairs(settings: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield settings as KEY=VALUE."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and before + key != "overrides":
            yield from _pairs(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value if isinstance(value, str) else json.dumps(value)}"
