"""Work that is done ahead: the same order, the same errors at the same place, and no thread that outlives it."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quantkit import hashing, room
from quantkit.ahead import ahead
from quantkit.checkpoint import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.headers import read_header
from quantkit.layouts import LAYOUTS
from quantkit.pipeline import pack
from quantkit.plan import plan_pack
from quantkit.repack import repacked
from quantkit.report import load
from tests.command_line import RTN, call
from tests.faults import faults, memory_path
from tests.test_interrupt import handlers

tmp_path = memory_path
__all__ = ["handlers"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("quantkit")]
    assert room._kept is None


@pytest.fixture(scope="module")
def packed(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "ct"
    call("quantize", small_llama, "-o", out, *RTN, "-q")
    return out


def counted(made: list[int], stop: int, error: BaseException | None = None) -> Iterator[int]:
    for i in range(stop):
        made.append(i)
        yield i
    if error is not None:
        raise error


def test_no_more_than_the_next_one_is_made_ahead() -> None:
    made: list[int] = []
    with ahead(counted(made, 50)) as items:
        for at, item in enumerate(items):
            assert item == at
            assert len(made) <= at + 2
    assert made == list(range(50))


@pytest.mark.parametrize("error", [CheckpointError("x.weight: damaged"), MemoryError("no room"), KeyError("a bug")])
def test_an_error_comes_where_its_item_is_due_and_as_it_was(error: BaseException) -> None:
    used = []
    with pytest.raises(type(error)) as caught, ahead(counted([], 3, error)) as items:
        for item in items:
            used.append(item)
    assert caught.value is error and used == [0, 1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_leaving_in_the_middle_stops_the_work(error: type[BaseException]) -> None:
    made: list[int] = []
    with pytest.raises(error), ahead(counted(made, 10**9)) as items:
        for item in items:
            if item == 3:
                raise error
    assert len(made) <= 5


def damage(folder: Path, name: str) -> None:
    for path in folder.glob("*.safetensors"):
        if (info := read_header(path)[0].get(name)) is not None:
            data = bytearray(path.read_bytes())
            data[info.start + 5] ^= 0x10
            path.write_bytes(bytes(data))


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_the_damaged_weight_is_the_one_that_is_named(which: int, packed: Path, tmp_path: Path) -> None:
    """Not the one that was being written when the look-ahead found it; and the first of two."""
    call("pack", packed, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    modules = Checkpoint(tmp_path / "ct").modules()
    for module in {modules[which], modules[-1]}:
        damage(tmp_path / "ct", f"{module}.weight_packed")
    shown = call("pack", tmp_path / "ct", "--layout", "marlin", "-o", tmp_path / "out", "-q", code=1).stderr
    assert f"{modules[which]}.weight: codes or scales differ" in shown and len(shown.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ct"]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("step", [1, 12])
def test_a_signal_while_the_next_weight_is_read(
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
        shown = call("pack", packed, "--layout", "gptq", "-o", tmp_path / "out", code=code).stderr
    assert "run the same command again" in shown and "Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_order_and_hashes_are_those_of_one_thing_after_another(packed: Path, tmp_path: Path) -> None:
    pack(packed, tmp_path / "out", "gptq", max_shard_size=40_000)
    src, out = Checkpoint(packed), Checkpoint(tmp_path / "out")
    assert len(out.files()) > 5
    assert out.logical() == src.logical()
    report = load(tmp_path / "out")
    assert report["source"]["files"] == src.hashes()
    assert list(report["source"]["files"]) == list(src.hashes())
    assert {layer["name"]: layer["digest"] for layer in report["layers"]} == {
        module: out.quantized(module).digest() for module in out.modules()
    }


def test_digests_are_those_of_what_was_written_not_of_what_was_read(packed: Path, tmp_path: Path) -> None:
    """A weight that is stated in another scheme has another digest than its source's report says."""
    pack(packed, tmp_path / "sparse", "marlin24", requantize=True)
    pack(tmp_path / "sparse", tmp_path / "out", "gptq")
    for folder in ("sparse", "out"):
        out, layers = Checkpoint(tmp_path / folder), load(tmp_path / folder)["layers"]
        assert {layer["name"]: layer["digest"] for layer in layers} == {
            module: out.quantized(module).digest() for module in out.modules()
        }


def another(shard: Path) -> None:
    """Put another file in the place of a shard; at no moment is there none."""
    data, other = shard.read_bytes(), shard.with_suffix(".other")
    other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    other.replace(shard)


def test_a_source_that_changes_behind_its_last_weight_is_refused(packed: Path, tmp_path: Path) -> None:
    call("pack", packed, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    src = Checkpoint(tmp_path / "ct")
    items = repacked(src, plan_pack(src, LAYOUTS["gptq"], out=tmp_path / "out"), {}, False, {})
    for _ in src.logical():
        next(items)
    another(src.files()[-1])
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        next(items)


def test_a_source_that_changes_on_the_way_is_refused(packed: Path, tmp_path: Path) -> None:
    """Its hashes are taken behind the reading: they must be those of the bytes that were read."""
    call("pack", packed, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    shard = Checkpoint(tmp_path / "ct").files()[0]

    def hook(operation: str, path: Path) -> None:
        if operation == "write" and path.suffix == ".safetensors":
            another(shard)

    with faults(hook), pytest.raises(CheckpointError, match="changed while it was in use"):
        pack(tmp_path / "ct", tmp_path / "out", "marlin")
    assert not any(tmp_path.glob("out*"))


@pytest.mark.parametrize("size", [0, 1, hashing.PIECE - 1, hashing.PIECE, hashing.PIECE + 1])
def test_hashes_taken_by_and_by_are_those_of_whole_files(size: int, tmp_path: Path) -> None:
    data = torch.arange(size, dtype=torch.int64).to(torch.uint8).numpy().tobytes()
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"b" + data)
    found: dict[str, str] = {}
    paths = {name: tmp_path / name for name in "ab"}
    assert sum(hashing.hashed(paths, found)) == 2 * size + 1
    assert found == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    assert found["a"] == hashing.sha256_of(tmp_path / "a")


@pytest.mark.parametrize("shape", [(0,), (3, 0), (5, 7), (1025, 4099)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
def test_large_memory_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = room.empty(shape, dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape), dtype, True)
    kept = made.fill_(3)[1:]
    del made
    assert bool((kept == 3).all())  # the memory lives as long as a view of it


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_that_is_given_back_goes_to_the_next_and_never_to_two() -> None:
    size = [room.LARGE]
    with room.kept():
        first, other = room.empty(size, torch.uint8), room.empty(size, torch.uint8)
        where, view = place(first), first[5:9]
        del first
        assert place(room.empty(size, torch.uint8)) != where  # the view is in use, and this one is given back at once
        del view
        now = [room.empty(size, torch.uint8).fill_(i) for i in range(2)]
        assert where in map(place, now) and len({place(tensor) for tensor in (*now, other)}) == 3
        with pytest.raises(KeyError), room.kept():
            raise KeyError
        assert room._kept is not None  # the inner one was none of its own
    assert room._kept is None
    assert [bool((tensor == i).all()) for i, tensor in enumerate(now)] == [True, True]


def test_no_more_memory_is_kept_than_was_in_use() -> None:
    with room.kept():
        three = [room.empty([room.LARGE], torch.uint8) for _ in range(3)]
        assert room._kept == []
        del three
        assert [len(block) for block in room._kept] == [room.LARGE] * 3
        one = room.empty([3 * room.LARGE], torch.uint8)
        assert room._kept == []
        del one
        small = room.empty([room.LARGE], torch.uint8)  # would waste two thirds of what is kept
        assert room._kept == [] and small.untyped_storage().nbytes() == room.LARGE


def test_threads_that_share_what_is_kept_do_not_meet() -> None:
    def work(number: int) -> bool:
        good = True
        for _ in range(40):
            tensor = room.empty([room.LARGE], torch.uint8).fill_(number)
            good = good and bool((tensor == number).all())
        return good

    with room.kept(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_more_memory_than_there_is_is_the_error_that_it_was() -> None:
    for size in (2**50, 2**62):
        with pytest.raises(RuntimeError):
            room.empty([size], torch.float32)
