"""Other processes that pack: the same bytes, order and errors as one process, and none that outlives its work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit import apart, repack, room
from quantkit.apart import Apart, Shared
from quantkit.checkpoint import Checkpoint
from quantkit.errors import CheckpointError, LayoutError, QuantkitError
from quantkit.layouts import LAYOUTS
from quantkit.pipeline import pack
from quantkit.plan import plan_pack
from quantkit.report import REPORT, load, peak_memory
from tests.command_line import call
from tests.faults import faults, memory_path
from tests.test_interrupt import handlers
from tests.test_streaming import damage, nothing_is_left, packed

tmp_path = memory_path
__all__ = ["handlers", "nothing_is_left", "packed"]
ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not apart.possible(), reason="no process can begin as a copy of this one here")


@pytest.fixture(params=[1, 3])
def others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As many other processes, however small a checkpoint is; yields those that have packed since."""
    seen: list[int] = []
    result = Apart.result

    def spied(self: Apart, begun: Any) -> Any:
        found = result(self, begun)
        seen.append(begun.result()[1])
        return found

    monkeypatch.setattr(repack, "MANY", 0)
    monkeypatch.setattr(repack, "_count", lambda planned: request.param)
    monkeypatch.setattr(Apart, "result", spied)
    yield seen


def files(folder: Path) -> dict[str, bytes]:
    """All but the report, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (REPORT, "README.md")}


@pytest.mark.parametrize("dense", [0, 10**9], ids=["dense ones at once", "dense ones in their turn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_processes_write_the_same_files(
    layout: str, dense: int, packed: Path, tmp_path: Path, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "WAITING", dense)
    source = packed
    if layout in ("humming", "tcfpx", "marlin24", "marlin24-ct"):  # from what holds their scheme
        source = tmp_path / "source"
        held = "humming" if layout in ("humming", "tcfpx") else "marlin24-ct"
        pack(packed, source, held, requantize=True, pad=True)
    assert not others  # what is rounded again is this process' own work
    pack(source, tmp_path / "out", layout, pad=True, max_shard_size=40_000)
    assert others and os.getpid() not in others
    with monkeypatch.context() as alone:
        alone.setattr(repack, "MANY", 2**60)
        before = len(others)
        pack(source, tmp_path / "alone", layout, pad=True, max_shard_size=40_000)
        assert len(others) == before
    assert files(tmp_path / "out") == files(tmp_path / "alone")
    one, two = load(tmp_path / "out"), load(tmp_path / "alone")
    for key in ("layers", "notices", "files", "source"):
        assert one[key] == two[key]


@pytest.mark.parametrize("others", [0, 1, 3], indirect=True)
@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_the_damaged_weight_is_the_one_that_is_named(
    which: int, packed: Path, tmp_path: Path, others: list[int]
) -> None:
    """Not one that is there when a thread or a process has found it; and the first of two."""
    call("pack", packed, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    modules = Checkpoint(tmp_path / "ct").modules()
    for module in {modules[which], modules[-1]}:
        damage(tmp_path / "ct", f"{module}.weight_packed")
    shown = call("pack", tmp_path / "ct", "--layout", "marlin", "-o", tmp_path / "out", "-q", code=1).stderr
    assert f"{modules[which]}.weight: codes or scales differ" in shown and len(shown.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ct"]


def test_what_the_data_do_not_allow_is_said_as_ever(packed: Path, tmp_path: Path, others: list[int]) -> None:
    with pytest.raises(LayoutError, match=r"weight: .* quads have more than two values .* add --requantize"):
        pack(packed, tmp_path / "out", "marlin24")
    assert others == [] and not any(tmp_path.iterdir())


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("others", [0, 3], indirect=True)
def test_a_signal_in_the_midst_of_a_weight_to_all_of_them(
    number: signal.Signals, code: int, step: int, packed: Path, tmp_path: Path, others: list[int]
) -> None:
    """As a terminal sends it."""
    writes = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal writes
        writes += operation == "write" and path.suffix == ".safetensors"
        if writes == step:
            writes += 1
            for process in multiprocessing.active_children():
                assert process.pid is not None
                os.kill(process.pid, number)
            signal.raise_signal(number)

    with faults(hook):
        small = ("--max-shard-size", "40KB")  # a file is written when it is full
        shown = call("pack", packed, "--layout", "gptq", *small, "-o", tmp_path / "out", code=code).stderr
    assert "run the same command again" in shown and "Traceback" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_process_that_is_killed_is_said_and_nothing_is_left(
    all_of_them: bool, packed: Path, tmp_path: Path, others: list[int]
) -> None:
    def hook(operation: str, path: Path) -> None:
        if operation == "write" and path.suffix == ".safetensors":
            for process in multiprocessing.active_children()[: None if all_of_them else 1]:
                process.kill()

    with faults(hook):
        shown = call(
            "pack", packed, "--layout", "gptq", "--max-shard-size", "40KB", "-o", tmp_path / "out", "-q", code=1
        ).stderr
    assert "a process that worked for this one was killed" in shown and len(shown.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


ENDLESS = """
import os, sys, time
from quantkit import apart
def work(given, made): return os.getpid()
with apart.processes(work, 3, 8, 8) as others:
    pids = set()
    while len(pids) < 3:
        pids |= {others.result(one) for one in [others.begin(others.given[0], others.made[0]) for _ in range(50)]}
    print(*pids, flush=True)
    time.sleep(60)
"""


def test_processes_end_with_the_first_even_if_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pids = [int(pid) for pid in first.stdout.readline().split()]
        assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        first.kill()
    limit = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_output_is_not_locked_by_what_still_runs(packed: Path, tmp_path: Path, others: list[int]) -> None:
    """A lock that a copy of the process holds would outlive one that is killed."""
    held: list[str] = []

    def hook(operation: str, path: Path) -> None:
        if operation == "write" and path.suffix == ".safetensors":
            for process in multiprocessing.active_children():
                for link in Path(f"/proc/{process.pid}/fd").iterdir():
                    held.append(os.readlink(link))

    with faults(hook):
        pack(packed, tmp_path / "out", "marlin")
    assert held and not [name for name in held if str(tmp_path) in name]


@pytest.mark.parametrize("others", [3], indirect=True)
@pytest.mark.parametrize("refused", ["memory", "the first process", "the second process"])
def test_where_the_system_refuses_them_one_process_does_it(
    refused: str, packed: Path, tmp_path: Path, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = [os.fork] if refused == "the second process" else []

    def fork() -> int:
        if not forks:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return forks.pop()()

    def none(size: int) -> Shared:
        raise OSError(12, "Cannot allocate memory")

    if refused == "memory":
        monkeypatch.setattr(apart, "Shared", none)
    else:
        monkeypatch.setattr(os, "fork", fork)
    pack(packed, tmp_path / "out", "marlin")
    assert others == [] and not forks and Checkpoint(tmp_path / "out").modules() == Checkpoint(packed).modules()


@pytest.mark.parametrize(("cores", "dense", "sparse"), [(1, 0, 0), (2, 1, 2), (3, 1, 2), (4, 2, 2), (64, 3, 3)])
def test_how_many_are_begun(cores: int, dense: int, sparse: int, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    src = Checkpoint(packed)
    for layout, count in (("marlin", dense), ("marlin24", sparse)):
        assert repack._count(plan_pack(src, LAYOUTS[layout], requantize=True)) == count


def test_a_process_that_may_begin_none_does_it_alone(packed: Path, tmp_path: Path) -> None:
    """As the workers of a pool are, from which someone may call us."""
    code = (
        "import multiprocessing, sys\n"
        "from quantkit import apart, repack\n"
        "from quantkit.pipeline import pack\n"
        "repack.MANY, repack._count = 0, lambda planned: 2\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    pool.apply(pack, (sys.argv[1], sys.argv[2], 'marlin'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(packed), str(tmp_path / "out")], cwd=ROOT, check=True)
    assert Checkpoint(tmp_path / "out").modules() == Checkpoint(packed).modules()


def test_the_memory_of_all_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_beside", 0)
    size, alone = 2**26, peak_memory()["ram"]
    kept: list[torch.Tensor] = []

    def work(given: Shared, made: Shared) -> None:
        kept.append(torch.ones(size, dtype=torch.uint8))

    with apart.processes(work, 1, 8, 8) as others:
        assert others is not None
        for count in (1, 2):
            others.result(others.begin(others.given[0], others.made[0]))
            assert 0.9 * count * size < apart.peak() < (count + 0.5) * size
    assert 1.9 * size < peak_memory()["ram"] - alone


def test_what_lies_in_shared_memory_is_not_copied_and_nothing_is_overwritten() -> None:
    memory = Shared(4 * apart.BLOCK)
    words = torch.arange(100, dtype=torch.int32)
    places = [memory.put(words + i) for i in range(3)]
    assert [memory.get(place).tolist() for place in places] == [(words + i).tolist() for i in range(3)]
    with pytest.raises(RuntimeError):
        memory.put(torch.zeros(apart.BLOCK + 1, dtype=torch.uint8))
    memory.clear()
    with room.within(memory.take):
        assert memory.put(room.empty([3], torch.int32))[0] == 0  # a small one has no need of it
    taken = memory.take(3 * apart.BLOCK)
    assert taken is not None and memory.take(1) is None
    taken.fill_(7)
    kept = memory.put_all({"a": taken[apart.BLOCK :], "b": words})  # of what took the rest, a part is no longer needed
    assert bool((memory.get(kept["a"]) == 7).all()) and torch.equal(memory.get(kept["b"]), words)


def test_conversions_in_two_threads_leave_torch_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    first, second = apart.one_thread(), apart.one_thread()
    for one in (first, second):
        one.__enter__()
        assert now == [1]
    for one in (first, second):  # the first ends first
        one.__exit__(None, None, None)
    assert now == [4]


def test_large_tensors_are_made_in_the_memory_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LARGE", 64)
    memory = Shared(8 * apart.BLOCK)
    with room.within(memory.take):
        made = room.empty([100, 10], torch.int16)
        other = room.empty([9 * apart.BLOCK], torch.uint8)  # for which there is no room
    assert memory.put(made) == (0, torch.int16, (100, 10))
    made.fill_(3)
    assert bool((memory.get((0, torch.int16, (100, 10))) == 3).all())
    assert other.shape == (9 * apart.BLOCK,)
    with pytest.raises(KeyError), room.within(memory.take):
        raise KeyError
    assert room._within is None


def test_an_error_and_a_death_in_the_work_are_told_apart() -> None:
    def work(given: Shared, made: Shared, what: str) -> None:
        if what == "die":
            os._exit(1)
        raise CheckpointError(what)

    with apart.processes(work, 2, 8, 8) as others:
        assert others is not None
        with pytest.raises(CheckpointError, match=r"^here$"):
            others.result(others.begin(others.given[0], others.made[0], "here"))
        with pytest.raises(QuantkitError, match="was killed"):
            others.result(others.begin(others.given[0], others.made[0], "die"))
