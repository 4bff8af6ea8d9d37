"""Refusals that need no computation: whether a source is complete, and its output opens rightly."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.inference.swap_linears import swap
from quantkit.inference.transformers_loading import NotTried, refusal_by_transformers
from quantkit.layouts.base import Layout
from quantkit.models.meta_model import skeleton
from quantkit.models.outline import Outline
from quantkit.models.outside import Outside, drafts_by_name
from quantkit.planning.plan import Plan


def require_right_weights(
    outline: Outline,
    layout: Layout,
    stated: dict[str, Any],
    planned: Plan,
    trust_remote_code: bool,
) -> None:
    """Raise CheckpointError, before any work, if transformers would fill weights of the planned
    output by itself.

    `stated` is the `quantization_config` of the output.
    """
    src = outline.src
    rows = {f"{row.module}.weight": row for row in planned.quantized}
    forms = {name: src.form_written(name) for name in src.names() if name not in rows}
    for row in rows.values():
        stored = layout.stored(Scheme.parse(row.scheme or ""), *row.stored)
        forms |= {
            f"{row.module}.{suffix}": (dtype, tuple(shape))
            for suffix, (dtype, shape) in stored.items()
        }
    with suppress(NotTried):
        refusal_by_transformers(outline, src, stated, forms, trust_remote_code)


def require_complete_source(src: Checkpoint, trust_remote_code: bool = False) -> Outside:
    """Raise CheckpointError unless a source has the tensors of its model and others that it
    declares, before any work.

    Returns the tensors that the model does not have. A model that transformers cannot build here is
    not checked, and draft layers are found by their names.
    """
    try:
        module = skeleton(src, src.dtype_of_model, trust_remote_code)
    except CheckpointError:
        return Outside.of(src, drafts_by_name(src))
    outline = Outline(src, module, as_matrices=False)
    swap(outline)
    return outline.outside
