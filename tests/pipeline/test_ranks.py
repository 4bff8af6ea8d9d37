"""A calibrated run over several processes: the bytes of one, and one line when any of them ends."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.block_tuning import TunedWeight
from quantkit.algorithms.hessian import CHUNK, Hessian
from quantkit.calibration.budget import split_documents
from quantkit.calibration.loop import require_devices
from quantkit.calibration.stages.tune import BlockTuning
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import load
from quantkit.core.ranks import Ranks
from quantkit.errors import NumericError, RecipeError
from quantkit.io import files
from quantkit.io.staging import JOURNAL
from quantkit.models.weights import BlockWeights
from quantkit.planning.needs import Memory
from tests import ranks
from tests.command_line import ROOT, call
from tests.folders import hashes
from tests.reliability import forks
from tests.reliability.forks import Ended
from tests.tiny_models import write_model

TEXT = ("--samples", 8, "--max-length", 64, "-q")
PLAIN = ("--set", "clip=none")  # a third of the time; one case of the other bytes below has the search
Work = Callable[[], int | None]
Tuned = Callable[[str], tuple[tuple[object, ...], Path]]


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(out)  # as every reader does
    for layer in found["layers"]:
        del layer["seconds"]
    return found


def same(a: Path, b: Path) -> bool:
    """Return whether two outputs hold the same bytes; the card names the hash of the report, which has the ranks."""
    found = [hashes(out) for out in (a, b)]
    for each in found:
        del each["README.md"]
    return found[0] == found[1]


@pytest.fixture(scope="module", autouse=True)
def held_out() -> Iterator[None]:
    """Let runs of so few tokens measure their linears on held-out text too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.text.sequences.HELD_OUT_PART", 16)
        patch.setattr("quantkit.text.sequences.LEAST_HELD_OUT", 2)
        yield


@pytest.fixture(scope="module")
def line(small_llama: Path, calib: Path) -> tuple[object, ...]:
    return "quantize", small_llama, "--calib", calib, *PLAIN, *TEXT


@pytest.fixture(scope="module")
def whole(line: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one process. It imports what all forks need."""
    out = tmp_path_factory.mktemp("one") / "out"
    call(*line, "-o", out)
    return out


@pytest.fixture
def work(line: tuple[object, ...], whole: Path, tmp_path: Path) -> Work:
    """The work of each rank, which writes to `out`."""
    return forks.command(*line, "-o", tmp_path / "out")


def ended(results: list[Ended], code: int, says: str) -> None:
    """Ask for one exit code of all ranks, and one line, which the first one prints."""
    assert [each.code for each in results] == [code] * len(results), results
    assert len(results[0].stderr.splitlines()) == 1 and says in results[0].stderr, results[0].stderr
    assert all(each.stderr == "" for each in results[1:]) and all(each.stdout == "" for each in results), results


def test_several_ranks_write_the_bytes_of_one_and_one_speaks(
    line: tuple[object, ...], whole: Path, tmp_path: Path
) -> None:
    out, count = tmp_path / "out", 3
    results = ranks.command(count, tmp_path, *line, "-o", out)
    assert [each.code for each in results] == [0] * count, results
    assert "14 linears" in results[0].stdout
    assert all(each.stdout == each.stderr == "" for each in results[1:]), results
    assert same(whole, out)
    found, expected = report(out), report(whole)
    assert found["layers"] == expected["layers"] and found["ranks"] == count and "ranks" not in expected
    assert all("packaged code" in layer["held_out"] for layer in found["layers"])
    opened = ("opened_by", "not_opened_by", "not_tried")  # by compressed-tensors too, which could wait for all ranks
    assert [found[key] for key in opened] == [expected[key] for key in opened]
    assert "processes     3" in call("report", out).stdout and "processes" not in call("report", whole).stdout


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", ("quantize", "--group-size", 64, *PLAIN)),
        ("small", ("quantize", "--set", "true_sequential=false", "--asym", "--set", "skip=[]")),
        ("small", ("prune",)),
    ],
)
def test_experts_and_pruned_weights_are_those_of_one_process(
    family: str, options: tuple[Any, ...], folders: dict[str, Path], small_llama: Path, calib: Path, tmp_path: Path
) -> None:
    made, warnings = [], []
    for count in (1, 2):
        out = tmp_path / f"out{count}"
        model = small_llama if family == "small" else folders[family]
        args = (options[0], model, "--calib", calib, *options[1:], *TEXT, "-o", out)
        if count == 1:
            said = call(*args).stderr
        else:
            first, second = ranks.command(count, tmp_path, *args)
            assert first.code == second.code == 0 and second.stderr == ""
            said = first.stderr
        made.append(out)
        warnings.append(sorted(said.splitlines()))
    assert warnings[0] == warnings[1]
    assert report(made[0])["layers"] == report(made[1])["layers"]
    assert same(*made)


def at_commit(number: int, act: Callable[[], object], work: Work) -> Work:
    """Let the first rank act just before the line `number` of the journal is durable."""

    def changed() -> int | None:
        seen = 0

        def fault(operation: str, path: Path) -> None:
            nonlocal seen
            seen += operation == "fsync" and path.name == JOURNAL
            if seen == number:
                act()

        files.FAULT = fault
        return work()

    return changed


def at_block(number: int, act: Callable[[], object], work: Work) -> Work:
    """Let a rank act when it loads a block."""

    def changed() -> int | None:
        load = BlockWeights.load_block

        def acting(self: BlockWeights, index: int) -> None:
            load(self, index)
            if index == number:
                act()

        BlockWeights.load_block = acting  # type: ignore[method-assign]  # in this rank's own process
        return work()

    return changed


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def failing(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.fixture(scope="module")
def stopped(line: tuple[object, ...], whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that gives a folder in which a run of some ranks ended after its first block."""

    @cache
    def of(count: int) -> Path:
        folder = tmp_path_factory.mktemp("stopped")
        work = forks.command(*line, "-o", folder / "out")
        results = ranks.run([at_block(1, send(signal.SIGTERM), work)] + [work] * (count - 1), folder)
        ended(results, 75, "--resume continues")
        return folder

    return of


@pytest.mark.parametrize(("before", "after", "damaged"), [(2, 1, False), (1, 2, False), (2, 2, True)])
def test_a_stopped_run_continues_with_any_number_of_ranks_or_all_compute_again(
    before: int,
    after: int,
    damaged: bool,
    line: tuple[object, ...],
    whole: Path,
    stopped: Callable[[int], Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(stopped(before), tmp_path / "stopped")
    parts = sorted(next(folder.glob("out.partial-*")).glob("activations-*"))
    assert [path.name for path in parts] == [f"activations-0{name}.bin" for name in ["-rank1", ""][2 - before :]]
    if damaged:
        parts[0].write_bytes(bytes(parts[0].stat().st_size))
    results = ranks.command(after, tmp_path, *line, "-o", folder / "out", "--resume")
    assert [each.code for each in results] == [0] * after, results
    assert ("computed again" in results[0].stderr) is damaged
    assert same(whole, folder / "out")
    assert report(folder / "out")["ranks"] == (before if before == after else [before, after])


@pytest.mark.parametrize(
    ("act", "code", "says"),
    [
        (failing(NumericError("model.x, calibration document 7: 1 of 128 activations are NaN")), 1, "document 7"),
        (send(signal.SIGINT), 130, "--resume continues"),
    ],
)
def test_what_ends_one_rank_ends_all_with_one_line(
    act: Callable[[], object], code: int, says: str, work: Work, tmp_path: Path
) -> None:
    ended(ranks.run([work, at_block(1, act, work)], tmp_path), code, says)
    assert "activations-0.bin" in os.listdir(next(tmp_path.glob("out.partial-*")))


def test_a_killed_rank_ends_all_with_one_line(
    work: Work, line: tuple[object, ...], whole: Path, tmp_path: Path
) -> None:
    first, killed, other = ranks.run([work, at_block(1, send(signal.SIGKILL), work), work], tmp_path)
    assert killed.code == -9
    ended([first, other], 1, "another process of this run has ended")
    call(*line, "-o", tmp_path / "out", "--resume")
    assert same(whole, tmp_path / "out")


def test_a_bug_in_one_rank_shows_its_traceback_there(work: Work, tmp_path: Path) -> None:
    first, second = ranks.run([work, at_block(0, failing(KeyError("bug")), work)], tmp_path)
    assert first.code == 1 and "rank 1 failed (KeyError" in first.stderr and len(first.stderr.splitlines()) == 1
    assert second.code and "Traceback" in second.stderr and "KeyError: 'bug'" in second.stderr


def test_an_error_behind_the_last_exchange_ends_all(work: Work, tmp_path: Path) -> None:
    full = failing(OSError(28, "No space left on device"))
    ended(ranks.run([at_commit(5, full, work), work], tmp_path), 1, "no space left")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("inspect", "model"), "2 processes were started, and quantkit inspect uses one"),
        (("quantize", "model", "-o", "out", "--method", "rtn"), "this recipe uses no activations"),
        (("quantize", "model", "-o", "out", "--calib", "text", "--samples", "1"), "1 calibration sequences for 2"),
        (("quantize", "model", "-o", "out", "--calib", "text", "--nothing"), "No such option"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_once(
    args: tuple[str, ...], says: str, small_llama: Path, calib: Path, whole: Path, tmp_path: Path
) -> None:
    places = {"model": small_llama, "out": tmp_path / "out", "text": calib}
    results = ranks.command(2, tmp_path, *(places.get(arg, arg) for arg in args))
    assert [each.code for each in results] == [2, 2], results
    assert says in results[0].stderr and results[0].stderr.count("Error: ") == 1 and not results[1].stderr
    assert not list(tmp_path.glob("out*"))


def test_the_python_api_uses_the_process_group_of_its_caller(
    small_llama: Path, calib: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def work() -> None:
        from torch import distributed

        import quantkit

        distributed.init_process_group("gloo")
        made = quantkit.quantize(small_llama, out, calib=str(calib), samples=8, max_length=64, clip="none")
        assert made["ranks"] == distributed.get_world_size() == 2 and made.path == out
        with pytest.raises(RecipeError, match="uses no activations"):
            quantkit.quantize(small_llama, tmp_path / "rtn", method="rtn")
        print(made["totals"]["bytes"])

    results = ranks.run([work, work], tmp_path)
    assert [each.code for each in results] == [0, 0], results
    assert results[0].stdout == results[1].stdout != "" and same(whole, out)


@contextmanager
def large_steps() -> Iterator[None]:
    """Tune in large steps, the last of which is taken: held-out errors seem to halve.

    Each batch has all eight sequences that are not held out, on one rank or two.
    """
    plain = BlockTuning.held_out_error

    def halved(self: BlockTuning, weights: Mapping[str, Tensor]) -> float:
        seen = vars(self)["seen"] = vars(self).get("seen", 0) + 1
        return plain(self, weights) * 0.5**seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockTuning, "held_out_error", halved)
        patch.setattr("quantkit.calibration.stages.tune.RATE", 0.02)
        patch.setattr("quantkit.calibration.stages.tune.BATCH", 8)
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")  # the same products everywhere
        yield


@pytest.fixture(scope="module")
def tuned(calib: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Return a function that gives the command that tunes a model of a family, and what two ranks make of it."""
    changes = ("output_aware=true", "tune=6", "clip=none", "gptq.descent=0")
    text = ("--calib", calib, "--samples", 9, "--max-length", 48, "--group-size", 32, "-q")

    @cache
    def of(family: str) -> tuple[tuple[object, ...], Path]:
        folder = tmp_path_factory.mktemp("tuned")
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = write_model(family, folder / "model", **shape, num_hidden_layers=1 if family == "mixtral" else 2)
        line = ("quantize", model, *text, *(word for change in changes for word in ("--set", change)))
        with large_steps():
            results = ranks.command(2, folder, *line, "-o", folder / "two")
        assert [each.code for each in results] == [0, 0] and not results[1].stderr, results
        return line, folder / "two"

    return of


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_ranks_tune_by_the_gradients_of_all_documents(family: str, tuned: Tuned, tmp_path: Path) -> None:
    (line, two), one = tuned(family), tmp_path / "one"
    with large_steps():
        call(*line, "-o", one)
    moved = codes = differ = 0
    for a, b in zip(report(one)["layers"], report(two)["layers"], strict=True):
        assert b["untuned_error"] == pytest.approx(a["untuned_error"], rel=1e-4)
        assert b["tuned_error"] == pytest.approx(a["tuned_error"], rel=1e-3) and b["tuned_step"] == 6
        mine, other = (Checkpoint(out).quantized(a["name"]) for out in (one, two))
        moved, codes = moved + a["tuned_changed"], codes + mine.codes.numel()
        differ += int((mine.codes != other.codes).sum())
    assert moved > codes / 50 and differ <= codes / 1000, (moved, differ, codes)


def test_an_error_of_one_rank_while_it_tunes_ends_all(tuned: Tuned, tmp_path: Path) -> None:
    work = forks.command(*tuned("llama")[0], "-o", tmp_path / "out")

    def failing_in_a_step() -> int | None:
        TunedWeight.dense = lambda self: failing(torch.OutOfMemoryError("CUDA out of memory"))()  # type: ignore[assignment, method-assign]
        return work()

    ended(ranks.run([work, failing_in_a_step], tmp_path), 1, "not enough memory")


def test_a_tuned_run_that_was_stopped_reads_the_gradients_of_each_rank(tuned: Tuned, tmp_path: Path) -> None:
    (line, undisturbed), out = tuned("llama"), tmp_path / "out"
    work = forks.command(*line, "-o", out)
    with large_steps():
        ended(ranks.run([at_commit(3, send(signal.SIGTERM), work), work], tmp_path), 75, "--resume continues")
        left = os.listdir(next(tmp_path.glob("out.partial-*")))
        assert {"activations-0.bin", "activations-gradients.json", "activations-gradients-rank1.json"} <= set(left)
        results = ranks.command(2, tmp_path, *line, "-o", out, "--resume")
    assert [each.code for each in results] == [0, 0] and "computed again" not in results[0].stderr, results
    assert same(out, undisturbed)


def test_documents_are_split_by_tokens_and_every_rank_has_one() -> None:
    assert split_documents([9, 1, 1, 1], 2) == [range(1), range(1, 4)]
    assert split_documents([1, 1, 1, 9], 3) == [range(2), range(2, 3), range(3, 4)]
    assert split_documents([], 1) == [range(0)]
    lengths = torch.randint(1, 500, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    for count in (1, 2, 3, 7, 20):
        parts = split_documents(lengths, count)
        assert [n for part in parts for n in part] == list(range(20)) and all(parts)
    with pytest.raises(RecipeError, match="2 calibration sequences for 3 processes: give more --samples"):
        split_documents([4, 4], 3)


def test_two_ranks_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Ranks(1, 2)
    for other, refused in (("cuda:0", False), ("cuda:1", True)):
        places = [(platform.node(), "cuda", other), (platform.node(), "cuda", "cuda:1")]
        monkeypatch.setattr(here, "exchange", lambda value, places=places: places)
        with pytest.raises(RecipeError, match="ranks 0 and 1 would share cuda:1") if refused else nullcontext():
            require_devices(torch.device("cuda", 1), here)


def test_the_memory_of_a_machine_holds_all_of_its_processes() -> None:
    memory = Memory({"program": 5, "activations": 10}, {"CUDA": 3})
    assert memory.of_processes(1) == memory
    assert memory.of_processes(3) == Memory({"program": 5, "activations": 10, "other processes": 30}, {"CUDA": 3})


@pytest.mark.parametrize("tokens", [[1000, 3000], [50, 0, 40], [9000, 9000]])
def test_a_hessian_does_not_depend_on_the_ranks(tokens: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(sum(tokens), 64, generator=generator), torch.rand(sum(tokens), generator=generator)
    one, merged = Hessian(64, "cpu"), Hessian(64, "cpu")
    one.add(x, weights)
    for part, weighed in zip(x.split(tokens), weights.split(tokens), strict=True):
        rank = Hessian(64, "cpu")
        rank.add(part, weighed)
        merged.absorb(rank.part())
    assert merged.tokens == one.tokens
    found, expected = merged.matrix(), one.matrix()
    assert (found - expected).norm() < 1e-5 * expected.norm()
    if len(x) < CHUNK:
        assert torch.equal(found, expected), "few tokens are summed in the same order"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--recipe", "int4-best", "--set", "tune=40"]], ids=["solved", "tuned"])
def test_two_gpus_give_the_same_bytes_twice_and_nearly_the_result_of_one(
    options: list[str], shared: Path, tmp_path: Path
) -> None:
    """Each run is one of torchrun, as a process that has used CUDA cannot be forked."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA GPUs, and torch sees {torch.cuda.device_count()}")
    text = shared / "data" / "wikitext2" / "train.txt"
    outs = [tmp_path / name for name in ("one", "two", "again")]
    for out, count in zip(outs, (1, 2, 2), strict=True):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        model = shared / "models" / "llama-29m"
        args = ["quantize", model, "-o", out, "--calib", text, "--samples", 64, "--max-length", 512, "-q", *options]
        done = subprocess.run(
            [*launch, "-m", "quantkit", *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    assert hashes(outs[1]) == hashes(outs[2]) and report(outs[1])["ranks"] == 2
    one, two = map(Checkpoint, outs[:2])
    equal = [(one.quantized(name).codes == two.quantized(name).codes).float().mean() for name in one.modules()]
    assert float(torch.stack(equal).mean()) > (0.8 if options else 0.99)  # steps of tuning take other documents
    kind = "tuned_error" if options else "loss"
    losses = [sum(layer[kind] for layer in report(out)["layers"]) for out in outs[:2]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if options else 1e-3)
