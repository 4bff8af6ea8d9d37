"""The KL divergence of packed folders from their source, one block in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import kl_div

from quantkit.calibration.run import Run, embedded
from quantkit.checkpoint.reader import Checkpoint


@torch.no_grad()
def divergences(run: Run, folders: Mapping[str, Checkpoint]) -> dict[str, float]:
    """Measure the mean divergence of each folder on the run's sequences, in nats for each token.

    The logits of one sequence are in memory together.
    """
    model = run.model
    streams = {name: embedded(run, kind=f"{name}-") for name in ("source", *folders)}
    packed = {name: set(folder.modules()) for name, folder in folders.items()}
    for block in run.progress.bar(range(len(model.blocks)), "divergence", len(model.blocks), "block"):
        for name, stream in streams.items():
            model.load_block(block)
            for linear in model.targets(block):
                if linear in packed.get(name, ()):
                    run.put_back(linear, folders[name].unpadded(linear))
            stream.forward(block)
            model.unload_block(block)
    model.weights.load_head()
    sums = dict.fromkeys(folders, 0.0)
    for number, tokens in enumerate(run.sequences):
        run.progress.check()
        logs = {
            name: model.logits_of(tokens, stream.activations.get(number).hidden).float().log_softmax(-1)
            for name, stream in streams.items()
        }
        for name in folders:
            found = kl_div(logs[name], logs["source"], reduction="none", log_target=True)
            sums[name] += float(found.sum(dtype=torch.float64))
    model.weights.drop_head()
    return {name: total / sum(map(len, run.sequences)) for name, total in sums.items()}
