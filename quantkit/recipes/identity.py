"""The identity of a run: everything that decides its bytes.

A resumed run must have the same identity. If the identity differs, the message names each
difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from quantkit.errors import Command, Option, Setting, Words
from quantkit.io.staging import JOURNAL, read_journal
from quantkit.kernels import gptq
from quantkit.keys import Key, keys_of, shown
from quantkit.models.weights import is_fast_in_bfloat16
from quantkit.names import JsonView
from quantkit.recipes.schema import RecipeKeys

#: The number of threads, which decides the bytes of calibrated runs on a CPU.
THREADS = "OMP_NUM_THREADS"
#: Who solves on a GPU: quantkit's kernels, or torch where they cannot be compiled. Ties between
#: codes fall differently.
SOLVER = "solver"
#: The dtype of products while a CPU tunes by gradient: bfloat16 where that is fast.
PRODUCTS = "tuning_dtype"
#: The date that chat templates write. A resumed run takes it from the journal.
DATE = "date"
#: The most source files that a message names.
MOST_FILES = 3


class Difference(NamedTuple):
    """A difference as a clause, with the options or the advice that undo it."""

    clause: str
    options: str = ""
    words: str = ""


def identity(report: JsonView) -> dict[str, Any]:
    """Collect everything that decides the bytes of a run, from its report before the work."""
    same = {
        key: report[key]
        for key in ("quantkit", "recipe", "recipe_sha256", "device", "compute_dtype")
    }
    same |= {name: report["environment"][name] for name in ("torch", "transformers")}
    if report["device"] == "cpu" and report["calibration"]:
        # The libraries that compute a model's forward may share out a sum among the threads
        # (RELIABILITY 1.4).
        same[THREADS] = report["environment"]["threads"]
        if report["recipe"].get("tune"):
            same[PRODUCTS] = "bfloat16" if is_fast_in_bfloat16(torch.device("cpu")) else "float32"
    elif report["calibration"]:
        same[SOLVER] = "kernels" if gptq.runs_on(torch.device("cuda")) else "torch"
    if DATE in report["calibration"]:
        same[DATE] = report["calibration"][DATE]
    return {
        **same,
        "source": report["source"]["files"],
        "calibration": report["calibration"].get("sha256"),
    }


def date_of(partial: Path) -> str | None:
    """Return the date that chat templates write in an interrupted run; None if they write none."""
    lines = read_journal(partial / JOURNAL)
    return cast("str | None", lines[0].get(DATE) if lines else None)


def difference(
    before: JsonView, now: JsonView, keys: Sequence[Key] = keys_of(RecipeKeys)
) -> Words | None:
    """Say how `before` differs from `now`, and how to undo it; None if the two are the same.

    Keys that `now` lacks are not compared. `before` may be of an older version, whose journals lack
    the recipe.
    """
    found = list(_differences(before, now, keys))
    if not found:
        return None
    options = [each.options for each in found if each.options]
    words = list(dict.fromkeys(each.words for each in found if each.words))
    remedies = [*([Words("use", *options)] if options else []), *words]
    remedy = [part for each in remedies for part in ("and", each)][1:]
    overwrite = Words(*(["use"] if words else []), Option("overwrite", True))
    return Words(", ".join(each.clause for each in found), ":", *remedy, ", or", overwrite)


def _differences(before: JsonView, now: JsonView, keys: Sequence[Key]) -> Iterator[Difference]:
    for name in ("quantkit", "torch", "transformers"):
        if name in now and before.get(name) != now[name]:
            yield Difference(
                _was(name, before.get(name), now[name]), words=f"install {name} {before.get(name)}"
            )
    same_recipe = before.get("recipe_sha256") == now["recipe_sha256"]
    if not same_recipe:
        found = list(_recipes(before["recipe"], now["recipe"], keys)) if "recipe" in before else []
        yield from found or [Difference("the recipe was another", words="use the options of then")]
    if before.get("device") != now["device"]:
        was = before.get("device")
        undone = (Option("device", "cpu"), "") if was == "cpu" else ("", f"run on {was}")
        yield Difference(_was("device", was, now["device"]), *undone)
    elif before.get("compute_dtype") != now["compute_dtype"]:  # the dtype follows the device
        yield Difference(
            _was("the compute dtype", before.get("compute_dtype"), now["compute_dtype"]),
            words="restore the source's config.json",
        )
    elif same_recipe and THREADS in now and before.get(THREADS) != now[THREADS]:
        was = before.get(THREADS, "not recorded")
        remedy = f"set {THREADS}={was}" if THREADS in before else "run with the threads of then"
        yield Difference(_was(THREADS, was, now[THREADS]), words=remedy)
    elif same_recipe and SOLVER in now and before.get(SOLVER, "torch") != now[SOLVER]:
        yield Difference(
            _was("the solver", before.get(SOLVER, "torch"), now[SOLVER]),
            words="install or remove CuPy as then",
        )
    elif same_recipe and PRODUCTS in now and before.get(PRODUCTS) != now[PRODUCTS]:
        yield Difference(
            _was("the dtype of tuning", before.get(PRODUCTS), now[PRODUCTS]),
            words="continue on a CPU like that one",
        )
    if "source" in now and before.get("source") != now["source"]:
        yield _files(before.get("source") or {}, now["source"])
    if (
        same_recipe and before.get("calibration") != now["calibration"]
    ):  # another recipe draws another text
        yield Difference(
            "the calibration text or the tokenizer has changed", words="restore the text"
        )


def _recipes(before: JsonView, now: JsonView, keys: Sequence[Key]) -> Iterator[Difference]:
    if ("layout" in before) != ("layout" in now):  # the options of prune have no layout
        command = Command("quantize" if "layout" in before else "prune")
        yield Difference(f"the command was {command.parts[0]}", words=Words("use", command))
        return
    old, new = _flat(before), _flat(now)
    by_path = {key.path: key for key in keys}
    for path in dict.fromkeys([*old, *new]):
        key = by_path.get(path, Key("", level="key", path=path))
        usual = key.default if key.may_lack else None
        was, is_now = old.get(path, usual), new.get(path, usual)
        if key.is_switch:  # older recipes lack some
            was, is_now = bool(was) != key.negated, bool(is_now) != key.negated
        if was == is_now or (path == ("prune",) and (path in old) != (path in new)):
            continue  # the rule for 2:4 masks comes and goes with 2:4
        name = key.name if key.level == "key" else key.keyword.replace("_", "-")
        yield Difference(_was(name, shown(was), shown(is_now)), *_undone(key, was))


def _undone(key: Key, value: Any) -> tuple[str, str]:
    """Return the options that give a key its value, or the words if there are none."""
    if key.level == "key":
        return "", f"set {key.name} to {value} in the recipe"
    values = [f"{k}={v}" for k, v in value.items()] if isinstance(value, Mapping) else value
    values = values if isinstance(values, list) else [] if values is None else [values]
    values = [
        each for each in values if (key.path, each) != (("skip",), "lm_head")
    ]  # which is always skipped
    if not values:
        return "", Words("drop", Setting(key.keyword))
    return Words(*(Setting(key.keyword, each) for each in values)), ""


def _flat(recipe: JsonView) -> dict[tuple[str, ...], Any]:
    """Return a recipe's values by their path. Overrides are one value, and so are several
    calibration texts.
    """
    found: dict[tuple[str, ...], Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and key != "overrides":
            found |= {(key, name): inner for name, inner in value.items()}
        else:
            found[key,] = value
    return found


def _was(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before} and is now {now}"


def _files(before: Mapping[str, str], now: Mapping[str, str]) -> Difference:
    found = [f"{name} is missing" for name in before if name not in now]
    found += [f"{name} is new" for name in now if name not in before]
    found += [f"{name} has changed" for name in now if name in before and before[name] != now[name]]
    more = f" (and {len(found) - MOST_FILES} more files)" if len(found) > MOST_FILES else ""
    return Difference(
        f"of the source {', '.join(found[:MOST_FILES])}{more}", words="restore the source"
    )
