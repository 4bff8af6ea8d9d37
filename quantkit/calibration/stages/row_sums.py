"""Keep sums of a row small that vLLM holds in float16 before the row's scale multiplies them
(docs/layouts.md 9b).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.calibration.stages.base import LoadedBlock, Stage
from quantkit.checkpoint.report import ROW_SUM
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.engines.readers import sums_in_float16
from quantkit.layouts.humming import Humming

#: A sum from here on is reported: served text may be worse than the calibration tokens.
LEAST = torch.finfo(torch.float16).max / 4
#: Raised scales bring the sums of the original weights below this. Those of codes may be somewhat
#: larger.
AIM = 0.9 * LEAST


class RowSums(Stage):
    """Find the least scales of FP6 and FP5 with which sums stay small.

    Where a scale is raised, only small weights lose precision. Integers would lose a bit for each
    power of two.
    """

    def enter(self, block: LoadedBlock) -> None:
        """Measure the largest outputs of the unquantized block, in a pass of its own."""
        recipe, floats = block.run.recipe, dict[str, Scheme]()
        if recipe.layout == Humming.NAME and recipe.factored and recipe.clip == "search":
            schemes = (
                (linear, goal) for linear, goal in block.goals.items() if isinstance(goal, Scheme)
            )
            floats = {linear: scheme for linear, scheme in schemes if scheme.format.is_float}
        with _peaks(block, floats) as found:
            if found:
                block.stream.forward(block.index, keep=False)
        block.floors.update({linear: peak / AIM for linear, peak in found.items()})


@contextmanager
def measured(block: LoadedBlock) -> Iterator[bool]:
    """Measure solved linears while the block runs on all documents; add ROW_SUM to the facts of
    those near overflow.

    A sum is `|output - bias| / scale`. Yields False if vLLM has no kernel that overflows so.
    """
    solved = ((name.removesuffix(".weight"), item.value) for name, item in block.solved.items())
    values = {linear: value for linear, value in solved if isinstance(value, QuantizedTensor)}
    with _peaks(block, {linear: value.scheme for linear, value in values.items()}) as found:
        yield bool(found)
    for linear, peak in found.items():
        scales = values[linear].scales[: len(peak), 0].to(peak.device, torch.float32).abs()
        largest = float((peak / scales).nan_to_num(0.0, posinf=0.0).amax())  # a scale may be 0
        if largest > LEAST:
            item = block.solved[f"{linear}.weight"]
            block.solved[item.name] = item._replace(facts={**(item.facts or {}), ROW_SUM: largest})


@contextmanager
def _peaks(block: LoadedBlock, schemes: Mapping[str, Scheme]) -> Iterator[dict[str, Tensor]]:
    """Measure the largest `|output - bias|` of each row, float32 `[n]`, of linears whose sums vLLM
    holds in float16.

    All ranks have the largest of all when the context ends.
    """
    run, layout, peaks = block.run, block.run.recipe.layout or "", dict[str, Tensor]()

    def see(linear: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        bias = getattr(module, "bias", None)
        rows = (output if bias is None else output - bias).flatten(0, -2)
        if len(rows):
            peaks[linear] = torch.maximum(
                peaks[linear], torch.maximum(rows.amax(0), -rows.amin(0)).float()
            )

    with ExitStack() as stack:
        for linear, scheme in schemes.items():
            n, k = run.model.linears[linear]
            if linear not in block.uncalled and sums_in_float16(
                layout, scheme, n, k, linear in run.model.experts
            ):
                peaks[linear] = torch.zeros(n, device=run.model.device)
                module = run.model.module.get_submodule(run.model.paths[linear])
                stack.callback(module.register_forward_hook(partial(see, linear)).remove)
        yield peaks
    for part in run.ranks.gather(peaks) if peaks else ():
        peaks.update({linear: torch.maximum(peak, part[linear]) for linear, peak in peaks.items()})
