"""Proof that a checkpoint holds what was quantized, bit by bit.

Five questions: are the files those that the report lists; does every packed weight unpack and repack to the same bytes;
is the record the one whose digest was taken when it was quantized; are codes, scales and zeros those of another
checkpoint; on a GPU, does a kernel multiply with the packed bytes as with the record. Damage inside one weight fails
that weight's row, and the others are still looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, KernelError, QuantkitError
from quantkit.io import files, hashing, json_files, model_folder
from quantkit.kernels import proof
from quantkit.layouts import LAYOUTS, stored_as
from quantkit.models.devices import device_of
from quantkit.progress import Clock, Progress
from quantkit.reporting import report

VERIFICATION = "verify.json"
UNREPORTED = f"no {report.REPORT}: the files were not compared with recorded hashes, nor weights with digests"


@dataclass(frozen=True)
class Row:
    """One packed weight: True where it passed, False where it failed, None where there was nothing to compare with.

    `error` is the largest relative error of its products, None where none was made or it is not finite.
    """

    module: str
    shape: tuple[int, ...]
    scheme: str
    bytes: int
    repack: bool | None
    digest: bool | None
    against: bool | None
    problem: str | None = None
    product: bool | None = None
    error: float | None = None


@dataclass(frozen=True)
class Verification:
    """The outcome: `rows` of weights, `files` (name -> hash), `failures` and `notices` as lines of text.

    `weights` counts the elements whose codes were unpacked, repacked and compared. `kernel` is the layout whose kernels
    multiplied on `device`, with `bound` for the `errors`; where it is None no kernel ran, and `unrun` says why.
    `seconds` are those of each phase.
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
    unrun: str = "nothing could be multiplied"
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def weights(self) -> int:
        return sum(prod(row.shape) for row in self.rows)

    @property
    def multiplied(self) -> int:
        """How many weights a kernel gave back one by one."""
        return sum(prod(row.shape) for row in self.rows if row.product)

    @property
    def errors(self) -> list[float]:
        return [row.error for row in self.rows if row.error is not None]

    @property
    def note(self) -> str:
        if self.kernel is None:
            return f"no kernel ran, the bits alone are proved: {self.unrun}"
        worst = max(self.errors, default=0.0)
        return (
            f"the {self.kernel} kernels on {self.device} gave back {self.multiplied} weights exactly, products are off "
            f"by {worst:.1e} at most (bound {self.bound:g})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of verify.json."""
        return {
            "ok": self.ok,
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
            "hashes": self.files,
            "rows": [asdict(row) for row in self.rows],
        }


@dataclass(frozen=True)
class _Job:
    """What the weights of one checkpoint are checked with: `kernels` says whether they run, on `device`."""

    src: Checkpoint
    other: Checkpoint | None
    device: torch.device
    kernels: bool
    pool: ThreadPoolExecutor
    clock: Clock


def verify(
    folder: Path, against: Path | None = None, progress: Progress | None = None, device: str = "auto"
) -> Verification:
    """Check every file and every packed weight of a quantized checkpoint; see the module for what is asked.

    One weight is in memory at a time. Kernels run on `device`, by default on a GPU that can. CheckpointError if
    `folder` or `against` cannot be read as a quantized checkpoint (and no file of it has changed: a changed one is a
    failure, and named). KernelError if kernels fail, or cannot be run on a `device` that is a GPU by name.
    """
    progress = progress or Progress(quiet=True)
    folder = Path(folder)
    place = device_of(device)
    recorded: dict[str, Any] = {}
    failures: list[str] = []
    notices: list[str] = []
    hashes: dict[str, str] = {}
    clock = Clock(torch.device("cpu"))
    try:
        recorded = report.load(folder)
        with clock.phase("files"):
            hashes, failures = _files(folder, recorded)
        src = _quantized(folder)
    except CheckpointError as error:
        if not failures:
            raise
        return Verification(None, (), hashes, tuple(dict.fromkeys([*failures, str(error)])), ())
    assert src.layout is not None
    if not recorded:
        with clock.phase("files"):
            hashes = src.hashes()
        notices.append(UNREPORTED)
    else:
        unlisted = [path.name for path in src.files() if path.name not in recorded.get("files", {})]
        failures += [f"{name}: is not a file that {report.REPORT} lists" for name in unlisted]
    unrun = _unrun(src, place, asked=device != "auto")
    other = None if against is None else _quantized(Path(against))
    layers = {layer["name"]: layer for layer in recorded.get("layers", [])}
    modules = src.modules()
    if not modules:
        failures.append(f"{folder}: no packed weight found: the tensors are missing")
    failures += _missing(modules, layers if recorded else None, other)
    here = torch.device("cpu") if unrun else place
    with ThreadPoolExecutor(1) as pool:
        job = _Job(src, other, here, unrun is None, pool, Clock(here, clock.seconds))
        rows = _rows(job, modules, layers, notices, progress)
    failures += [f"{row.module}: {row.problem}" for row in rows if row.problem is not None]
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
    name = torch.cuda.get_device_name(place)
    return replace(found, kernel=src.layout.NAME, device=name, bound=proof.BOUND)


def write(verification: Verification, folder: Path) -> Path:
    """Write verify.json into the folder of the checkpoint and return its path."""
    path = Path(folder) / VERIFICATION
    files.write_atomic(path, json_files.dump_json(verification.to_dict()))
    return path


def _unrun(src: Checkpoint, device: torch.device, asked: bool) -> str | None:
    """Return why no kernel runs on `device`, None if it does; KernelError where one was asked for by name."""
    assert src.layout is not None
    unrun = kernels.missing(src.layout.NAME, device)
    if unrun and device.type == "cuda" and asked and src.layout.NAME in kernels.MATMULS:
        raise KernelError(f"{src.path}: its weights cannot be multiplied on {device}: {unrun}")
    return unrun


def _quantized(folder: Path) -> Checkpoint:
    src = Checkpoint(folder)
    if src.layout is None:
        raise CheckpointError(
            f"{folder}: is dense, and packed weights are compared with packed ones: give the quantized checkpoint, "
            "or compare with a dense model by quantkit eval kld"
        )
    return src


def _files(folder: Path, recorded: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the hash of every file that the report lists, and a line for each that is not as listed."""
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
            found[name] = hashed[name].result()
        except QuantkitError as error:
            failures.append(str(error))
        else:
            if found[name] != expected:
                failures.append(f"{name}: its hash is not the one that {report.REPORT} lists, the file was changed")
    return found, failures


def _hash(folder: Path, name: str, like: object) -> str:
    return hashing.hash_of_file(model_folder.inside(folder.resolve(), name), like)


def _missing(modules: list[str], layers: Mapping[str, Any] | None, other: Checkpoint | None) -> list[str]:
    """Return a line for each module that one side has and another lacks: every layer counts."""
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


def _rows(
    job: _Job, modules: list[str], layers: Mapping[str, Any], notices: list[str], progress: Progress
) -> list[Row]:
    """Return a row for each module, adding to `notices` what is worth telling once."""
    rows = []
    for module in progress.bar(modules, "verify", len(modules)):
        try:
            with job.clock.phase("rest"):  # of which the parts of a row take their own
                row, seen = _row(job, module, layers.get(module))
        except torch.OutOfMemoryError as error:
            raise KernelError(
                f"{module}: does not fit into the GPU's memory: free some, or prove the bits alone with --device cpu"
            ) from error
        rows.append(row)
        notices += [line for line in seen if line not in notices]
    return rows


def _row(job: _Job, module: str, layer: Mapping[str, Any] | None) -> tuple[Row, list[str]]:
    """Check one packed weight; one that cannot even be read is a row that failed."""
    src, other, clock = job.src, job.other, job.clock
    size = sum(prod(src.shape(name)) * src.dtype(name).itemsize for name in src.parts(module).values())
    row = Row(module, (), "", size, None, None, None)
    seen: list[str] = []
    intact = equal = None
    differences: list[str] = []
    try:
        with clock.phase("read"):
            tensors = {suffix: tensor.to(job.device) for suffix, tensor in src.stored(module).items()}
        with clock.phase("repack"):
            q = src.record(module, tensors)
            if layer is not None:
                intact = job.pool.submit(q.matches, layer.get("digest"))  # beside the kernels
            shape = src.true_size(module) if src.is_padded(module) else q.shape
            row = Row(module, shape, q.scheme.label, size, None, None, None)
            different = _repacked(src, tensors, q, seen)
        if other is not None and module in set(other.modules()):
            with clock.phase("against"):
                mine = _on(src.unpadded(module), job.device) if src.is_padded(module) else q
                differences = _differences(mine, _on(other.unpadded(module), job.device))
                equal = not differences
        zero = int((q.scales == 0).sum())
        if zero:
            seen.append(f"{module}: {zero} scales are zero")
        if src.is_padded(module):
            seen.append(f"{module}: is {list(shape)}, padded with zeros to {list(q.shape)}")
    except QuantkitError as error:
        message = str(error).removeprefix(f"{src.path}: ").removeprefix(f"{module}: ")
        return Row(module, row.shape, row.scheme, size, False, None, None, message), seen
    problems = [f"{suffix} is not what its own codes pack to" for suffix in different]
    row = replace(row, repack=not different, against=equal)
    kernel: tuple[str, ...] = ()
    if job.kernels and not different:  # outside of the try: a kernel that cannot run is no fault of the weight
        shown = _multiplied(src, tensors, q, clock)
        kernel = shown.problems
        row = replace(row, product=not kernel, error=shown.error if isfinite(shown.error) else None)
    if intact is not None:
        with clock.phase("digest"):
            row = replace(row, digest=intact.result())
    if row.digest is False:
        problems.append(f"codes or scales are not those that {report.REPORT} recorded")
    if other is not None:
        problems += [f"{line} in {other.path}" for line in differences]
    return replace(row, problem="; ".join([*problems, *kernel]) or None), seen


def _multiplied(src: Checkpoint, tensors: Mapping[str, Tensor], q: QuantizedTensor, clock: Clock) -> proof.Proof:
    """Multiply with the stored tensors; where a program wrote them otherwise, with the same values as quantkit does."""
    assert src.layout is not None
    usual = src.layout.stored(q.scheme, *q.shape)
    if {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in tensors.items()} != usual:
        tensors = src.layout.pack(q)
    return proof.prove(src.layout.NAME, tensors, q, clock)


def _on(q: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    zeros = None if q.zeros is None else q.zeros.to(device)
    return replace(q, codes=q.codes.to(device), scales=q.scales.to(device), zeros=zeros)


def _repacked(src: Checkpoint, tensors: Mapping[str, Tensor], q: QuantizedTensor, seen: list[str]) -> list[str]:
    """Return the suffixes whose stored bytes are not those that the record packs to.

    A checkpoint of another program may hold the same values in another dtype, or zero points of the other GPTQ
    version than its label says (LAYOUTS 1.4); that is told, and is no difference.
    """
    assert src.layout is not None
    packed = LAYOUTS[stored_as(src.layout, tensors, q.scheme)].pack(q)
    different = [suffix for suffix, tensor in tensors.items() if not _same(tensor, packed.get(suffix))]
    for suffix, tensor in tensors.items() if not different else ():
        if tensor.dtype != packed[suffix].dtype:
            theirs, ours = dtype_name(tensor.dtype), dtype_name(packed[suffix].dtype)
            seen.append(f"{suffix} is stored as {theirs}, quantkit writes {ours}")
    return different


def _same(tensor: Tensor, packed: Tensor | None) -> bool:
    """Return whether two tensors are one in every bit, or in every value where a float has another width.

    Bytes may stand for words, and a column for a vector: the layout read them so.
    """
    if packed is None:
        return False
    if tensor.dtype == torch.uint8:
        tensor = tensor.contiguous().view(packed.dtype)
    if tensor.squeeze().shape != packed.squeeze().shape:
        return False
    tensor = tensor.reshape(packed.shape)
    if tensor.dtype != packed.dtype:
        return tensor.is_floating_point() and packed.is_floating_point() and torch.equal(tensor.float(), packed.float())
    return torch.equal(tensor.contiguous().view(torch.uint8), packed.contiguous().view(torch.uint8))


def _differences(q: QuantizedTensor, other: QuantizedTensor) -> list[str]:
    """Return what two records of one weight do not share, with counts of elements."""
    if q.shape != other.shape:
        return [f"shape is {list(q.shape)}, it is {list(other.shape)}"]
    found = [] if q.scheme == other.scheme else [f"scheme is {q.scheme.label}, it is {other.scheme.label}"]
    for name in ("codes", "scales", "zeros"):
        a, b = getattr(q, name), getattr(other, name)
        if a is None or b is None or a.shape != b.shape:
            found += [] if a is b else [f"{name} are of another shape"]
            continue
        # Bits, so that zeros of both signs differ and nothing is compared as a number.
        bits = torch.uint8 if a.dtype == torch.uint8 else torch.int16
        count = int((a.view(bits) != b.view(bits)).sum())
        found += [f"{count} of {a.numel()} {name} differ from those"] if count else []
    return found
