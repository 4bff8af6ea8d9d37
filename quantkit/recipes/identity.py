"""The identity of a run: everything that decides its bytes.

A resumed run must have the same identity. If it has another, the message names each difference.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from quantkit.kernels import gptq
from quantkit.models.devices import is_fast_in_bfloat16
from quantkit.recipes.recipe import KEYS

#: Recipe keys that are on or off, and the options for True and False.
SWITCHES = {
    ("scheme", "symmetric"): ("--sym", "--asym"),
    ("signed",): ("--signed", "--unsigned"),
    ("pad",): ("--pad", "--no-pad"),
    ("fused_alike",): ("--fused-alike", "--no-fused-alike"),
    ("true_sequential",): ("--true-sequential", "--no-true-sequential"),
    ("gptq", "refit"): ("--refit", "--no-refit"),
    ("distill_codes",): ("--distill-codes", "--no-distill-codes"),
    ("output_aware",): ("--output-aware", "--no-output-aware"),
}
#: Every other recipe key that has an option.
OPTIONS = {path: f"--{name.replace('_', '-')}" for name, path in KEYS.items()} | {
    ("skip",): "--skip",
    ("overrides",): "--override",
}
#: The number of threads, which decides the bytes of calibrated runs on a CPU.
THREADS = "OMP_NUM_THREADS"
#: Who solves on a GPU: quantkit's kernels, or torch where they cannot be compiled. Ties between codes fall differently.
SOLVER = "solver"
#: The dtype of products while a CPU tunes by gradient: bfloat16 where that is fast.
PRODUCTS = "tuning_dtype"
#: The most source files that a message names.
MOST_FILES = 3


class Difference(NamedTuple):
    """Hold the clause that says what differs, the options that undo it, or else the words."""

    clause: str
    options: str = ""
    words: str = ""


def identity(report: Mapping[str, Any]) -> dict[str, Any]:
    """Collect everything that decides the bytes of a run, from what its report has before the work."""
    same = {key: report[key] for key in ("quantkit", "recipe", "recipe_sha256", "device", "compute_dtype")}
    same |= {name: report["environment"][name] for name in ("torch", "transformers")}
    if report["device"] == "cpu" and report["calibration"]:
        # The libraries that compute a model's forward may share out a sum among the threads (RELIABILITY 1.4).
        same[THREADS] = report["environment"]["threads"]
        if any(report["recipe"].get(key) for key in ("tune", "output_aware", "distill")):
            same[PRODUCTS] = "bfloat16" if is_fast_in_bfloat16(torch.device("cpu")) else "float32"
    elif report["calibration"]:
        same[SOLVER] = "kernels" if gptq.runs_on(torch.device("cuda")) else "torch"
    return {**same, "source": report["source"]["files"], "calibration": report["calibration"].get("sha256")}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Say how `before` differs from `now`, and how to undo it; None if the two are the same.

    Keys that `now` lacks are not compared. `before` may be of an older version, whose journals lack the recipe.
    """
    found = list(_differences(before, now))
    if not found:
        return None
    options = " ".join(each.options for each in found if each.options)
    words = list(dict.fromkeys(each.words for each in found if each.words))
    remedy = " and ".join([*([f"use {options}"] if options else []), *words])
    return f"{', '.join(each.clause for each in found)}: {remedy}, or {'use ' if words else ''}--overwrite"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for name in ("quantkit", "torch", "transformers"):
        if name in now and before.get(name) != now[name]:
            yield Difference(_was(name, before.get(name), now[name]), words=f"install {name} {before.get(name)}")
    same_recipe = before.get("recipe_sha256") == now["recipe_sha256"]
    if not same_recipe:
        found = list(_recipes(before["recipe"], now["recipe"])) if "recipe" in before else []
        yield from found or [Difference("the recipe was another", words="use the options of then")]
    if before.get("device") != now["device"]:
        was = before.get("device")
        undone = ("--device cpu", "") if was == "cpu" else ("", f"run on {was}")
        yield Difference(_was("device", was, now["device"]), *undone)
    elif before.get("compute_dtype") != now["compute_dtype"]:  # the dtype follows the device
        clause = _was("the compute dtype", before.get("compute_dtype"), now["compute_dtype"])
        yield Difference(clause, words="restore the source's config.json")
    elif same_recipe and THREADS in now and before.get(THREADS) != now[THREADS]:
        was = before.get(THREADS, "not recorded")
        remedy = f"set {THREADS}={was}" if THREADS in before else "run with the threads of then"
        yield Difference(_was(THREADS, was, now[THREADS]), words=remedy)
    elif same_recipe and SOLVER in now and before.get(SOLVER, "torch") != now[SOLVER]:
        clause = _was("the solver", before.get(SOLVER, "torch"), now[SOLVER])
        yield Difference(clause, words="install or remove CuPy as then")
    elif same_recipe and PRODUCTS in now and before.get(PRODUCTS) != now[PRODUCTS]:
        clause = _was("the dtype of tuning", before.get(PRODUCTS), now[PRODUCTS])
        yield Difference(clause, words="continue on a CPU like that one")
    if "source" in now and before.get("source") != now["source"]:
        yield _files(before.get("source") or {}, now["source"])
    if same_recipe and before.get("calibration") != now["calibration"]:  # another recipe draws another text
        yield Difference("the calibration text or the tokenizer has changed", words="restore the text")


def _recipes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    if ("layout" in before) != ("layout" in now):  # the options of prune have no layout
        command = "quantize" if "layout" in before else "prune"
        yield Difference(f"the command was {command}", words=f"use quantkit {command}")
        return
    old, new = _flat(before), _flat(now)
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) == new.get(path) or (path == ("prune",) and (path in old) != (path in new)):
            continue  # the rule for 2:4 masks comes and goes with 2:4
        was, now_is = old.get(path), new.get(path)
        if path == ("scheme", "symmetric"):
            name, was, now_is = "asym", not was, not now_is
        else:
            name = OPTIONS.get(path, path[-1] if path in SWITCHES else ".".join(path)).removeprefix("--")
        if path in SWITCHES:  # a recipe may lack a key that is off
            was, now_is = bool(was), bool(now_is)
        clause = _was(name.replace("_", "-"), _shown(was), _shown(now_is))
        yield Difference(clause, *_undone(path, old.get(path)))


def _undone(path: tuple[str, ...], value: Any) -> tuple[str, str]:
    """Return the options that give a recipe key its value, or the words if there are none."""
    if path in SWITCHES:
        return SWITCHES[path][0 if value else 1], ""
    if path not in OPTIONS:
        return "", f"set {'.'.join(path)} to {value} in the recipe"
    values = [f"{k}={v}" for k, v in value.items()] if isinstance(value, Mapping) else value
    values = values if isinstance(values, list) else [] if values is None else [values]
    values = [each for each in values if (path, each) != (("skip",), "lm_head")]  # which is always skipped
    if not values:
        return "", f"drop {OPTIONS[path]}"
    return " ".join(f"{OPTIONS[path]} {shlex.quote(str(each))}" for each in values), ""


def _flat(recipe: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return a recipe's values by their path. Overrides are one value, and so are several calibration texts."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and key != "overrides":
            found |= {(key, name): inner for name, inner in value.items()}
        else:
            found[key,] = value
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return _shown([f"{key}={each}" for key, each in value.items()])
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _was(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before} and is now {now}"


def _files(before: Mapping[str, str], now: Mapping[str, str]) -> Difference:
    found = [f"{name} is missing" for name in before if name not in now]
    found += [f"{name} is new" for name in now if name not in before]
    found += [f"{name} has changed" for name in now if name in before and before[name] != now[name]]
    more = f" (and {len(found) - MOST_FILES} more files)" if len(found) > MOST_FILES else ""
    return Difference(f"of the source {', '.join(found[:MOST_FILES])}{more}", words="restore the source")
