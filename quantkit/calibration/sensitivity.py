"""How much the model's likelihood suffers from each linear in each scheme (ALGORITHMS 17).

The unquantized model runs forward and back once, on some calibration documents (`stages.gradients`). A linear's harm in
a scheme is the squared change of its outputs by rounding, each output weighted by its mean squared gradient. One block
is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import rtn
from quantkit.algorithms.deviation import widened
from quantkit.algorithms.numerics import row_slices
from quantkit.calibration.run import Run, embedded
from quantkit.calibration.stages import gradients
from quantkit.core.scheme import Scheme
from quantkit.errors import about

#: The documents that are run have at least this many tokens together, if there are so many.
TOKENS = 2**13

#: The harm of each linear in each scheme, by its label.
Harms = dict[str, dict[str, float]]


def measure(run: Run, schemes: Mapping[str, Collection[str]]) -> Harms:
    """Measure the harm of each linear in its `schemes`, by their labels, in nats for each token.

    A linear that no token reaches has no entry. Raises as `gradients.measure`.
    """
    count, total, found = 0, 0, Harms()
    while count < len(run.sequences) and total < TOKENS:
        count, total = count + 1, total + len(run.sequences[count])
    #: Squared inputs `[k]` and squared gradients by the outputs `[n]`, float64 sums, and the number of tokens.
    sums: dict[str, tuple[Tensor, Tensor, int]] = {}

    @contextmanager
    def watch(block: int) -> Iterator[None]:
        seen: list[tuple[str, Tensor, Tensor, int]] = []

        def see(linear: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            x = args[0].detach()
            if x.numel():
                output.register_hook(partial(add, linear, _squares(x), x.numel() // x.shape[-1]))

        def add(linear: str, x: Tensor, tokens: int, g: Tensor) -> None:
            seen.append((linear, x, _squares(g), tokens))

        with ExitStack() as stack:
            for linear in schemes.keys() & run.model.targets(block):
                module = run.model.module.get_submodule(run.model.paths[linear])
                stack.callback(module.register_forward_hook(partial(see, linear)).remove)
            yield
        for linear, x, g, tokens in seen:  # behind a pass that did not fail
            before = sums.get(linear, (0, 0, 0))
            sums[linear] = x + before[0], g + before[1], tokens + before[2]

    for _ in gradients.carried_back(run, embedded(run, count, "unquantized-"), watch):
        with run.clock.phase("rounding"):
            for linear in list(sums):
                found[linear] = _harms(run, linear, schemes[linear], *sums.pop(linear), total)
    return found


def _squares(x: Tensor) -> Tensor:
    """Sum the squares of `x` `[..., c]` over all but the last axis, float64 `[c]`."""
    return x.reshape(-1, x.shape[-1]).float().square().sum(0, dtype=torch.float64)


def _harms(
    run: Run, linear: str, schemes: Collection[str], x: Tensor, g: Tensor, tokens: int, total: int
) -> dict[str, float]:
    """Compute the harm of a linear in each scheme: `sum(g (W - Q(W))^2 x) / 2`, with means over its tokens.

    An expert sees only some of the `total` tokens, and does so much less harm.
    """
    weight = run.model.weights.source(linear)
    found = {}
    for scheme in map(Scheme.parse, sorted(schemes)):
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
