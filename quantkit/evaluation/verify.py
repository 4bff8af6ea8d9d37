"""Proof that a checkpoint holds what was quantized, bit by bit.

It answers five questions:

1. Do the files have the hashes that the report lists?
2. Does every packed weight unpack, and pack again to the same bytes?
3. Does its record have the digest that was taken at quantization?
4. Are its codes, scales and zeros equal to those of another checkpoint?
5. Does a kernel on a GPU multiply with the packed bytes as with the record?

A damaged weight fails its own row, and the other weights are still checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from quantkit import kernels
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, KernelError, QuantkitError
from quantkit.evaluation.verification import VERIFICATION, Row, Verification
from quantkit.evaluation.weight_check import Job, check_weight
from quantkit.io import files, hashing, model_folder
from quantkit.kernels import proof
from quantkit.models.devices import device_of
from quantkit.progress import Clock, Progress
from quantkit.reporting import report

#: Files of an output that its report does not list: people edit the card, and the proof is written later.
EDITED = ("README.md", VERIFICATION)
UNLISTED = (report.REPORT, *EDITED)
TEMPLATES = "additional_chat_templates"
UNREPORTED = f"no {report.REPORT}: the files were not compared with recorded hashes, nor weights with digests"


def verify(
    folder: Path, against: Path | None = None, progress: Progress | None = None, device: str = "auto"
) -> Verification:
    """Check every file and every packed weight of a quantized checkpoint, one weight in memory at a time.

    `against` is a checkpoint to compare with. `device` "auto" takes a GPU if it can run the kernels.

    CheckpointError if `folder` or `against` is no readable quantized checkpoint; a file that changed since it was
    written is a failure instead. KernelError if a kernel fails, or if a GPU asked for by name cannot run kernels.
    """
    progress = progress or Progress(quiet=True)
    folder = Path(folder)
    place = device_of(device)
    recorded: dict[str, Any] = {}
    extra: list[str] = []
    failures: list[str] = []
    hashes: dict[str, str] = {}
    clock = Clock(torch.device("cpu"))
    try:
        recorded = report.load(folder)
        with clock.phase("files"):
            hashes, failures = _check_files(folder, recorded)
        extra = extra_files(folder, recorded)
        failures += [_unlisted(name) for name in extra if is_loadable(name)]
        src = _quantized(folder)
    except CheckpointError as error:
        if not failures:
            raise
        return Verification(None, (), hashes, tuple(dict.fromkeys([*failures, str(error)])), ())
    assert src.layout is not None
    notices = [_unlisted(name) for name in extra if not is_loadable(name)]
    if not recorded:
        with clock.phase("files"):
            hashes = src.hashes()
        notices.append(UNREPORTED)
    unrun = _why_no_kernel(src, place, asked=device != "auto")
    other = None if against is None else _quantized(Path(against))
    if not src.modules():
        failures.append(f"{folder}: no packed weight found: the tensors are missing")
    runs_on = torch.device("cpu") if unrun else place
    with ThreadPoolExecutor(1) as pool:
        job = Job(src, other, runs_on, unrun is None, pool, Clock(runs_on, clock.seconds))
        rows = _check_weights(job, recorded, progress, failures, notices)
    found = Verification(
        src.layout.NAME,
        tuple(rows),
        hashes,
        tuple(failures),
        (*src.notices, *notices),
        None if against is None else str(against),
        seconds=clock.seconds,
    )
    if unrun:
        return replace(found, unrun=unrun)
    return replace(found, kernel=src.layout.NAME, device=torch.cuda.get_device_name(place), bound=proof.BOUND)


def verify_files(folder: Path) -> tuple[list[str], list[str]]:
    """Check the files of an output, dense or quantized, against its report; returns failures and notices.

    CheckpointError if the folder has no report.
    """
    recorded = report.load(folder)
    if not recorded:
        raise CheckpointError(f"{folder}: has no {report.REPORT}: give a folder that quantkit wrote")
    extra = extra_files(folder, recorded)
    failures = _check_files(folder, recorded)[1] + [_unlisted(name) for name in extra if is_loadable(name)]
    return failures, [_unlisted(name) for name in extra if not is_loadable(name)]


def extra_files(folder: Path, recorded: Mapping[str, Any]) -> list[str]:
    """List what a folder has and its report lacks, without hidden files, card and proof; nothing without a report."""
    if not recorded:
        return []
    listed = {*recorded.get("files", {}), *UNLISTED}
    with files.guarded(folder):
        found = [p.relative_to(folder) for p in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*"))]
        names = [f"{p.as_posix()}/" if (folder / p).is_dir() else p.as_posix() for p in found if p.name[:1] != "."]
    return sorted(name for name in names if name not in listed and name != f"{TEMPLATES}/")


def is_loadable(name: str) -> bool:
    """Return True for a file that a program may load or run beside those that the report lists."""
    return name.endswith((".safetensors", ".py", *model_folder.PICKLES))


def _unlisted(name: str) -> str:
    return f"{report.valid_text(name)}: is not a file that {report.REPORT} lists"


def _why_no_kernel(src: Checkpoint, device: torch.device, asked: bool) -> str | None:
    """Give the reason why no kernel runs on `device`, or None; KernelError if a GPU was asked for by name."""
    assert src.layout is not None
    unrun = kernels.missing(src.layout.NAME, device)
    if unrun and device.type == "cuda" and asked and src.layout.NAME in kernels.MATMULS:
        raise KernelError(f"{src.path}: its weights cannot be multiplied on {device}: {unrun}")
    return unrun


def _quantized(folder: Path) -> Checkpoint:
    src = Checkpoint(folder)
    if src.layout is None:
        raise CheckpointError(
            f"{folder}: is {src.low_bit or 'dense'}, and packed weights are compared with packed ones: give the "
            "quantized checkpoint, or compare with a dense model by quantkit eval kld"
        )
    return src


def _check_files(folder: Path, recorded: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Hash every file that the report lists; returns the hashes and a line for each file that differs."""
    if not recorded:
        return {}, []
    listed = recorded.get("files")
    if not listed:
        return {}, [f"{report.REPORT}: lists no files, so it is damaged or not quantkit's"]
    found, failures = {}, []
    with ThreadPoolExecutor() as pool:
        hashed = {name: pool.submit(_hash, folder, name, expected) for name, expected in listed.items()}
    for name, expected in listed.items():
        try:
            if PurePosixPath(name).name == name and name.isprintable() and not os.path.lexists(folder / name):
                raise CheckpointError(f"{name}: is missing, {report.REPORT} lists it: restore it")
            found[name] = hashed[name].result()
        except QuantkitError as error:
            failures.append(str(error))
        else:
            if found[name] != expected:
                failures.append(f"{name}: its hash is not the one that {report.REPORT} lists, the file was changed")
    return found, failures


def _hash(folder: Path, name: str, like: object) -> str:
    return hashing.hash_of_file(model_folder.inside(folder.resolve(), name), like)


def _missing_weights(modules: list[str], layers: Mapping[str, Any] | None, other: Checkpoint | None) -> list[str]:
    """List each module that the folder, the report or the other checkpoint lacks."""
    here = set(modules)
    found = []
    if layers is not None:
        found += [
            f"{module}: is in {report.REPORT} and has no packed weight" for module in layers if module not in here
        ]
        found += [
            f"{module}: has a packed weight that {report.REPORT} lacks" for module in modules if module not in layers
        ]
    if other is not None:
        there = set(other.modules())
        found += [f"{module}: is packed in {other.path} only" for module in other.modules() if module not in here]
        found += [f"{module}: is not packed in {other.path}" for module in modules if module not in there]
    return found


def _check_weights(
    job: Job, recorded: Mapping[str, Any], progress: Progress, failures: list[str], notices: list[str]
) -> list[Row]:
    """Check each packed weight; adds to `failures`, and each notice once to `notices`."""
    layers = {layer["name"]: layer for layer in recorded.get("layers", [])}
    modules = job.src.modules()
    failures += _missing_weights(modules, layers if recorded else None, job.other)
    rows = []
    for module in progress.bar(modules, "verify", len(modules)):
        try:
            with job.clock.phase("rest"):  # the phases inside are counted separately
                row, seen = check_weight(job, module, layers.get(module))
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{module}: does not fit into the GPU's memory: free some, or prove the bits alone with --device cpu"
            ) from error
        rows.append(row)
        notices += [line for line in seen if line not in notices]
    failures += [f"{row.module}: {row.problem}" for row in rows if row.problem is not None]
    return rows
