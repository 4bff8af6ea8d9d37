"""The interface of a stage, a loaded block, and the tasks into which its linears are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantkit.algorithms.hessian import Hessian
from quantkit.calibration.budget import Peaks, Sizes
from quantkit.calibration.run import Run, Stream
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.recipes.goals import Goal


@dataclass(frozen=True)
class Group:
    """List linears that receive the same tensor, in order of first call.

    `once`: a document calls them once. `normalised`: their input is a norm's output, with a row for
    each token.
    """

    linears: tuple[str, ...]
    once: bool = True
    normalised: bool = False


@dataclass
class Task:
    """A group to solve, its Hessian, facts for the report, and the rank that solves it.

    Once summed, the Hessian covers all documents. It is None on a rank that does not solve the
    group. With `owner` None, each rank solves some of the rows.
    """

    group: Group
    facts: dict[str, Any] = field(default_factory=dict)
    hessian: Hessian | None = None
    owner: int | None = None


@dataclass
class LoadedBlock:
    """Hold a block in memory: its number, the `stream` that enters it, its goals, and solved
    weights by tensor name.

    `uncalled` gives the reason why a text-only pass never calls a linear. `starved` names the
    experts with too few tokens; the loop then makes tasks of all tokens for them. `floors` has the
    least scale of each row, float32 `[n]`, of some linears.
    """

    run: Run
    stream: Stream
    index: int
    goals: Mapping[str, Goal]
    uncalled: Mapping[str, str]
    solved: dict[str, Item] = field(default_factory=dict)
    starved: dict[str, str] = field(default_factory=dict)
    floors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The module path of the block."""
        return self.run.model.blocks[self.index]

    def put_back(self, item: Item) -> None:
        """Let a solved linear take the place of the original one."""
        assert isinstance(
            item.value, Tensor | QuantizedTensor
        )  # only conversions yield packed items
        self.run.put_back(item.name.removesuffix(".weight"), item.value)
        self.solved[item.name] = item


class Stage:
    """A part of a calibrated run. The loop calls each step of all stages, in their order; by
    default a step is empty.

    A stage may hold state for later stages of the same run.
    """

    def bytes(self, sizes: Sizes) -> Peaks:
        """Bound the memory that the stage takes in a run of such sizes."""
        return Peaks()

    def check(self, sequences: Sequence[Tensor]) -> None:
        """Raise RecipeError for calibration sequences that the stage cannot work with."""

    def start(self, run: Run, finished: int) -> None:
        """Begin a run after `finished` blocks of a stopped one; no block is loaded."""

    def enter(self, block: LoadedBlock) -> None:
        """Work on a loaded block before any of its linears is solved."""

    def work(self, block: LoadedBlock, tasks: list[Task]) -> None:
        """Work on independent groups; their Hessians fit into memory together.

        A stage may remove tasks from the list.
        """

    def leave(self, block: LoadedBlock) -> None:
        """Work on a block whose linears are all solved."""
