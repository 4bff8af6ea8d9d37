"""A model's own forward, taken over block by block: inputs of a block come from outside, and its
outputs are stored.

The model's code makes masks, rotary tables and per-layer windows, and calls its blocks in order.
The block before the chosen one returns a stored activation instead of running, and the model's code
hands that to the chosen block. After that block, an exception ends the forward.

Some blocks also pass tensors to later ones: they return them after the hidden state, or put them
into a mapping that the model hands to all its blocks. Between runs these are a list of tensors and
a `Form`, which JSON can hold.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from quantkit.errors import CheckpointError, Setting, Words
from quantkit.names import Json, JsonView

T = TypeVar("T")
#: The way out for a model that does not run block by block.
USE_RTN = Words("use", Setting("method", "rtn"))

#: `returned`: None, or one entry for each value that a block returns after its hidden state.
#: `left`: name of the argument that is a mapping -> its new entries.
Form = Json


class State(NamedTuple):
    """Hold the input of a block for one document: the hidden state `[t, h]` or `[t, streams, h]`,
    and other tensors.
    """

    hidden: Tensor
    passed: tuple[Tensor, ...] = ()


class Passed(NamedTuple):
    """Hold the tensors as Python values: `hidden` by token, `returned` after it, and the entries
    `left` in mappings.
    """

    hidden: Tensor
    returned: list[Any] | None
    left: dict[str, dict[Any, Any]]


@dataclass(eq=False)
class Needed(Exception):
    """Record that the model uses a block's return value `number`, counted after the
    hidden state.
    """

    number: int


class Unused(Tensor):
    """Stand for a returned tensor that nothing has used so far. Any operation on it
    raises Needed.
    """

    number: int

    @classmethod
    def of(cls, number: int) -> Unused:
        """Return the placeholder of the value `number`."""
        made = torch.empty(0).as_subclass(cls)
        made.number = number
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Needed(next(x.number for x in tensors_in((args, kwargs)) if isinstance(x, Unused)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments of a call."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


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
    kwargs: Json
    shape: torch.Size
    is_stored: bool


#: Stands for the hidden state among arguments.
HIDDEN = object()


def _exchanged(
    args: Iterable[Any], kwargs: JsonView, old: object, new: object
) -> tuple[tuple[Any, ...], Json]:
    """Copy the arguments of a call with `new` in the place of `old`."""
    return (
        tuple(new if each is old else each for each in args),
        {name: new if each is old else each for name, each in kwargs.items()},
    )


@dataclass
class Pass:
    """A forward of the model in which only block `at` runs, on the `passed` values.

    With `enters_only` this block does not run either. With `is_disturbed`, other hidden states go
    through the blocks before it, and with `is_emptied` into the first block too. Batches come and
    go as they are if `in_batch`, documents by token.

    The pass leaves the block's `output`, or its input as `output` and its arguments as `given` if
    it `enters_only`. None if a watcher stopped the block. `stored` is the output of the block
    before, and the version of that tensor then.
    """

    at: int
    passed: Passed | None = None
    in_batch: bool = False
    enters_only: bool = False
    is_disturbed: bool = False
    is_emptied: bool = False
    output: Passed | None = None
    given: Given | None = None
    stored: tuple[Tensor, int] | None = None

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
        self._pass: Pass | None = None
        self._forwards = [block.forward for block in blocks]
        for index, block in enumerate(blocks):
            block.forward = partial(self._visit, index)

    def run(self, forward: Callable[[], object], now: Pass) -> Pass:
        """Call the model's `forward` until the pass is over, and return the pass.

        NotReached if the forward ends without the block. Needed if the block takes a value that was
        not stored.
        """
        with suppress(Stop):
            self.run_behind(forward, now)
            raise NotReached
        return now

    def call(self, at: int, given: Given, passed: Passed, in_batch: bool) -> Passed | None:
        """Return the output of block `at`, called alone with the arguments that the model's forward
        would give; None if a watcher stopped it.
        """
        args, kwargs = _exchanged(
            given.args, given.kwargs, HIDDEN, _like(passed.hidden, given.shape)
        )
        try:
            return _outputs(self._forwards[at](*args, **kwargs), in_batch, {})
        except Stop:
            return None

    def run_behind(self, forward: Callable[[], T], now: Pass) -> T:
        """Call the model's `forward` without running the blocks before that of a pass, and return
        its result.
        """
        self._pass = now
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
                *_exchanged(args, kwargs, entering, HIDDEN),
                entering.shape,
                is_stored=index == 0 or now.holds(entering),
            )
            raise Stop
        assert now.passed is not None
        if index == 0:
            args, kwargs = _exchanged(
                args, kwargs, entering, _like(now.passed.hidden, entering.shape)
            )
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
    args: tuple[Any, ...], kwargs: Json, left: dict[str, dict[Any, Any]]
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

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Json) -> None:
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
REPEATED, MOST_SHAPES = 5, 8
#: The most bytes of stored arguments, as a multiple of the hidden state.
LARGEST = 2


@dataclass
class Repeated:
    """The arguments of the block that runs, for some shapes of batches."""

    _index: int | None = None
    _passes: Counter[Hashable] = field(default_factory=Counter)
    _stored: dict[Hashable, tuple[Given, list[tuple[Tensor, int]]]] = field(default_factory=dict)

    def get(self, index: int, shape: Hashable, compare: Callable[[], Given | None]) -> Given | None:
        """Return the stored arguments of block `index` for batches of a shape, if any.

        `compare` is called once, in the last of the first `REPEATED` passes. Returns the arguments,
        or None if they may change.
        """
        if index != self._index:
            self._index = index
            self._passes.clear()
            self._stored.clear()
        if shape in self._stored:
            given, versions = self._stored[shape]
            if all(tensor._version == version for tensor, version in versions):
                return given
            del self._stored[shape]  # the block changes them in place
        self._passes[shape] += 1
        if (
            self._passes[shape] == REPEATED
            and len(self._stored) < MOST_SHAPES
            and (found := compare()) is not None
        ):
            self._stored[shape] = (
                found,
                [(tensor, tensor._version) for tensor in tensors_in(found[:2])],
            )
            return found
        return None


def independent(given: Given, other: Given, hidden: Tensor) -> bool:
    """Return True if a block's arguments were the same for other tokens and another hidden state,
    and may be stored.
    """
    return (
        given.is_stored
        and _same(given.args, other.args)
        and given.kwargs.keys() == other.kwargs.keys()
        and all(_same(value, other.kwargs[name]) for name, value in given.kwargs.items())
        and sum(tensor.nbytes for tensor in tensors_in(given[:2])) <= LARGEST * hidden.nbytes
    )


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


def pack(passed: Passed, unused: frozenset[int]) -> tuple[State, Form]:
    """Split a block's outputs into tensors and their form, without the returned values that are
    `unused`.

    CheckpointError for a value of an unsupported type.
    """
    found: list[Tensor] = []
    returned: list[Any] | None = None
    if passed.returned is not None:
        returned = [
            {"unused": i} if i in unused else _flatten(value, found)
            for i, value in enumerate(passed.returned)
        ]
    left = {name: _flatten(entries, found) for name, entries in passed.left.items()}
    return State(passed.hidden, tuple(found)), {"returned": returned, "left": left}


def unpack(state: State, form: Form, device: torch.device) -> Passed:
    """Undo `pack` with copies on `device`, which the model may change in place."""
    tensors = [tensor.to(device, copy=True) for tensor in state.passed]
    returned, left = form["returned"], form["left"]
    return Passed(
        state.hidden.to(device, copy=True),
        None if returned is None else [_unflatten(each, tensors) for each in returned],
        {name: _unflatten(each, tensors) for name, each in left.items()},
    )


def _flatten(value: Any, found: list[Tensor]) -> Json:
    """Return the form of a value, and add its tensors to `found`."""
    if isinstance(value, Tensor):
        found.append(value)
        return {"tensor": len(found) - 1}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_flatten(each, found) for each in value]}
    if type(value) is dict:
        return {"dict": [[key, _flatten(each, found)] for key, each in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    kind = type(value).__name__
    raise CheckpointError(
        f"passes on a value of type {kind}, and only tensors can be stored between blocks", USE_RTN
    )


def _unflatten(form: JsonView, tensors: Sequence[Tensor]) -> Any:
    ((kind, inner),) = form.items()
    if kind == "unused":
        return Unused.of(inner)
    if kind == "tensor":
        return tensors[inner]
    if kind == "value":
        return inner
    if kind == "dict":
        return {key: _unflatten(each, tensors) for key, each in inner}
    values = [_unflatten(each, tensors) for each in inner]
    return tuple(values) if kind == "tuple" else values
