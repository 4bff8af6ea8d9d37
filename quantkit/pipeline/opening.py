"""Opens a finished folder as its readers do, on the meta device and from headers only, before it is
published.

`quantkit.load` must find a tensor for each state of the model and a state for each tensor. Then
transformers opens the folder with its own quantizer, if it has one. It may refuse. A folder that it
would fill with random weights fails the run.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, Words
from quantkit.inference.swap_linears import swap
from quantkit.inference.transformers_loading import NotTried, refusal_by_transformers
from quantkit.layouts.base import Layout
from quantkit.models.meta_model import skeleton
from quantkit.models.outside import Outside, drafts_by_name
from quantkit.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OURS, THEIRS = "quantkit.load", "transformers"
#: The reader of `engines.tables` that stands for THEIRS, once tried.
TRIED = "transformers (with compressed-tensors)"


class Opening(NamedTuple):
    """Hold the readers that open a folder. Others have a reason: they refuse it, or
    were not tried.
    """

    readers: tuple[str, ...]
    refused: dict[str, str]
    untried: dict[str, str]


def open_folder(
    folder: Path, config: dict[str, Any], src: Checkpoint, trust_remote_code: bool = False
) -> Opening:
    """Open a folder made from `src` that gets `config` as its config.json.

    No reader is tried if transformers cannot build the model here. CheckpointError names the
    reader, and the tensor that is missing, unexpected, or of another shape or dtype.
    """
    model: PreTrainedModel | None = None
    unbuildable = ""
    try:
        model = skeleton(src, src.dtype_of_model, trust_remote_code)
    except CheckpointError as error:
        unbuildable = str(error)
    try:
        made = Checkpoint(folder, trust_remote_code, config=config)
        _require_tensors_of(src, made)
        if model is not None:
            swap(model, made)
    except CheckpointError as error:
        raise CheckpointError(
            Words(f"the output is not published, {OURS} does not open it (", error.typed, ")"),
            "a bug, please report it",
        ) from error
    if model is None:
        return Opening((), {}, dict.fromkeys((OURS, THEIRS), unbuildable))
    forms = {name: (made.dtype(name), made.shape(name)) for name in made.names()}
    try:
        refusal = refusal_by_transformers(model, src, made.stated, forms, trust_remote_code)
    except NotTried as why:
        return Opening((OURS,), {}, {THEIRS: str(why)})
    return Opening((OURS,), {THEIRS: refusal}, {}) if refusal else Opening((OURS, THEIRS), {}, {})


def require_right_weights(
    model: PreTrainedModel,
    src: Checkpoint,
    layout: Layout,
    stated: dict[str, Any],
    planned: Plan,
    trust_remote_code: bool,
) -> None:
    """Raise CheckpointError, before any work, if transformers would fill weights of the planned
    output by itself.

    `stated` is the `quantization_config` of the output.
    """
    rows = {f"{row.module}.weight": row for row in planned.quantized}
    forms = {name: _stored_form(src, name) for name in src.names() if name not in rows}
    for row in rows.values():
        stored = layout.stored(Scheme.parse(row.scheme or ""), *row.stored)
        forms |= {
            f"{row.module}.{suffix}": (dtype, tuple(shape))
            for suffix, (dtype, shape) in stored.items()
        }
    with suppress(NotTried):
        refusal_by_transformers(model, src, stated, forms, trust_remote_code)


def require_complete_source(src: Checkpoint, trust_remote_code: bool = False) -> Outside:
    """Raise CheckpointError unless a source has the tensors of its model and others that it
    declares, before any work.

    Returns the tensors that the model does not have. A model that transformers cannot build here is
    not checked, and draft layers are found by their names.
    """
    try:
        model = skeleton(src, src.dtype_of_model, trust_remote_code)
    except CheckpointError:
        return Outside.of(src, drafts_by_name(src))
    return Outside.of(src, swap(model, src)[1])


def _require_tensors_of(src: Checkpoint, made: Checkpoint) -> None:
    """Raise CheckpointError unless `made` has the tensors of `src`, packed ones as its layout
    stores them.
    """
    before, after = set(src.logical()), set(made.logical())
    for name in sorted(before ^ after):
        what = "missing" if name in before else "not a tensor of the source"
        raise CheckpointError(f"{name} is {what}", subject=made.path)
    expected = {name: _stored_form(src, name) for name in before.intersection(src.names())}
    found = {
        name: (made.dtype(name), made.shape(name)) for name in after.intersection(made.names())
    }
    for module in made.modules():
        assert made.layout is not None
        expected.pop(f"{module}.weight", None)
        stored = made.layout.stored(made.scheme(module), *made.size(module))
        expected |= {
            f"{module}.{suffix}": (dtype, tuple(shape)) for suffix, (dtype, shape) in stored.items()
        }
        found |= {
            name: (made.dtype(name), made.shape(name)) for name in made.parts(module).values()
        }
    for name in {**expected, **found}:
        have, need = (_form(forms.get(name)) for forms in (found, expected))
        if have != need:
            raise CheckpointError(f"{name} is {have}, and should be {need}", subject=made.path)


def _stored_form(src: Checkpoint, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape in which a tensor of the source is written if it stays dense."""
    stored = src.as_stored(name, torch.empty(src.shape(name), dtype=src.dtype(name), device="meta"))
    return stored.dtype, tuple(stored.shape)


def _form(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if form is None else f"{dtype_name(form[0])} {list(form[1])}"
