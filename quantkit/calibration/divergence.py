"""How far packed folders are from their source: their KL divergence on held-out text, and the loss
increase of each linear.

One block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import kl_div

from quantkit.calibration.budget import TUNED_AT_ONCE, Sizes, gradient_documents
from quantkit.calibration.run import Run, embedded
from quantkit.calibration.stages import gradients
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.modules import get_tensor, put_tensor

#: The measured documents have at least this many tokens together, as far as there are.
TOKENS = 2**12
#: Tokens that are compared at a time.
ROWS = 64


@torch.no_grad()
def divergences(run: Run, folders: Mapping[str, Checkpoint]) -> dict[str, float]:
    """Measure the mean divergence of each folder on the run's sequences, in nats for each token.

    The logits of one sequence by two models are in memory together.
    """
    model = run.model

    def decoded(end: int, folder: Checkpoint) -> dict[str, Tensor]:
        path, name = model.ends[end]
        return {
            f"{path}.weight": folder.dense(f"{module}.weight", model.dtype).to(model.device)
            for module in {name}.intersection(folder.modules())
        }

    streams = {"source": embedded(run, kind="source-")} | {
        name: embedded(run, kind=f"{name}-", instead=decoded(0, folder))
        for name, folder in folders.items()
    }
    packed = {name: set(folder.modules()) for name, folder in folders.items()}
    for block in run.progress.bar(range(len(model.blocks)), "divergence", "block"):
        for name, stream in streams.items():
            model.weights.load_block(block)
            for linear in packed.get(name, set()).intersection(model.targets(block)):
                run.put_back(linear, folders[name].unpadded(linear))
            stream.forward(block)
            model.weights.unload_block(block)
    model.weights.load_head()
    sums, last = dict.fromkeys(folders, 0.0), f"{model.ends[1][0]}.weight"
    source = get_tensor(model.module, last)

    def logs(name: str, number: int, head: Tensor) -> list[Tensor]:
        put_tensor(model.module, last, head)
        hidden = streams[name].activations.get(number).hidden
        return [*model.logits_of(run.sequences[number], hidden).float().log_softmax(-1).split(ROWS)]

    for name, folder in folders.items():
        head = decoded(1, folder).get(last, source)
        for number in range(len(run.sequences)):
            run.progress.check()
            before = logs("source", number, source)
            for one, other in zip(logs(name, number, head), before, strict=True):
                found = kl_div(one, other, reduction="none", log_target=True)
                sums[name] += float(found.sum(dtype=torch.float64))
    model.weights.drop_head()
    return {name: total / sum(map(len, run.sequences)) for name, total in sums.items()}


def pass_bytes(sizes: Sizes) -> list[dict[str, int]]:
    """Count the memory of the two passes by part, with the errors of a block's linears."""
    drawing, back = gradients.pass_bytes(sizes, sizes.gradient_bytes(TOKENS))
    once = max(sizes.longest, TUNED_AT_ONCE[sizes.device])
    logits = sizes.longest * sizes.vocabulary
    return [
        drawing | {"error of the head": 4 * (max(sizes.outside, default=0) + logits)},
        back | {"errors of a block": 4 * sizes.most(once)},
    ]


def loss_increases(run: Run, folder: Checkpoint) -> dict[str, float]:
    """Estimate the loss increase by each packed weight of a folder made from the run's source, in
    nats for each token (ALGORITHMS 17).

    The unquantized model runs forward and back once, on documents that did not calibrate. The
    estimate is the squared change of the likelihood to first order, token by token. A linear that
    no token reaches has no entry. Raises as `gradients.measure`.
    """
    lengths, found = list(map(len, run.sequences)), dict[str, float]()
    count = gradient_documents(lengths, TOKENS)
    total = sum(lengths[:count])
    packed, (table, (_, head)) = set(folder.modules()), run.model.ends
    #: For each linear of the block: the error of the weight, float32 `[n, k]`, and the sum of
    #: squares, a float64 scalar.
    errors, sums = dict[str, Tensor](), dict[str, Tensor]()

    def error(linear: str) -> Tensor:
        source = run.model.weights.source(linear)
        decoded = folder.unpadded(linear).dequantize(torch.float32)[:, : source.shape[1]]
        return decoded.to(source.device).sub_(source).to(run.model.device)

    @contextmanager
    def watch(block: int) -> Iterator[None]:
        seen: list[tuple[str, Tensor]] = []

        def see(linear: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            changed = args[0].detach().flatten(0, -2).float() @ errors[linear].T

            def square(g: Tensor) -> None:
                each = (changed * g.flatten(0, -2)).sum(-1)
                seen.append((linear, each.square().sum(dtype=torch.float64)))

            if len(changed):
                output.register_hook(square)

        inside = run.model.targets(block) if block < len(run.model.blocks) else [head]
        with ExitStack() as stack:
            for linear in packed.intersection(inside):
                errors[linear] = errors[linear] if linear in errors else error(linear)
                module = run.model.module.get_submodule(run.model.places[linear])
                stack.callback(module.register_forward_hook(partial(see, linear)).remove)
            yield
        for linear, each in seen:  # after a pass without an error
            sums[linear] = each + sums.get(linear, 0.0)

    tokens = torch.cat([*run.sequences[:count]])
    for at, entering in gradients.carried_back(run, embedded(run, count, "unquantized-"), watch):
        errors.clear()
        if at == 0 and table[1] in packed:
            # By the embeddings' own forward, which may scale rows. A projection behind them has no
            # estimate.
            module = run.model.module.get_submodule(table[0])
            changed = functional_call(module, {"weight": error(table[1])}, (tokens,))
            if changed.shape == entering.shape:
                products = (changed * entering.to(changed.device)).sum(-1)
                sums[table[1]] = products.square().sum(dtype=torch.float64)
        for linear, each in sums.items():
            found[linear] = float(each) / (2 * total) + found.get(linear, 0.0)  # of both if tied
        sums.clear()
    return found
