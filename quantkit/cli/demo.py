"""The command demo: quantize three ways, repack, verify, compare perplexities, without network or
GPU.

The model comes with the package; `demo_model/README.md` names its training text. The demo's text is
Python's own documentation strings. Some modules' strings calibrate, others' are for evaluation.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from quantkit.cli import options, show
from quantkit.cli.process import emit
from quantkit.core.units import format_bytes
from quantkit.errors import CheckpointError
from quantkit.names import Json
from quantkit.progress import QUIET, Progress

MODEL = Path(__file__).parents[1] / "demo_model"

CALIBRATION = """
    argparse bdb calendar cmd codecs collections collections.abc concurrent.futures configparser
    contextlib copy csv datetime decimal difflib dis doctest email.message enum fileinput fractions
    ftplib functools gettext glob gzip heapq html.parser http.client http.cookiejar imaplib inspect
    io ipaddress json logging mailbox numbers
"""
EVALUATION = """
    pathlib pickle random re statistics tempfile textwrap traceback urllib.request zipfile
"""
#: Shorter documentation strings, in characters, are left out.
SHORTEST = 100
SAMPLES = 128
WINDOW = 512

#: Columns of the table.
DEMO = ("format", "method", "layout", "bits/weight", "size", "perplexity", "change")

CALIBRATED_ON, EVALUATED_ON = "calibration.jsonl", "evaluation.txt"

#: Folder -> options of `quantkit.quantize`; PACKED is made of the second.
RECIPES: dict[str, Json] = {
    "int4-rtn": {"format": "int4", "method": "rtn"},
    "int4-gptq": {"format": "int4", "method": "gptq"},
    "fp6-gptq": {"format": "fp6", "method": "gptq"},
}
SOURCE, PACKED = "int4-gptq", "int4-gptq-marlin"


@options.command("demo", "quantkit demo")
@click.option("-o", "--out", type=options.PATH, help="Keep the checkpoints in this new folder.")
def demo(out: Path | None, as_json: bool, progress: Progress) -> None:
    """Do the whole job in a minute.

    Quantize the small model that comes with quantkit, pack, verify, and compare perplexities: no
    network, no GPU."""
    found = run(out, progress)
    emit(show.as_json(found) if as_json else format_demo(found, progress))


def run(out: Path | None = None, progress: Progress = QUIET) -> Json:
    """Do the main job on the packaged model; return the `rows` of the comparison and the `protocol`
    of perplexities.

    The checkpoints stay in the new folder `out`; without it they are made in a temporary one.
    Raises a CheckpointError if `out` exists, if Python has no documentation strings, or if a
    checkpoint does not verify.
    """
    from quantkit.io.staging import publish, staging

    os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's client reads it at its first import
    if out is None:
        with tempfile.TemporaryDirectory(prefix="quantkit-demo-") as folder:
            _write_texts(Path(folder))
            return _run(Path(folder), progress)
    with staging(out, resume=None) as partial:
        _write_texts(partial)
        publish(partial, out)
    return _run(out, progress)


def texts() -> tuple[list[str], str]:
    """Collect the calibration documents, one a class or function, and the evaluation text. They
    share no string.
    """
    first = list(_documents(CALIBRATION))
    seen = {string for strings in first for string in strings}
    second = [
        string for strings in _documents(EVALUATION) for string in strings if string not in seen
    ]
    if not first or not second:
        raise CheckpointError("this Python runs without documentation strings: run it without -OO")
    return ["\n\n".join(strings) for strings in first], "\n\n".join(second)


def _write_texts(folder: Path) -> None:
    from quantkit.io import files

    documents, text = texts()
    files.write_atomic(
        folder / CALIBRATED_ON, "".join(json.dumps({"text": d}) + "\n" for d in documents).encode()
    )
    files.write_atomic(folder / EVALUATED_ON, text.encode())


def _run(folder: Path, progress: Progress) -> Json:
    from quantkit import api

    calibration, evaluation = folder / CALIBRATED_ON, folder / EVALUATED_ON
    for name, recipe in RECIPES.items():
        progress.note(f"quantize  {name}")
        options = {**recipe, "calib": str(calibration), "samples": SAMPLES, "max_length": WINDOW}
        api.quantize(
            MODEL,
            folder / name,
            device="cpu",
            progress=progress if progress.verbose else None,
            **options,
        )
    progress.note(f"pack      {SOURCE} -> {PACKED}")
    api.pack(folder / SOURCE, folder / PACKED, "marlin")
    methods = {
        **{name: options["method"] for name, options in RECIPES.items()},
        PACKED: "as above, repacked",
    }
    for name in methods:
        progress.note(f"verify    {name}")
        proof = api.verify(folder / name, folder / SOURCE if name == PACKED else None)
        if not proof.ok:
            raise CheckpointError(f"{name}: does not verify: {proof.failures[0]}")
    rows = [_row(MODEL, "as it is", evaluation, None, progress)]
    for name in ("int4-rtn", SOURCE, PACKED, "fp6-gptq"):
        rows.append(_row(folder / name, methods[name], evaluation, rows[0], progress))
    protocol = (
        f"perplexity on the documentation strings of {len(EVALUATION.split())} Python modules, "
        f"windows and stride {WINDOW}; calibrated on {SAMPLES} classes and functions of "
        f"{len(CALIBRATION.split())} other modules. The model was trained on the documentation of "
        "other modules too, not on the evaluated ones'."
    )
    return {"rows": rows, "protocol": protocol}


def _row(folder: Path, method: str, text: Path, before: Json | None, progress: Progress) -> Json:
    from quantkit import api
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.pipeline.inspection import describe

    progress.note(f"evaluate  {folder.name}")
    found = describe(Checkpoint(folder))
    ppl = api.eval_ppl(folder, data=str(text), window=WINDOW, device="cpu", progress=progress)
    bits = found["bits_per_weight"]
    return {
        "format": next(iter(found["schemes"]), found["dtype"]),
        "method": method,
        "layout": found["layout"] or "-",
        "bits_per_weight": 16.0 if bits is None else bits,
        "bytes": sum(found["files"].values()),
        "perplexity": ppl.perplexity,
        "change": None if before is None else ppl.perplexity / before["perplexity"] - 1,
    }


def _documents(modules: str) -> Iterator[list[str]]:
    """Yield the documentation strings of each module, class with its methods, and function, in
    their order there.
    """
    for name in modules.split():
        module = import_module(name)
        yield from filter(None, [_strings([module])])
        for value in vars(module).values():
            if getattr(value, "__module__", None) == name:
                members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
                yield from filter(None, [_strings(members)])


def _strings(objects: list[Any]) -> list[str]:
    documented = (
        o for o in objects if isinstance(o, ModuleType | property | type) or inspect.isroutine(o)
    )
    strings = [inspect.cleandoc(o.__doc__) for o in documented if isinstance(o.__doc__, str)]
    return [string for string in strings if len(string) >= SHORTEST]


def format_demo(found: Mapping[str, Any], progress: Progress) -> str:
    """Format the table of the demo and its protocol."""
    changes = [
        f"{row['format']} {row['method']} {row['perplexity']:.3f} ({100 * row['change']:+.2f} %)"
        for row in found["rows"][1:]
    ]
    line = f"verified; perplexity {found['rows'][0]['perplexity']:.3f}, {', '.join(changes)}"
    rows = [
        (
            row["format"],
            row["method"],
            row["layout"],
            f"{row['bits_per_weight']:.3f}",
            format_bytes(row["bytes"]),
            f"{row['perplexity']:.3f}",
            "" if row["change"] is None else f"{100 * row['change']:+.2f} %",
        )
        for row in found["rows"]
    ]
    return show.of_level(progress, line, f"{show.table(DEMO, rows)}\n\n{found['protocol']}")
