"""A model's own forward, taken over block by block: inputs of a block come from outside, and its
outputs are stored.

The model's code makes masks, rotary tables and per-layer windows, and calls its blocks in order.
The block before the chosen one returns a stored activation instead of running, and the model's code
hands that to the chosen block. After that block, an exception ends the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from quantkit.models.passing import Needed, Passed, Unused, tensors_in

T = TypeVar("T")


class Stop(Exception):
    """End the model's forward early."""


class NotReached(Exception):
    """Make the error of a forward that ended before it called a block."""


class Given(NamedTuple):
    """The arguments of a block's call. `HIDDEN` stands for its hidden state, whose dimensions are
    `shape`.

    `is_stored`: whether this is the stored activation, unchanged by code between the blocks.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size
    is_stored: bool


#: Stands for the hidden state among arguments.
HIDDEN = object()


@dataclass
class _Pass:
    """The state of a forward: the block `at` runs on the `passed` values, and leaves its `output`.

    `stored` is the previous block's output, and the version of that tensor then. With
    `is_disturbed`, other hidden states go through the blocks before it, and with `is_emptied` into
    the first block too.
    """

    at: int
    passed: Passed | None
    in_batch: bool = False
    enters_only: bool = False
    output: Passed | None = None
    given: Given | None = None
    stored: tuple[Tensor, int] | None = None
    is_disturbed: bool = False
    is_emptied: bool = False

    def skip(self, index: int, entering: Tensor) -> Any:
        """Make the result of a block before `at`, which does not run."""
        assert self.passed is not None
        # Code between blocks may change their results in place, so only the last block returns the
        # activation.
        if self.is_emptied and index == 0:
            entering.add_(1)
        hidden = entering + 1 if self.is_disturbed else entering
        if index + 1 == self.at:
            hidden = _like(self.passed.hidden, entering.shape)
            self.stored = hidden, hidden._version
        return hidden if self.passed.returned is None else (hidden, *self.passed.returned)

    def holds(self, entering: Tensor) -> bool:
        """Tell whether a tensor is the unchanged output of the block before `at`."""
        return (
            self.stored is not None
            and self.stored[0] is entering
            and self.stored[1] == entering._version
        )


class Interception:
    """Replace the forward of each of a model's `blocks`. Outside a pass, modules run unchanged.

    `batch_comes_first`: whether the last document that entered a block did so as `[1, t, h]`.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.batch_comes_first = False
        self._pass: _Pass | None = None
        self._forwards = [block.forward for block in blocks]
        for index, block in enumerate(blocks):
            block.forward = partial(self._visit, index)

    def run(
        self,
        forward: Callable[[], object],
        at: int,
        passed: Passed | None,
        *,
        in_batch: bool = False,
        enters_only: bool = False,
    ) -> Passed | None:
        """Call the model's `forward` with block `at` running on the `passed` values; return the
        block's output.

        With `enters_only` the block does not run, and its input is returned. None if a watcher
        stopped the block. NotReached if the forward ends without it. Needed if the block takes a
        value that was not stored.
        """
        found = self._pass = _Pass(at, passed, in_batch, enters_only)
        try:
            forward()
        except Stop:
            return found.output
        finally:
            self._pass = None
        raise NotReached

    def arguments(
        self,
        forward: Callable[[], object],
        at: int,
        passed: Passed,
        *,
        in_batch: bool,
        disturbed: bool = False,
        emptied: bool = False,
    ) -> Given | None:
        """Call the model's `forward` up to block `at`, and return the arguments of the block, which
        does not run.

        With `disturbed`, other hidden states go through the blocks before it; with `emptied`, into
        the first one too.
        """
        found = self._pass = _Pass(
            at, passed, in_batch, enters_only=True, is_disturbed=disturbed, is_emptied=emptied
        )
        try:
            forward()
        except Stop:
            pass
        finally:
            self._pass = None
        return found.given

    def call(self, at: int, given: Given, passed: Passed, in_batch: bool) -> Passed | None:
        """Call only block `at`, with the arguments that the model's forward would give; as `run`
        otherwise.
        """
        hidden = _like(passed.hidden, given.shape)
        args = tuple(hidden if each is HIDDEN else each for each in given.args)
        kwargs = {name: hidden if each is HIDDEN else each for name, each in given.kwargs.items()}
        try:
            return _outputs(self._forwards[at](*args, **kwargs), in_batch, {})
        except Stop:
            return None

    def run_behind(self, forward: Callable[[], T], last: int, passed: Passed) -> T:
        """Call the model's `forward` without running the `last` blocks, and return its result."""
        self._pass = _Pass(last, passed)
        try:
            return forward()
        finally:
            self._pass = None

    def _visit(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of block `index`."""
        now, forward = self._pass, self._forwards[index]
        if now is None:
            return forward(*args, **kwargs)
        entering = args[0] if args else kwargs["hidden_states"]
        if index < now.at:
            return now.skip(index, entering)
        for given in tensors_in((args, kwargs)):
            if isinstance(given, Unused):
                raise Needed(given.number)
        if not now.in_batch:
            self.batch_comes_first = entering.ndim == 3 and len(entering) == 1
        if now.enters_only:
            now.output = Passed(_by_token(entering), None, {})
            now.given = Given(
                tuple(HIDDEN if each is entering else each for each in args),
                {name: HIDDEN if each is entering else each for name, each in kwargs.items()},
                entering.shape,
                index == 0 or now.holds(entering),
            )
            raise Stop
        assert now.passed is not None
        if index == 0:
            hidden = _like(now.passed.hidden, entering.shape)
            args = tuple(hidden if given is entering else given for given in args)
            kwargs = {
                name: hidden if given is entering else given for name, given in kwargs.items()
            }
            entering = hidden
        left = dict(now.passed.left)
        with _sharing(args, kwargs, left):
            out = forward(*args, **kwargs)
        now.output = _outputs(out, now.in_batch, left)
        raise Stop


def _outputs(out: Any, in_batch: bool, left: dict[str, dict[Any, Any]]) -> Passed:
    """Split a block's return value into the hidden state and the rest."""
    first, returned = (out[0], list(out[1:])) if isinstance(out, tuple | list) else (out, None)
    return Passed(first if in_batch else _by_token(first), returned, left)


@contextmanager
def _sharing(
    args: tuple[Any, ...], kwargs: dict[str, Any], left: dict[str, dict[Any, Any]]
) -> Iterator[None]:
    """Give mappings among a call's arguments the entries that were `left`, and collect their new
    entries there.
    """
    arguments = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    shared = {name: value for name, value in arguments.items() if isinstance(value, MutableMapping)}
    before = {name: dict(value) for name, value in shared.items()}
    for name, mapping in shared.items():
        mapping.update(left.get(name, {}))
    yield
    for name, mapping in shared.items():
        if entries := {
            key: value for key, value in mapping.items() if before[name].get(key) is not value
        }:
            left[name] = entries


@contextmanager
def watching(
    linears: Mapping[str, nn.Module], see: Callable[[str, Tensor], bool]
) -> Iterator[None]:
    """Call `see(name, input [..., k])` before each linear runs; the pass ends when `see` returns
    True.
    """

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if see(name, args[0] if args else kwargs["input"]):
            raise Stop

    with ExitStack() as stack:
        for name, module in linears.items():
            stack.callback(
                module.register_forward_pre_hook(partial(hook, name), with_kwargs=True).remove
            )
        yield


@contextmanager
def telling(modules: Iterable[nn.Module]) -> Iterator[Callable[[Tensor], bool]]:
    """Return a function that tells whether a tensor is an output of some modules, or shares memory
    with an output.

    It keeps no tensor in memory, so it is asked while the model runs.
    """
    returned: list[ReferenceType[Tensor]] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        returned[:] = [each for each in returned if each() is not None]
        returned.extend(map(ref, tensors_in(output)))

    def tell(x: Tensor) -> bool:
        alive = (each() for each in returned)
        return any(each is not None and each.data_ptr() == x.data_ptr() for each in alive)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook).remove)
        yield tell


def _batch_axis(shape: torch.Size) -> int:
    """Find the batch dimension of a document: 0, or 1 if tokens or streams of hidden states come
    first.
    """
    return 1 if len(shape) > 2 and shape[0] > 1 and shape[1] == 1 else 0


def _by_token(hidden: Tensor) -> Tensor:
    """Put the tokens of one document first: `[s, 1, t, h]` becomes `[t, s, h]`."""
    axis = _batch_axis(hidden.shape)
    return hidden.select(axis, 0).movedim(axis if hidden.ndim > 3 else 0, 0)


def _like(hidden: Tensor, shape: torch.Size) -> Tensor:
    """Give `_by_token`'s result the dimensions of a tensor that enters a block; a batch has them
    already.
    """
    if hidden.shape == shape:
        return hidden
    axis = _batch_axis(shape)
    return hidden.movedim(0, axis if len(shape) > 3 else 0).unsqueeze(axis)


#: Passes of a shape until its arguments are compared, and the number of shapes whose arguments are
#: stored.
REPEATED, KEPT = 5, 8
#: The most bytes of stored arguments, as a multiple of the hidden state.
LARGEST = 2


class Repeated:
    """The arguments of the block that runs, for some shapes of batches."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._passes: Counter[Hashable] = Counter()
        self._kept: dict[Hashable, tuple[Given, list[tuple[Tensor, int]]]] = {}

    def get(self, index: int, shape: Hashable, compare: Callable[[], Given | None]) -> Given | None:
        """Return the stored arguments of block `index` for batches of a shape, if any.

        `compare` is called once, in the last of the first `REPEATED` passes. Returns the arguments,
        or None if they may change.
        """
        if index != self._index:
            self._index = index
            self._passes.clear()
            self._kept.clear()
        if shape in self._kept:
            given, versions = self._kept[shape]
            if all(tensor._version == version for tensor, version in versions):
                return given
            del self._kept[shape]  # the block changes them in place
        self._passes[shape] += 1
        if (
            self._passes[shape] == REPEATED
            and len(self._kept) < KEPT
            and (found := compare()) is not None
        ):
            self._kept[shape] = found, [(tensor, tensor._version) for tensor in _tensors(found)]
            return found
        return None


def independent(given: Given | None, other: Given | None, hidden: Tensor) -> bool:
    """Return True if a block's arguments were the same for other tokens and another hidden state,
    and may be stored.
    """
    return (
        given is not None
        and other is not None
        and given.is_stored
        and _same(given.args, other.args)
        and given.kwargs.keys() == other.kwargs.keys()
        and all(_same(value, other.kwargs[name]) for name, value in given.kwargs.items())
        and sum(tensor.nbytes for tensor in _tensors(given)) <= LARGEST * hidden.nbytes
    )


def _tensors(given: Given) -> list[Tensor]:
    return list(tensors_in((given.args, given.kwargs)))


def _same(a: Any, b: Any) -> bool:
    """Compare two arguments. Objects that the block might change, such as mappings, count as
    different.
    """
    if isinstance(a, Tensor):
        is_alike = isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        return is_alike and not a.requires_grad and torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool | int | float | str):
        return type(a) is type(b) and bool(a == b)
    return (a is None or a is HIDDEN) and a is b
