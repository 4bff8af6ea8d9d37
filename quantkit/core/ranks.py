"""The processes that share one run, each a rank, and the messages between them.

torchrun and accelerate start several processes, which join a process group of torch.distributed.
Messages go through its object collectives, in groups of our own beside the default one. A rank that
fails tells the others, and all of them end with its error. Values are moved and not added: whoever
adds them does so in the order of the ranks (ALGORITHMS 13).
"""

from __future__ import annotations

import io
import os
import pickle
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from quantkit.core.threads import divide
from quantkit.errors import Option, QuantkitError, Words, is_out_of_memory, reason
from quantkit.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

#: A rank may wait for another rank that reads or solves. If one dies, its connections end, and
#: nobody waits for it.
PATIENCE = timedelta(days=7)
#: Tensors on GPUs are sent only when all ranks are ready. NCCL does not see that a process has died
#: meanwhile.
MOVING = timedelta(minutes=5)
#: Divided rows begin at multiples of this, as the products on a CPU and the tiles on a GPU do.
ROWS = 256
#: The message when a rank has died, with the way out.
LOST = (
    "another process of this run has ended (killed, or out of memory)",
    Words(
        "run the same command again, with", Option("resume", True), "if a .partial- folder was left"
    ),
)
#: Bytes of values that move at once; a larger value moves by itself.
MOVED_BYTES = 2**30


class _Form(NamedTuple):
    """A value without its tensors, pickled, and the dtype, shape and device type of each tensor."""

    text: bytes
    tensors: list[tuple[torch.dtype, torch.Size, str]]


class Ranks:
    """The place of this process, `rank` of `count`, and its exchanges of values with the others.

    A single process exchanges nothing. Every exchange begins with a message of each rank to all. A
    rank that has failed sends its error instead, and then all ranks raise that error. So all ranks
    must make the same exchanges. Tensors are received on `device` if they were sent from a GPU.
    Signals wait until an exchange is over. `control` is a process group of all ranks that moves
    tensors on CPUs.
    """

    def __init__(self, rank: int = 0, count: int = 1, control: Any = None) -> None:
        self.rank, self.count = rank, count
        self.device = torch.device("cpu")
        self.progress = Progress(quiet=True)
        self._control, self._nccl = control, None
        self._raised: BaseException | None = None
        #: Whether a rank has died, or may wait for tensors that will not come: nothing can be
        #: exchanged any more.
        self.lost = False

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    @property
    def local(self) -> int:
        """The number of ranks on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.count)) if self.count > 1 else 1

    def device_name(self, asked: str) -> str:
        """Choose the device of this rank: with several ranks, `auto` and `cuda` mean a GPU for
        each.
        """
        if self.count == 1 or asked not in ("auto", "cuda") or not torch.cuda.is_available():
            return asked
        return f"cuda:{os.environ.get('LOCAL_RANK', self.rank % torch.cuda.device_count())}"

    def rows(self, count: int) -> slice:
        """Choose the rows of this rank, of a weight with `count` rows."""
        units = -(-count // ROWS)
        first, end = (
            min(count, units * rank // self.count * ROWS) for rank in (self.rank, self.rank + 1)
        )
        return slice(first, end)

    def owners(self, costs: Sequence[int]) -> list[int]:
        """Choose a rank for each task: tasks by falling cost, each to the rank with the
        least work.
        """
        work, owners = [0] * self.count, [0] * len(costs)
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owners[number] = work.index(min(work))
            work[owners[number]] += costs[number]
        return owners

    def exchange(self, value: T) -> list[T]:
        """Exchange values without tensors: each rank gets the values of all, in rank order."""
        if self.count == 1:
            return [value]
        with self.progress.loop():
            return self._exchange(value)

    def broadcast(self, value: T | None) -> T:
        """Send the value of the first rank, which may hold tensors, to all."""
        return cast(T, self.gather(value if self.first else None)[0])

    def gather(self, value: T) -> list[T]:
        """Exchange values that may hold tensors: each rank gets the values of all, in
        rank order.
        """
        with closing(self.gather_each([value], [None])) as gathered:
            return [each for values in gathered for each in values or ()]

    def gather_each(
        self, values: Sequence[T], owners: Sequence[int | None]
    ) -> Generator[Iterator[T] | None, None, None]:
        """Yield for each value an iterator over all ranks' values in rank order, on the rank that
        owns it.

        It must be used up before the next one is taken. An owner None means all ranks; the others
        get None. The caller closes the generator.
        """
        if self.count == 1:
            yield from (iter([value]) for value in values)
            return
        separated = [_separate(value) for value in values]
        with self.progress.loop():
            forms = self._exchange([form for form, _ in separated])
            with self._moving([form for of_rank in forms for form in of_rank]):
                every = [
                    (number, source)
                    for number in range(len(values))
                    for source in range(self.count)
                ]
                steps = divide(every, lambda at: _size(forms[at[1]][at[0]]), MOVED_BYTES)
                moved: dict[tuple[int, int], list[Tensor]] = {}

                def each(number: int) -> Iterator[T]:
                    for source in range(self.count):
                        while (number, source) not in moved:
                            moved.update(
                                self._move(
                                    next(steps), forms, [own for _, own in separated], owners
                                )
                            )
                        tensors = moved.pop((number, source))
                        if source == self.rank:
                            yield values[number]
                        elif owners[number] in (None, self.rank):
                            yield cast(T, _join(forms[source][number], tensors))

                for number, owner in enumerate(owners):
                    if owner in (None, self.rank):
                        yield each(number)
                    else:
                        list(each(number))  # sends the own tensors
                        yield None

    def each(
        self, tasks: Sequence[T], owners: Sequence[int], work: Callable[[T], R]
    ) -> Iterator[R]:
        """Apply `work` to each task on the rank that owns it; yield all results in order, on every
        rank.
        """
        if self.count == 1:
            yield from map(work, tasks)
            return
        mine = {
            number: work(tasks[number]) for number, owner in enumerate(owners) if owner == self.rank
        }
        found = ChainMap(*self.gather(mine))
        yield from (found[number] for number in range(len(tasks)))

    @contextmanager
    def together(self, progress: Progress | None = None) -> Iterator[None]:
        """End the block on every rank at one time, or with the error of the first rank that fails
        in it.

        `progress` defers signals.
        """
        if self.count == 1:
            yield
            return
        before, self.progress = self.progress, progress or self.progress
        try:
            yield
            self.exchange(None)
        except BaseException as error:
            if not self.lost and error is not self._raised:
                self._exchange(None, error)
            raise
        finally:
            self.progress = before

    def leave(self) -> None:
        """Wait until all ranks are about to end, with or without an error, so that no launcher
        stops one too soon, and give the groups up.

        The threads of a group that is still held abort the process if Python ends too soon.
        """
        if self.count > 1 and not self.lost:
            with self.progress.loop():
                self._messages(None, None)
        self._control = self._nccl = None

    def _exchange(self, value: T, error: BaseException | None = None) -> list[T]:
        """Exchange values, or raise the error of the first rank that has one."""
        found = self._messages(value, error)
        if found is None:
            self._raised = error or QuantkitError(*LOST)
            raise self._raised
        failed = next((rank for rank, (_, other) in enumerate(found) if other is not None), None)
        if failed is None:
            return [value for value, _ in found]
        own = error is not None and (failed == self.rank or not _is_shown(error))
        self._raised = error if own else found[failed][1]
        assert self._raised is not None
        raise self._raised

    def _messages(
        self, value: T, error: BaseException | None
    ) -> list[tuple[T, BaseException | None]] | None:
        """Exchange values and errors; None if a rank has died."""
        found: list[Any] = [None] * self.count
        try:
            distributed.all_gather_object(
                found, (value, self._portable(error)), group=self._control
            )
        except RuntimeError:
            self.lost = True
            return None
        return found

    def _portable(self, error: BaseException | None) -> BaseException | None:
        """Make the error that the other ranks raise. For a bug it is one line, and this rank shows
        the traceback.
        """
        if error is None or _is_shown(error):
            return error
        return QuantkitError(f"rank {self.rank} failed ({reason(error)}): its own message is above")

    @contextmanager
    def _moving(self, forms: Iterable[_Form]) -> Iterator[None]:
        """Let tensors move. A rank that fails meanwhile cannot report it: the others notice when it
        ends.
        """
        self.lost = True
        try:
            if self._nccl is None and any(
                kind == "cuda" for form in forms for _, _, kind in form.tensors
            ):
                self._nccl = distributed.new_group(backend="nccl", timeout=MOVING)
                distributed.all_reduce(
                    torch.zeros(1, device=self.device), group=self._nccl
                )  # all ranks connect
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise QuantkitError(*LOST) from error
        self.lost = False

    def _move(
        self,
        step: Iterable[tuple[int, int]],
        forms: Sequence[Sequence[_Form]],
        own: Sequence[list[Tensor]],
        owners: Sequence[int | None],
    ) -> dict[tuple[int, int], list[Tensor]]:
        """Exchange tensors between ranks, all at once and in both directions. Returns the received
        values.
        """
        found: dict[tuple[int, int], list[Tensor]] = {}
        operations: dict[bool, list[Any]] = {False: [], True: []}

        def add(function: Callable[..., Any], tensors: Iterable[Tensor], peer: int) -> None:
            for tensor in tensors:
                if tensor.numel():
                    data = tensor.reshape(-1).view(torch.uint8)  # gloo and NCCL lack some dtypes
                    group = self._nccl if tensor.is_cuda else self._control
                    operations[tensor.is_cuda].append(
                        distributed.P2POp(function, data, peer, group)
                    )

        for number, source in step:
            found[number, source], owner = [], owners[number]
            receivers = list(range(self.count)) if owner is None else [owner]
            if source == self.rank:
                for receiver in receivers:
                    if receiver != source:
                        add(distributed.isend, own[number], receiver)
            elif self.rank in receivers:
                found[number, source] = [
                    torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else self.device)
                    for dtype, shape, kind in forms[source][number].tensors
                ]
                add(distributed.irecv, found[number, source], source)
        for of_kind in filter(None, operations.values()):
            for work in distributed.batch_isend_irecv(of_kind):
                work.wait()
        return found


#: A process that shares its run with no other one.
ALONE = Ranks()
#: Default process group -> its ranks, as long as the caller keeps it.
_RANKS: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()


def ranks() -> Ranks:
    """Find the ranks of the process group that this process has joined, or ALONE."""
    if (
        not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_world_size() == 1
    ):
        return ALONE
    world = distributed.group.WORLD
    if world not in _RANKS:
        # once: all of them join another group for their messages
        control = distributed.new_group(backend="gloo", timeout=PATIENCE)
        _RANKS[world] = Ranks(distributed.get_rank(), distributed.get_world_size(), control)
    return _RANKS[world]


def _is_shown(error: BaseException) -> bool:
    """Return True if a user can meet this error and it can be sent. All ranks then raise it."""
    if not (
        isinstance(error, QuantkitError | KeyboardInterrupt | OSError) or is_out_of_memory(error)
    ):
        return False
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


class _Pickler(pickle.Pickler):
    """Pickle a value without its tensors, which are put into `tensors` and become contiguous.

    Only the garbage collector would free a class made inside a function, much later, and its
    tensors with it.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, held: Any) -> int | None:
        if not isinstance(held, Tensor):
            return None
        self.tensors.append(held.detach().contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Read a value that `_Pickler` wrote; its tensors are passed separately."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: Any) -> Any:
        return self.tensors[number]


def _size(form: _Form) -> int:
    """Compute the bytes of the tensors of a value."""
    return sum(dtype.itemsize * shape.numel() for dtype, shape, _ in form.tensors)


def _separate(value: Any) -> tuple[_Form, list[Tensor]]:
    """Separate a value from the tensors in it, which become contiguous."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(value)
    tensors = pickler.tensors
    return _Form(text.getvalue(), [(t.dtype, t.shape, t.device.type) for t in tensors]), tensors


def _join(form: _Form, tensors: Sequence[Tensor]) -> Any:
    """Join a value with its tensors again."""
    return _Unpickler(io.BytesIO(form.text), tensors).load()
