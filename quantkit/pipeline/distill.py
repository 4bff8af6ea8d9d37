"""End-to-end tuning: scales and norms of a quantized model, and codes if asked, learn from the unquantized model.

All tensors are quantized first, and committed as drafts. This stage reads them back, with the whole model in memory.
Each step lowers the KL divergence of next-token distributions from those of the unquantized model on some calibration
sequences. Every eighth sequence is held out, and the step that is best on these is written (ALGORITHMS 8.2).

The stage is one commit: after a stop it begins anew from the drafts, and comes to the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.algorithms.deviation import relative_error
from quantkit.algorithms.learned_weight import LearnedVector, LearnedWeight
from quantkit.algorithms.rtn import scale_facts
from quantkit.calibration.backward import backward, explaining, in_fixed_order
from quantkit.calibration.preflight import new_run
from quantkit.calibration.resume import committed
from quantkit.calibration.run import Run
from quantkit.checkpoint.items import Commit, Final, Item
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import untuned
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import NumericError, Setting, Words
from quantkit.models.block_runner import BlockRunner
from quantkit.models.devices import compute_dtype
from quantkit.models.meta_model import get_tensor
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe

INSTEAD = Words("drop", Setting("distill"))
#: One of so many sequences is held out, at least one.
HELD_OUT = 8
#: Sequences of a step.
BATCH = 8
#: How often the held-out sequences are measured, besides before the first step.
MEASURED = 8
#: The largest steps of Adam for scales and norms, relative to their size.
SCALE_RATE, NORM_RATE = 2e-3, 1e-3
#: The largest steps of Adam for codes are so many codes by the number of steps, as SignRound has it: all steps in one
#: direction, at rates that rise and fall, come to about half of it. A 2:4 weight is far from its source, and gains more
#: from moves than their noise costs.
CODE_TRAVEL, SPARSE_TRAVEL = 0.9, 3.6
BETAS = (0.9, 0.95)
#: Rows of logits whose divergence is computed at a time.
ROWS = 1024


def distilled(
    src: Checkpoint,
    recipe: Recipe,
    model: BlockRunner,
    sequences: Sequence[Tensor],
    work: Path,
    done: Sequence[Mapping[str, Any]],
    *,
    progress: Progress | None = None,
) -> Iterator[Item | Commit | Final]:
    """Yield every tensor of a dense checkpoint again, with what was learned from `sequences` (int64 `[t]`).

    `work` is the run's folder with the drafts, `done` its journal lines. Nothing is yielded if they go past the drafts.
    Facts of an item are those of its draft. Losses are not computed anew, and become those of untuned codes
    (`untuned_loss`). The facts of the commit have `distillation`, which is what `tune` returns.

    Raises as `tune`.
    """
    if not all(line.get("draft") for line in done):
        return
    run = new_run(src, recipe, model, sequences, work, progress=progress)
    with run.clock.phase("load"):
        model.load_whole()
        student = Student(run, recipe.distill_codes, done)
    with run.clock.phase("distill"):
        found = student.tune(sequences, recipe.distill, recipe.calibration.seed)
    layers = {layer["name"]: layer for line in done for layer in line.get("facts", {}).get("layers", [])}
    yield Final()
    for name in src.names():
        linear = name.removesuffix(".weight")
        if name in student.norms:
            yield Item(name, student.norms[name].record().cpu())
        elif linear != name and linear in student.weights:
            record = student.weights[linear].record()
            yield Item(name, record, _facts(layers[linear], model.weights.source(linear), record))
        else:
            yield Item(name, src.get(name))
    yield Commit({"distillation": found, "phases": run.clock.take()})


class Student:
    """A quantized model that learns: `weights` and `norms` by their names in the checkpoint.

    It shares all other parameters with the unquantized model, which the run's BlockRunner holds. On a CPU with AMX,
    products of both models are computed in bfloat16.
    """

    def __init__(self, run: Run, codes: bool, done: Sequence[Mapping[str, Any]]) -> None:
        self._model, self._progress, self._codes = run.model, run.progress, codes
        self.weights: dict[str, LearnedWeight] = {}
        for linear, record in committed(run, run.model.linears, done):
            assert isinstance(record, QuantizedTensor)
            place = _on(record, self._model.device)
            source = _padded(self._model.weights.source(linear), place.shape) if codes else None
            self.weights[linear] = LearnedWeight(place, run.src.dtype_of_model, source)
        self._paths = run.model.norms()
        self.norms = {name: LearnedVector(run.src.get(name).to(self._model.device)) for name in self._paths}
        device = self._model.device
        fast = device.type == "cpu" and compute_dtype(torch.bfloat16, device) == torch.bfloat16
        self._mixed = fast and self._model.dtype == torch.float32

    def tune(self, sequences: Sequence[Tensor], steps: int, seed: int) -> dict[str, Any]:
        """Learn for `steps` steps, and go back to the best one by the held-out sequences; return facts.

        Facts: steps, best_step (0: nothing was better than the start), codes (whether they were learned), held_out
        (sequences), tokens (of all steps), and kl_before and kl_after, the mean held-out KL divergence in nats.

        NumericError if the divergence is not finite, CheckpointError if the model's code has no gradient.
        """
        last = len(sequences) - 1
        held = [sequences[i] for i in range(last, -1, -HELD_OUT)]
        others = [sequences[i] for i in range(last) if (last - i) % HELD_OUT]
        optimizer = torch.optim.Adam(self._groups(steps), betas=BETAS)
        rates = [group["lr"] for group in optimizer.param_groups]
        learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        draw, order = torch.Generator().manual_seed(seed), list[int]()
        before = best = self._measure(held)
        best_step, kept, tokens = 0, _copies(learned), 0
        for step in self._progress.bar(range(1, steps + 1), "distill", steps):
            while len(order) < BATCH:
                order += torch.randperm(len(others), generator=draw).tolist()
            batch, order = [others[i] for i in order[:BATCH]], order[BATCH:]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _schedule(step, steps)
            optimizer.zero_grad()
            self._backward(batch)
            optimizer.step()
            tokens += sum(map(len, batch))
            if step == steps or step % max(1, steps // MEASURED) == 0:
                now = self._measure(held)
                self._progress.detail(f"distill: step {step}, held-out KL divergence {now:.6f}")
                if now < best:
                    best, best_step, kept = now, step, _copies(learned)
        with torch.no_grad():
            for parameter, value in zip(learned, kept, strict=True):
                parameter.copy_(value)
        facts = {"steps": steps, "best_step": best_step, "codes": self._codes, "held_out": len(held), "tokens": tokens}
        return {**facts, "kl_before": before, "kl_after": best}

    def _groups(self, steps: int) -> list[dict[str, Any]]:
        """Return the learned parameters, in groups of one rate."""
        weights = list(self.weights.values())
        positions: dict[bool, list[Tensor]] = {False: [], True: []}
        for weight in weights:
            if weight.positions is not None:
                positions[weight.is_sparse].append(weight.positions)
        groups = [
            {"params": [weight.factors for weight in weights], "lr": SCALE_RATE},
            {"params": [norm.moves for norm in self.norms.values()], "lr": NORM_RATE},
            {"params": positions[False], "lr": CODE_TRAVEL / steps},
            {"params": positions[True], "lr": SPARSE_TRAVEL / steps},
        ]
        return [group for group in groups if group["params"]]

    def _backward(self, documents: Sequence[Tensor]) -> None:
        """Compute the gradients of the divergence summed over all positions; weights are decoded once."""
        tensors = self._tensors()
        with explaining(self._model, INSTEAD):
            found = in_fixed_order(self._model, self._progress, lambda: self._gradients(documents, tensors))
        torch.autograd.backward([tensors[path] for path in found], list(found.values()))

    def _gradients(self, documents: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients by the weights and norms that are reached."""
        leaves = {path: tensor.detach().requires_grad_() for path, tensor in tensors.items()}
        for document in documents:
            backward(self._model, self._divergence(document, leaves))
        return {path: leaf.grad for path, leaf in leaves.items() if leaf.grad is not None}

    @torch.no_grad()
    def _measure(self, documents: Sequence[Tensor]) -> float:
        """Return the mean KL divergence at all positions of the documents, in nats."""
        tensors = self._tensors()
        with explaining(self._model, INSTEAD):
            total = in_fixed_order(
                self._model, self._progress, lambda: sum(float(self._divergence(d, tensors)) for d in documents)
            )
        return total / sum(map(len, documents))

    def _divergence(self, tokens: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return KL(unquantized || quantized) of the next-token distributions of a document, summed over positions."""
        self._progress.check()
        with self._computing():
            with torch.no_grad():
                theirs = self._model.logits(tokens, {})
            ours = self._model.logits(tokens, tensors)
        total = ours.new_zeros((), dtype=torch.float32)
        for p, q in zip(theirs.split(ROWS), ours.split(ROWS), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total = total + (p.exp() * (p - q)).sum()
        if not bool(total.isfinite()):
            raise NumericError(
                "the divergence from the unquantized model is not finite", Words("drop", Setting("distill"))
            )
        return total

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights and norms of the quantized model, by path."""
        found: dict[str, Tensor] = {}
        for linear, weight in self.weights.items():
            n, k = self._model.linears[linear]
            found[f"{self._model.paths[linear]}.weight"] = weight.dense(self._model.dtype)[:n, :k]
        for name, norm in self.norms.items():
            path = self._paths[name]
            found[path] = norm.dense(get_tensor(self._model.module, path).dtype)
        return found

    def _computing(self) -> AbstractContextManager[Any]:
        """Compute products in bfloat16 where that is fast on a CPU."""
        return torch.autocast("cpu", torch.bfloat16) if self._mixed else nullcontext()


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _schedule(step: int, steps: int) -> float:
    """Return the part of the largest rate for a step of 1 to `steps`: it rises over a tenth, then falls as a cosine."""
    return min(1.0, 10 * step / steps) * (1 + math.cos(math.pi * (step - 1) / steps)) / 2


def _on(record: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    zeros = None if record.zeros is None else record.zeros.to(device)
    return QuantizedTensor(record.scheme, record.codes.to(device), record.scales.to(device), zeros)


def _padded(weight: Tensor, shape: tuple[int, int]) -> Tensor:
    return pad(weight, (0, shape[1] - weight.shape[1], 0, shape[0] - weight.shape[0]))


def _facts(before: Mapping[str, Any], weight: Tensor, record: QuantizedTensor) -> dict[str, Any]:
    """Return the facts of a draft's layer, those that tuning changes anew."""
    counts = scale_facts(record)
    if "zeros" in counts:  # not those of padding
        counts["zeros"] -= record.codes.numel() - weight.numel()
    n, k = weight.shape
    error = relative_error(weight, record.dequantize()[:n, :k])
    return {**untuned(before), **counts, "relative_error": error}
