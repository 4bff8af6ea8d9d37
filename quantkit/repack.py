"""What `pack` does with each packed weight: the same values as the target wants them stated, or rounded again if asked.

The plan has chosen scheme and shape from headers; here the data decide whether that is lossless.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from quantkit import apart, room, rtn
from quantkit.apart import Apart, Place, Shared
from quantkit.checkpoint import Checkpoint
from quantkit.direct import Inlet
from quantkit.errors import CheckpointError, LayoutError, about
from quantkit.formats import INT4
from quantkit.items import Item, Packed
from quantkit.layouts import LAYOUTS, family, gptq
from quantkit.layouts.config import Schemes
from quantkit.layouts.protocol import Stored
from quantkit.plan import Plan, Row
from quantkit.report import REPORT
from quantkit.restate import broken_rule, restated
from quantkit.solve import relative_error
from quantkit.tensor import QuantizedTensor, Scheme

#: Bytes of packed weights from which on other processes are worth their beginning.
MANY = 2**27
#: Bytes of dense tensors that wait for packed ones before them.
WAITING = room.LARGE

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
    hashes: dict[str, str],
    others: Apart | None = None,
) -> Generator[Item, None, None]:
    """Yield the tensors `names` (`src.logical()`, in that order), packed ones as `planned`; one weight in memory.

    With `others` (of `helpers`) one in each of these processes, and one that is read or written; they pack it, too.

    `recorded` has the facts of each linear from the source's report. `hashes` becomes what `src.hashes()` returns: the
    files are hashed piece by piece behind the reading, so that a disk gives each byte once. That and the weights'
    digests (`facts["digest"]`, a future) are a thread's work, beside the packing. LayoutError, naming the weight, where
    its data cannot be stated so and `requantize` does not allow to round it again; CheckpointError for a damaged one.
    """
    rows = {row.module: row for row in planned.rows}
    if not recorded:
        src.notices.extend(_trusted(src))
    with ThreadPoolExecutor(1, "quantkit-hash") as hasher, src.in_passing() as inlet:
        if others is not None:
            yield from _by_others(src, names, others, inlet)
            names = ()
        for name in names:
            item = src.item(name)
            if isinstance(item.value, QuantizedTensor):
                row = rows[name.removesuffix(".weight")]
                item = _packed(src, item.value, row, recorded.get(row.module, {}), requantize, hasher)
            digest = (item.facts or {}).get("digest")
            yield item
            del item  # its memory is that of the next
            if digest is not None:
                digest.result()
        hashes |= inlet.hashes()
    src.require_unchanged()  # so these are the hashes of what was read


@contextmanager
def helpers(
    src: Checkpoint, planned: Plan, recorded: Mapping[str, Mapping[str, Any]], requantize: bool
) -> Iterator[Apart | None]:
    """Yield processes for `repacked`, whose arguments these are; None where this one does it as well alone.

    They begin with what is open now: the output must not be. What is rounded again wants torch's threads instead.
    """
    count = _count(planned)
    stored = {module: [src.nbytes(name) for name in src.parts(module).values()] for module in src.modules()}
    if requantize or count < 1 or sum(map(sum, stored.values())) < MANY or not apart.possible():
        yield None
        return
    rows = {row.module: row for row in planned.rows}
    layout = LAYOUTS[planned.layout]

    def work(given: Shared, made: Shared, module: str, places: dict[str, Place]) -> _Made:
        before = len(src.notices)
        q = src.record(module, {suffix: given.get(place) for suffix, place in places.items()})
        with ThreadPoolExecutor(1, "quantkit-hash") as hasher:
            name, value, facts = _packed(src, q, rows[module], recorded.get(module, {}), False, hasher)
            assert isinstance(value, QuantizedTensor) and facts is not None
            made.clear()
            with about(name), room.within(made.take):
                parts = layout.pack(value)
            digest = facts.pop("digest").result()
        return _Made(made.put_all(parts), value.scheme, value.shape, digest, facts, src.notices[before:])

    read = max(sum(map(apart.room_for, sizes)) for sizes in stored.values())
    written = max(row.bytes for row in planned.rows) + apart.room_for(0) * len(layout.TENSORS)
    with apart.processes(work, count, read, written) as others:
        yield others


def _count(planned: Plan) -> int:
    """Return how many processes are begun: this one reads, hashes in two threads and writes meanwhile.

    With two cores one, or for 2:4 weights, which take longer to pack than all of that, two.
    """
    count = min(torch.get_num_threads() // 2, apart.MOST)
    sparse = any(Scheme.parse(row.scheme).sparsity for row in planned.quantized if row.scheme is not None)
    return max(count, 2) if count and sparse else count


class _Made(NamedTuple):
    """What another process made of a weight, and the notices that it found reason for."""

    places: dict[str, Place]
    scheme: Scheme
    shape: tuple[int, int]
    digest: str
    facts: dict[str, Any]
    notices: list[str]


class _Begun(NamedTuple):
    """A weight that another process works on, the memory that it is in, and that where it will be packed."""

    name: str
    given: Shared
    made: Shared
    result: Future[Any]


def _by_others(src: Checkpoint, names: Iterable[str], others: Apart, inlet: Inlet) -> Iterator[Item]:
    """Yield tensors in order: one weight is read and one written while other processes work on those between."""
    waiting: deque[Item | _Begun] = deque()
    dense, modules = 0, {f"{module}.weight": module for module in src.modules()}
    for name in names:
        ready: list[Item | _Begun] = []
        if (module := modules.get(name)) is not None:
            while not others.given:
                ready.append(_worked_on(waiting.popleft(), others))
            given = others.given.pop()
            given.clear()
            parts = src.parts(module).items()
            places = {suffix: given.put(src.get(part, given.rest())) for suffix, part in parts}
            yield from _items(src, ready, others)
            inlet.arrive()
            made = others.made.pop()
            waiting.append(_Begun(name, given, made, others.begin(given, made, module, places)))
        elif (dense := dense + src.nbytes(name)) <= WAITING:
            waiting.append(src.item(name))
        else:
            yield from _items(src, (_worked_on(one, others) for one in waiting), others)
            waiting.clear()
            dense = 0
            yield src.item(name)
    yield from _items(src, (_worked_on(one, others) for one in waiting), others)


def _worked_on(one: Item | _Begun, others: Apart) -> Item | _Begun:
    """Wait until a weight is packed; the memory that it came in is free then."""
    if isinstance(one, _Begun):
        others.result(one.result)
        others.given.append(one.given)
    return one


def _items(src: Checkpoint, done: Iterable[Item | _Begun], others: Apart) -> Iterator[Item]:
    """Yield what is packed; the memory that it is in is free when the next is asked for."""
    for one in done:
        if isinstance(one, Item):
            yield one
            continue
        made: _Made = others.result(one.result)
        src.notices.extend(line for line in made.notices if line not in src.notices)
        tensors = {suffix: one.made.get(place) for suffix, place in made.places.items()}
        yield Item(one.name, Packed(made.scheme, made.shape, tensors, made.digest), made.facts)
        others.made.append(one.made)


def _packed(
    src: Checkpoint, q: QuantizedTensor, row: Row, before: Mapping[str, Any], requantize: bool, hasher: Executor
) -> Item:
    """Return a weight as the plan wants it, and its facts; `hasher` finds its digest and whether it is intact."""
    name = f"{row.module}.weight"
    digest = hasher.submit(_intact, name, q, before.get("digest"))
    with about(name):
        try:
            value, facts = _as_planned(src, q, before, row, requantize)
        except LayoutError:
            digest.result()  # damage is the better reason
            raise
    if value is not q:
        digest.result()
        digest = hasher.submit(value.digest)
    return Item(name, value, facts | {"digest": digest})


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
