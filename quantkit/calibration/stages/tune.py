"""Tune the solved linears of one block together towards the unquantized model's hidden states
(ALGORITHMS 8.1).

The inputs come from the quantized blocks before it, so a block also makes up for the errors of
earlier blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.block_tuning import TUNING_BYTES, TunedWeight, is_moved_in_place
from quantkit.algorithms.hessian import Hessian
from quantkit.calibration.activations import Activations
from quantkit.calibration.backward import (
    PASS_BYTES,
    Captured,
    backward_bytes,
    explaining,
    in_fixed_order,
    parts,
    run_part,
    stacked,
    strictly,
)
from quantkit.calibration.budget import (
    LOADED,
    TUNED_AT_ONCE,
    UNQUANTIZED,
    Peaks,
    Sizes,
    split_documents,
    stays_on_gpu,
)
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages.base import LoadedBlock, Stage, quantized
from quantkit.calibration.stages.gradients import Gradients
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import NumericError, RecipeError, Setting, Words
from quantkit.models.weights import is_fast_in_bfloat16

#: One of this many sequences is held out.
HELD_OUT = 8
#: Sequences of a step.
BATCH = 4
#: The largest step of a latent value, in grid steps, for this many steps. Fewer steps are larger,
#: by the square root.
RATE, RATE_STEPS = 0.005, 200
#: Warm-up steps, and the number of evaluations of the held-out error in a run.
WARM_UP, CHECKS = 5, 8
_TINY = 1e-30


#: Helps with recipes too that tune by gradients.
INSTEAD = Words("use", Setting("tune", 0), "and", Setting("output_aware", False))


class Tune(Stage):
    """Tune the solved linears of each block in `steps` steps. If given, `gradients` weigh the
    errors.

    `_targets` has the activations of the unquantized model: the inputs of a block, and then its
    outputs.
    """

    _targets: Activations
    _sources: dict[str, Tensor]

    def __init__(self, steps: int, gradients: Gradients | None) -> None:
        self._steps, self._gradients = steps, gradients

    def bytes(self, sizes: Sizes) -> Peaks:
        """Count the weights before solving and the unquantized model's activations; behind the
        groups, the passes with gradients, or the root of the weighing matrix.
        """
        peak, _ = backward_bytes(sizes)
        # The matrix and its root, and two copies in float64.
        root = 6 * Hessian.bytes(sizes.hidden) if self._gradients is not None else 0
        tuning = TUNING_BYTES * sizes.most() + max(peak, root)
        at = {LOADED: sizes.block, UNQUANTIZED: sizes.tokens * sizes.token}
        return Peaks(at=at, behind={"tuning": tuning})

    def check(self, sequences: Sequence[Tensor]) -> None:
        """Raise RecipeError if there are too few calibration sequences to hold one out."""
        require_held_out("tune", len(sequences), INSTEAD)

    def start(self, run: Run, finished: int) -> None:
        """Run the documents through the finished blocks of the unquantized model."""
        stream = embedded(run, kind="unquantized-")
        for index in range(finished):
            run.load(index)
            stream.forward(index)
            run.model.weights.unload_block(index)
        self._targets = stream.activations

    def enter(self, block: LoadedBlock) -> None:
        """Run the documents through a block before its called weights are quantized, and keep these
        weights.
        """
        self._sources = {
            name: block.run.model.weights.source(name)
            for name in block.goals
            if name not in block.uncalled
        }
        # A GPU without memory for a block may have it for the next, so each block has a new stream.
        Stream(block.run, self._targets).forward(block.index)

    def leave(self, block: LoadedBlock) -> None:
        """Tune the block and put the tuned linears back."""
        block.stream.waiting.close()
        with block.run.clock.phase("tune"):
            for item in self._tuned(block):
                block.put_back(item)
        self._sources.clear()

    def _tuned(self, block: LoadedBlock) -> list[Item]:
        """Tune the solved linears; list them anew, in the same order.

        Facts: `untuned_error` and `tuned_error` are the mean relative squared errors of the block's
        held-out hidden states, before and after `tuned_step` steps. `tuned_changed` counts codes.
        Losses are not recomputed: they are reported as losses of untuned codes (`untuned_loss`).
        """
        solved = {
            linear: item
            for name, item in block.solved.items()
            if (linear := name.removesuffix(".weight")) not in block.uncalled
        }
        if not solved:
            return []
        sources, starts = self._sources, quantized(solved)
        root = None if self._gradients is None else self._gradients.found.root(block.index)
        found, common = BlockTuning(block, self._targets, root, starts, sources).run(self._steps)
        block.run.progress.detail(
            f"{block.path}: error on held-out sequences {common['untuned_error']:.4g}, tuned "
            f"{common['tuned_error']:.4g} after {common['tuned_step']} of {self._steps} steps"
        )
        return [
            _tuned_item(item, sources[name], starts[name], found[name], common)
            for name, item in solved.items()
        ]


def _tuned_item(
    item: Item,
    source: Tensor,
    start: QuantizedTensor,
    tuned: QuantizedTensor,
    common: Mapping[str, Any],
) -> Item:
    """Give a solved linear its tuned value, and add the facts of tuning."""
    facts = {
        **(item.facts or {}),
        **common,
        "tuned_changed": int((tuned.codes != start.codes).sum()),
    }
    return item._replace(
        value=tuned, facts=tuned_facts(facts, source, tuned, bool(common["tuned_step"]))
    )


def tuned_facts(
    facts: Mapping[str, Any], source: Tensor, tuned: QuantizedTensor, changed: bool = True
) -> dict[str, Any]:
    """Return a linear's facts after tuning. If it is `changed`, its losses are no longer its own:
    they are not computed again.
    """
    found = {**facts, **{k: n for k, n in rtn.scale_facts(tuned).items() if k in facts}}
    found.pop("zeroed", None)
    found |= rtn.zeroed(source, tuned)
    if changed:
        found.pop("held_out", None)
        found = {"untuned_loss" if key == "loss" else key: fact for key, fact in found.items()}
    return {**found, "relative_error": rtn.relative_error(source, tuned)}


def require_held_out(key: str, count: int, instead: Words) -> None:
    """Raise RecipeError if there are too few calibration sequences to hold one out."""
    if count < HELD_OUT:
        raise RecipeError(
            Words(
                Setting(key),
                f"holds out one of {HELD_OUT} calibration sequences, and there are {count}",
            ),
            Words("use", Setting("samples", HELD_OUT), "or more"),
            instead,
        )


def batches(of_ranks: Sequence[Sequence[int]], generator: torch.Generator) -> Iterator[list[int]]:
    """Yield the numbers of the sequences of each step, without end: `BATCH`, or more so that each
    rank has as many.
    """
    ranks = len(of_ranks)
    orders = cycle([_epochs(numbers, generator) for numbers in of_ranks if numbers])
    while True:
        yield [next(next(orders)) for _ in range(-(-BATCH // ranks) * ranks)]


def _epochs(numbers: Sequence[int], generator: torch.Generator) -> Iterator[int]:
    """Yield all numbers in a random order, and then in others, without end.

    All sequences count equally often, so that the noise of steps cancels. That of independent draws
    would add up.
    """
    while True:
        for place in torch.randperm(len(numbers), generator=generator).tolist():
            yield numbers[place]


def _squares(x: Tensor) -> Tensor:
    """Sum the squares of rows `[..., h]` in float32, in one pass over memory."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norms.square()


class _SquareSum(torch.autograd.Function):
    """Sum the squares of rows, with a gradient of one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sums `[...]`."""
        ctx.save_for_backward(x)
        return _squares(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient by the rows, in their dtype."""
        (x,) = ctx.saved_tensors
        return torch.mul(x, 2 * gradients[0].unsqueeze(-1), out=torch.empty_like(x))


class BlockTuning:
    """The state of tuning one block towards `targets`, the unquantized model's hidden states after
    it.

    Sequences are numbered over all ranks. Each rank computes the errors of its own sequences, and
    updates its part of the weights by the gradients of all ranks.
    """

    def __init__(
        self,
        block: LoadedBlock,
        targets: Activations,
        root: Tensor | None,
        starts: Mapping[str, QuantizedTensor],
        sources: Mapping[str, Tensor],
    ) -> None:
        run = block.run
        self._block, self._stream, self._run, self._model = block, block.stream, run, run.model
        self._targets, self._root, self._starts = targets, root, starts
        self._owners = run.ranks.owners([sources[name].numel() for name in starts])
        self._weights = {
            name: TunedWeight(sources[name], starts[name])
            for name, owner in zip(starts, self._owners, strict=True)
            if owner == run.ranks.rank
        }
        numbers = range(run.calibrating)
        self._held_out = numbers[HELD_OUT - 1 :: HELD_OUT]
        trained = [number for number in numbers if number not in self._held_out]
        divided = split_documents([len(run.every[n]) for n in numbers], run.ranks.count)
        self._of_ranks = [[number for number in trained if number in part] for part in divided]
        self._generator = torch.Generator().manual_seed(
            (run.recipe.calibration.seed + block.index) % 2**63
        )
        in_place = {
            name for name, start in starts.items() if is_moved_in_place(sources[name], start)
        }
        self._captured = Captured() if len(in_place) == len(starts) else None
        #: Where several ranks put the weights of all, always the same memory.
        self._places: dict[str, Tensor] = {}
        for name in starts if run.ranks.count > 1 else ():
            if name in in_place and name in self._weights:
                self._places[name] = self._weights[name].dense()
            else:
                dtype = torch.bfloat16 if name in in_place else torch.float32
                self._places[name] = torch.empty_like(sources[name], dtype=dtype)

    def run(self, steps: int) -> tuple[dict[str, QuantizedTensor], dict[str, Any]]:
        """Take all steps; return the weights of least held-out error, and the facts that they
        share.

        NumericError if the error is not finite.
        """
        best, before, best_step = (
            {name: self._starts[name] for name in self._weights},
            self.held_out_error(self._solved()),
            0,
        )
        least, rate = before, RATE * math.sqrt(RATE_STEPS / steps)
        for step, batch in zip(
            range(1, steps + 1), batches(self._of_ranks, self._generator), strict=False
        ):
            self._move(
                batch,
                rate
                * min(1.0, step / WARM_UP)
                * (1 + math.cos(math.pi * (step - 0.5) / steps))
                / 2,
            )
            if step * CHECKS // steps > (step - 1) * CHECKS // steps:
                error = self.held_out_error(self._dense())
                if error < least:
                    best, least, best_step = (
                        {n: w.tensor() for n, w in self._weights.items()},
                        error,
                        step,
                    )
        if self._captured is not None:
            self._captured.close()
        with self._run.exchanging():
            found = self._run.ranks.each(list(self._starts), self._owners, best.__getitem__)
            tuned = dict(zip(self._starts, found, strict=True))
        return tuned, {"untuned_error": before, "tuned_error": least, "tuned_step": best_step}

    def _move(self, batch: Sequence[int], rate: float) -> None:
        """Take one step on a batch of sequences, the same on all ranks."""
        task = partial(self._gradients, batch, self._dense())
        with explaining(self._model, INSTEAD):
            found = in_fixed_order(self._model, self._run.progress, task)
        del task  # frees the dense weights
        for name, gradient in self._added(found).items():
            self._weights[name].descend(gradient, rate)

    def _gradients(
        self, batch: Sequence[int], weights: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """Compute the part of this rank's sequences in the gradients of the mean error of a batch's
        tokens.
        """
        size, divided = (
            self._tokens(batch),
            list(parts(self._stream, self._block.index, self._here(batch))),
        )
        if self._captured is not None and len(divided) == 1:
            count = torch.full((), size, dtype=torch.float32, device=self._model.device)
            function = partial(self._of_parts, divided, weights)
            return self._captured(function, self._may_be_captured, count, *self._states(divided[0]))
        return self._of_parts(divided, weights, size)

    def _of_parts(
        self,
        divided: Sequence[Sequence[int]],
        weights: Mapping[str, Tensor],
        size: Tensor | int,
        *states: Tensor,
    ) -> list[Tensor | None]:
        """Add up the gradients of several parts. `states` is given for a single part."""
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        for part in divided:
            error = self.error(part, leaves, *(states or self._states(part)))
            with strictly(self._model):
                (error / size).backward()
        return [leaf.grad for leaf in leaves.values()]

    def _states(self, part: Sequence[int]) -> list[Tensor]:
        """Take a part's inputs and targets to the device."""
        return [
            stacked(store, part).to(self._model.device)
            for store in (self._stream.activations, self._targets)
        ]

    def _may_be_captured(self, hidden: Tensor) -> bool:
        """Return True if a pass reads no tokens, and its memory fits on the GPU beside the other
        passes.
        """
        outputs = sum(start.codes.shape[0] for start in self._starts.values())
        tokens = max(hidden[..., 0].numel(), TUNED_AT_ONCE["cuda"])
        free, _ = torch.cuda.mem_get_info(self._model.device)
        return self._model.ran_alone and stays_on_gpu(PASS_BYTES * tokens * outputs, free)

    def _added(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Add the gradients of all ranks, in their order, for the weights that this rank moves."""
        added = {}
        with (
            self._run.exchanging(),
            closing(self._run.ranks.gather_each(gradients, self._owners)) as gathered,
        ):
            for name, of_ranks in zip(self._starts, gathered, strict=True):
                found = [gradient for gradient in of_ranks or () if gradient is not None]
                if (
                    found
                ):  # else another rank moves it, or no token of the batch reached this expert
                    added[name] = reduce(Tensor.add_, found)
        return added

    def _dense(self) -> dict[str, Tensor]:
        """Gather the dequantized weights `[n, k]`; several ranks send them as products take them.

        The next step may overwrite them.
        """
        if not self._places:
            return {name: weight.dense() for name, weight in self._weights.items()}
        dtype = torch.bfloat16 if is_fast_in_bfloat16(self._model.device) else torch.float32
        with self._run.exchanging():
            each = self._run.ranks.each(
                list(self._starts), self._owners, lambda name: self._weights[name].dense().to(dtype)
            )
            return {
                name: self._places[name].copy_(weight)
                for name, weight in zip(self._starts, each, strict=True)
            }

    def _solved(self) -> dict[str, Tensor]:
        """Dequantize the solved weights, in the shapes and dtypes of `_dense`."""
        return {
            name: self._starts[name].dequantize(like.dtype)[: len(like), : like.shape[1]]
            for name, like in self._dense().items()
        }

    def held_out_error(self, weights: Mapping[str, Tensor]) -> float:
        """Compute the mean error of the tokens of the held-out sequences."""

        def total() -> float:
            held_out = parts(self._stream, self._block.index, self._here(self._held_out))
            return sum(float(self.error(part, weights, *self._states(part))) for part in held_out)

        with torch.no_grad():
            error = in_fixed_order(self._model, self._run.progress, total)
        error = sum(self._run.ranks.exchange(error)) / self._tokens(self._held_out)
        if not math.isfinite(error):
            raise NumericError(
                "its outputs on held-out sequences are not finite",
                INSTEAD,
                subject=self._block.path,
            )
        return error

    def error(
        self, part: Sequence[int], weights: Mapping[str, Tensor], hidden: Tensor, wanted: Tensor
    ) -> Tensor:
        """Add up the squared errors of the tokens of some sequences, each relative to its target's
        square, float32.

        `hidden` are their inputs. Where sequences are padded, the target is zero, and the error
        does not count.
        """
        found = run_part(self._stream, self._block.index, part, weights, hidden)
        wanted = wanted.view_as(found)
        size = _squares(wanted)
        if self._root is None:
            weighed = found.float() - wanted
        else:
            with self._model.fast_products():
                weighed = (
                    found - wanted
                ) @ self._root  # both are bfloat16 only where the product is
        errors: Tensor = _SquareSum.apply(weighed)  # type: ignore[no-untyped-call]
        return torch.where(size > 0, errors / size.clamp_min(_TINY), 0.0).sum()

    def _tokens(self, numbers: Sequence[int]) -> int:
        return sum(len(self._run.every[number]) for number in numbers)

    def _here(self, numbers: Sequence[int]) -> list[int]:
        """List those of some sequences that this rank holds, by their numbers in the stream."""
        first, count = self._run.first, len(self._run.sequences)
        return [number - first for number in numbers if 0 <= number - first < count]
