"""Facts of any checkpoint, from its headers only (`inspect`)."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.tensors import dtype_name
from quantkit.engines.readers import Folder, opened_by
from quantkit.models.outline import decoder_weights, share_of


def describe(src: Checkpoint) -> dict[str, Any]:
    """Collect layout, schemes, counts, sizes and shapes of a checkpoint, whoever wrote it."""
    modules = {module: (src.scheme(module), src.true_size(module)) for module in src.modules()}
    padded = {
        module: f" in {list(src.size(module))}" if src.is_padded(module) else ""
        for module in modules
    }
    packed = {name: suffix for module in modules for suffix, name in src.parts(module).items()}
    every = {name: src.nbytes(name) for name in src.names()}
    suffixes: Counter[str] = Counter()
    for name, suffix in packed.items():
        suffixes[suffix] += every[name]
    dense = [name for name in every if name not in packed]
    weights = sum(n * k for _, (n, k) in modules.values())
    shapes = Counter(
        f"[{n}, {k}]{padded[module]} {scheme.label}" for module, (scheme, (n, k)) in modules.items()
    )
    shapes.update(f"{list(src.shape(name))} {dtype_name(src.dtype(name))}" for name in dense)
    parameters = weights + sum(prod(src.shape(name)) for name in dense)
    kind, of_form = "Hugging Face folders", f" of {src.low_bit}" if src.low_bit else ""
    if src.home != src.path:
        kind, of_form = "GGUF", ""
    return {
        "path": str(src.home),
        "model_type": src.config.get("model_type"),
        "dtype": dtype_name(src.dtype_of_model),
        "layout": src.layout.NAME if src.layout else None,
        "dequantized_from": src.low_bit,
        "schemes": dict(Counter(scheme.label for scheme, _ in modules.values())),
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
            "packed": dict(suffixes),
        },
        "shapes": dict(shapes),
        "files": {path.name: path.stat().st_size for path in src.files()},
        "readers": ", ".join(_readers(src))
        if src.layout
        else f"anything that reads {kind}{of_form}",
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
    return opened_by(Folder(src.layout.NAME, linears, src.schemes.ignore, padded, src.config))
