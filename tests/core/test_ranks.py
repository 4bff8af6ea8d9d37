"""Messages between ranks: any tensors, the order of the ranks, errors, and what other libraries see."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from quantkit.core import ranks as ranks_module
from quantkit.core.ranks import ALONE, LOST, ROWS, Ranks, ranks
from quantkit.errors import NumericError, QuantkitError
from tests import ranks as processes


def joined(work: Callable[[Ranks], None], count: int, folder: Path) -> None:
    """Run `work` on `count` ranks, all of which must end well."""

    def rank() -> None:
        distributed.init_process_group("gloo")
        work(ranks())

    results = processes.run([rank] * count, folder)
    assert [each.code for each in results] == [0] * count, results


def tensors(rank: int) -> list[Tensor]:
    """Return tensors of odd dtypes and shapes, one of them with strides."""
    wide = torch.arange(12).view(3, 4) + rank
    return [wide.T, wide.bfloat16(), wide > 5, torch.tensor(rank), torch.empty(0, 3), wide[1].half()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_values_with_tensors_arrive_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    def work(here: Ranks) -> None:
        assert here.exchange(here.rank) == [0, 1, 2]
        assert same(here.broadcast({"a": tensors(here.rank)})["a"], tensors(0))
        found = here.gather((f"rank {here.rank}", tensors(here.rank)))
        assert [name for name, _ in found] == ["rank 0", "rank 1", "rank 2"]
        assert all(same(held, tensors(rank)) for rank, (_, held) in enumerate(found))
        owners = [1, None, 0, 1]
        for ranks_module.MOVED_BYTES in (2**30, 200, 1):  # of this process alone: all at once, some, and each alone
            for owner, gathered in zip(owners, here.gather_each([tensors(here.rank)] * 4, owners), strict=True):
                assert (gathered is None) == (owner not in (None, here.rank))
                for rank, held in enumerate(gathered or ()):
                    assert same(held, tensors(rank))
        tasks = list(here.each(range(5), [2, 0, 1, 2, 0], lambda task: (task, here.rank, torch.tensor(task))))
        assert [(task, rank, int(held)) for task, rank, held in tasks] == [
            (0, 2, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 0, 4)
        ]  # fmt: skip

    joined(work, 3, tmp_path)


def test_tensors_that_have_moved_leave_memory_before_the_garbage_collector_comes(tmp_path: Path) -> None:
    def work(here: Ranks) -> None:
        gc.collect()
        gc.disable()
        for values in (here.gather({"a": torch.zeros(1000)}), [here.broadcast([torch.zeros(1000)])]):
            del values
        list(here.each(range(2), [0, 1], lambda task: torch.zeros(1000)))
        with closing(here.gather_each([torch.zeros(1000)] * 2, [None, 0])) as gathered:
            for parts in gathered:
                list(parts or ())
                del parts
        assert not [held for held in gc.get_objects() if isinstance(held, Tensor) and held.shape == (1000,)]

    joined(work, 2, tmp_path)


def test_all_ranks_raise_the_error_of_the_first_that_fails_and_go_on(tmp_path: Path) -> None:
    def work(here: Ranks) -> None:
        for failing in ({1}, {0, 2}, {2}):
            with pytest.raises(NumericError, match=f"^rank {min(failing)}$"), here.together(), here.together():
                if here.rank in failing:
                    raise NumericError(f"rank {here.rank}")
                here.broadcast(None)
        with pytest.raises(KeyError if here.rank == 1 else QuantkitError, match="a bug"), here.together():
            if here.rank == 1:
                raise KeyError("a bug")
            here.exchange(None)
        assert here.exchange(here.rank) == [0, 1, 2]

    joined(work, 3, tmp_path)


def test_the_default_process_group_stays_and_is_not_used(tmp_path: Path) -> None:
    def work(here: Ranks) -> None:
        world, value = distributed.group.WORLD, torch.tensor(7 * (here.rank == 0))
        with here.together():
            sent = distributed.isend(value, 1) if here.first else None
            here.gather(torch.zeros(2))  # does not take the message of another group
            assert distributed.group.WORLD is world and ranks() is here
        sent.wait() if sent else distributed.recv(value, 0)
        assert int(value) == 7

    joined(work, 2, tmp_path)


def test_a_rank_that_died_is_an_error_of_the_others(tmp_path: Path) -> None:
    def work() -> None:
        distributed.init_process_group("gloo")
        here = ranks()
        if here.rank == 1:
            return
        with pytest.raises(QuantkitError, match=LOST[0][:30]), here.together():
            here.exchange(None)
        assert here.lost
        here.leave()

    assert [each.code for each in processes.run([work] * 3, tmp_path)] == [0, 0, 0]


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads")
def test_ended_groups_have_no_thread_that_could_abort_the_process(leaves: bool, tmp_path: Path) -> None:
    """The command line leaves, and holds its ranks; a caller of the library only ends its own group."""

    def work() -> None:
        distributed.init_process_group("gloo")
        here = ranks()
        with here.together():
            here.exchange(None)
        if leaves:
            here.leave()
        else:
            del here
        distributed.destroy_process_group()
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        assert not [name for name in names if "gloo" in name], names

    assert [each.code for each in processes.run([work] * 2, tmp_path)] == [0, 0]


def test_one_process_exchanges_nothing() -> None:
    assert ranks() is ALONE and ALONE.first and ALONE.local == 1 and ALONE.device_name("auto") == "auto"
    value = object()
    with ALONE.together():
        assert ALONE.exchange(value) == [value] and ALONE.broadcast(value) is value and ALONE.gather(value) == [value]
        assert [list(each or ()) for each in ALONE.gather_each([value], [None])] == [[value]]
        assert list(ALONE.each([1, 2], [0, 0], str)) == ["1", "2"]
    ALONE.leave()


def test_rows_are_divided_at_multiples_without_gaps() -> None:
    for rows in (1, 255, 256, 1000, 6144):
        for count in (1, 2, 3, 8):
            parts = [Ranks(rank, count).rows(rows) for rank in range(count)]
            assert parts[0].start == 0 and parts[-1].stop == rows
            assert all(a.stop == b.start for a, b in pairwise(parts))
            assert all(part.start % ROWS == 0 or part.start == rows for part in parts)
            sizes = [part.stop - part.start for part in parts]
            assert max(sizes) - min(sizes) <= 2 * ROWS


def test_each_rank_takes_its_own_gpu_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(1, 2).device_name("auto") == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [Ranks(5, 8).device_name(name) for name in ("auto", "cuda", "cpu", "cuda:3")] == [
        *("cuda:1", "cuda:1", "cpu", "cuda:3")
    ]
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert Ranks(5, 8).device_name("cuda") == "cuda:2" and ALONE.device_name("cuda") == "cuda"
