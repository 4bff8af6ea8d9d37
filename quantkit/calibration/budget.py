"""The policy of memory: how many tokens run together, and how much is held, summed, solved and
saved at a time.

A plan adds up the bytes that each stage takes of a run's `Sizes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import torch

from quantkit.algorithms.numerics import factor_dtype
from quantkit.algorithms.rtn import ROUNDING_BYTES
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Goal, Shape, is_sparse
from quantkit.core.ranks import ROWS as UNIT, ranks
from quantkit.core.threads import MOST_BYTES, grouped
from quantkit.errors import RecipeError, Setting, Words
from quantkit.models.families import BLOCK, EXPERT
from quantkit.models.meta_model import ROUTED
from quantkit.models.weights import compute_dtype, free_gpu_memory
from quantkit.recipes.recipe import Recipe

#: Tokens in one forward pass of documents of equal length, by device. On a GPU these are enough to
#: hide the launches of kernels, and as many as a chunk of a Hessian. On a CPU no sum of a document
#: may depend on other documents.
TOKENS_AT_ONCE = {"cpu": 0, "cuda": 16384}
#: The same with gradients: every token leaves values for the backward pass.
TUNED_AT_ONCE = {"cpu": 0, "cuda": 8192}
#: Output gradients come from the first documents that have this many tokens together.
GRADIENT_TOKENS = 2**16
#: The most bytes of Hessians that one pass over experts sums, unless a single one is larger; on a
#: GPU at least so many, and `PART_OF_GPU`.
HESSIAN_BYTES = 4 * 2**30
#: The most weights of a group that are solved together, unless a single linear has more.
SOLVED_WEIGHTS = 2**28
#: The most weights whose rows are solved at a time, by device, and the bytes that each of the other
#: weights takes meanwhile beside its source: a code, and its copy.
AT_ONCE, SOLVED_BYTES = {"cpu": 2**25, "cuda": 2**28}, 2
#: On a GPU a thread rounds so many weights at a time, with so many bytes for each, and so many
#: threads do at most: more would wait for Python's lock. Others read and store meanwhile. The parts
#: of a weight wait there until it is packed, with so many bytes.
PART, PART_BYTES, LAUNCHERS, ROUNDED_BYTES = 2**24, 96, 2, 4
#: Beside a GPU so many threads read and store, and a CPU rounds about so many weights at a time: of
#: eight cores or more, several share one.
ROUNDERS = {"cpu": 4, "cuda": 16}
#: Activations stay on a GPU if they take at most this part of its free memory.
PART_OF_GPU = 1 / 4
#: The most bytes of RAM for passes that wait in a block. On a GPU it is `PART_OF_GPU`.
PASSES_BYTES = 2**31
#: Hidden states that such a pass holds beside a linear's input: its own input, the residual and a
#: norm's output.
PASS_STATES = 3
#: Blocks from one snapshot of the activations to the next. On a GPU, repeating a few blocks is
#: faster than writing them to disk.
SAVED_BLOCKS = {"cpu": 1, "cuda": 8}
#: Whether finished blocks are written, and the source is hashed, in a background thread.
BESIDE = {"cpu": False, "cuda": True}
#: Files of the source that are hashed at a time: one on a CPU, where the same cores compute.
READERS = {"cpu": 1, "cuda": 8}

#: Products of weights and tokens that are calibrated in a second, from forward pass to Hessian: by
#: two cores of a laptop, or by a GPU.
RATE = {"cpu": 2e10, "cuda": 3e13}
#: A weight is solved in the time of so many of its products with a token, and of so many more for
#: each input channel of its linear.
SOLVED, SOLVED_BY_CHANNEL = 13000, 4
#: Seconds of a calibrated run without a GPU, and the fewest tokens and the shortest sequences that
#: it gets by default; tokens are a multiple of STEP.
SECONDS, LEAST_TOKENS, LEAST_LENGTH, STEP = 600, 2**14, 512, 2**13


def rounding_bytes(goals: Iterable[Goal | None], dtype: torch.dtype, device: str) -> int:
    """Return the bytes of host memory for each weight `dtype` that is rounded or pruned to these
    goals: on a GPU its source and what is stored.
    """
    if device == "cuda":
        return dtype.itemsize + SOLVED_BYTES
    sparse = any(goal is not None and is_sparse(goal) for goal in goals)
    return ROUNDING_BYTES if sparse else 2 * dtype.itemsize + SOLVED_BYTES


def rounders(device: torch.device) -> int:
    """Count the threads that read, round and store weights; on a CPU few, because more would wait
    for Python's lock.
    """
    threads, most = torch.get_num_threads(), ROUNDERS[device.type]
    return min(threads, most) if device.type == "cuda" else threads // max(1, threads // most)


def launchers(device: torch.device, free: int | None = None) -> int:
    """Count the threads that round on a GPU at a time: as its `free` bytes allow, None asks it."""
    free = free_gpu_memory(device) if free is None else free
    waiting = ROUNDED_BYTES * MOST_BYTES // rounding_bytes([], torch.bfloat16, "cuda")
    return max(1, min(LAUNCHERS, (free - waiting) // (PART * PART_BYTES)))


def rows_at_once(k: int, device: str) -> int:
    """Count the rows of `k` weights that are solved at a time: units in which ranks divide rows."""
    return max(1, AT_ONCE[device] // (k * UNIT)) * UNIT


def solving_work(shapes: Iterable[Shape]) -> float:
    """Count the products of weights and tokens that take as long as solving linears `(n, k)`."""
    return sum(n * k * (SOLVED + SOLVED_BY_CHANNEL * k) for n, k in shapes)


def affordable_tokens(shapes: Collection[Shape]) -> int:
    """Count the tokens on which two cores calibrate linears `(n, k)` in `SECONDS`, by shapes alone:
    no load or number of threads changes a byte of the output.
    """
    tokens = (SECONDS * RATE["cpu"] - solving_work(shapes)) / max(1, sum(n * k for n, k in shapes))
    return max(LEAST_TOKENS, int(tokens // STEP) * STEP)


def gradient_documents(
    lengths: Iterable[int], tokens: int = GRADIENT_TOKENS, ranks: int = 1
) -> int:
    """Count the first documents that have this many `tokens` together: one for each of `ranks` at
    least, or all.
    """
    totals = list(accumulate(lengths))
    return min(len(totals), max(ranks, bisect_left(totals, tokens) + 1))


def split_documents(lengths: Sequence[int], count: int, held_out: int = 0) -> list[range]:
    """Divide documents of `lengths` tokens into adjacent ranges for `count` ranks, balanced by
    tokens. The last rank has the `held_out` documents behind them too.

    RecipeError if there are fewer documents than ranks.
    """
    if len(lengths) < count > 1:
        raise RecipeError(
            f"{len(lengths)} calibration sequences for {count} processes",
            Words("give more", Setting("samples")),
            "start fewer processes",
        )
    ends = list(accumulate(lengths))
    bounds = [0]
    for rank in range(1, count):
        share = ends[-1] * rank / count
        nearest = min(range(len(ends)), key=lambda number: abs(ends[number] - share)) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(lengths) - count + rank))
    ends = [*bounds[1:], len(lengths) + held_out]
    return [range(*bound) for bound in zip(bounds, ends, strict=True)]


def stays_on_gpu(size: int, free: int | None) -> bool:
    """Decide whether activations of `size` bytes stay on a GPU with `free` bytes; None means that
    there is no GPU.
    """
    return free is not None and size <= PART_OF_GPU * free


def most_summed(free: int | None) -> int:
    """Limit the bytes of Hessians that one pass sums; `free` as above."""
    return max(HESSIAN_BYTES, 0 if free is None else int(PART_OF_GPU * free))


def most_waiting(stored: int, budget: int | None, free: int | None) -> int:
    """Limit the bytes of passes that wait, given `stored` activations and their `budget`; `free` as
    above.
    """
    most = PASSES_BYTES if free is None else int(PART_OF_GPU * free)
    return most if budget is None else max(0, min(most, budget - stored))


#: Parts of a run's memory, by their names in a plan: memory that grows with the longest sequence,
#: activations of all documents, and activations of the unquantized model.
DOCUMENT, ACTIVATIONS, UNQUANTIZED = (
    "one document",
    "activations",
    "activations of the unquantized model",
)
#: The gradients of all documents, and a block's file that is read.
GRADIENTS, READ = "output gradients", "file of hidden states"
#: The source and the quantized weights together, while scales of the whole model are tuned.
WHOLE = "whole model, twice"
#: The weights of the largest block, the writer's queue, and a solver's matrices.
LOADED, WAITING, SQUARES, ROWS = (
    "block",
    "waiting to be written",
    "Hessian and factor",
    "rows being solved",
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a calibrated run, with upper bounds for sizes that depend on its documents.

    `device` is cpu or cuda, `width` the bytes of a number there, and `factors` the dtype of factors
    of Hessians. `linears` has name -> `(n, k)` of all linears in blocks, and of the head and the
    embeddings if they are solved. `blocks` has the sizes of
    each block, by path, and `outside` the sizes of each other tensor. `outputs` are the most
    outputs of all linears in a block, and `passed` those that a pass without gradients has at a
    time: of a layer's experts one, and those that a token is routed to. `channels` are the inputs
    of the widest linear. `token` are the bytes of a token's hidden state, `longest` the tokens of
    the longest document, and `tokens` those of a rank. `gpu_memory` are the free bytes of the GPU.
    """

    recipe: Recipe
    device: str
    width: int
    factors: torch.dtype
    linears: Mapping[str, Shape]
    blocks: Mapping[str, int]
    outside: Sequence[int]
    outputs: int
    passed: int
    channels: int
    hidden: int
    heads: int
    vocabulary: int
    longest: int
    tokens: int
    gpu_memory: int | None

    @classmethod
    def of(
        cls,
        src: Checkpoint,
        linears: Mapping[str, Shape],
        recipe: Recipe,
        device: str,
        gpu_memory: int | None = None,
    ) -> Sizes:
        """Collect the sizes of a run on `device`. `linears` as in the class. `gpu_memory` is that
        of a GPU that is not here.
        """
        kind, cuda, here = torch.device(device), device == "cuda", torch.cuda.is_available()
        if cuda and here and gpu_memory is None:
            gpu_memory = torch.cuda.mem_get_info()[0]
        inside = {module: shape for module, shape in linears.items() if BLOCK.match(module)}
        counts = {name: prod(src.shape(name)) for name in src.names()}
        calib, ranked = recipe.calibration, ranks().count
        longest = min(calib.max_length, _stated(src, "max_position_embeddings") or calib.max_length)
        return cls(
            recipe,
            kind.type,
            compute_dtype(src.dtype_of_model, kind).itemsize,
            factor_dtype(kind) if here and cuda else torch.float64,
            linears,
            _in_blocks(counts),
            [count for name, count in counts.items() if not BLOCK.match(name)],
            max(_in_blocks({module: n for module, (n, _) in inside.items()}).values(), default=0),
            max(_in_blocks(_passed(src, inside)).values(), default=0),
            max((k for _, k in inside.values()), default=0),
            _stated(src, "hidden_size")
            or max((min(shape) for shape in inside.values()), default=0),
            _stated(src, "num_attention_heads") or 1,
            _stated(src, "vocab_size") or 0,
            longest,
            # A rank may have one document more than another.
            min(
                (calib.samples // ranked + (ranked > 1)) * longest,
                (calib.tokens or 2**63) // ranked + len(calib.sources) * longest,
            ),
            gpu_memory if cuda else None,
        )

    @property
    def on_gpu(self) -> bool:
        """Whether the run computes on a GPU."""
        return self.device == "cuda"

    @property
    def block(self) -> int:
        """The bytes of the largest block."""
        return self.width * max(self.blocks.values(), default=0)

    @property
    def token(self) -> int:
        """The bytes of a token's hidden state."""
        return self.width * self.hidden

    def gradient_bytes(self, tokens: int = GRADIENT_TOKENS) -> int:
        """Bound the bytes of the gradients of a rank's part of `gradient_documents`."""
        count = ranks().count
        of_all = min(self.recipe.calibration.samples * self.longest, tokens + self.longest)
        return self.token * (of_all // count + (self.longest if count > 1 else 0))

    def most(self, tokens: int = 0) -> int:
        """Count the weights of the largest block, with inputs and outputs of some `tokens`."""
        counts = {module: n * k + tokens * (n + k) for module, (n, k) in self.linears.items()}
        return max(_in_blocks(counts).values(), default=0)


@dataclass(frozen=True)
class Peaks:
    """The bytes that a stage takes, by part: in each of its passes `before` the blocks, and of a
    block `at` the groups and `behind` them.
    """

    before: Sequence[Mapping[str, int]] = ()
    at: Mapping[str, int] = field(default_factory=dict)
    behind: Mapping[str, int] = field(default_factory=dict)


def _stated(src: Checkpoint, key: str) -> int | None:
    """Look up a size of the text model in config.json, None if it is no positive number."""
    text = src.config.get("text_config")
    value = (text if isinstance(text, dict) else src.config).get(key)
    return value if type(value) is int and value > 0 else None


def _passed(src: Checkpoint, linears: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Count the outputs of each linear, those of an expert by its share of `Sizes.passed`."""
    found = {module: EXPERT.match(module) for module in linears}
    of_layers = grouped((each[1], each[2]) for each in found.values() if each)
    experts = {layer: len(set(numbers)) for layer, numbers in of_layers.items()}
    routed = next((top for key in ROUTED if (top := _stated(src, key))), None)
    counts = {module: experts[each[1]] if each else 1 for module, each in found.items()}
    return {
        module: n if routed is None else -(-n * min(counts[module], routed + 1) // counts[module])
        for module, (n, _) in linears.items()
    }


def _in_blocks(counts: Mapping[str, int]) -> dict[str, int]:
    """Add up counts of tensors or linears by the path of their block."""
    blocks = ((BLOCK.match(name), count) for name, count in counts.items())
    found = grouped((block[1], count) for block, count in blocks if block)
    return {path: sum(each) for path, each in found.items()}
