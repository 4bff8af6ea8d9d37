"""How much the model's likelihood suffers from each linear in each scheme (ALGORITHMS 17).

The unquantized model runs forward and back once, on some calibration documents. The gradients of `stages.gradients` by
a block's outputs are carried on to the outputs of its linears. A linear's harm in a scheme is the squared change of its
outputs by rounding, each output weighted by its mean squared gradient. One block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import rtn
from quantkit.algorithms.deviation import widened
from quantkit.algorithms.numerics import row_slices
from quantkit.calibration.backward import explaining, gradient, in_fixed_order, parts, run_part, stacked
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages import gradients
from quantkit.core.scheme import Scheme
from quantkit.errors import Words, about

#: The documents that are run have at least this many tokens together, if there are so many.
TOKENS = 2**15
INSTEAD = Words("quantize it with one scheme")

#: The harm of each linear in each scheme, by its label.
Harms = dict[str, dict[str, float]]


def measure(run: Run, schemes: Mapping[str, Sequence[Scheme]], done: int = 0) -> Iterator[Harms]:
    """Yield the harm of the linears of each block, in nats for each token, behind the first `done` blocks.

    `schemes` has the schemes to try for each linear. A linear that no token reaches has no entry. The gradients of a
    stopped run are read from its folder. Raises as `gradients.measure`.
    """
    count, total = 0, 0
    while count < len(run.sequences) and total < TOKENS:
        count, total = count + 1, total + len(run.sequences[count])
    found = gradients.measure(run, embedded(run, count, "unquantized-"), resumed=done > 0)
    stream = embedded(run, count, "sensitivity-")
    for block in run.progress.bar(range(len(run.model.blocks)), "sensitivities", len(run.model.blocks), "block"):
        with run.clock.phase("load"):
            run.model.load_block(block)
        if block >= done:
            with run.clock.phase("sensitivities"):
                linears = [linear for linear in run.model.targets(block) if linear in schemes]
                seen = _observe(stream, block, linears, found.of(block))
                yield {name: _harms(run, name, schemes[name], *sums, total) for name, sums in seen.items()}
        stream.forward(block)
        run.model.unload_block(block)


def _observe(
    stream: Stream, block: int, linears: Sequence[str], behind: Tensor
) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Sum what each linear of a loaded block sees in all documents.

    These are its squared inputs `[k]`, the squared gradients by its outputs `[n]`, float64, and the number of tokens.
    `behind` are the gradients by the block's outputs.
    """
    model, rows = stream.model, stream.activations.rows
    modules = {linear: model.module.get_submodule(model.paths[linear]) for linear in linears}
    gradients_of = behind.split(rows)
    sums: dict[str, tuple[Tensor, Tensor, int]] = {}
    for part in parts(stream, block):
        with explaining(model, INSTEAD):
            seen = in_fixed_order(model, stream.progress, partial(_seen, stream, block, part, gradients_of, modules))
        for linear, x, g, tokens in seen:
            before = sums.get(linear)
            sums[linear] = (x, g, tokens) if before is None else (before[0] + x, before[1] + g, before[2] + tokens)
    return sums


@torch.enable_grad()
def _seen(
    stream: Stream, block: int, part: Sequence[int], behind: Sequence[Tensor], modules: Mapping[str, nn.Module]
) -> list[tuple[str, Tensor, Tensor, int]]:
    """Run some documents through a loaded block and back; return the sums of each call of its linears."""
    found: list[tuple[str, Tensor, Tensor, int]] = []
    device = stream.model.device

    def see(linear: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = args[0].detach()
        if x.numel():
            output.register_hook(partial(add, linear, _squares(x), x.numel() // x.shape[-1]))

    def add(linear: str, x: Tensor, tokens: int, g: Tensor) -> None:
        found.append((linear, x, _squares(g), tokens))

    with ExitStack() as stack:
        for linear, module in modules.items():
            stack.callback(module.register_forward_hook(partial(see, linear)).remove)
        hidden = stacked(stream.activations, part).detach().to(device, copy=True).requires_grad_()
        passed_back = torch.stack([behind[number] for number in part]).to(device)
        out = run_part(stream, block, part, {}, hidden)
        gradient(stream.model, out, hidden, passed_back.view_as(out).to(out.dtype))
    return found


def _squares(x: Tensor) -> Tensor:
    """Sum the squares of `x` `[..., c]` over all but the last axis, float64 `[c]`."""
    return x.reshape(-1, x.shape[-1]).float().square().sum(0, dtype=torch.float64)


def _harms(
    run: Run, linear: str, schemes: Sequence[Scheme], x: Tensor, g: Tensor, tokens: int, total: int
) -> dict[str, float]:
    """Compute the harm of a linear in each scheme: `sum(g (W - Q(W))^2 x) / 2`, with means over its tokens.

    An expert sees only some of the `total` tokens, and does so much less harm.
    """
    weight = run.model.weights.source(linear)
    found = {}
    for scheme in schemes:
        run.progress.check()
        with about(linear):
            q, _ = rtn.quantize(widened(weight, scheme.padded_k(weight.shape[1])), scheme)
        decoded = q.dequantize(torch.float32)[:, : weight.shape[1]]
        harm = 0.0
        for rows in row_slices(weight, weight.shape[1]):
            error = (weight[rows].float() - decoded[rows]).square_().double() @ (x / tokens)
            harm += float(error @ (g[rows] / total))
        found[scheme.label] = harm / 2
    return found
