"""Proof of a checkpoint's bits: they are the quantized weights, and are unchanged.

It answers five questions:

1. Do the files have the hashes that the report lists, or without a report the tensors the digests
in their files? 2. Does every packed weight unpack, and pack again to the same bytes? 3. Does its
record have the digest that was taken at quantization? 4. Are its codes, scales and zeros, and all
dense tensors, equal to those of another checkpoint? 5. Does a GPU kernel get the same products from
the packed bytes as from the record?

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
from quantkit.checkpoint import report
from quantkit.checkpoint.provenance import damage
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.core.tensors import dtype_name, raw_bytes
from quantkit.errors import CheckpointError, Command, KernelError, Option, QuantkitError, Words
from quantkit.evaluation.verification import VERIFICATION, Row, Verification
from quantkit.evaluation.weight_check import Job, check_weight
from quantkit.io import files, model_folder
from quantkit.io.safetensors_files import damaged_tensors
from quantkit.kernels import proof
from quantkit.models.devices import device_of
from quantkit.progress import Clock, Progress

#: Files of an output that its report does not list, because people edit the card and the proof is
#: written later.
EDITED = ("README.md", VERIFICATION)
UNLISTED = (report.REPORT, *EDITED)
TEMPLATES = "additional_chat_templates"
UNREPORTED = f"no {report.REPORT}: {{}}, and no other file was compared with a recorded hash"
UNSEALED = (
    "codes unchecked: no report, no digests in the weight files, and no checkpoint to compare with"
)
UNMARKED = (
    f"{report.REPORT}: has no seal, so it was edited, or written by an early version: restore it, "
    "or pack again"
)


def verify(
    folder: Path,
    against: Path | None = None,
    progress: Progress | None = None,
    device: str = "auto",
    unsealed: bool = False,
) -> Verification:
    """Check every file and every packed weight of a quantized checkpoint, one weight in memory at a
    time.

    Everything is as for `quantkit.verify`.
    """
    progress = progress or Progress(quiet=True)
    folder = Path(folder)
    place = device_of(device)
    recorded: dict[str, Any] = {}
    failures: list[str] = []
    hashes: dict[str, str] = {}
    clock = Clock(torch.device("cpu"))
    try:
        recorded = report.load(folder)
        with clock.phase("files"):
            hashes, failures = _check_files(folder, recorded)
        loadable, notices = _unlisted(folder, recorded)
        failures += loadable
        src = _quantized(folder)
    except CheckpointError as error:
        if not failures:
            raise
        return Verification(None, (), hashes, tuple(dict.fromkeys([*failures, error.typed])), ())
    assert src.layout is not None
    checked = bool(recorded or against)
    if not recorded:
        with clock.phase("files"):
            hashes = src.hashes()
            sealed, changed = _check_digests([src.path / name for name in hashes if name != CONFIG])
        failures += changed
        checked |= sealed
        what = (
            "weights were compared with the digests in their files"
            if sealed
            else "the weight files have no digests"
        )
        notices.append(UNREPORTED.format(what))
    if not (checked or unsealed):
        failures.append(Words(f"{UNSEALED}: add", Option("unsealed", True), "to accept that"))
    unrun = _why_no_kernel(src, place, asked=device != "auto")
    other = None if against is None else _quantized(Path(against))
    if not src.modules():
        failures.append(f"{folder}: no packed weight found: the tensors are missing")
    runs_on = torch.device("cpu") if unrun else place
    with ThreadPoolExecutor(1) as pool:
        job = Job(src, other, runs_on, unrun is None, pool, Clock(runs_on, clock.seconds))
        rows = _check_weights(job, recorded, progress, failures, notices)
    if other is not None:
        with clock.phase("against"):
            failures += _dense_differences(src, other, progress)
    found = Verification(
        src.layout.NAME,
        tuple(rows),
        hashes,
        tuple(failures),
        (*src.notices, *notices),
        None if against is None else str(against),
        checked=checked,
        seconds=clock.seconds,
    )
    if unrun:
        return replace(found, unrun=unrun)
    return replace(
        found, kernel=src.layout.NAME, device=torch.cuda.get_device_name(place), bound=proof.BOUND
    )


def verify_files(folder: Path) -> tuple[list[str], list[str]]:
    """Check the files of a folder, dense or quantized, against its report; returns failures and
    notices.

    Without a report, weight files are checked against the digests in them. CheckpointError if they
    have none.
    """
    recorded = report.load(folder)
    if not recorded:
        sealed, failures = _check_digests(sorted(folder.glob("*.safetensors")))
        if not sealed:
            raise CheckpointError(
                f"has no {report.REPORT}, and no digests in its weight files, so nothing can be "
                "checked",
                "give a folder that quantkit wrote",
                subject=folder,
            )
        return failures, [
            UNREPORTED.format("weights were compared with the digests in their files")
        ]
    loadable, notices = _unlisted(folder, recorded)
    return _check_files(folder, recorded)[1] + loadable, notices


def _unlisted(folder: Path, recorded: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Name the files that a report lacks, without hidden files, card and proof: first files that a
    program may load or run, then others.
    """
    if not recorded:
        return [], []
    listed = {*recorded.get("files", {}), *UNLISTED}
    with files.guarded(folder):
        paths = [p.relative_to(folder) for p in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*"))]
        names = [
            f"{p.as_posix()}/" if (folder / p).is_dir() else p.as_posix()
            for p in paths
            if p.name[:1] != "."
        ]
    found: tuple[list[str], list[str]] = [], []
    for name in sorted(name for name in names if name not in listed and name != f"{TEMPLATES}/"):
        is_loadable = name.endswith((".safetensors", ".py", *model_folder.PICKLES))
        line = f"{report.valid_text(name)}: is not a file that {report.REPORT} lists"
        found[0 if is_loadable else 1].append(line)
    return found


def _why_no_kernel(src: Checkpoint, device: torch.device, asked: bool) -> str | None:
    """Give the reason why no kernel runs on `device`, or None; KernelError if a GPU was asked for
    by name.
    """
    assert src.layout is not None
    unrun = kernels.missing(src.layout.NAME, device)
    if unrun and device.type == "cuda" and asked and src.layout.NAME in kernels.MATMULS:
        raise KernelError(f"its weights cannot be multiplied on {device}", unrun, subject=src.path)
    return unrun


def _quantized(folder: Path) -> Checkpoint:
    src = Checkpoint(folder)
    if src.layout is None:
        raise CheckpointError(
            f"is {src.low_bit or 'dense'}, and packed weights are compared with packed ones",
            "give the quantized checkpoint",
            Words("compare with a dense model by", Command("eval kld")),
            subject=folder,
        )
    return src


def _check_files(folder: Path, recorded: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Hash every file that the report lists; returns the hashes and a line for each file that
    differs.
    """
    if not recorded:
        return {}, []
    listed = recorded.get("files")
    if not listed:
        return {}, [f"{report.REPORT}: lists no files, so it is damaged or not quantkit's"]
    found: dict[str, str] = {}
    failures = [] if report.SEAL in recorded else [UNMARKED]
    with ThreadPoolExecutor() as pool:
        hashed = {
            name: pool.submit(_hash, folder, name, expected) for name, expected in listed.items()
        }
    for name, expected in listed.items():
        try:
            if (
                PurePosixPath(name).name == name
                and name.isprintable()
                and not os.path.lexists(folder / name)
            ):
                raise CheckpointError(
                    f"is missing, {report.REPORT} lists it", "restore it", subject=name
                )
            found[name] = hashed[name].result()
        except QuantkitError as error:
            failures.append(error.typed)
        else:
            if found[name] != expected:
                failures.append(damage(name, folder / name, f"{report.REPORT} lists"))
    return found, failures


def _check_digests(paths: list[Path]) -> tuple[bool, list[str]]:
    """Compare the tensors of weight files with the digests in them.

    Returns whether all files have digests, and a line for each tensor that differs.
    """
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(damaged_tensors, map(Path.resolve, paths)))
    lines = [
        f"{path.name}: {tensor} does not have the digest that the file states, it was changed"
        for path, tensors in zip(paths, found, strict=True)
        for tensor in tensors or ()
    ]
    return bool(found) and None not in found, lines


def _dense_differences(src: Checkpoint, other: Checkpoint, progress: Progress) -> list[str]:
    """List the dense tensors that another checkpoint lacks, has in addition, or has with other
    bits.
    """
    packed = {f"{module}.weight" for one in (src, other) for module in one.modules()}
    mine, theirs = ([name for name in one.logical() if name not in packed] for one in (src, other))
    found = [f"{name}: is in {other.path} only" for name in theirs if name not in {*mine}]
    for name in progress.bar(mine, "compare", len(mine)):
        if name not in {*theirs}:
            found.append(f"{name}: is not in {other.path}")
            continue
        forms = [f"{list(one.shape(name))} {dtype_name(one.dtype(name))}" for one in (src, other)]
        if forms[0] != forms[1]:
            found.append(f"{name}: is {forms[0]}, and {forms[1]} in {other.path}")
        elif not torch.equal(raw_bytes(src.get(name)), raw_bytes(other.get(name))):
            found.append(f"{name}: its bits differ from those in {other.path}")
    return found


def _hash(folder: Path, name: str, like: object) -> str:
    return files.hash_of_file(model_folder.inside(folder.resolve(), name), like)


def _missing_weights(
    modules: list[str], layers: Mapping[str, Any] | None, other: Checkpoint | None
) -> list[str]:
    """List each module that the folder, the report or the other checkpoint lacks."""
    here = set(modules)
    found = []
    if layers is not None:
        found += [
            f"{name}: is in {report.REPORT} and has no packed weight"
            for name in layers
            if name not in here
        ]
        found += [
            f"{name}: has a packed weight that {report.REPORT} lacks"
            for name in modules
            if name not in layers
        ]
    if other is not None:
        there = set(other.modules())
        found += [
            f"{module}: is packed in {other.path} only"
            for module in other.modules()
            if module not in here
        ]
        found += [
            f"{module}: is not packed in {other.path}" for module in modules if module not in there
        ]
    return found


def _check_weights(
    job: Job,
    recorded: Mapping[str, Any],
    progress: Progress,
    failures: list[str],
    notices: list[str],
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
                "does not fit into the GPU's memory",
                "free some",
                Words("prove the bits alone with", Option("device", "cpu")),
                subject=module,
            ) from error
        rows.append(row)
        notices += [line for line in seen if line not in notices]
    failures += [Words(row.module, ":", row.problem) for row in rows if row.problem is not None]
    return rows
