"""The state of a calibrated run, and the stream of its documents through the blocks.

A pass of documents through a block may wait where it calls a linear, until that linear is solved.
Otherwise each group of linears would need a pass from the start of the block. A pass that goes on
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from quantkit.calibration.activations import Activations, file_of
from quantkit.calibration.budget import PASS_STATES, TOKENS_AT_ONCE, most_waiting
from quantkit.core.quantized_tensor import Goal, QuantizedTensor
from quantkit.core.ranks import ALONE, Ranks
from quantkit.errors import Option, QuantkitError, Setting, Words
from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import State
from quantkit.models.modules import put_tensor
from quantkit.models.weights import free_gpu_memory
from quantkit.progress import Clock, Progress
from quantkit.recipes.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The state of a calibrated run for all blocks: recipe, model, goals and the documents of this
    rank.

    `sequences` are token ids, int64 `[t]`; the first one has the number `first` among `every`
    sequence of all ranks. The last of all do not calibrate: `held_out` names the source of each.
    Files of the run are in `work`. With `beside`, a background thread writes
    finished blocks.
    """

    recipe: Recipe
    model: BlockRunner
    sequences: Sequence[Tensor]
    work: Path
    act_budget: int | None
    progress: Progress
    clock: Clock
    chosen: Mapping[str, Goal | None]
    every: Sequence[Tensor]
    beside: bool = False
    ranks: Ranks = ALONE
    first: int = 0
    held_out: Sequence[str] = ()

    @property
    def calibrating(self) -> int:
        """The number of sequences of all ranks that calibrate."""
        return len(self.every) - len(self.held_out)

    def held_out_source(self, number: int) -> str | None:
        """Name the source of a sequence of this rank if it does not calibrate."""
        place = self.first + number - self.calibrating
        return self.held_out[place] if place >= 0 else None

    def exchanging(self) -> AbstractContextManager[None]:
        """Open the phase in which several ranks wait for each other and exchange values."""
        return self.clock.phase("exchange") if self.ranks.count > 1 else nullcontext()

    def goals(self, linears: Iterable[str]) -> dict[str, Goal]:
        """Look up the goal of each linear that does not stay dense."""
        goals = {name: self.chosen[name] for name in linears}
        return {name: goal for name, goal in goals.items() if goal is not None}

    @property
    def head(self) -> dict[str, Goal]:
        """The output head, or the table tied to it, with its goal; empty if it stays dense."""
        return self.goals(name for name in self.chosen if name == self.model.head)

    def file(self, kind: str, suffix: str = ".bin") -> Path:
        """Name the file of a kind that this rank keeps for the run."""
        return file_of(self.work, kind, self.ranks.rank, suffix)

    def store(
        self, rows: Sequence[int], like: tuple[int, ...], dtype: torch.dtype, kind: str = ""
    ) -> Activations:
        """Make room for activations of this rank's documents, as Activations does."""
        return Activations(
            self.work, self.act_budget, rows, like, dtype, self.model.device, self.ranks.rank, kind
        )

    def load(self, block: int, following: int = -1) -> None:
        """Load a block, and read the `following` one ahead."""
        with self.clock.phase("load"):
            self.model.weights.load_block(block)
        self.read_ahead(following)

    def read_ahead(self, block: int) -> None:
        """On a GPU, begin to read a block, if there is one of this number."""
        if self.model.device.type == "cuda" and 0 <= block < len(self.model.blocks):
            self.model.weights.read_ahead(block)

    def put_back(self, linear: str, value: QuantizedTensor | Tensor) -> None:
        """Replace the weight of a linear in a loaded block by its solved value, without padding."""
        n, k = self.model.linears[linear]
        dense = value.dequantize(self.model.dtype) if isinstance(value, QuantizedTensor) else value
        self.model.weights.replace(linear, dense[:n, :k].contiguous())


class Waiting:
    """Hold the passes that wait, by their documents.

    Each runs in a greenlet, so that all share one thread: its CUDA handles, and torch's mode of
    gradients, which is set anew at each switch. Only `close` frees their memory: Python collects no
    cycle through a greenlet.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, ...], greenlet] = {}
        self._running: greenlet | None = None

    def __contains__(self, documents: tuple[int, ...]) -> bool:
        return documents in self._passes

    def run(self, documents: tuple[int, ...], work: Callable[[], T]) -> T | None:
        """Start a pass, or resume a waiting pass. Returns None if it waits again."""
        gradients = torch.is_grad_enabled()
        self._running = one = self._passes.pop(documents, None) or greenlet(work)
        try:
            found: T | None = one.switch()
        finally:
            torch.set_grad_enabled(gradients)
        if not one.dead:
            self._passes[documents] = one
        return found

    def wait(self) -> bool:
        """Let the pass that calls this wait, and return True when it goes on; False at once if it
        cannot wait.
        """
        gradients = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        if getcurrent() is not self._running or autocast:
            return False
        self._running.parent.switch()
        torch.set_grad_enabled(gradients)
        return True

    def close(self) -> bool:
        """End all passes that wait; False if there are none."""
        waited, gradients = bool(self._passes), torch.is_grad_enabled()
        while self._passes:
            self._passes.popitem()[1].throw()
        torch.set_grad_enabled(gradients)
        return waited


class Stream:
    """Documents on their way through the blocks: their `sequences`, and the `activations` that
    enter the next block.

    `at_once` is the number of tokens that run together. It is halved where a GPU has no memory
    left. `padding` is a token of the text, which fills up shorter documents. It is read once,
    because reading from a GPU waits for its work.
    """

    def __init__(self, run: Run, activations: Activations) -> None:
        self.model, self.progress, self.clock = run.model, run.progress, run.clock
        self._held_out_source = run.held_out_source
        self.sequences = run.sequences[: len(activations.rows)]
        self.padding = int(self.sequences[0][0])
        self.activations = activations
        self.at_once = TOKENS_AT_ONCE[run.model.device.type]
        self.waiting = Waiting()
        self._waits = True

    def batches(
        self, block: int, numbers: Sequence[int], at_once: int, padded: bool = False
    ) -> Iterator[Sequence[int]]:
        """Divide documents, in order, into batches for one pass: neighbours of equal length, where
        possible.

        They have at most `at_once` tokens together, unless a single one is longer. Held-out
        documents run alone. The order of tokens in each Hessian stays. With `padded` the documents,
        shortest first, need not be equal; each counts as the longest of its batch.
        """
        first = 0
        while first < len(numbers):
            self.progress.check()
            length, end = len(self.sequences[numbers[first]]), first + 1
            if self.model.takes_batches(block) and self.activations.hidden_only:
                while end < len(numbers):
                    following = len(self.sequences[numbers[end]])
                    if (
                        following * (end + 1 - first) > at_once
                        or (following != length and not padded)
                        or self._held_out_source(numbers[end]) is not None
                    ):
                        break
                    end += 1
            yield numbers[first:end]
            first = end

    def forwards(
        self, block: int, first: int = 0, at_once: int | None = None
    ) -> Iterator[Sequence[int]]:
        """Divide the documents from `first` on into batches for one forward pass."""
        numbers = range(first, len(self.sequences))
        return self.batches(block, numbers, self.at_once if at_once is None else at_once)

    def run(self, block: int, numbers: Sequence[int], waits: bool = False) -> State | None:
        """Run the loaded block on one document, or on a batch; None if a watcher stopped it, or if
        it waits.

        A pass of these documents that waits goes on. Only with `waits` a new one may wait.
        """
        documents, tokens = tuple(numbers), self.sequences[numbers[0]]
        if len(numbers) == 1:
            state = self.activations.get(numbers[0])
        else:
            tokens = torch.stack([self.sequences[number] for number in numbers])
            state = self.activations.get_batch(numbers)
        work = partial(self.model.run, block, tokens, state)
        return self.waiting.run(documents, work) if waits or documents in self.waiting else work()

    def may_wait(self, documents: Sequence[int], x: Tensor) -> bool:
        """Return True if memory holds the waiting passes of all documents at a linear with such
        inputs `x`.
        """
        store = self.activations
        share = sum(store.rows[number] for number in documents) / len(store.hidden)
        size = round(x.nbytes / share) + PASS_STATES * store.hidden.nbytes
        free = free_gpu_memory(self.model.device) if self.model.device.type == "cuda" else None
        return self._waits and size <= most_waiting(store.hidden.nbytes, store.budget, free)

    def forward(self, block: int, keep: bool = True) -> None:
        """Run the loaded block on every document. With `keep`, its outputs replace the states."""
        done = 0
        with self.clock.phase("forward"):
            while (done := self._forward(block, done, keep)) < len(self.sequences):
                self.run_fewer(block)

    def _forward(self, block: int, done: int, keep: bool) -> int:
        """Run documents from number `done` on, until the GPU's memory is full. Returns the new
        count.
        """
        try:
            for numbers in self.forwards(block, done):
                out = self.run(block, numbers)
                assert out is not None
                if not keep or (len(numbers) > 1 and not out.passed):
                    if keep:
                        self.activations.put_batch(numbers, out)
                    done = numbers[-1] + 1
                    continue
                for number in numbers:  # hidden states are stored by document
                    out = out if len(numbers) == 1 else self.run(block, [number])
                    assert out is not None
                    self.activations.put(number, out)
                    done = number + 1
        except torch.OutOfMemoryError:
            pass  # the caller goes on: here the traceback still holds tensors
        return done

    def stop_waiting(self) -> bool:
        """End the passes that wait, and let no other wait; False if there are none."""
        waited = self.waiting.close()
        self._waits = self._waits and not waited
        return waited

    def run_fewer(self, block: int) -> None:
        """Run fewer documents together after a GPU ran out of memory; QuantkitError if only one
        ran.

        If passes waited, they end first, and no other will wait.
        """
        if self.stop_waiting():
            return
        longest, path = max(map(len, self.sequences)), [*self.model.blocks, self.model.head][block]
        if self.at_once < 2 * longest:
            raise QuantkitError(
                f"the GPU has not enough memory for a document of {longest} tokens",
                Words("use a smaller", Setting("max_length"), "or", Option("act_budget")),
                Option("device", "cpu"),
                subject=path,
            )
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        before, self.at_once = self.at_once, self.at_once // 2
        self.progress.warn(
            Words(
                f"{path}: the GPU has not enough memory for {before} tokens at a time, "
                f"{self.at_once} are tried; the last bits of sums may differ, a smaller",
                Option("act_budget"),
                "makes space",
            )
        )


def embedded(
    run: Run, count: int | None = None, kind: str = "", instead: Mapping[str, Tensor] | None = None
) -> Stream:
    """Let documents enter the first block: all, or the first `count`; `kind` begins the names of
    their files. Tensors `instead`, by state, take the place of the model's.
    """
    model, sequences = run.model, run.sequences[:count]
    with run.clock.phase("load"):
        model.prepare(embeddings=True)
        for state, tensor in (instead or {}).items():
            put_tensor(model.module, state, tensor)
    with run.clock.phase("forward"):
        first = model.embed(sequences[0]).hidden
        rows = [len(tokens) for tokens in sequences]
        if len(first) != rows[0]:  # padding, prompts or streams come with the tokens
            rows = [len(model.embed(tokens).hidden) for tokens in sequences]
        store = run.store(rows, tuple(first.shape[1:]), model.dtype, kind)
        for number, tokens in enumerate(sequences):
            run.progress.check()
            store.put(number, model.embed(tokens))
    model.drop_embeddings()
    return Stream(run, store)
