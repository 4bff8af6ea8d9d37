"""The checks of a packed weight: it is repacked, compared with its digest and another checkpoint,
and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite, prod

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.core.formats import dtype_name
from quantkit.core.quantized_tensor import QuantizedTensor, Tensors
from quantkit.errors import KernelError, LayoutError, Option, QuantkitError, Words
from quantkit.kernels import proof
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import recast
from quantkit.names import JsonView
from quantkit.progress import Clock, Progress


@dataclass(frozen=True)
class Row:
    """The checks of one packed weight: True if passed, False if failed, None if there was nothing
    to compare with.

    `error` is the largest relative error of the kernel's products, None if no kernel ran or it is
    not finite.
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
class Job:
    """The inputs that all checks of a checkpoint share.

    `other` is the checkpoint to compare with, and `kernels` says if kernels run on `device`. `pool`
    computes digests.
    """

    src: Checkpoint
    other: Checkpoint | None
    device: torch.device
    kernels: bool
    pool: ThreadPoolExecutor
    clock: Clock


def check_weights(
    job: Job, layers: JsonView | None, progress: Progress
) -> tuple[list[Row], list[str], list[str]]:
    """Check each packed weight against its entry in the `layers` of a report, if there is one.

    Returns the rows, the failures, and each notice once. KernelError if a weight does not fit into
    the GPU's memory.
    """
    modules = job.src.modules()
    rows, notices = [], dict[str, None]()
    failures = [*_missing_weights(modules, layers, job.other)]
    for module in progress.bar(modules, "verify"):
        try:
            with job.clock.phase("rest"):  # the phases inside are counted separately
                row, seen = _check_weight(job, module, (layers or {}).get(module))
        except torch.OutOfMemoryError as error:
            raise KernelError(
                "does not fit into the GPU's memory",
                "free some",
                Words("prove the bits alone with", Option("device", "cpu")),
                subject=module,
            ) from error
        rows.append(row)
        notices |= dict.fromkeys(seen)
    failures += [Words(row.module, ":", row.problem) for row in rows if row.problem is not None]
    return rows, failures, [*notices]


def _missing_weights(
    modules: Sequence[str], layers: JsonView | None, other: Checkpoint | None
) -> Iterator[str]:
    """Name each module that the folder, the report or the other checkpoint lacks."""
    if layers is not None:
        yield from only_in_one(
            modules,
            layers,
            f"is in {REPORT} and has no packed weight",
            f"has a packed weight that {REPORT} lacks",
        )
    if other is not None:
        place = f"packed in {other.path}"
        yield from only_in_one(modules, other.modules(), f"is {place} only", f"is not {place}")


def only_in_one(
    ours: Iterable[str], theirs: Iterable[str], only_theirs: str, only_ours: str
) -> list[str]:
    """List the names that only one of two places has, each with the words for that case."""
    here, there = dict.fromkeys(ours), dict.fromkeys(theirs)
    return [
        *(f"{name}: {only_theirs}" for name in there if name not in here),
        *(f"{name}: {only_ours}" for name in here if name not in there),
    ]


def _check_weight(job: Job, module: str, layer: JsonView | None) -> tuple[Row, list[str]]:
    """Check one packed weight, with its entry `layer` of the report; returns the row and notices.

    A weight that cannot be read is a failed row.
    """
    src, clock = job.src, job.clock
    size = sum(
        prod(src.shape(name)) * src.dtype(name).itemsize for name in src.parts(module).values()
    )
    row = Row(module, (), "", size, None, None, None)
    notices: list[str] = []
    try:
        with clock.phase("read"):
            tensors = {
                suffix: tensor.to(job.device) for suffix, tensor in src.stored(module).items()
            }
        with clock.phase("repack"):
            q = src.record(module, tensors)
            digest = None if layer is None else job.pool.submit(q.matches, layer.get("digest"))
            row = replace(
                row,
                shape=src.true_size(module) if src.is_padded(module) else q.shape,
                scheme=q.scheme.label,
            )
            changed = _changed_by_repacking(src, tensors, q, notices)
        differences = _compare(job, module, q, notices)
        if zeros := int((q.scales == 0).sum()):
            notices.append(f"{module}: {zeros} scales are zero")
        if src.is_padded(module):
            notices.append(
                f"{module}: is {list(src.true_size(module))}, padded with zeros to {list(q.shape)}"
            )
    except QuantkitError as error:
        if str(error.subject) in (f"{src.path}: {module}", str(src.path), module):
            error.subject = None  # the failure names the module itself
        return replace(row, repack=False, problem=error.typed), notices
    row = replace(row, repack=not changed, against=None if differences is None else not differences)
    problems = [f"{suffix} is not what its own codes pack to" for suffix in changed]
    wrong_products: tuple[str, ...] = ()
    if (
        job.kernels and not changed
    ):  # outside of the try: a kernel that cannot run is no fault of the weight
        proved = _multiply(src, tensors, q, clock)
        wrong_products = proved.problems
        row = replace(
            row, product=not proved.problems, error=proved.error if isfinite(proved.error) else None
        )
    if digest is not None:
        with clock.phase("digest"):
            row = replace(row, digest=digest.result())
    if row.digest is False:
        problems.append(f"codes or scales are not those that {REPORT} recorded")
    return replace(
        row, problem="; ".join([*problems, *(differences or []), *wrong_products]) or None
    ), notices


def _changed_by_repacking(
    src: Checkpoint, tensors: Tensors, q: QuantizedTensor, notices: list[str]
) -> list[str]:
    """List the suffixes whose stored bytes differ from the packed record.

    Another program may store the same values in another dtype, or zero points of the other GPTQ
    version (layouts.md 1). That is a notice, not a difference.
    """
    assert src.layout is not None
    packed = LAYOUTS[src.layout.stored_as(tensors, q.scheme)].pack(q)
    different = [
        suffix for suffix, tensor in tensors.items() if not _same(tensor, packed.get(suffix))
    ]
    for suffix, tensor in tensors.items() if not different else ():
        if tensor.dtype != packed[suffix].dtype:
            theirs, ours = dtype_name(tensor.dtype), dtype_name(packed[suffix].dtype)
            notices.append(f"{suffix} is stored as {theirs}, quantkit writes {ours}")
    return different


def _same(tensor: Tensor, packed: Tensor | None) -> bool:
    """Return True if two tensors have equal bits, or equal values if their float widths differ.

    A tensor of bytes may stand for words, and a column for a vector, because the layout reads both.
    """
    if packed is None:
        return False
    if tensor.dtype == torch.uint8:
        tensor = tensor.contiguous().view(packed.dtype)
    if tensor.squeeze().shape != packed.squeeze().shape:
        return False
    tensor = tensor.reshape(packed.shape)
    if tensor.dtype != packed.dtype:
        return (
            tensor.is_floating_point()
            and packed.is_floating_point()
            and torch.equal(tensor.float(), packed.float())
        )
    return torch.equal(tensor.contiguous().view(torch.uint8), packed.contiguous().view(torch.uint8))


def _compare(job: Job, module: str, q: QuantizedTensor, notices: list[str]) -> list[str] | None:
    """List the differences from the other checkpoint, None if it does not have the weight.

    The same values in another scheme, which a conversion recast, are a notice.
    """
    src, other = job.src, job.other
    if other is None or module not in set(other.modules()):
        return None
    with job.clock.phase("against"):
        mine = src.unpadded(module).to(job.device) if src.is_padded(module) else q
        theirs = other.unpadded(module).to(job.device)
        differences = _differences(mine, theirs)
        if differences and mine.scheme != theirs.scheme and _are_recast(mine, theirs):
            notices.append(
                f"weights in {mine.scheme.label} have the values of {theirs.scheme.label} in "
                f"{other.path}"
            )
            return []
    return [f"{line} in {other.path}" for line in differences]


def _are_recast(q: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return True if one of two records is the other in another scheme, value for value
    (docs/layouts.md 11).
    """
    for source, recorded in ((other, q), (q, other)):
        try:
            if not _differences(recorded, recast(source, recorded.scheme, recorded.shape)):
                return True
        except LayoutError:  # the scheme, or the data, cannot hold those values
            continue
    return False


def _differences(q: QuantizedTensor, other: QuantizedTensor) -> list[str]:
    """Describe how two records of one weight differ, with counts of elements."""
    if q.shape != other.shape:
        return [f"shape is {list(q.shape)}, it is {list(other.shape)}"]
    found = (
        []
        if q.scheme == other.scheme
        else [f"scheme is {q.scheme.label}, it is {other.scheme.label}"]
    )
    for name in ("codes", "scales", "zeros"):
        a, b = getattr(q, name), getattr(other, name)
        if a is None or b is None or a.shape != b.shape:
            found += [] if a is b else [f"{name} are of another shape"]
            continue
        # Compare bits, because 0.0 and -0.0 must differ, and NaN must equal itself.
        bits = torch.uint8 if a.dtype == torch.uint8 else torch.int16
        count = int((a.view(bits) != b.view(bits)).sum())
        found += [f"{count} of {a.numel()} {name} differ from those"] if count else []
    return found


def _multiply(src: Checkpoint, tensors: Tensors, q: QuantizedTensor, clock: Clock) -> proof.Proof:
    """Multiply with the stored tensors, or with packed copies if the kernel cannot read their
    dtypes and shapes.
    """
    assert src.layout is not None
    usual = src.layout.stored(q.scheme, *q.shape)
    if {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in tensors.items()} != usual:
        tensors = src.layout.pack(q)
    return proof.prove(src.layout.NAME, tensors, q, clock)
