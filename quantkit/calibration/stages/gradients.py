"""How strongly the model's likelihood depends on each block's hidden states (ALGORITHMS 8.2).

One block is in memory at a time. The forward pass saves the hidden states that enter each block.
The backward pass replaces them by the sums of gradients that tuning needs. A run that is resumed
reads these sums, or computes them again to the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK, Hessian
from quantkit.algorithms.numerics import is_finite
from quantkit.calibration.activations import Activations
from quantkit.calibration.backward import (
    backward_bytes,
    explaining,
    in_fixed_order,
    parts,
    run_part,
    stacked,
    strictly,
)
from quantkit.calibration.budget import (
    DOCUMENT,
    GRADIENTS,
    LOADED,
    READ,
    UNQUANTIZED,
    WAITING,
    Peaks,
    Sizes,
    gradient_documents,
    split_documents,
)
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages.base import Stage
from quantkit.core.threads import MOST_BYTES, WorkQueue
from quantkit.errors import CheckpointError, NumericError, RecipeError, Setting, Words
from quantkit.io import files
from quantkit.models.block_runner import BlockRunner

#: Added to the diagonal of the Fisher information of a block's outputs, relative to the mean
#: diagonal, where it weighs their errors.
DAMP = 1.0
#: Bytes for each logit of one document while tokens are drawn and their gradient is made: four
#: float32 copies.
DRAWING_BYTES = 16
INSTEAD = Words("use", Setting("output_aware", False))
#: Makes the context of one forward and backward pass of a block. A pass that fails there may run
#: again in a new one.
Watch = Callable[[int], AbstractContextManager[None]]


class Gradients(Stage):
    """Measure the gradients of the unquantized model, which weigh the error of tuning."""

    found: Fisher

    def bytes(self, sizes: Sizes) -> Peaks:
        """Count the passes that draw tokens and that go back through the blocks."""
        return Peaks(before=pass_bytes(sizes, sizes.gradient_bytes()))

    def start(self, run: Run, finished: int) -> None:
        """Run the unquantized model forward and back, or read the gradients of a stopped run.

        All ranks together have the documents of a single process, divided anew.
        """
        lengths, ranks = [len(tokens) for tokens in run.every[: run.calibrating]], run.ranks
        count = gradient_documents(lengths, ranks=ranks.count)
        mine = split_documents(lengths[:count], ranks.count)[ranks.rank]
        here = [tokens.to(run.model.device) for tokens in run.every[mine.start : mine.stop]]
        some = replace(run, sequences=here, first=mine.start)
        self.found = measure(some, embedded(some, kind="unquantized-"), resumed=finished > 0)


@dataclass(frozen=True)
class Fisher:
    """The Fisher information of each block's output hidden states, float32 `[h, h]`, in files of
    the run's folder.

    Its matrices are `H` of `Hessian`, summed over the gradients by the first documents' tokens.
    Each rank has all.
    """

    run: Run
    hidden: int
    hashes: Sequence[str]

    def read(self, block: int) -> Tensor:
        """Read the matrix of a block into RAM; CheckpointError if its file changed."""
        path, shape = self.run.file(f"fisher-{block}"), (self.hidden, self.hidden)
        return files.load_tensor(path, shape, torch.float32, self.hashes[block])

    def root(self, block: int) -> Tensor:
        """Compute the matrix `[h, h]` that weighs errors of hidden states: `|error @ root|^2` is
        the loss.

        It is the Cholesky factor of the Fisher information with a damped diagonal, whose mean is 1.
        """
        model = self.run.model
        found = self.read(block).to(model.device).double()
        mean = float(found.diagonal().mean())
        if not mean > 0:
            raise NumericError(
                "its outputs have no finite gradient", INSTEAD, subject=model.blocks[block]
            )
        found.div_(mean * (1 + DAMP)).diagonal().add_(DAMP / (1 + DAMP))
        root: Tensor = torch.linalg.cholesky(found)
        return root.float()


def pass_bytes(sizes: Sizes, gradients: int) -> list[dict[str, int]]:
    """Count the memory of the two passes by part; the hidden states of the documents take as many
    bytes as their `gradients`.
    """
    square = Hessian.bytes(sizes.hidden)
    # The own sum and that of all ranks, a copy of each, and a chunk of tokens.
    summing = 4 * square + Hessian.chunk_bytes(sizes.hidden, sizes.device, sizes.width)
    held = {UNQUANTIZED: gradients, GRADIENTS: gradients}
    backward = max(sum(backward_bytes(sizes)), summing)
    block = {LOADED: sizes.block, READ: gradients, "backward pass": backward}
    if sizes.on_gpu:  # the next file is read meanwhile, and copies wait to be written
        each = max(gradients, square)
        block |= {READ: 2 * gradients, WAITING: min(MOST_BYTES, len(sizes.blocks) * each)}
    logits = DRAWING_BYTES * sizes.longest * sizes.vocabulary
    head = {"output head": sizes.width * max(sizes.outside, default=0), DOCUMENT: logits}
    return [held | head, held | block]


def measure(run: Run, stream: Stream, resumed: bool = False) -> Fisher:
    """Compute the gradients and save their sums, or read the sums of a stopped run.

    `stream` has the documents of the gradients, with the hidden states that enter the first block.
    A run that is `resumed` after finished blocks has saved these. RecipeError for a model whose
    blocks pass on more than one hidden state. CheckpointError if its code has no gradient.
    NumericError for a gradient that is not finite.
    """
    shape = list(stream.activations.hidden.shape)
    saved = _saved(run, shape)
    if all(run.ranks.exchange(saved is not None)) and saved is not None:
        return saved
    if resumed and run.ranks.first:
        run.progress.warn(
            f"{run.work}: the gradients of the model's outputs are lost, damaged or of other "
            "documents: computed again"
        )
    hashes = [""] * len(run.model.blocks)
    with WorkQueue(run.model.device, run.beside) as queue:
        for behind, found in carried_back(run, stream):
            with run.clock.phase("gradients"):
                fisher = _fisher(run, found)
            _save(run, queue, "fisher", behind - 1, fisher, hashes)
    index = {"first": run.first, "shape": shape, "hashes": hashes}
    files.write_atomic(run.file("gradients", ".json"), json.dumps(index).encode())
    return Fisher(run, shape[-1], hashes)


def carried_back(
    run: Run, stream: Stream, watch: Watch | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Run the model forward and back. Yields the gradients by the inputs of each block, from the
    last block to the second.

    The first pair is the number of blocks, with the gradients by the last outputs. Each other block
    is still loaded when its pair comes. With `watch`, each pass of a block back is in its context,
    and that of the head in that of the number of blocks. The first block then has a pair too.
    Raises as `measure`.
    """
    model, hidden, first = run.model, stream.activations.hidden, 0 if watch else 1
    hashes = _go_forward(run, stream, first)
    shape = tuple(hidden.shape)
    # Gradients in float16 would underflow.
    dtype = torch.bfloat16 if model.dtype == torch.float16 else model.dtype
    store = run.store(stream.activations.rows, shape[1:], dtype, "gradients-")
    with run.clock.phase("load"):
        model.weights.load_head()
    with run.clock.phase("gradients"):
        _sample(stream, store, run.recipe.calibration.seed, run.first, watch)
    model.weights.drop_head()
    yield len(model.blocks), store.hidden
    blocks = range(len(model.blocks) - 1, first - 1, -1)

    def read(block: int) -> Callable[[], Tensor]:
        """Return a function that reads a block's inputs. On a GPU the reading begins here, beside
        other work.
        """
        task = partial(
            files.load_tensor, run.file(f"entered-{block}"), shape, model.dtype, hashes[block]
        )
        return model.weights.beside(task) if run.beside and block in blocks else task

    entered = read(len(model.blocks) - 1)
    for block in run.progress.bar(blocks, "gradients, backward", "block"):
        run.load(block, block - 1 if block > first else -1)
        with run.clock.phase("load"):
            # The tensor that was read has no name, so that it is freed here.
            hidden.copy_(entered())
            files.remove(run.file(f"entered-{block}"))
        entered = read(block - 1)
        with run.clock.phase("gradients"):
            _carry_back(stream, block, store, watch)
        yield block, store.hidden
        model.weights.unload_block(block)


def _fisher(run: Run, gradients: Tensor) -> Tensor:
    """Sum the Fisher information of gradients `[..., h]` of all ranks, float32 `[h, h]`."""
    hidden, device = gradients.shape[-1], run.model.device
    chunk = LONG_CHUNK if device.type == "cuda" else CHUNK
    # They check each call: numbers stored for a later check would fragment the heap.
    own, found = (Hessian(hidden, device, chunk=chunk) for _ in range(2))
    for tokens in gradients.flatten(0, -2).split(chunk):
        own.add(tokens.to(device))
    for part in run.ranks.gather(own.part()):
        found.absorb(part)
    return found.matrix()


def _saved(run: Run, shape: Sequence[int]) -> Fisher | None:
    """Read the files of a stopped run; None if a file is missing, changed or of other documents."""
    try:
        index: Any = json.loads(run.file("gradients", ".json").read_text())
        found = Fisher(run, shape[-1], index["hashes"])
        for block in range(len(found.hashes)):
            found.read(block)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None
    same = (index.get("first"), index.get("shape")) == (run.first, list(shape))
    return found if same and len(found.hashes) == len(run.model.blocks) else None


def _go_forward(run: Run, stream: Stream, first: int) -> list[str]:
    """Run all blocks, save the inputs of blocks from `first` on, and list the hashes of
    the files.
    """
    model, hashes = run.model, [""] * len(run.model.blocks)
    with WorkQueue(model.device, run.beside) as queue:
        for block in run.progress.bar(range(len(model.blocks)), "gradients, forward", "block"):
            if block >= first:
                _save(run, queue, "entered", block, stream.activations.hidden, hashes)
            run.load(block, block + 1)
            stream.forward(block)
            model.weights.unload_block(block)
            if not stream.activations.hidden_only or model.forms[block].get("left"):
                raise RecipeError(
                    "passes on more than its hidden state, through which gradients would be lost",
                    INSTEAD,
                    subject=model.blocks[block],
                )
        with run.clock.phase("save"):
            queue.drain()
    return hashes


def _save(
    run: Run, queue: WorkQueue, kind: str, block: int, tensor: Tensor, hashes: list[str]
) -> None:
    """Write a tensor to its file and note its hash. From a GPU, a copy is written beside other
    work.
    """
    held = tensor
    if queue.beside and tensor.device == run.model.device:
        with suppress(torch.OutOfMemoryError):
            held = tensor.clone()

    def write() -> None:
        # A file damaged by a power cut is computed again. Waiting for the disk would take longer
        # than the passes.
        hashes[block] = files.save_tensor(run.file(f"{kind}-{block}"), held, durable=False)

    with run.clock.phase("save"):
        if held is tensor:
            write()
        else:
            queue.put(write, held.nbytes)


def _sample(stream: Stream, store: Activations, seed: int, first: int, watch: Watch | None) -> None:
    """Store the gradients by the last block's hidden states; the tokens are drawn by the model.

    The first document has the number `first`. Each number has a seed of its own.
    """
    model = stream.model
    generator = torch.Generator(model.device)
    for number, tokens in enumerate(stream.sequences):
        stream.progress.check()
        hidden = (
            stream.activations.get(number)
            .hidden.detach()
            .to(model.device, copy=True)
            .requires_grad_()
        )
        place = (seed + first + number) % 2**63
        draw = partial(_drawn, model, tokens, hidden, generator, place, watch)
        with explaining(model, INSTEAD):
            found = in_fixed_order(model, stream.progress, draw)
        if not bool(found.isfinite().all()):
            raise NumericError(
                "its gradient is not finite",
                INSTEAD,
                subject=f"calibration document {first + number}",
            )
        store.get(number).hidden.copy_(found)


@torch.enable_grad()
def _drawn(
    model: BlockRunner,
    tokens: Tensor,
    hidden: Tensor,
    generator: torch.Generator,
    seed: int,
    watch: Watch | None,
) -> Tensor:
    """Draw tokens of a document, and compute the gradient by its hidden states after the last
    block.
    """
    generator.manual_seed(seed)
    with watch(len(model.blocks)) if watch else nullcontext():
        logits = model.logits_of(tokens, hidden)
        wanted = logits.detach().float().softmax(-1)
        drawn = drawn_tokens(wanted, generator)
        wanted.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=wanted.dtype))
        with strictly(model):
            return torch.autograd.grad(logits, hidden, wanted.to(logits.dtype))[0]


def drawn_tokens(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each row of probabilities `[t, v]`, int64 `[t, 1]`; on a CPU with one
    random number a row.
    """
    if probabilities.is_cuda:  # its sums of a row have no fixed order
        return torch.multinomial(probabilities, 1, generator=generator)
    ends = probabilities.cumsum(-1)
    drawn = torch.rand(len(ends), 1, generator=generator) * ends[:, -1:]
    return torch.searchsorted(ends, drawn, right=True).clamp_(max=ends.shape[1] - 1)


def _carry_back(stream: Stream, block: int, store: Activations, watch: Watch | None) -> None:
    """Run a loaded block back: replace the gradients by its outputs with the gradients by its
    inputs.
    """
    model = stream.model
    for part in parts(stream, block, padded=watch is None):
        with explaining(model, INSTEAD):
            found = in_fixed_order(
                model, stream.progress, partial(_carried, stream, block, part, store, watch)
            )
        if not is_finite(found):
            raise NumericError("its gradient is not finite", INSTEAD, subject=model.blocks[block])
        for number, each in zip(part, [found] if len(part) == 1 else found, strict=True):
            store.get(number).hidden.copy_(each[: store.rows[number]])


@torch.enable_grad()
def _carried(
    stream: Stream, block: int, part: Sequence[int], gradients: Activations, watch: Watch | None
) -> Tensor:
    """Compute the gradients by a loaded block's inputs from the gradients by its outputs, for some
    documents.
    """
    device = stream.model.device
    hidden = stacked(stream.activations, part).detach().to(device, copy=True).requires_grad_()
    behind = stacked(gradients, part).to(device)
    with watch(block) if watch else nullcontext():
        out = run_part(stream, block, part, {}, hidden)
        with strictly(stream.model):
            return torch.autograd.grad(out, hidden, behind.view_as(out).to(out.dtype))[0]
