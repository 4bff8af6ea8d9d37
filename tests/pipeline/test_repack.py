"""Workers that read and pack ahead: the same bytes, order and errors as one, within the budget of memory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, load
from quantkit.io.files import hash_of
from quantkit.layouts import LAYOUTS
from quantkit.models.outside import Outside
from quantkit.pipeline import convert
from quantkit.pipeline.convert import pack
from quantkit.planning.plan import plan_pack
from quantkit.progress import Progress
from tests.command_line import call
from tests.faults import faults
from tests.folders import flip
from tests.properties.conversions import nothing_is_left

__all__ = ["nothing_is_left"]


@pytest.fixture(params=[1, 3])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """As many workers, whatever the machine has."""
    monkeypatch.setattr(convert, "workers", lambda: request.param)
    yield request.param


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights go to the workers one by one, as large ones do."""
    monkeypatch.setattr(convert, "BATCH", 1)


def files(folder: Path) -> dict[str, bytes]:
    """All but the report, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (REPORT, "README.md")}


@pytest.mark.parametrize("layout", ["gptq", "humming", "marlin24"])
def test_many_threads_write_the_same_files_with_their_hashes(
    layout: str, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = int4
    if layout == "marlin24":  # from what holds its scheme
        pack(int4, source := tmp_path / "source", "marlin24-ct", requantize=True, pad=True)
    for name, count, batch in (("one", 1, 60_000), ("five", 5, 1)):
        monkeypatch.setattr(convert, "workers", lambda count=count: count)
        monkeypatch.setattr(convert, "BATCH", batch)
        pack(source, tmp_path / name, layout, pad=True, max_shard_size=40_000)
    one, other = load(tmp_path / "one"), load(tmp_path / "five")
    assert files(tmp_path / "one") == files(tmp_path / "five")
    for key in ("layers", "notices", "files", "source"):
        assert one[key] == other[key]
    shards = {path.name for path in Checkpoint(tmp_path / "one").files()}
    assert len(shards) > 5 and {"config.json", *shards} <= one["files"].keys()
    assert one["files"] == {name: hash_of((tmp_path / "one" / name).read_bytes()) for name in one["files"]}


@pytest.mark.parametrize("which", [0, -2])
def test_the_damaged_weight_is_the_one_that_is_named(which: int, int4: Path, tmp_path: Path, workers: int) -> None:
    """Not one behind it that a thread has found before; and the first of two."""
    call("pack", int4, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    modules = Checkpoint(tmp_path / "ct").modules()
    for module in {modules[which], modules[-1]}:
        flip(tmp_path / "ct", f"{module}.weight_packed")
    shown = call("pack", tmp_path / "ct", "--layout", "marlin", "-o", tmp_path / "out", "-q", code=1).stderr
    assert f"{modules[which]}.weight: codes or scales differ" in shown and len(shown.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ct"]


@pytest.mark.usefixtures("handlers", "workers")
@pytest.mark.parametrize(("number", "code", "step"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 75, 4)])
def test_a_signal_while_a_weight_is_written(
    number: signal.Signals, code: int, step: int, int4: Path, tmp_path: Path
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
        shown = call("pack", int4, "--layout", "gptq", *small, "-o", tmp_path / "out", code=code).stderr
    assert "run the same command again" in shown and "Traceback" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", [1, 100_000])
def test_no_more_is_read_than_the_budget_holds(
    budget: int, int4: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow writing is: one tensor, or as many as fit the budget, until the next is asked for."""
    monkeypatch.setattr(convert, "BUDGET", budget)
    src = Checkpoint(int4)
    begun: list[str] = []
    lock, get = threading.Lock(), Checkpoint.get

    def spied(self: Checkpoint, name: str) -> torch.Tensor:
        with lock:
            begun.append(name)
        return get(self, name)

    monkeypatch.setattr(Checkpoint, "get", spied)
    planned = plan_pack(src, LAYOUTS["gptq"], outside=Outside([], []), out=tmp_path / "out")
    sizes = convert.Repacker(src, planned, {}, False)
    given: list[str] = []
    for item in convert.repacked(src, src.logical(), planned, {}, False, Progress(quiet=True)):
        for thread in threading.enumerate():  # the workers have nothing left to do
            if thread.name.startswith("quantkit-pack"):
                thread.join(0.01)
        read = {name if name in src.logical() else f"{name.rpartition('.')[0]}.weight" for name in begun}
        ahead = [sizes.nbytes(name) for name in read if name not in given]  # the one that is written now, too
        assert len(ahead) == 1 or sum(ahead) <= budget
        given.append(item.name)
    assert given == src.logical()


def test_notices_come_in_the_order_of_the_weights(int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that in which threads have found them."""
    modules = Checkpoint(int4).modules()
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
    monkeypatch.setattr(convert, "workers", lambda: 3)
    pack(int4, tmp_path / "out", "gptq")
    found = [line for line in load(tmp_path / "out")["notices"] if line.startswith("found in")]
    assert found == [f"found in {module}" for module in modules]
