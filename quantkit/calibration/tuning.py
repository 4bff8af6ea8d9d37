"""Tune the solved linears of one block together, so that the block passes on what the unquantized model has there.

The inputs are those that the quantized blocks before pass on. The target is the hidden state of the unquantized model
after the block, so a block also makes up for the errors of those before it. Output gradients, if the run has them,
weigh the channels of the error. An eighth of the sequences is held out; the codes and scales of least error on them are
taken, the start included (ALGORITHMS 8.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.block_tuning import TunedWeight
from quantkit.calibration.backward import backward, explaining, in_fixed_order, parts, run_part, stacked
from quantkit.calibration.layer_solver import relative_error, zeroed
from quantkit.checkpoint.items import Item
from quantkit.checkpoint.report import untuned
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import NumericError, RecipeError

if TYPE_CHECKING:
    from quantkit.calibration.calibrate import Run

#: One sequence of so many is held out.
HELD_OUT = 8
#: Sequences of a step.
BATCH = 8
#: The largest step of a latent value in so many steps, in steps of the grid. Fewer steps are longer, by the root.
RATE, RATE_STEPS = 0.0025, 200
#: Steps in which the rate rises, and how often in a run the held-out error is computed.
WARM_UP, CHECKS = 5, 8
_TINY = 1e-30


def check_held_out(sequences: int) -> None:
    """Raise RecipeError if there are too few calibration sequences to hold one out."""
    if sequences < HELD_OUT:
        raise RecipeError(
            f"--tune holds out one of {HELD_OUT} calibration sequences, and there are {sequences}: use --samples "
            f"{HELD_OUT} or more, or drop --tune"
        )


def tune(run: Run, block: int, steps: int, solved: Sequence[Item]) -> list[Item]:
    """Tune the solved linears of a loaded block in `steps` steps; return them anew, in the same order.

    `run.unquantized` has the target of each sequence. Facts: `untuned_error` and `tuned_error` are the squared error of
    the block's hidden states on held-out sequences, relative to their squares, before and after `tuned_step` steps.
    `tuned_changed` counts codes. Losses are not computed anew, and become those of untuned codes (`untuned_loss`).
    NumericError if the error is not finite.
    """
    if not solved:
        return []
    names = [item.name.removesuffix(".weight") for item in solved]
    sources = {name: run.src.get(f"{name}.weight").to(run.model.device) for name in names}
    values = zip(names, (item.value for item in solved), strict=True)
    starts = {name: value for name, value in values if isinstance(value, QuantizedTensor)}
    found, common = _Tuning(run, block, starts, sources).run(steps)
    run.progress.detail(
        f"{run.model.blocks[block]}: error on held-out sequences {common['untuned_error']:.4g}, tuned "
        f"{common['tuned_error']:.4g} after {common['tuned_step']} of {steps} steps"
    )
    tuned = []
    for name, item in zip(names, solved, strict=True):
        source, tensor = sources[name], found[name]
        facts = {**(item.facts or {}), **common, "tuned_changed": int((tensor.codes != starts[name].codes).sum())}
        facts |= {fact: count for fact, count in rtn.scale_facts(tensor).items() if fact in facts}
        facts.pop("zeroed", None)
        facts |= zeroed(source, tensor)
        if common["tuned_step"]:
            facts = untuned(facts)
        tuned.append(item._replace(value=tensor, facts={**facts, "relative_error": relative_error(source, tensor)}))
    return tuned


class _Tuning:
    """The state of tuning one block."""

    def __init__(
        self, run: Run, block: int, starts: Mapping[str, QuantizedTensor], sources: Mapping[str, Tensor]
    ) -> None:
        assert run.activations is not None and run.unquantized is not None
        self._run, self._block, self._starts = run, block, starts
        self._inputs, self._targets = run.activations, run.unquantized
        self._weights = {name: TunedWeight(sources[name], start) for name, start in starts.items()}
        numbers = range(len(run.sequences))
        self._held_out = list(numbers[HELD_OUT - 1 :: HELD_OUT])
        self._trained = [number for number in numbers if number not in set(self._held_out)]
        self._root = None if run.gradients is None else run.gradients.root(block)
        seed = (run.recipe.calibration.seed + block) % 2**63
        self._generator = torch.Generator().manual_seed(seed)
        squares = [float(self._targets.get(number).hidden.float().square().sum()) for number in numbers]
        self._squares = [max(square, _TINY) for square in squares]

    def run(self, steps: int) -> tuple[dict[str, QuantizedTensor], dict[str, Any]]:
        """Take all steps; return the weights of least held-out error, and the facts that they share."""
        best, before, best_step = dict(self._starts), self._held_out_error(), 0
        least, rate = before, RATE * math.sqrt(RATE_STEPS / steps)
        for step in range(1, steps + 1):
            self._move(rate * min(1.0, step / WARM_UP) * (1 + math.cos(math.pi * (step - 0.5) / steps)) / 2)
            if step * CHECKS // steps > (step - 1) * CHECKS // steps:
                error = self._held_out_error()
                if error < least:
                    best, least, best_step = {n: w.tensor() for n, w in self._weights.items()}, error, step
        return best, {"untuned_error": before, "tuned_error": least, "tuned_step": best_step}

    def _move(self, rate: float) -> None:
        """Take one step on a batch that the generator draws."""
        order = torch.randperm(len(self._trained), generator=self._generator).tolist()[:BATCH]
        batch = sorted((self._trained[i] for i in order), key=lambda number: len(self._run.sequences[number]))
        with explaining(self._run.model, "drop --tune"):
            gradients = in_fixed_order(self._run.model, self._run.progress, lambda: self._gradients(batch))
        for name, gradient in gradients.items():
            if gradient is not None:  # no token of the batch reached this expert
                self._weights[name].descend(gradient, rate)

    def _gradients(self, batch: Sequence[int]) -> dict[str, Tensor | None]:
        """Return the gradients of the error on some sequences, relative to the squares of their targets."""
        weights = {name: weight.dense().requires_grad_() for name, weight in self._weights.items()}
        size = sum(self._squares[number] for number in batch)
        for part in parts(self._run, self._block, self._inputs, batch):
            backward(self._run.model, self._error(part, weights) / size)
        return {name: weight.grad for name, weight in weights.items()}

    def _held_out_error(self) -> float:
        """Return the squared error on the held-out sequences, relative to the squares of their targets."""

        def total() -> float:
            weights = {name: weight.dense() for name, weight in self._weights.items()}
            held_out = parts(self._run, self._block, self._inputs, self._held_out)
            return sum(float(self._error(part, weights)) for part in held_out)

        with torch.no_grad():
            error = in_fixed_order(self._run.model, self._run.progress, total)
        error /= sum(self._squares[number] for number in self._held_out)
        if not math.isfinite(error):
            raise NumericError(
                f"{self._run.model.blocks[self._block]}: its outputs on held-out sequences are not finite: drop --tune"
            )
        return error

    def _error(self, part: Sequence[int], weights: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of squared errors of the hidden states of some sequences, float32."""
        found = run_part(self._run, self._block, part, self._inputs, weights)
        wanted = stacked(self._targets, part).to(found.device)
        difference = found.float() - wanted.float().view_as(found)
        return (difference if self._root is None else difference @ self._root).square().sum()
