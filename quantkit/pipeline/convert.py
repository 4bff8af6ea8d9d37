"""What `pack` does with each packed weight: the same values as the target wants them stated, or rounded again if asked.

The plan has chosen scheme and shape from headers; here the data decide whether that is lossless.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms import rtn
from quantkit.checkpoint.items import Item, Packed
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import Digest, QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError, about
from quantkit.io import direct
from quantkit.layouts import LAYOUTS, family, gptq
from quantkit.layouts.base import TILE, Layout, Stored
from quantkit.layouts.recast import broken_rule, restated
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline.layer_solver import relative_error
from quantkit.pipeline.plan import Plan, Row
from quantkit.reporting.report import REPORT

#: Beyond this many threads that pack, one that reads and one that writes, both with a hash, are no faster.
MOST = 3

#: Bytes of small tensors that are read, or packed, at a time: each handing over to another thread takes as long as
#: packing some ten thousand codes.
TOGETHER = 4 * 2**20

#: Codes that are unpacked and packed at a time, or some more: what stays in a processor's cache.
CODES = 2**21

#: What a report said of a weight that is no longer so once it was rounded again.
OUTDATED = ("relative_error", "loss", "rtn_loss", "norm", "guard_rows", "rungs", "reason", "fallback", "dead_columns")


def outcome(src: Checkpoint, planned: Plan) -> Stored:
    """Return name -> (dtype, shape) of every tensor of the result in the order of writing, if the data allow it."""
    rows = {f"{row.module}.weight": row for row in planned.quantized}
    found: Stored = {}
    for name in src.logical():
        if (row := rows.get(name)) is None or row.scheme is None:
            found[name] = src.dtype(name), src.shape(name)
        else:
            stored = LAYOUTS[planned.layout].stored(Scheme.parse(row.scheme), *row.stored)
            found |= {f"{row.module}.{suffix}": what for suffix, what in stored.items()}
    return found


def repacked(
    src: Checkpoint,
    names: Iterable[str],
    planned: Plan,
    recorded: Mapping[str, Mapping[str, Any]],
    requantize: bool,
    files: Mapping[str, object],
    hashes: dict[str, str],
) -> Generator[Item, None, None]:
    """Yield the tensors `names` (`src.logical()`, in that order), packed ones as `planned`.

    Until the next is asked for, one thread reads what follows and others pack it, a weight or several small ones each.
    `recorded` has the facts of each linear from the source's report, `files` the hashes stated of its files. `hashes`
    becomes what `src.hashes(files)` returns: files are hashed piece by piece behind the reading, so that a disk gives
    each byte once. LayoutError, naming the weight, where its data cannot be stated so and `requantize` does not allow
    to round it again; CheckpointError for a damaged one.
    """
    if not recorded:
        src.notices.extend(_trusted(src))
    layout, rows = LAYOUTS[planned.layout], {row.module: row for row in planned.rows}
    modules = {f"{module}.weight": module for module in src.modules()}
    sizes = {name: sum(map(src.nbytes, src.parts(module).values())) for name, module in modules.items()}
    count = 1 if requantize else packers()
    ahead = (count + 1) * max(TOGETHER, *sizes.values())

    def read(some: list[str]) -> deque[Any]:
        found = deque[Any]()
        for name in some:
            try:
                found.append(src.stored(modules[name]) if name in modules else src.get(name))
            except QuantkitError as error:  # told in its turn
                found.append(error)
                break
        return found

    def packed(some: list[str], coming: Future[deque[Any]]) -> tuple[deque[Item], list[str]]:
        notices: list[str] = []
        items, found = deque[Item](), coming.result()
        for name in some:
            value = found.popleft()  # a future keeps what it gave
            if isinstance(value, QuantkitError):
                raise value
            items.append(one(name, value, notices) if name in modules else Item(name, value))
            del value
        return items, notices

    def one(name: str, tensors: dict[str, Tensor], notices: list[str]) -> Item:
        row, before = rows[modules[name]], recorded.get(modules[name], {})
        if (same := _by_rows(src, tensors, before.get("digest"), row, layout, notices)) is not None:
            return Item(name, same, {key: value for key, value in before.items() if key != "true_shape"})
        q = src.record(modules[name], tensors, notices)
        tensors.clear()
        digest = _intact(name, q, before.get("digest"))
        notices += _rows_lost(name, q)
        with about(name):
            value, facts = _as_planned(src, q, before, row, requantize)
            digest = digest if value is q else value.digest()
            return Item(name, Packed(value.scheme, value.shape, layout.pack(value), digest), facts)

    with (
        # What is rounded again wants torch's threads, and numbers that do not depend on how they are shared.
        nullcontext() if requantize else one_thread(),
        src.in_passing(files) as inlet,
        direct.threads(pack=count, read=1) as (packing, reading),
    ):
        waiting: deque[tuple[int, Future[tuple[deque[Item], list[str]]]]] = deque()

        def next_ones() -> Iterator[Item]:
            found, notices = direct.result_of(waiting.popleft()[1])
            src.notices.extend(line for line in notices if line not in src.notices)
            while found:
                yield found.popleft()

        for size, some in _together((sizes.get(name) or src.nbytes(name), name) for name in names):
            waiting.append((size, packing.submit(packed, some, reading.submit(read, some))))
            while len(waiting) > count + 1 or sum(some for some, _ in waiting) > ahead:
                yield from next_ones()
        while waiting:
            yield from next_ones()
        hashes |= inlet.hashes()
    src.require_unchanged()  # so these are the hashes of what was read


def _together(sized: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield names in their order, as many as have TOGETHER bytes or one that has more, and these bytes before them."""
    some: list[str] = []
    total = 0
    for size, name in sized:
        if some and total + size > TOGETHER:
            yield total, some
            some, total = [], 0
        some.append(name)
        total += size
    if some:
        yield total, some


def packers() -> int:
    """Return how many threads pack: half as many as there are cores, since those that read and write do as much."""
    return min(max(1, torch.get_num_threads() // 2), MOST)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch shares no operation among threads: those of a weight's pieces would wait longer than they work."""
    threads = torch.get_num_threads()
    if threads == 1:  # perhaps by another thread's conversion, which sets it back
        yield
        return
    torch.set_num_threads(1)  # also for threads that begin later
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Codes(threading.local):
    """Memory of each thread for codes, kept from weight to weight: it would leave gaps in the allocator's."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def of(self, rows: int, k: int) -> Tensor:
        """Return `[rows, k]` of it, uint8, where the codes before were."""
        if self._flat.numel() < rows * k:
            self._flat = torch.empty(rows * k, dtype=torch.uint8)
        return self._flat[: rows * k].view(rows, k)


_codes = _Codes()


def _by_rows(
    src: Checkpoint,
    tensors: Mapping[str, Tensor],
    recorded: str | None,
    row: Row,
    layout: Layout,
    notices: list[str],
) -> Packed | None:
    """Return a weight packed as it is, without all of its codes in memory: those of some rows stay in the cache.

    None where it is to be stated otherwise, or anything is not as it should be: to say what, and where, takes all.
    """
    scheme = src.scheme(row.module)
    if src.is_padded(row.module) or row.padded or row.scheme not in (None, scheme.label):
        return None
    with suppress(QuantkitError):
        given = src.unpacking(row.module, tensors, notices)
        (n, k), scales, zeros = given.shape, given.scales, given.zeros
        made, digest = layout.packing(scheme, given.shape, scales, zeros), Digest(scheme, given.shape)
        step = TILE * -(-CODES // (TILE * k))
        for first in range(0, n, step):
            some = slice(first, min(n, first + step))
            codes = _codes.of(some.stop - first, k)
            given.fill(first, codes)
            QuantizedTensor(scheme, codes, scales[some], None if zeros is None else zeros[some])  # which checks them
            digest.update(codes)
            made.add(first, codes)
        found = digest.finish(scales, zeros)
        if recorded in (None, found) and not bool((scales == 0).any()):
            return Packed(scheme, given.shape, made.tensors, found)
    return None


def _intact(name: str, q: QuantizedTensor, recorded: str | None) -> str:
    """Return the digest of a weight; CheckpointError if its codes are not the ones that its report recorded."""
    digest = q.digest()
    if recorded is not None and digest != recorded and not q.matches(recorded):
        raise CheckpointError(
            f"{name}: codes or scales differ from what {REPORT} recorded: the file is damaged, quantize again"
        )
    return digest


def schemes_of(src: Checkpoint, planned: Plan) -> Schemes:
    """Return the output's schemes: the source's as they are named there, or by exact names where they part ways."""
    assert src.schemes is not None
    now = {row.module: Scheme.parse(row.scheme) for row in planned.quantized if row.scheme is not None}
    became: dict[Scheme, set[Scheme]] = {}
    for module, scheme in now.items():
        became.setdefault(src.scheme(module), set()).add(scheme)
    one = {before: next(iter(after)) for before, after in became.items() if len(after) == 1}
    default, overrides = src.schemes.default, src.schemes.overrides
    if len(one) == len(became) and default in one:
        kept = tuple((pattern, one[scheme]) for pattern, scheme in overrides if scheme in one)
        stated = Schemes(one[default], kept, src.schemes.ignore)
        if all(stated.of(module) == scheme for module, scheme in now.items()):
            return stated
    most = Scheme.parse(planned.scheme)
    exact = tuple((re.escape(module), scheme) for module, scheme in now.items() if scheme != most)
    return Schemes(most, exact, src.schemes.ignore)


def rounded_again(layers: list[dict[str, Any]], recorded: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning of what `requantize` lost in this run, nothing if it rounded nothing; `recorded` as above."""
    lost = [
        (float(layer["requantized_error"]), layer["name"])
        for layer in layers
        if layer.get("requantized_error") != recorded.get(layer["name"], {}).get("requantized_error")
    ]
    if not lost:
        return []
    worst, name = max(lost)
    mean = sum(error for error, _ in lost) / len(lost)
    return [
        f"{len(lost)} of {len(layers)} linears were rounded again: relative to the source's weights, mean {mean:.4g}, "
        f"worst {worst:.4g} ({name})"
    ]


def _trusted(src: Checkpoint) -> list[str]:
    """Return a notice where nothing but a label says what the data mean: zero points of the two GPTQ versions."""
    assert src.layout is not None
    if family(src.layout.NAME) != gptq.NAME or all(src.scheme(module).symmetric for module in src.modules()):
        return []
    return [
        f"zero points are read as the label {src.layout.NAME} says: asymmetric ones do not show whether they are v1 or "
        "v2 (LAYOUTS 1.4), so check the perplexity"
    ]


def _as_planned(
    src: Checkpoint, q: QuantizedTensor, before: Mapping[str, Any], row: Row, requantize: bool
) -> tuple[QuantizedTensor, dict[str, Any]]:
    """Return a weight as the plan wants it, and its facts, of which `before` are those of its report."""
    _check_scales(q)
    padded = src.is_padded(row.module)
    true = src.true_size(row.module) if padded else q.shape  # headers may know k only roughly
    scheme = Scheme.parse(row.scheme or q.scheme.label)
    shape = row.padded or true
    facts = {key: value for key, value in before.items() if key != "true_shape"}
    if scheme != q.scheme:
        facts["restated_from"] = q.scheme.label
    try:
        value = restated(q, scheme, shape)
    except LayoutError as error:
        if not requantize:
            raise LayoutError(f"{error}: {_ways_out(src, q.scheme, true)}") from error
        value, lost = _rounded(q, true, scheme, shape, src.dtype_of_model)
        facts = {key: known for key, known in facts.items() if key not in (*OUTDATED, "restated_from")} | lost
    return value, facts | ({} if shape == true else {"true_shape": list(true)})


def _ways_out(src: Checkpoint, scheme: Scheme, shape: tuple[int, int]) -> str:
    names = [x.NAME for x in LAYOUTS.values() if x is not src.layout and broken_rule(x, scheme, *shape) is None]
    kept = f"use a layout that holds {scheme.label} as it is ({', '.join(names)}), or " if names else ""
    return f"{kept}add --requantize to round again (lossy)"


def _rounded(
    q: QuantizedTensor, true: tuple[int, int], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[QuantizedTensor, dict[str, Any]]:
    """Return the decoded weight rounded to nearest in another scheme, filled up with zeros, and what that lost.

    INT4 scales are searched by squared error, floating formats follow the published rule (LAYOUTS 6.3), a weight that
    becomes 2:4 keeps the two largest of each four.
    """
    (n, k), (more, wider) = true, shape
    weight = pad(q.dequantize()[:n, :k], (0, wider - k, 0, more - n))
    value, facts = rtn.quantize(weight.to(dtype), scheme, clip="none" if scheme.format.is_float else "search")
    error = relative_error(weight, value)
    return value, {**facts, "method": "rtn", "requantized_from": q.scheme.label, "requantized_error": error}


def _rows_lost(name: str, q: QuantizedTensor) -> list[str]:
    """Return a notice of FPx rows with a scale of zero over values that are not, as tiny ones are rounded to."""
    rows = (q.scales == 0).all(1).nonzero().flatten()
    if q.scheme.format == INT4 or not len(rows):
        return []
    lost = int((q.scheme.format.decode(q.codes[rows]) != 0).any(1).sum())
    return [f"{name}: {lost} of {len(q.codes)} rows have a stored scale of 0: their weights are zeros"] if lost else []


def _check_scales(q: QuantizedTensor) -> None:
    """Refuse INT4 scales of zero over codes that are not: FPx rows round to such ones, integers only by damage."""
    if q.scheme.format != INT4 or not bool((q.scales == 0).any()):
        return
    n, g = q.scales.shape
    zeros = INT4.zero_code if q.zeros is None else q.zeros.unsqueeze(-1)
    lost = (q.scales == 0) & (q.codes.view(n, g, -1) != zeros).any(-1)
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        raise CheckpointError(
            f"{int(lost.sum())} of {lost.numel()} scales are 0 over codes that are not, first row {row}, group {group}:"
            " those weights are lost, quantize the original model again"
        )
