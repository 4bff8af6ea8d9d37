"""One packed weight in another layout: recast to the same values, or rounded again if the user
allows it.

The plan chose scheme and shape from headers; here the data decide whether that is lossless.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms import rtn
from quantkit.algorithms.rtn import relative_error, zeroed
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, ROW_SUM
from quantkit.checkpoint.writer import Item, Packed
from quantkit.core.quantized_tensor import Digest, QuantizedTensor, Scheme
from quantkit.engines.joined import is_expert
from quantkit.engines.readers import sums_in_float16
from quantkit.errors import (
    CheckpointError,
    LayoutError,
    Option,
    QuantkitError,
    Setting,
    Words,
    about,
)
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import broken_rule, recast
from quantkit.planning.output import Row
from quantkit.planning.plan import Plan

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
        recorded: Mapping[str, Mapping[str, Any]],
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
        if not sums_in_float16(self._layout.NAME, scheme, *row.stored, is_expert(module)):
            before = {key: value for key, value in before.items() if key != ROW_SUM}
        if (same := self.by_rows(tensors, before.get("digest"), row, notices)) is not None:
            return Item(
                name, same, {key: value for key, value in before.items() if key != "true_shape"}
            )
        q = self._src.record(module, tensors, notices)
        tensors.clear()
        digest = _checked_digest(name, q, before.get("digest"))
        notices += _rows_lost(name, q)
        with about(name):
            value, facts = _as_planned(self._src, q, before, row, self._requantize)
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


def _round_scales(src: Checkpoint, module: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
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
    src: Checkpoint, q: QuantizedTensor, before: Mapping[str, Any], row: Row, requantize: bool
) -> tuple[QuantizedTensor, dict[str, Any]]:
    """Recast or round a weight to the planned scheme and shape; return it with its facts. `before`
    has its report's.
    """
    _check_scales(q)
    padded = src.is_padded(row.module)
    true = src.true_size(row.module) if padded else q.shape  # headers may know k only roughly
    scheme = row.goal if isinstance(row.goal, Scheme) else q.scheme
    shape = row.padded or true
    facts = {key: value for key, value in before.items() if key != "true_shape"}
    if scheme != q.scheme:
        facts["restated_from"] = q.scheme.label
    try:
        value = recast(q, scheme, shape)
    except LayoutError as error:
        if not requantize:
            raise LayoutError(error.rule, *_ways_out(src, q.scheme, true)) from error
        value, lost = _rounded(q, true, scheme, shape, src.dtype_of_model)
        facts = {
            key: known for key, known in facts.items() if key not in (*OUTDATED, "restated_from")
        } | lost
    return value, facts | ({} if shape == true else {"true_shape": list(true)})


def _ways_out(src: Checkpoint, scheme: Scheme, shape: tuple[int, int]) -> list[str]:
    names = [
        x.NAME
        for x in LAYOUTS.values()
        if x is not src.layout and broken_rule(x, scheme, *shape) is None
    ]
    kept = [
        Words("use", Setting("layout", name), f", which holds {scheme.label} as it is")
        for name in names[:1]
    ]
    return [*kept, Words("add", Option("requantize", True), "to round again (lossy)")]


def _rounded(
    q: QuantizedTensor,
    true: tuple[int, int],
    scheme: Scheme,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[QuantizedTensor, dict[str, Any]]:
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
        **zeroed(weight, value),
        "method": "rtn",
        "requantized_from": q.scheme.label,
        "requantized_error": relative_error(weight, value),
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
            f"{row}, group {group}:"
            " those weights are lost, quantize the original model again"
        )
