"""`pack` and `convert`: write the values of a quantized checkpoint in another layout.

A pool of workers reads and packs weights within a memory budget: each is recast to the same values,
or rounded again if the user allows it. The plan chose scheme and shape from headers; the data
decide whether that is lossless. The caller's thread writes the weights in the order of the source.
One more thread hashes the source's files.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms import rtn
from quantkit.checkpoint.origin import SourceHashes, name_of, origin
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, ROW_SUM, heading, load as load_report
from quantkit.checkpoint.writer import SHARD_BYTES, CheckpointWriter, Item, Packed
from quantkit.core.quantized_tensor import Digest, QuantizedTensor, Scheme, Shape
from quantkit.core.threads import ahead
from quantkit.engines.joined import is_expert, output_config
from quantkit.engines.readers import sums_in_float16
from quantkit.errors import (
    CheckpointError,
    Command,
    LayoutError,
    Option,
    QuantkitError,
    RecipeError,
    Setting,
    Words,
    about,
)
from quantkit.inference.load import NotTried, refusal_by_transformers
from quantkit.io.staging import staging
from quantkit.layouts import LAYOUTS
from quantkit.layouts.base import Layout
from quantkit.layouts.recast import broken_rule, fitting, recast
from quantkit.models.meta_model import generation_config_of
from quantkit.models.outside import Outside
from quantkit.names import Json, JsonView
from quantkit.pipeline.publish import finish, write
from quantkit.planning.output import Row
from quantkit.planning.plan import Plan, plan_pack
from quantkit.planning.verdict import FILLED, require_complete_source
from quantkit.progress import QUIET, Clock, Progress
from quantkit.text.tokenizer import require_readable_tokenizer

#: Bytes of weights, read and packed, in memory at a time; a larger weight is processed by itself.
BUDGET = 256 * 2**20
#: Bytes of small tensors that a worker takes at a time: handing each over costs as much as packing
#: 10,000 codes.
BATCH = 4 * 2**20
#: The most workers: more would wait for the writing and the hashing thread.
MOST_WORKERS = 4
#: The key of an error that a linear may have of a run -> the event in words, and the key of the
#: mean error.
LOSSES = {
    "requantized_error": (
        "were rounded again: relative to the source's weights",
        "requantized_error",
    ),
    "scale_error": (
        "had scales that are no float16 values, rounded: relative error of the weights",
        "mean_scale_error",
    ),
}


def pack(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    expect: str | None = None,
    pad: bool = False,
    requantize: bool = False,
    requantize_scales: bool = False,
    max_shard_size: int = SHARD_BYTES,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = QUIET,
) -> Json:
    """Rewrite a quantized checkpoint in another layout, bit for bit, into a new folder `out`;
    return its report.

    `pad` adds zeros up to a shape that the layout holds. `requantize` rounds weights again that
    cannot be converted without loss. `requantize_scales` rounds scales to float16 and leaves the
    codes. `max_shard_size` is the most bytes of one weight file. Everything else is as for
    `quantkit.pack`.
    """
    for name in filter(None, (layout, expect)):
        if name not in LAYOUTS:
            raise RecipeError(f"unknown layout {name!r}", f"use one of {', '.join(LAYOUTS)}")
    clock = Clock(torch.device("cpu"))
    with clock.phase("prepare"):
        src = Checkpoint(Path(checkpoint), trust_remote_code)
        if (given := src.layout) is None:
            held = f"{src.low_bit} weights, a source" if src.low_bit else "no quantized weights"
            raise CheckpointError(
                f"holds {held}", Words("use", Command("quantize"), "first"), subject=checkpoint
            )
        if expect is not None and given.family != LAYOUTS[expect].family:
            raise CheckpointError(
                f"is in the {given.NAME} layout, not {expect}",
                f"say {given.NAME}-to-{layout}",
                subject=checkpoint,
            )
        require_readable_tokenizer(src.path)
        outside, outline = require_complete_source(src)
        planned = plan_pack(
            src,
            LAYOUTS[layout],
            out=Path(out),
            pad=pad,
            requantize=requantize,
            outside=outside,
        )
        planned.require()
        if outline is not None:  # else this would show when the folder is finished
            generation_config_of(src)
            output, written = planned.output, LAYOUTS[layout]
            shapes = {row.module: row.shape if row.padded else None for row in output.quantized}
            config = output_config(src, written, output.schemes, shapes, None)
            with suppress(NotTried):
                refusal_by_transformers(
                    outline, src, config["quantization_config"], dict(output.forms)
                )
    src.notices += outside.notices()
    progress.note(*planned.notices, *outside.notices())
    known = list(src.notices)
    report, recorded = _begin_report(checkpoint, src, planned, outside)
    with staging(
        Path(out), resume=None, overwrite=overwrite, source=src.path, notice=src.notices.append
    ) as partial:
        writer = CheckpointWriter(
            partial,
            like=src,
            layout=LAYOUTS[layout],
            max_shard_bytes=max_shard_size,
            expected=planned.output.forms,
        )
        # A signal that raised while this thread waits for another could leave a lock taken.
        with progress.loop(), closing(SourceHashes(src, progress.check)) as source:
            source.start()
            names = src.logical()
            bar = progress.bar(names, "pack")
            with closing(
                repacked(src, bar, planned, recorded, requantize, progress, requantize_scales)
            ) as items:
                layers = write(clock.around("pack", items), writer, report, clock)
            with clock.phase("hash"):
                report["layers"] = layers
                report["source"]["files"], edited = source.all()
        src.require_unchanged()  # also after the last read, so these are the hashes of all bytes
        src.notices += edited
        # Those found in the data or on the disk.
        progress.note(*(line for line in src.notices if line not in known))
        for line in (lost := [*_losses(layers, recorded)]):
            progress.warn(line)
        if lost:  # then the figures describe other values
            report.pop("evaluation", None)
        report["notices"] = list(dict.fromkeys([*report["notices"], *src.notices, *lost]))
        changed = {each["name"] for key in LOSSES for each in _lost(layers, recorded, key)}
        report["same_values"] = len(layers) - len(changed)
        return finish(
            writer, Path(out), planned.output.schemes, report, planned.share, clock, overwrite
        )


def repacked(
    src: Checkpoint,
    names: Iterable[str],
    planned: Plan,
    recorded: Mapping[str, JsonView],
    requantize: bool,
    progress: Progress,
    requantize_scales: bool = False,
) -> Generator[Item, None, None]:
    """Yield the tensors `names` of `src.logical()`, in that order, packed weights as `planned`.

    `recorded` has the facts of each linear from the source's report. The errors of a weight are
    raised when its item is yielded: LayoutError for data that the layout does not hold,
    CheckpointError for damaged data.
    """
    repacker = Repacker(src, planned, recorded, requantize, requantize_scales)
    yield from ahead(
        names,
        partial(map, repacker.item),
        repacker.nbytes,
        workers=1 if requantize else workers(),  # rounding again uses all threads for each weight
        most=BUDGET,
        batch=BATCH,
        check=progress.check,
    )
    src.notices.extend(repacker.notices())


def workers() -> int:
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(usable, MOST_WORKERS)


def _lost(layers: list[Json], recorded: Mapping[str, JsonView], key: str) -> list[Json]:
    """Find the layers with an error of this run under a `key`; `recorded` has the facts of the
    source's report.
    """
    return [
        each
        for each in layers
        if key in each and each[key] != recorded.get(each["name"], {}).get(key)
    ]


def _losses(layers: list[Json], recorded: Mapping[str, JsonView]) -> Iterator[str]:
    """Warn, in a line each, how much rounding again and rounding scales lost in this run."""
    for key, (event, mean_key) in LOSSES.items():
        if lost := _lost(layers, recorded, key):
            worst, name = max((float(layer[key]), layer["name"]) for layer in lost)
            mean = sum(float(layer[mean_key]) for layer in lost) / len(lost)
            yield (
                f"{len(lost)} of {len(layers)} linears {event}, mean {mean:.4g}, worst {worst:.4g} "
                f"({name})"
            )


def _begin_report(
    checkpoint: str | Path, src: Checkpoint, planned: Plan, outside: Outside
) -> tuple[Json, dict[str, Json]]:
    """Begin the report of a rewritten checkpoint; return it, and the facts of each layer of `src`.

    `outside` are the tensors that the model does not have. Unreadable facts of the origin become
    notices of `src`.
    """
    before, notices, schemes = load_report(src.path), list(src.notices), planned.output.schemes
    assert schemes is not None  # a plan without misfits has them
    base, unread = (before["base"], []) if before.get("base") else origin(src, checkpoint, None)
    src.notices += unread
    carried = ("recipe", "recipe_sha256", "calibration", "device", "compute_dtype", "evaluation")
    report = {
        **{key: before[key] for key in carried if key in before},
        **heading("pack", name_of(checkpoint), None, {}, base),
        "layout": planned.layout,
        "scheme": schemes.default.label,
        "dense": list(schemes.ignore),
        **outside.counted(),
        "notices": list(dict.fromkeys([*before.get("notices", []), *notices])),
        "layout_notices": list(planned.verdict.layout_remarks),
        "readers": list(planned.output.readers),
    }
    return report, {layer["name"]: layer for layer in before.get("layers", [])}


#: About the number of codes unpacked and packed at a time, so that they stay in a core's cache.
CODES = 2**21

#: Facts in a weight's report that no longer hold after it is rounded again.
OUTDATED = (
    "relative_error",
    "zeroed",
    "loss",
    "rtn_loss",
    "norm",
    ROW_SUM,
    "raised_scales",
    "guard_rows",
    "rungs",
    "reason",
    "fallback",
    "dead_columns",
)


class Repacker:
    """Reads weights of a checkpoint and packs them as `planned`; several threads may do so at once.

    `recorded` has the facts of each linear from the source's report. `requantize` allows rounding a
    weight again if no lossless way exists. `requantize_scales` allows rounding scales that float16
    does not hold. LayoutError, naming the weight, if there is no lossless way and rounding is not
    allowed; CheckpointError for a damaged weight.
    """

    def __init__(
        self,
        src: Checkpoint,
        planned: Plan,
        recorded: Mapping[str, JsonView],
        requantize: bool,
        requantize_scales: bool = False,
    ) -> None:
        self._src, self._recorded = src, recorded
        self._requantize, self._requantize_scales = requantize, requantize_scales
        self._layout = LAYOUTS[planned.layout]
        self._rows = {row.module: row for row in planned.output.rows}
        self._modules = {f"{module}.weight": module for module in src.modules()}
        self._notices: dict[str, list[str]] = {}

    def nbytes(self, name: str) -> int:
        """Estimate the bytes of a tensor while it is converted, as read plus as written."""
        if (module := self._modules.get(name)) is None:
            return self._src.nbytes(name)
        return 2 * sum(map(self._src.nbytes, self._src.parts(module).values()))

    def notices(self) -> list[str]:
        """List the notices that the data gave so far, in the order of the checkpoint, each once."""
        found = [] if self._recorded else _trusted_labels(self._src)
        for name in self._src.logical():
            found += [line for line in self._notices.get(name, ()) if line not in found]
        return [line for line in found if line not in self._src.notices]

    def item(self, name: str) -> Item:
        """Read and pack a tensor by its name in `Checkpoint.logical`."""
        if (module := self._modules.get(name)) is None:
            return Item(name, self._src.get(name))
        notices = self._notices.setdefault(name, [])
        tensors, before = self._src.stored(module), self._recorded.get(module, {})
        if self._requantize_scales:
            before = {**before, **_round_scales(self._src, module, tensors)}
        row = self._rows[module]
        scheme = row.goal if isinstance(row.goal, Scheme) else self._src.scheme(module)
        sums = sums_in_float16(self._layout.NAME, scheme, *row.stored, is_expert(module))
        stale = ("true_shape",) if sums else ("true_shape", ROW_SUM)
        before = {key: value for key, value in before.items() if key not in stale}
        if (same := self.by_rows(tensors, before.get("digest"), row, notices)) is not None:
            return Item(name, same, before)
        q = self._src.record(module, tensors, notices)
        tensors.clear()
        digest = _checked_digest(name, q, before.get("digest"))
        notices += _rows_lost(name, q)
        with about(name):
            value, facts = _as_planned(self._src, q, before, row, self._layout, self._requantize)
            digest = digest if value is q else value.digest()
            return Item(
                name, Packed(value.scheme, value.shape, self._layout.pack(value), digest), facts
            )

    def by_rows(
        self, tensors: Mapping[str, Tensor], recorded: str | None, row: Row, notices: list[str]
    ) -> Packed | None:
        """Pack a weight a few rows at a time, so that its codes stay in the cache.

        None if the weight must be recast, or fails a check: then it is processed whole, so that the
        error can name the position.
        """
        scheme = self._src.scheme(row.module)
        if self._src.is_padded(row.module) or row.padded or row.goal not in (None, scheme):
            return None
        with suppress(QuantkitError):
            given = self._src.unpacking(row.module, tensors, notices)
            scales, zeros, digest = given.scales, given.zeros, Digest(scheme, given.shape)
            made = self._layout.packing(scheme, given.shape, scales, zeros)
            for some, part in given.records(CODES):  # each record is checked
                digest.update(part.codes)
                made.add(some.start, part.codes)
            found = digest.finish(scales, zeros)
            if recorded in (None, found) and not bool((scales == 0).any()):
                return Packed(scheme, given.shape, made.tensors, found)
        return None


def _round_scales(src: Checkpoint, module: str, tensors: dict[str, Tensor]) -> Json:
    """Round the scales among a weight's `tensors` to float16, in place; return their number and
    relative errors.

    Nothing is rounded if all scales are float16 values, or if one is beyond them.
    """
    assert src.layout is not None
    for suffix, (dtype, _) in src.layout.stored(src.scheme(module), *src.size(module)).items():
        exact = tensors.get(suffix)
        if (
            dtype != torch.float16
            or exact is None
            or exact.dtype not in (torch.float32, torch.bfloat16)
        ):
            continue
        half, exact = exact.to(torch.float16), exact.float()
        changed = half.float() != exact
        if bool(changed.any()) and bool(torch.isfinite(half).all()):
            tensors[suffix] = half
            error = torch.where(changed, (half.float() / exact - 1).abs(), 0)
            return {
                "rounded_scales": int(changed.sum()),
                "scale_error": float(error.max()),
                "mean_scale_error": float(error.mean()),
            }
    return {}


def _checked_digest(name: str, q: QuantizedTensor, recorded: str | None) -> str:
    """Compute the digest of a weight. CheckpointError if it differs from the report's."""
    digest = q.digest()
    if recorded is not None and digest != recorded and not q.matches(recorded):
        raise CheckpointError(
            f"codes or scales differ from what {REPORT} recorded",
            "the file is damaged, quantize again",
            subject=name,
        )
    return digest


def _trusted_labels(src: Checkpoint) -> list[str]:
    """Give a notice if only a label determines the meaning of the zero points."""
    assert src.layout is not None
    doubt = src.layout.ZEROS_IN_DOUBT
    if doubt is None or all(src.scheme(module).symmetric for module in src.modules()):
        return []
    return [f"zero points are read as the label {src.layout.NAME} says: {doubt}"]


def _as_planned(
    src: Checkpoint,
    q: QuantizedTensor,
    before: JsonView,
    row: Row,
    layout: Layout,
    requantize: bool,
) -> tuple[QuantizedTensor, Json]:
    """Recast or round a weight to the planned scheme and shape; return it with its facts. `before`
    has those of its report that still hold.
    """
    _check_scales(q)
    # Headers may know k only roughly.
    true = src.true_size(row.module) if src.is_padded(row.module) else q.shape
    scheme = row.goal if isinstance(row.goal, Scheme) else q.scheme
    shape = row.padded or true
    facts = dict(before)
    if scheme != q.scheme:
        facts["restated_from"] = q.scheme.label
    try:
        value = recast(q, scheme, shape)
    except LayoutError as error:
        if not requantize:
            raise LayoutError(error.rule, *_ways_out(src, layout, q.scheme, true)) from error
        value, lost = _rounded(q, true, scheme, shape, src.dtype_of_model)
        facts = {
            key: known for key, known in facts.items() if key not in (*OUTDATED, "restated_from")
        } | lost
    return value, facts | ({} if shape == true else {"true_shape": list(true)})


def _ways_out(src: Checkpoint, layout: Layout, scheme: Scheme, shape: Shape) -> list[str]:
    names = [
        x.NAME
        for x in LAYOUTS.values()
        if x is not src.layout and broken_rule(x, scheme, *shape) is None
    ]
    kept = [
        Words("use", Setting("layout", name), f", which holds {scheme.label} as it is")
        for name in names[:1]
    ]
    pads = [Words("add", Option("pad", True), FILLED)] * bool(
        fitting(layout, scheme, *shape, pad=True)
    )
    return [*pads, *kept, Words("add", Option("requantize", True), "to round again (lossy)")]


def _rounded(
    q: QuantizedTensor,
    true: Shape,
    scheme: Scheme,
    shape: Shape,
    dtype: torch.dtype,
) -> tuple[QuantizedTensor, Json]:
    """Round the decoded weight to nearest in another scheme, padded with zeros; return it with the
    loss.

    INT4 scales are searched by squared error. Floating formats follow the published rule (LAYOUTS
    6.3). A weight that becomes 2:4 keeps the two largest of each four.
    """
    (n, k), (more, wider) = true, shape
    weight = pad(q.dequantize()[:n, :k], (0, wider - k, 0, more - n))
    value, facts = rtn.quantize(
        weight.to(dtype), scheme, clip="none" if scheme.format.is_float else "search"
    )
    return value, {
        **facts,
        **rtn.zeroed(weight, value),
        "method": "rtn",
        "requantized_from": q.scheme.label,
        "requantized_error": rtn.relative_error(weight, value),
    }


def _rows_lost(name: str, q: QuantizedTensor) -> list[str]:
    """Give a notice of FPx rows with a tiny scale that was rounded to zero."""
    rows = (q.scales == 0).all(1).nonzero().flatten()
    if not q.scheme.format.is_float or not len(rows):
        return []
    lost = int((q.scheme.format.decode(q.codes[rows]) != 0).any(1).sum())
    return (
        [f"{name}: {lost} of {len(q.codes)} rows have a stored scale of 0: their weights are zeros"]
        if lost
        else []
    )


def _check_scales(q: QuantizedTensor) -> None:
    """Raise CheckpointError for integer groups with a zero scale but nonzero codes, a sign of
    damage (not for FPx).
    """
    if q.scheme.format.is_float or not bool((q.scales == 0).any()):
        return
    n, g = q.scales.shape
    zeros = q.scheme.format.zero_code if q.zeros is None else q.zeros.unsqueeze(-1)
    lost = (q.scales == 0) & (q.codes.view(n, g, -1) != zeros).any(-1)
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        raise CheckpointError(
            f"{int(lost.sum())} of {lost.numel()} scales are 0 over codes that are not, first row "
            f"{row}, group {group}: those weights are lost, quantize the original model again"
        )
