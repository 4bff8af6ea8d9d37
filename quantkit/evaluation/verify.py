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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from quantkit import kernels
from quantkit.checkpoint import report
from quantkit.checkpoint.origin import damage
from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.core.formats import dtype_name, raw_bytes
from quantkit.errors import (
    CheckpointError,
    Command,
    KernelError,
    Option,
    QuantkitError,
    Words,
    printable,
)
from quantkit.evaluation.engine_check import EngineProof, prove_engine, require_engine
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.weight_check import Job, Row, check_weights, only_in_one
from quantkit.io import files, json_files, model_folder
from quantkit.io.safetensors_files import damaged_tensors
from quantkit.kernels import proof
from quantkit.models.outside import unexplained
from quantkit.models.weights import device_of
from quantkit.names import VERIFICATION, Json
from quantkit.progress import QUIET, Clock, Progress
from quantkit.reporting.summary import short_repr

#: Files of an output that its report does not list, because people edit the card and the proof is
#: written later.
UNLISTED = (report.REPORT, "README.md", VERIFICATION)
TEMPLATES = "additional_chat_templates/"
UNMARKED = (
    f"{report.REPORT}: has no seal, so it was edited, or written by an early version: restore it, "
    "or pack again"
)


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of `verify`: a row for each weight, the hash of each file, failures and notices as
    lines of text.

    `kernel` is the layout whose kernels multiplied on `device`, and `bound` limits their `errors`.
    If `kernel` is None, no kernel ran, and `unrun` gives the reason. The codes are `checked` if a
    report, digests in the weight files or another checkpoint could be compared with. `seconds` has
    the time of each phase. `engine` is None if none was asked.
    """

    layout: str | None
    rows: tuple[Row, ...]
    files: dict[str, str]
    failures: tuple[str, ...]
    notices: tuple[str, ...]
    against: str | None = None
    kernel: str | None = None
    device: str = "cpu"
    bound: float | None = None
    checked: bool = True
    unrun: str = "nothing could be multiplied"
    seconds: Mapping[str, float] = field(default_factory=dict)
    engine: EngineProof | None = None

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.failures

    @property
    def weights(self) -> int:
        """The number of elements whose codes were unpacked, repacked and compared."""
        return sum(prod(row.shape) for row in self.rows)

    @property
    def multiplied(self) -> int:
        """The number of elements that a kernel reproduced one by one."""
        return sum(prod(row.shape) for row in self.rows if row.product)

    @property
    def errors(self) -> list[float]:
        """The largest relative error of each weight that a kernel multiplied."""
        return [row.error for row in self.rows if row.error is not None]

    @property
    def note(self) -> str:
        """One line about the kernels, and the engine."""
        asked = "" if self.engine is None else f"; {self.engine.note}"
        if self.kernel is None:
            return f"no kernel ran, the bits alone are proved: {self.unrun}{asked}"
        return (
            f"the {self.kernel} kernels on {self.device} gave back {self.multiplied} weights "
            "exactly, products are off "
            f"by {max(self.errors, default=0.0):.1e} at most (bound {self.bound:g}){asked}"
        )

    def __repr__(self) -> str:
        facts = self.to_dict()
        shown = (
            "ok",
            "checked",
            "layout",
            "linears",
            "weights",
            "note",
            "against",
            "failures",
            "notices",
        )
        return short_repr(self, **{name: facts[name] for name in shown})

    def to_dict(self) -> Json:
        """Build the content of verify.json."""
        return {
            "ok": self.ok,
            "checked": self.checked,
            "layout": self.layout,
            "linears": len(self.rows),
            "weights": self.weights,
            "kernel": self.kernel,
            "device": self.device,
            "note": self.note,
            "multiplied": self.multiplied,
            "errors": self.errors,
            "bound": self.bound,
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "against": self.against,
            "failures": list(self.failures),
            "notices": list(self.notices),
            "engine": None if self.engine is None else asdict(self.engine),
            "hashes": self.files,
            "rows": [asdict(row) for row in self.rows],
        }


def write(verification: Verification, folder: Path) -> Path:
    """Write verify.json into the folder of the checkpoint, and return its path."""
    path = Path(folder) / VERIFICATION
    given = [folder, *([Path(verification.against)] if verification.against else [])]
    names = {
        one: each.resolve().name
        for each in given
        for one in (each.resolve(), each.absolute(), each)
    }
    stated = json_files.without_folders(verification.to_dict(), names)
    files.write_atomic(path, json_files.dump_json(stated))
    return path


def verify(
    folder: Path,
    against: str | Path | None = None,
    asked: VerifyOptions = VerifyOptions(),
    progress: Progress = QUIET,
) -> Verification:
    """Check every file and every packed weight of a quantized checkpoint, one weight in memory at a
    time, then compare an engine with it, if one is named.

    An engine that does not run is a failure. Everything else is as for `quantkit.verify`.
    """
    require_engine(folder, asked)
    found, engine = _check_bits(folder, against, asked, progress), asked.engine
    if engine is None:
        return found
    if found.failures:
        return replace(
            found,
            notices=(
                *found.notices,
                f"{engine} was not started, because the folder failed already",
            ),
        )
    clock = Clock(torch.device("cpu"), dict(found.seconds))
    try:
        proof = prove_engine(folder, engine, asked, clock, progress)
    except KernelError as error:
        return replace(found, failures=(error.typed,), seconds=clock.seconds)
    wrong = f"{engine} does not compute what the folder holds: {proof.note}"
    failures = () if proof.ok else (wrong,)
    return replace(found, failures=failures, engine=proof, seconds=clock.seconds)


def _check_bits(
    folder: Path, against: str | Path | None, asked: VerifyOptions, progress: Progress
) -> Verification:
    """Check the files and the packed weights."""
    place, clock = device_of(asked.device), Clock(torch.device("cpu"))
    hashes, failures, notices = dict[str, str](), list[str](), list[str]()
    try:
        if recorded := report.load(folder):
            with clock.phase("files"):
                hashes, failures, notices = _check_files(folder, recorded)
        src = _quantized(folder, asked.trust_remote_code)
    except CheckpointError as error:
        if not failures:
            raise
        return Verification(None, (), hashes, tuple(dict.fromkeys([*failures, error.typed])), ())
    assert src.layout is not None
    checked = bool(recorded or against)
    layers = {each["name"]: each for each in recorded.get("layers", [])} if recorded else None
    if not recorded:
        with clock.phase("files"):
            hashes = src.hashes()
            weights = [src.path / name for name in hashes if name != CONFIG]
            sealed, failures, notices = _check_digests(weights)
        checked |= sealed
    if not (checked or asked.unsealed):
        failures.append(
            Words(
                "codes unchecked: no report, no digests in the weight files, and no checkpoint to "
                "compare with: add",
                Option("unsealed", True),
                "to accept that",
            )
        )
    unrun = kernels.missing(src.layout.NAME, place)
    on_gpu = place.type == "cuda" and asked.device != "auto"
    if unrun and on_gpu and src.layout.NAME in kernels.MATMULS:
        raise KernelError(f"its weights cannot be multiplied on {place}", unrun, subject=src.path)
    other = None if against is None else _quantized(Path(against), asked.trust_remote_code)
    if not src.modules():
        failures.append(f"{folder}: no packed weight found: the tensors are missing")
    runs_on = torch.device("cpu") if unrun else place
    with ThreadPoolExecutor(1) as pool:
        job = Job(src, other, runs_on, unrun is None, pool, Clock(runs_on, clock.seconds))
        rows, wrong, seen = check_weights(job, layers, progress)
    failures += wrong
    if other is not None:
        with clock.phase("against"):
            failures += _dense_differences(src, other, progress)
    ran: Any = {"unrun": unrun}
    if not unrun:
        device = torch.cuda.get_device_name(place)
        ran = {"kernel": src.layout.NAME, "device": device, "bound": proof.BOUND}
    return Verification(
        src.layout.NAME,
        tuple(rows),
        hashes,
        tuple(failures),
        tuple(dict.fromkeys([*src.notices, *notices, *seen])),
        None if against is None else str(against),
        checked=checked,
        seconds=clock.seconds,
        **ran,
    )


def verify_files(folder: Path) -> tuple[list[str], list[str]]:
    """Check the files of a folder, dense or quantized, against its report; returns failures and
    notices.

    Without a report, weight files are checked against the digests in them. CheckpointError if they
    have none.
    """
    if recorded := report.load(folder):
        return _check_files(folder, recorded)[1:]
    sealed, failures, notices = _check_digests(sorted(folder.glob("*.safetensors")))
    if not sealed:
        raise CheckpointError(
            f"has no {report.REPORT}, and no digests in its weight files, so nothing can be "
            "checked",
            "give a folder that quantkit wrote",
            subject=folder,
        )
    return failures, notices


def _quantized(folder: Path, trust_remote_code: bool) -> Checkpoint:
    src = Checkpoint(folder, trust_remote_code)
    if src.layout is None:
        raise CheckpointError(
            unexplained(src)
            or f"is {src.low_bit or 'dense'}, and packed weights are compared with packed ones",
            "give the quantized checkpoint",
            Words("compare with a dense model by", Command("eval kld")),
            subject=folder,
        )
    return src


def _check_files(
    folder: Path, recorded: Mapping[str, Any]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Hash every file that the report lists; returns the hashes, a failure for each file that
    differs or may be loaded unlisted, and a notice for each other file.
    """
    listed = recorded.get("files")
    if not listed:
        return {}, [f"{report.REPORT}: lists no files, so it is damaged or not quantkit's"], []
    found: dict[str, str] = {}
    failures = [] if report.SEAL in recorded else [UNMARKED]
    with ThreadPoolExecutor() as pool:
        hashed = {
            name: pool.submit(_hash, folder, name, expected) for name, expected in listed.items()
        }
    for name, expected in listed.items():
        try:
            found[name] = hashed[name].result()
        except QuantkitError as error:
            failures.append(error.typed)
        else:
            if found[name] != expected:
                failures.append(damage(name, folder / name, f"{report.REPORT} lists"))
    loadable, others = _unlisted(folder, listed)
    return found, failures + loadable, others


def _hash(folder: Path, name: str, like: object) -> str:
    """Hash a listed file; CheckpointError if it is missing, or outside of the folder."""
    is_name = PurePosixPath(name).name == name and name.isprintable()
    if is_name and not os.path.lexists(folder / name):
        raise CheckpointError(f"is missing, {report.REPORT} lists it", "restore it", subject=name)
    return files.hash_of_file(model_folder.inside(folder.resolve(), name), like)


def _unlisted(folder: Path, listed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Name the files that a report does not list: first files that a program may load or run, then
    others. Hidden files, the card and the proof are left out.
    """
    with files.guarded(folder):
        names = {
            p.relative_to(folder).as_posix() + "/" * p.is_dir()
            for p in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}*"))
            if p.name[:1] != "."
        }
    found: tuple[list[str], list[str]] = [], []
    for name in sorted(names - {*listed, *UNLISTED, TEMPLATES}):
        is_loadable = name.endswith((".safetensors", ".py", *model_folder.PICKLES))
        line = f"{printable(name)}: is not a file that {report.REPORT} lists"
        found[0 if is_loadable else 1].append(line)
    return found


def _check_digests(paths: list[Path]) -> tuple[bool, list[str], list[str]]:
    """Compare the tensors of weight files with the digests in them.

    Returns whether all files have digests, a failure for each tensor that differs, and a notice.
    """
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(damaged_tensors, map(Path.resolve, paths)))
    lines = [
        f"{path.name}: {tensor} does not have the digest that the file states, it was changed"
        for path, tensors in zip(paths, found, strict=True)
        for tensor in tensors or ()
    ]
    sealed = bool(found) and None not in found
    what = (
        "weights were compared with the digests in their files"
        if sealed
        else "the weight files have no digests"
    )
    notice = f"no {report.REPORT}: {what}, and no other file was compared with a recorded hash"
    return sealed, lines, [notice]


def _dense_differences(src: Checkpoint, other: Checkpoint, progress: Progress) -> Iterator[str]:
    """Name the dense tensors that another checkpoint lacks, has in addition, or has with other
    bits.
    """
    packed = {f"{module}.weight" for one in (src, other) for module in one.modules()}
    mine, theirs = ([name for name in one.logical() if name not in packed] for one in (src, other))
    apart = [name for name in {*mine} ^ {*theirs} if name.endswith(".bias")]
    # A conversion leaves out a bias of zeros that the model's class lacks.
    zeros = {name for name in apart if not (src if name in src else other).get(name).any()}
    mine, theirs = ([name for name in names if name not in zeros] for names in (mine, theirs))
    yield from only_in_one(mine, theirs, f"is in {other.path} only", f"is not in {other.path}")
    common = sorted({*mine} & {*theirs})
    for name in progress.bar(common, "compare"):
        forms = [f"{list(one.shape(name))} {dtype_name(one.dtype(name))}" for one in (src, other)]
        if forms[0] != forms[1]:
            yield f"{name}: is {forms[0]}, and {forms[1]} in {other.path}"
        elif not torch.equal(raw_bytes(src.get(name)), raw_bytes(other.get(name))):
            yield f"{name}: its bits differ from those in {other.path}"
