"""Measure how large the sums of a row grow before its scale multiplies them (docs/layouts.md 9b)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.calibration.stages.base import LoadedBlock
from quantkit.checkpoint.report import ROW_SUM
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.engines.readers import sums_in_float16

#: A sum from here on is reported: served text may be worse than the calibration tokens.
LEAST = torch.finfo(torch.float16).max / 4


@contextmanager
def measured(block: LoadedBlock) -> Iterator[bool]:
    """Measure solved linears while the block runs on all documents; add ROW_SUM to the facts of those near overflow.

    A sum is `|output - bias| / scale`. Yields False if vLLM has no kernel that overflows so.
    """
    run, layout = block.run, block.run.recipe.output_layout
    scales: dict[str, Tensor] = {}
    for name, item in block.solved.items():
        linear = name.removesuffix(".weight")
        n, k = run.model.linears[linear]
        if layout is None or not isinstance(item.value, QuantizedTensor) or linear in block.uncalled:
            continue
        if sums_in_float16(layout.NAME, item.value.scheme, n, k, linear in run.model.experts):
            scales[linear] = item.value.scales[:n, 0].to(run.model.device, torch.float32).abs()
    most = {linear: torch.zeros((), device=run.model.device) for linear in scales}

    def see(linear: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        bias = getattr(module, "bias", None)
        rows = (output if bias is None else output - bias).flatten(0, -2)
        if len(rows):
            reached = torch.maximum(rows.amax(0), -rows.amin(0)).float() / scales[linear]
            most[linear] = torch.maximum(most[linear], reached.nan_to_num(0.0, posinf=0.0).amax())  # a scale may be 0

    with ExitStack() as stack:
        for linear in scales:
            module = run.model.module.get_submodule(run.model.paths[linear])
            stack.callback(module.register_forward_hook(partial(see, linear)).remove)
        yield bool(scales)
    found = run.ranks.exchange({linear: float(value) for linear, value in most.items()}) if scales else []
    for linear in scales:
        name, largest = f"{linear}.weight", max(each[linear] for each in found)
        if largest > LEAST:
            item = block.solved[name]
            block.solved[name] = item._replace(facts={**(item.facts or {}), ROW_SUM: largest})
