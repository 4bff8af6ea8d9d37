"""How much the model's likelihood suffers from the error of each linear in a folder (ALGORITHMS 17).

The unquantized model runs forward and back once, on some calibration documents (`stages.gradients`). A linear's harm is
the squared error of its weights, times their squared inputs and the squared gradients by outputs, token by token. One
block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.run import Run, embedded
from quantkit.calibration.stages import gradients
from quantkit.checkpoint.reader import Checkpoint

#: The documents that are run have at least this many tokens together, if there are so many.
TOKENS = 2**13


def measure(run: Run, folder: Checkpoint) -> dict[str, float]:
    """Measure the harm of each packed linear of a folder made from the run's source, in nats for each token.

    A linear that no token reaches has no entry. Raises as `gradients.measure`.
    """
    count, total, found = 0, 0, dict[str, float]()
    while count < len(run.sequences) and total < TOKENS:
        count, total = count + 1, total + len(run.sequences[count])
    packed = set(folder.modules())
    #: Sums over tokens of the squared gradient by each output times each squared input, float32 `[n, k]`.
    sums: dict[str, Tensor] = {}

    @contextmanager
    def watch(block: int) -> Iterator[None]:
        seen: list[tuple[str, Tensor, Tensor]] = []

        def see(linear: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            x = args[0].detach().flatten(0, -2).float().square()  # code may overwrite the input
            if len(x):
                output.register_hook(lambda g: seen.append((linear, x, g.flatten(0, -2).float().square().T)))

        with ExitStack() as stack:
            for linear in packed.intersection(run.model.targets(block)):
                module = run.model.module.get_submodule(run.model.paths[linear])
                stack.callback(module.register_forward_hook(partial(see, linear)).remove)
            yield
        for linear, x, g in seen:  # behind a pass that did not fail
            sums[linear] = sums[linear].addmm_(g, x) if linear in sums else g @ x

    for _ in gradients.carried_back(run, embedded(run, count, "unquantized-"), watch):
        for linear in list(sums):
            weight = run.model.weights.source(linear)
            decoded = folder.unpadded(linear).dequantize(torch.float32)[:, : weight.shape[1]]
            squares = decoded.to(weight.device).sub_(weight).square_()
            found[linear] = float(squares.mul_(sums.pop(linear)).sum(dtype=torch.float64)) / (2 * total)
    return found
