"""The KL divergence of packed folders from their source, one block in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from quantkit.calibration.run import Run, embedded
from quantkit.checkpoint.reader import Checkpoint

#: Tokens that are compared at a time.
ROWS = 64


@torch.no_grad()
def divergences(run: Run, folders: Mapping[str, Checkpoint]) -> dict[str, float]:
    """Measure the mean divergence of each folder on the run's sequences, in nats for each token.

    The logits of one sequence by two models are in memory together.
    """
    model = run.model
    streams = {name: embedded(run, kind=f"{name}-") for name in ("source", *folders)}
    packed = {name: set(folder.modules()) for name, folder in folders.items()}
    for block in run.progress.bar(
        range(len(model.blocks)), "divergence", len(model.blocks), "block"
    ):
        for name, stream in streams.items():
            model.load_block(block)
            for linear in model.targets(block):
                if linear in packed.get(name, ()):
                    run.put_back(linear, folders[name].unpadded(linear))
            stream.forward(block)
            model.unload_block(block)
    model.weights.load_head()
    sums = dict.fromkeys(folders, 0.0)

    def logs(name: str, number: int) -> Tensor:
        hidden = streams[name].activations.get(number).hidden
        return model.logits_of(run.sequences[number], hidden).float().log_softmax(-1)

    for number in range(len(run.sequences)):
        run.progress.check()
        source = logs("source", number).split(ROWS)
        for name in folders:
            for one, other in zip(logs(name, number).split(ROWS), source, strict=True):
                found = kl_div(one, other, reduction="none", log_target=True)
                sums[name] += float(found.sum(dtype=torch.float64))
    model.weights.drop_head()
    return {name: total / sum(map(len, run.sequences)) for name, total in sums.items()}
