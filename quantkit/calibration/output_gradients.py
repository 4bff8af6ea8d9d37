"""How strongly the model's likelihood depends on what each block passes on, and on each output of its linears.

The unquantized model runs on some calibration documents, and draws the next token of every position from its own
distribution. The gradients of the log likelihood of these tokens are those of a sample of the Fisher information
(ALGORITHMS 8.3). One block is in memory at a time: the hidden states that enter each block are saved on the way
forward, and on the way back the gradients take their place. With the saved gradients, a block alone gives those of its
linears' outputs, when it is solved.

A run that is resumed reads the saved gradients, or computes them again to the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.algorithms.numerics import is_finite
from quantkit.calibration.activations import Activations
from quantkit.calibration.backward import explaining, gradient, in_fixed_order, parts, run_part, stacked
from quantkit.core.tensors import dtype_name
from quantkit.errors import CheckpointError, NumericError, RecipeError
from quantkit.io import files
from quantkit.models.block_runner import BlockRunner

if TYPE_CHECKING:
    from quantkit.calibration.calibrate import Run

#: Added to the diagonal of the Fisher information of a block's outputs, relative to the mean diagonal, where it weighs
#: their errors.
DAMP = 1.0
_INDEX = "activations-gradients.json"
INSTEAD = "use --no-output-aware"


@dataclass(frozen=True)
class OutputGradients:
    """The gradients by what each block passes on, `[T, h]` of the first `documents`, in files of the run's folder."""

    work: Path
    model: BlockRunner
    documents: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    hashes: Sequence[str]

    def of(self, block: int) -> Tensor:
        """Return the gradient by what a block passes on, on the device; CheckpointError if its file changed."""
        found = files.load_tensor(_file(self.work, block), self.shape, self.dtype, self.hashes[block])
        return found.to(self.model.device)

    def root(self, block: int) -> Tensor:
        """Return the matrix `[h, h]` that weighs errors of what a block passes on: `|error @ root|^2` is the loss.

        It is the Cholesky factor of the Fisher information with a damped diagonal, whose mean is 1.
        """
        passed_on = self.of(block).flatten(0, -2)
        fisher = _empty(passed_on.shape[-1], self.model)
        fisher.add(passed_on)
        found = fisher.matrix().double()
        mean = float(found.diagonal().mean())
        if not mean > 0:
            raise NumericError(
                f"{self.model.blocks[block]}: its outputs have no finite gradient: use --no-output-aware"
            )
        found.div_(mean * (1 + DAMP)).diagonal().add_(DAMP / (1 + DAMP))
        root: Tensor = torch.linalg.cholesky(found)
        return root.float()

    def of_linears(self, run: Run, block: int, linears: Iterable[str]) -> dict[str, Tensor]:
        """Return the Hessian `[n, n]` of the outputs of a loaded block's linears, of those that gradients reach.

        `run` has the documents of the gradients, with the hidden states that enter the block.
        """
        model = run.model

        def summed() -> dict[str, Hessian]:
            sums: dict[str, Hessian] = {}

            def see(linear: str, found: Tensor) -> None:
                if linear not in sums:
                    sums[linear] = _empty(found.shape[-1], model)
                try:
                    sums[linear].add(found)
                except NumericError as error:
                    raise NumericError(
                        f"{linear}: its outputs have no finite gradient: use --no-output-aware"
                    ) from error

            with model.watching_gradients(linears, see):
                for part in _parts(run, block):
                    _carried(run, block, part, behind)
            return sums

        behind = _by_document(run, self.of(block))
        with explaining(model, INSTEAD):
            sums = in_fixed_order(model, run.progress, summed)
        return {name: sums.pop(name).matrix() for name in list(sums)}  # each sum is freed


def measure(run: Run, resumed: bool = False) -> OutputGradients:
    """Compute and save the gradients, or read what a stopped run has saved.

    `run` is a stream of the documents of the gradients, with the hidden states that enter the first block. A run that
    is `resumed` behind finished blocks has saved them.

    RecipeError for a model whose blocks pass on more than one hidden state. CheckpointError if its code has no
    gradient. NumericError for a gradient that is not finite.
    """
    assert run.activations is not None
    dtype = torch.bfloat16 if run.model.dtype == torch.float16 else run.model.dtype  # float16 would underflow
    shape = tuple(run.activations.hidden.shape)
    kept = _saved(run, shape, dtype)
    if kept is not None:
        return kept
    if resumed:
        run.progress.warn(f"{run.work}: the gradients of the model's outputs are lost or damaged: computed again")
    model, hashes = run.model, [""] * len(run.model.blocks)
    for block in run.progress.bar(range(len(model.blocks)), "gradients, forward", len(model.blocks)):
        if block:
            with run.clock.phase("save"):
                hashes[block - 1] = files.save_tensor(_file(run.work, block - 1), run.activations.hidden)
        with run.clock.phase("load"):
            model.load_block(block)
        run.forward(block)
        model.unload_block(block)
        if not run.activations.hidden_only or model.forms[block].get("left"):
            raise RecipeError(
                f"{model.blocks[block]}: passes on more than its hidden state, through which gradients would be lost: "
                "use --no-output-aware"
            )
    work, budget, rows = run.work, run.act_budget, run.activations.rows
    store = Activations(work, budget, rows, shape[1:], dtype, model.device, kind="gradients-")
    with run.clock.phase("load"):
        model.load_head()
    with run.clock.phase("gradients"):
        _sampled(run, store)
    model.drop_head()
    with run.clock.phase("save"):
        hashes[-1] = files.save_tensor(_file(work, len(hashes) - 1), store.hidden)
    for block in run.progress.bar(range(len(hashes) - 1, 0, -1), "gradients, backward", len(hashes) - 1):
        with run.clock.phase("load"):
            model.load_block(block)
            run.activations.hidden.copy_(  # what was read has no name, so that it is freed here
                files.load_tensor(_file(work, block - 1), shape, model.dtype, hashes[block - 1])
            )
        with run.clock.phase("gradients"):
            _carry_back(run, block, store)
        with run.clock.phase("save"):
            hashes[block - 1] = files.save_tensor(_file(work, block - 1), store.hidden)
        model.unload_block(block)
    index = {"shape": list(shape), "dtype": dtype_name(dtype), "hashes": hashes}
    files.write_atomic(work / _INDEX, json.dumps(index).encode())
    return OutputGradients(work, model, len(rows), shape, dtype, hashes)


def _saved(run: Run, shape: tuple[int, ...], dtype: torch.dtype) -> OutputGradients | None:
    """Return the gradients that a stopped run has saved; None if a part is missing or changed."""
    try:
        index: Any = json.loads((run.work / _INDEX).read_text())
        found = OutputGradients(run.work, run.model, len(run.sequences), shape, dtype, index["hashes"])
        for block in range(len(found.hashes)):
            files.load_tensor(_file(run.work, block), shape, dtype, found.hashes[block])
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None
    return found if len(found.hashes) == len(run.model.blocks) else None


def _sampled(run: Run, store: Activations) -> None:
    """Put into `store` the gradients by the hidden states behind the last block, of tokens drawn by the model."""
    assert run.activations is not None
    generator, model = torch.Generator(run.model.device), run.model
    for number, tokens in enumerate(run.sequences):
        run.progress.check()
        hidden = run.activations.get(number).hidden.detach().to(model.device, copy=True).requires_grad_()
        with explaining(model, INSTEAD):
            found = in_fixed_order(model, run.progress, partial(_drawn, run, number, tokens, hidden, generator))
        if not bool(found.isfinite().all()):
            raise NumericError(f"calibration document {number}: its gradient is not finite: use --no-output-aware")
        store.get(number).hidden.copy_(found)


@torch.enable_grad()
def _drawn(run: Run, number: int, tokens: Tensor, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Draw tokens of a document, and return the gradient by its hidden states behind the last block."""
    generator.manual_seed((run.recipe.calibration.seed + number) % 2**63)
    logits = run.model.logits_of(tokens, hidden)
    wanted = logits.detach().float().softmax(-1)
    drawn = torch.multinomial(wanted, 1, generator=generator)
    wanted.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=wanted.dtype))
    return gradient(run.model, logits, hidden, wanted.to(logits.dtype))


def _carry_back(run: Run, block: int, store: Activations) -> None:
    """Replace the gradients by what a loaded block passes on by those of what enters it."""
    model, behind = run.model, _by_document(run, store.hidden)
    for part in _parts(run, block):
        with explaining(model, INSTEAD):
            found = in_fixed_order(model, run.progress, partial(_carried, run, block, part, behind))
        if not is_finite(found):
            raise NumericError(f"{model.blocks[block]}: its gradient is not finite: use --no-output-aware")
        for number, each in zip(part, [found] if len(part) == 1 else found, strict=True):
            store.get(number).hidden.copy_(each)


@torch.enable_grad()
def _carried(run: Run, block: int, part: Sequence[int], gradients: Sequence[Tensor]) -> Tensor:
    """Return the gradients by what enters a loaded block, of some documents, from those by what it passes on."""
    assert run.activations is not None
    hidden = stacked(run.activations, part).detach().to(run.model.device, copy=True).requires_grad_()
    behind = torch.stack([gradients[number] for number in part]).to(run.model.device)
    out = run_part(run, block, part, run.activations, {}, hidden)
    return gradient(run.model, out, hidden, behind.view_as(out).to(out.dtype))


def _parts(run: Run, block: int) -> Iterator[list[int]]:
    assert run.activations is not None
    return parts(run, block, run.activations, range(len(run.sequences)))


def _by_document(run: Run, gradients: Tensor) -> Sequence[Tensor]:
    """Return views of gradients `[T, h]`, one for each document."""
    assert run.activations is not None
    found: Sequence[Tensor] = gradients.split(run.activations.rows[: len(run.sequences)])
    return found


def _empty(size: int, model: BlockRunner) -> Hessian:
    chunk = LONG_CHUNK if model.device.type == "cuda" else CHUNK
    # It checks each call: the numbers kept for a check in the end would keep the heap between them from shrinking.
    return Hessian(size, model.device, cap_tokens=False, chunk=chunk)


def _file(work: Path, block: int) -> Path:
    return work / f"activations-gradient-{block}.bin"
