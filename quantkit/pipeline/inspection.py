"""Folders from their headers: the facts of any checkpoint, and a finished folder opened as its
readers do, on the meta device, before it is published.

`quantkit.load` must find a tensor for each state of the model and a state for each tensor. Then
transformers opens the folder with its own quantizer, if it has one. It may refuse. A folder that it
would fill with random weights fails the run.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import dtype_name
from quantkit.core.threads import grouped
from quantkit.engines.readers import Folder, opened_by
from quantkit.errors import CheckpointError, Words
from quantkit.inference.load import Forms, NotTried, refusal_by_transformers
from quantkit.inference.swap_linears import swap
from quantkit.layouts.schemes import key_of
from quantkit.models.meta_model import skeleton
from quantkit.models.outline import Outline, decoder_weights, share_of
from quantkit.models.outside import unexplained
from quantkit.names import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel
OURS, THEIRS = "quantkit.load", "transformers"
#: The reader of `engines.tables` that stands for THEIRS, once tried.
TRIED = "transformers (with compressed-tensors)"


def describe(src: Checkpoint) -> Json:
    """Collect layout, schemes, counts, sizes and shapes of a checkpoint, whoever wrote it."""
    modules = {module: (src.scheme(module), src.true_size(module)) for module in src.modules()}
    padded = {
        module: f" in {list(src.size(module))}" if src.is_padded(module) else ""
        for module in modules
    }
    packed = {name: suffix for module in modules for suffix, name in src.parts(module).items()}
    every = {name: src.nbytes(name) for name in src.names()}
    parts = grouped((suffix, every[name]) for name, suffix in packed.items())
    suffixes = {suffix: sum(sizes) for suffix, sizes in parts.items()}
    dense = [name for name in every if name not in packed]
    weights = sum(n * k for _, (n, k) in modules.values())
    shapes = Counter(
        f"[{n}, {k}]{padded[module]} {scheme.label}" for module, (scheme, (n, k)) in modules.items()
    )
    shapes.update(f"{list(src.shape(name))} {dtype_name(src.dtype(name))}" for name in dense)
    parameters = weights + sum(prod(src.shape(name)) for name in dense)
    kind = f"Hugging Face folders{f' of {src.low_bit}' if src.low_bit else ''}"
    kind = kind if src.home == src.path else "GGUF"
    strange = unexplained(src)
    plain = f"nothing that is known: {strange}" if strange else f"anything that reads {kind}"
    return {
        "path": str(src.home),
        "model_type": src.config.get("model_type"),
        "dtype": dtype_name(src.dtype_of_model),
        "layout": src.layout.NAME if src.layout else None,
        "dequantized_from": src.low_bit,
        "schemes": dict(Counter(scheme.label for scheme, _ in modules.values())),
        "embeddings_and_heads": {
            module: scheme.label for module, (scheme, _) in modules.items() if key_of(module)
        },
        "quantized_linears": len(modules),
        "padded_linears": sum(map(bool, padded.values())),
        "dense_tensors": len(dense),
        "parameters": parameters,
        "quantized_weights": weights,
        "share": share_of(decoder_weights(src), modules),
        "bits_per_weight": 8 * sum(suffixes.values()) / weights if weights else None,
        "bits_per_parameter": 8 * src.source_bytes / parameters if parameters else None,
        "bytes": {
            "total": src.source_bytes,
            "dense": src.source_bytes - sum(suffixes.values()),
            "packed": suffixes,
        },
        "shapes": dict(shapes),
        "files": src.sizes(),
        "readers": ", ".join(_readers(src)) if src.layout else plain,
        "notices": list(src.notices),
    }


def tensors(src: Checkpoint) -> list[tuple[str, list[int], str]]:
    """List each packed linear with its scheme, and each dense tensor with its dtype."""
    packed = {name for module in src.modules() for name in src.parts(module).values()}
    linears = [
        (module, list(src.true_size(module)), src.scheme(module).label) for module in src.modules()
    ]
    dense = [
        (name, list(src.shape(name)), dtype_name(src.dtype(name)))
        for name in src.names()
        if name not in packed
    ]
    return linears + dense


def _readers(src: Checkpoint) -> list[str]:
    assert src.layout is not None and src.schemes is not None
    linears = {module: (src.scheme(module), src.size(module)) for module in src.modules()}
    padded = any(map(src.is_padded, linears))
    folder = Folder(
        src.layout.NAME, linears, src.schemes.ignore, padded, src.config, tied=src.is_tied
    )
    return opened_by(folder)


class Opening(NamedTuple):
    """Hold the readers that open a folder. Others have a reason: they refuse it, or
    were not tried.
    """

    readers: tuple[str, ...]
    refused: dict[str, str]
    untried: dict[str, str]


def open_folder(folder: Path, config: Json, src: Checkpoint) -> Opening:
    """Open a folder made from `src` that gets `config` as its config.json.

    No reader is tried if transformers cannot build the model here. CheckpointError names the
    reader, and the tensor that is missing, unexpected, or of another shape or dtype.
    """
    module: PreTrainedModel | str
    try:
        module = skeleton(src, src.dtype_of_model)
    except CheckpointError as error:
        module = str(error)
    try:
        made = Checkpoint(folder, src.trusted, config=config)
        forms = {name: (made.dtype(name), made.shape(name)) for name in made.names()}
        _require_tensors_of(src, made, forms)
        if isinstance(module, str):
            return Opening((), {}, dict.fromkeys((OURS, THEIRS), module))
        outline = Outline(made, module, as_matrices=False)
        swap(outline)
    except CheckpointError as error:
        raise CheckpointError(
            Words(f"the output is not published, {OURS} does not open it (", error.typed, ")"),
            "a bug, please report it",
        ) from error
    try:
        refusal = refusal_by_transformers(outline, src, made.stated, forms)
    except NotTried as why:
        return Opening((OURS,), {}, {THEIRS: str(why)})
    return Opening((OURS,), {THEIRS: refusal}, {}) if refusal else Opening((OURS, THEIRS), {}, {})


def _require_tensors_of(src: Checkpoint, made: Checkpoint, found: Forms) -> None:
    """Raise CheckpointError unless `made`, with the forms `found`, has the tensors of `src`, and
    packed weights in the form of its layout.
    """
    before, after = set(src.logical()), set(made.logical())
    for name in sorted(before ^ after):
        what = "missing" if name in before else "not a tensor of the source"
        raise CheckpointError(f"{name} is {what}", subject=made.path)
    expected = {name: src.form_written(name) for name in before.intersection(src.names())}
    for module in made.modules():
        assert made.layout is not None
        expected.pop(f"{module}.weight", None)
        stored = made.layout.stored(made.scheme(module), *made.size(module))
        expected |= {
            f"{module}.{suffix}": (dtype, tuple(shape)) for suffix, (dtype, shape) in stored.items()
        }
    for name in {**expected, **found}:
        have, need = (_form(forms.get(name)) for forms in (found, expected))
        if have != need:
            raise CheckpointError(f"{name} is {have}, and should be {need}", subject=made.path)


def _form(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if form is None else f"{dtype_name(form[0])} {list(form[1])}"
