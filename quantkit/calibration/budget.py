"""The policy of memory: how many tokens run together, and how much is held, summed, solved and
saved at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from quantkit.errors import RecipeError, Setting, Words

#: Tokens in one forward pass of documents of equal length, by device. On a GPU these are enough to
#: hide the launches of kernels, and as many as a chunk of a Hessian. On a CPU no sum of a document
#: may depend on other documents.
TOKENS_AT_ONCE = {"cpu": 0, "cuda": 16384}
#: The same with gradients: every token leaves values for the backward pass.
TUNED_AT_ONCE = {"cpu": 0, "cuda": 8192}
#: Output gradients come from the first documents that have this many tokens together.
GRADIENT_TOKENS = 2**16
#: The most bytes of Hessians that one pass over experts sums, unless a single one is larger.
HESSIAN_BYTES = 4 * 2**30
#: The most weights of a group that are solved together, unless a single linear has more.
SOLVED_WEIGHTS = 2**28
#: Activations stay on a GPU if they take at most this part of its free memory.
PART_OF_GPU = 1 / 4
#: The most bytes of RAM that passes take which wait in a block. On a GPU it is `PART_OF_GPU`.
PASSES_BYTES = 2**31
#: Hidden states that such a pass holds beside a linear's input: its own input, the residual and
#: what a norm returned.
PASS_STATES = 3
#: Activations are saved after every so many blocks. On a GPU, repeating a few blocks is faster than
#: writing them to disk.
SAVED_BLOCKS = {"cpu": 1, "cuda": 8}
#: Whether finished blocks are written, and the source is hashed, in a background thread.
BESIDE = {"cpu": False, "cuda": True}


def gradient_documents(lengths: Iterable[int], tokens: int = GRADIENT_TOKENS) -> int:
    """Count the first documents, of `lengths` tokens, that have this many `tokens` together, or
    all.
    """
    totals = list(accumulate(lengths))
    return min(len(totals), bisect_left(totals, tokens) + 1)


def split_documents(lengths: Sequence[int], count: int) -> list[range]:
    """Divide documents of `lengths` tokens into adjacent ranges for `count` ranks, balanced by
    tokens.

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
    return [range(*bound) for bound in zip(bounds, [*bounds[1:], len(lengths)], strict=True)]


def gradient_tokens(total: int, longest: int, tokens: int = GRADIENT_TOKENS) -> int:
    """Bound the tokens of `gradient_documents`, of `total` tokens in documents of at most
    `longest`.
    """
    return min(total, tokens + longest)


def stays_on_gpu(size: int, free: int | None) -> bool:
    """Decide whether activations of `size` bytes stay on a GPU with `free` bytes; None means that
    there is no GPU.
    """
    return free is not None and size <= PART_OF_GPU * free


def fits_beside(size: int, stored: int, budget: int | None, free: int | None) -> bool:
    """Decide whether passes of `size` bytes wait beside `stored` activations with their `budget`;
    `free` as above.
    """
    if budget is not None and size + stored > budget:
        return False
    return size <= PASSES_BYTES if free is None else stays_on_gpu(size, free)
