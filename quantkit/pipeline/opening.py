"""Opens a finished folder as its readers do, on the meta device and from headers only. This happens
before publishing.

`quantkit.load` must find a tensor for each state of the model and a state for each tensor. Then
transformers opens the folder with its own quantizer, if it has one. It may refuse. A folder that it
would fill with random weights fails the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, Words
from quantkit.inference.swap_linears import swap
from quantkit.inference.transformers_loading import NotTried, refusal_by_transformers
from quantkit.models.meta_model import skeleton
from quantkit.models.outline import Outline

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
    module: PreTrainedModel | None = None
    unbuildable, outline = "", None
    try:
        module = skeleton(src, src.dtype_of_model, trust_remote_code)
    except CheckpointError as error:
        unbuildable = str(error)
    try:
        made = Checkpoint(folder, trust_remote_code, config=config)
        _require_tensors_of(src, made)
        if module is not None:
            outline = Outline(made, module, as_matrices=False)
            swap(outline)
    except CheckpointError as error:
        raise CheckpointError(
            Words(f"the output is not published, {OURS} does not open it (", error.typed, ")"),
            "a bug, please report it",
        ) from error
    if outline is None:
        return Opening((), {}, dict.fromkeys((OURS, THEIRS), unbuildable))
    forms = {name: (made.dtype(name), made.shape(name)) for name in made.names()}
    try:
        refusal = refusal_by_transformers(outline, src, made.stated, forms, trust_remote_code)
    except NotTried as why:
        return Opening((OURS,), {}, {THEIRS: str(why)})
    return Opening((OURS,), {THEIRS: refusal}, {}) if refusal else Opening((OURS, THEIRS), {}, {})


def _require_tensors_of(src: Checkpoint, made: Checkpoint) -> None:
    """Raise CheckpointError unless `made` has the tensors of `src`, with packed weights in the form
    of its layout.
    """
    before, after = set(src.logical()), set(made.logical())
    for name in sorted(before ^ after):
        what = "missing" if name in before else "not a tensor of the source"
        raise CheckpointError(f"{name} is {what}", subject=made.path)
    expected = {name: src.form_written(name) for name in before.intersection(src.names())}
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


def _form(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if form is None else f"{dtype_name(form[0])} {list(form[1])}"
