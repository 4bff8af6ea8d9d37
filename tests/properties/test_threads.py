"""Threads that read and pack ahead: the same bytes, order and errors as without, and no more memory than said."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, LayoutError
from quantkit.layouts import LAYOUTS
from quantkit.pipeline import convert
from quantkit.pipeline.plan import plan_pack
from quantkit.pipeline.quantize import pack
from quantkit.reporting.report import REPORT, load
from tests.cli.test_interrupt import handlers
from tests.command_line import call
from tests.faults import faults, memory_path
from tests.properties.test_streaming import damage, nothing_is_left, packed

tmp_path = memory_path
__all__ = ["handlers", "nothing_is_left", "packed"]


@pytest.fixture(params=[1, 3])
def packers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """As many threads that pack, whatever the machine has."""
    monkeypatch.setattr(convert, "packers", lambda: request.param)
    yield request.param


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights pass from thread to thread as large ones do."""
    monkeypatch.setattr(convert, "TOGETHER", 1)


def files(folder: Path) -> dict[str, bytes]:
    """All but the report, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (REPORT, "README.md")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_threads_write_the_same_files(
    layout: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packed
    if layout in ("humming", "tcfpx", "marlin24", "marlin24-ct"):  # from what holds their scheme
        source = tmp_path / "source"
        held = "humming" if layout in ("humming", "tcfpx") else "marlin24-ct"
        pack(packed, source, held, requantize=True, pad=True)
    for name, count, together in (("one", 1, 1), ("five", 5, 1), ("by some", 5, 60_000)):
        monkeypatch.setattr(convert, "packers", lambda count=count: count)
        monkeypatch.setattr(convert, "TOGETHER", together)
        pack(source, tmp_path / name, layout, pad=True, max_shard_size=40_000)
    one = load(tmp_path / "one")
    for name in ("five", "by some"):
        other = load(tmp_path / name)
        assert files(tmp_path / "one") == files(tmp_path / name)
        for key in ("layers", "notices", "files", "source"):
            assert one[key] == other[key]


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_the_damaged_weight_is_the_one_that_is_named(which: int, packed: Path, tmp_path: Path, packers: int) -> None:
    """Not one behind it that a thread has found before; and the first of two."""
    call("pack", packed, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    modules = Checkpoint(tmp_path / "ct").modules()
    for module in {modules[which], modules[-1]}:
        damage(tmp_path / "ct", f"{module}.weight_packed")
    shown = call("pack", tmp_path / "ct", "--layout", "marlin", "-o", tmp_path / "out", "-q", code=1).stderr
    assert f"{modules[which]}.weight: codes or scales differ" in shown and len(shown.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ct"]


@pytest.mark.usefixtures("packers")
def test_what_the_data_do_not_allow_is_said_as_ever(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"weight: .* quads have more than two values .* add --requantize"):
        pack(packed, tmp_path / "out", "marlin24")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("handlers", "packers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("step", [1, 4])
def test_a_signal_in_the_midst_of_a_weight(
    number: signal.Signals, code: int, step: int, packed: Path, tmp_path: Path
) -> None:
    writes = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal writes
        writes += operation == "write" and path.suffix == ".safetensors"
        if writes == step:
            writes += 1
            signal.raise_signal(number)

    with faults(hook):
        small = ("--max-shard-size", "40KB")  # a file is written when it is full
        shown = call("pack", packed, "--layout", "gptq", *small, "-o", tmp_path / "out", code=code).stderr
    assert "run the same command again" in shown and "Traceback" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("large", [False, True], ids=["small tensors between", "large tensors between"])
def test_no_more_is_read_than_what_can_be_packed_meanwhile(
    large: bool, packed: Path, tmp_path: Path, packers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow writing is; and what is larger than weights waits for no others, nor they for it."""
    src = Checkpoint(packed)
    weights = {f"{module}.weight" for module in src.modules()}
    size = Checkpoint.nbytes
    if large:
        packed_parts = {part for module in src.modules() for part in src.parts(module).values()}
        monkeypatch.setattr(
            Checkpoint, "nbytes", lambda self, name: size(self, name) if name in packed_parts else 2**40
        )
    begun: list[str] = []
    lock = threading.Lock()
    get = Checkpoint.get

    def spied(self: Checkpoint, name: str) -> torch.Tensor:
        with lock:
            begun.append(name)
        return get(self, name)

    monkeypatch.setattr(Checkpoint, "get", spied)
    planned = plan_pack(src, LAYOUTS["gptq"], out=tmp_path / "out")
    items = convert.repacked(src, src.logical(), planned, {}, False, {}, {})
    most = 0
    for yielded, item in enumerate(items, 1):
        for thread in threading.enumerate():  # those that read and pack have nothing left to do
            if thread.name.startswith(("quantkit-read", "quantkit-pack")):
                thread.join(0.01)
        read = {name.rpartition(".")[0] for name in begun}
        ahead = len(read) - yielded
        most = max(most, ahead)
        if large and item.name not in weights:
            assert ahead <= packers + 1
    assert 1 <= most <= packers + 1


@pytest.mark.parametrize("together", [1, 30_000, 100_000, 2**30])
def test_small_weights_are_read_ahead_by_their_bytes(
    together: int, packed: Path, tmp_path: Path, packers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "TOGETHER", together)
    src, read, get = Checkpoint(packed), 0, Checkpoint.get

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        nonlocal read
        read += self.nbytes(name)
        return get(self, name)

    monkeypatch.setattr(Checkpoint, "get", counted)
    planned = plan_pack(src, LAYOUTS["gptq"], out=tmp_path / "out")
    total = sum(map(src.nbytes, src.names()))
    largest = max(sum(map(src.nbytes, src.parts(module).values())) for module in src.modules())
    items, given, most = convert.repacked(src, src.logical(), planned, {}, False, {}, {}), 0, 0
    for item in items:
        for thread in threading.enumerate():  # those that read and pack have nothing left to do
            if thread.name.startswith(("quantkit-read", "quantkit-pack")):
                thread.join(0.01)
        most = max(most, read - given)
        module = item.name.removesuffix(".weight")
        given += sum(map(src.nbytes, src.parts(module).values() if module in src.modules() else [item.name]))
    assert given == read == total
    dense = max(src.nbytes(name) for name in src.names() if name in src.logical())
    assert min(together, total) // 2 <= most <= (packers + 2) * max(together, largest) + dense


def test_conversions_in_two_threads_leave_torch_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    first, second = convert.one_thread(), convert.one_thread()
    for one in (first, second):
        one.__enter__()
        assert now == [1]
    for one in (first, second):  # the first ends first
        one.__exit__(None, None, None)
    assert now == [4]


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 3)])
def test_how_many_pack(cores: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert convert.packers() == count


def test_notices_come_in_the_order_of_the_weights(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in that in which threads have found them."""
    modules = Checkpoint(packed).modules()
    unpacking = Checkpoint.unpacking
    turn = threading.Condition()
    last = [len(modules)]

    def late(self: Checkpoint, module: str, tensors: Any, notices: list[str]) -> Any:
        notices.append(f"found in {module}")
        if modules.index(module) == 0:
            with turn:
                turn.wait_for(lambda: last[0] < len(modules), timeout=5)
        else:
            with turn:
                last[0] -= 1
                turn.notify_all()
        return unpacking(self, module, tensors, notices)

    monkeypatch.setattr(Checkpoint, "unpacking", late)
    monkeypatch.setattr(convert, "packers", lambda: 3)
    pack(packed, tmp_path / "out", "gptq")
    found = [line for line in load(tmp_path / "out")["notices"] if line.startswith("found in")]
    assert found == [f"found in {module}" for module in modules]


@pytest.mark.parametrize("together", [1, 2**20], ids=["each alone", "both at once"])
def test_an_unreadable_weight_is_named_in_its_turn(
    together: int, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading thread fails behind a weight that does not pack: the first of both is said."""
    monkeypatch.setattr(convert, "TOGETHER", together)
    call("pack", packed, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    modules = Checkpoint(tmp_path / "ct").modules()
    damage(tmp_path / "ct", f"{modules[0]}.weight_packed")
    stored = Checkpoint.stored

    def failing(self: Checkpoint, module: str) -> dict[str, torch.Tensor]:
        if module == modules[1]:
            raise CheckpointError("the second one cannot be read")
        return stored(self, module)

    monkeypatch.setattr(Checkpoint, "stored", failing)
    with pytest.raises(CheckpointError, match=f"{modules[0]}.weight: codes or scales differ"):
        pack(tmp_path / "ct", tmp_path / "out", "marlin")
    assert [path.name for path in tmp_path.iterdir()] == ["ct"]
