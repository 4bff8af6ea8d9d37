"""What can go wrong with an output folder: a kill, a full disk or an interrupt at any moment, two runs, bad targets."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.report import load
from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.io.files import write_atomic
from quantkit.io.staging import JOURNAL, append_journal, is_complete, publish, read_journal, staging
from tests.command_line import call
from tests.faults import Killed, count, failing, faults, killer, state
from tests.reliability import power


def small_run(out: Path, *, resume: bool = False, overwrite: bool = False, blocks: int = 3) -> None:
    """Three units of work, each a file and a journal line, then what a finish writes."""
    with staging(out, resume=resume, overwrite=overwrite) as partial:
        if not is_complete(partial):
            done = read_journal(partial / JOURNAL)
            if not done:
                append_journal(partial / JOURNAL, {"identity": 1})
            for i in range(max(len(done) - 1, 0), blocks):
                write_atomic(partial / f"block-{i}", bytes([i]) * 1000)
                sha256 = files.save_tensor(partial / f"activations-{i % 2}.bin", torch.full((4, 5), float(i)))
                append_journal(partial / JOURNAL, {"block": i, "activations": sha256})
            write_atomic(partial / "config.json", b"{}")
        publish(partial, out, overwrite)


def test_a_kill_at_every_operation_then_resume_gives_the_same_bytes(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    steps = count(lambda: small_run(reference))
    assert steps > 40
    expected = state(reference)
    assert set(expected) == {"block-0", "block-1", "block-2", "config.json"}
    for step in range(1, steps + 1):
        out = tmp_path / f"out{step}"
        with faults(killer(step)), pytest.raises(Killed):
            small_run(out)
        for path in tmp_path.glob(f"out{step}*"):
            # A complete OUT, or a partial that does not look like a model before its last step.
            partial = path.name.startswith(f"out{step}.partial-")
            assert partial or state(path) == expected
            if partial and (path / "config.json").exists():
                assert all((path / f"block-{i}").exists() for i in range(3))
        if not out.exists():
            small_run(out, resume=True)
        assert state(out) == expected, step
        assert list(tmp_path.glob(f"out{step}.*")) == [], step


def test_a_kill_while_overwriting_leaves_old_or_new_after_the_next_run(tmp_path: Path) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    small_run(reference)
    small_run(out)
    steps = count(lambda: small_run(out, overwrite=True))
    for step in range(1, steps + 1):
        (out / "block-0").write_bytes(b"the old one")
        old = state(out)
        with faults(killer(step)), pytest.raises(Killed):
            small_run(out, overwrite=True)
        saved = [state(p) for p in tmp_path.iterdir() if p.name == "out" or p.name.startswith("out.old-")]
        assert old in saved or state(reference) in saved, step
        small_run(out, resume=True, overwrite=True)
        assert state(out) == state(reference), step
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "reference"], step


def test_a_power_cut_while_complete_work_is_discarded_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with suppress(Killed), faults(stop_before_publishing):
        small_run(root / "out")
    (partial,) = root.iterdir()
    assert is_complete(partial)
    disk, looked_complete, seen = power.Disk(root), 0, 0

    def cut(operation: str, path: Path) -> None:
        nonlocal looked_complete, seen
        disk.hook(operation, path)
        for seed in range(40):
            seen += 1
            world = disk.crashed("reordered", random.Random(seed))
            if f"{partial.name}/config.json" in world and f"{partial.name}/{JOURNAL}" not in world:
                looked_complete += 1
                assert all(world.get(f"{partial.name}/block-{i}") == bytes([i]) * 1000 for i in range(3))

    with faults(cut):
        small_run(root / "out", overwrite=True)
    assert 0 < looked_complete < seen


def stop_before_publishing(operation: str, path: Path) -> None:
    if operation == "rename" and path.name == "out":
        raise Killed


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_at_every_operation(tmp_path: Path, error: int, once: bool) -> None:
    reference = tmp_path / "reference"
    small_run(reference)
    for step in range(1, 200):
        out = tmp_path / f"out{step}"
        try:
            with faults(failing(step, error, once)):
                small_run(out)
        except CheckpointError as failure:
            assert "\n" not in str(failure) and ("free" in str(failure)) == (error == errno.ENOSPC)
            for partial in tmp_path.glob(f"out{step}.partial-*"):
                assert is_complete(partial) or len(read_journal(partial / JOURNAL)) > 1
        else:
            break
        if not out.exists():
            small_run(out, resume=True)
        assert state(out) == state(reference)
    assert 40 < step < 199


@pytest.mark.parametrize("reason", [KeyboardInterrupt, CheckpointError("x"), OSError(errno.ENOSPC, "x")])
@pytest.mark.parametrize("blocks", [0, 1])
def test_the_partial_folder_stays_only_if_it_can_be_resumed(tmp_path: Path, reason: BaseException, blocks: int) -> None:
    with pytest.raises(BaseException) as caught, staging(tmp_path / "out") as partial:
        append_journal(partial / JOURNAL, {"identity": 1})
        for i in range(blocks):
            append_journal(partial / JOURNAL, {"block": i})
        raise reason
    assert isinstance(caught.value, KeyboardInterrupt) or caught.value is reason
    assert [p.name.split("-")[0] for p in tmp_path.iterdir()] == ["out.partial"] * blocks


def interrupted(out: Path) -> Path:
    """Leave the partial folder of a run that was interrupted after its first block."""
    with pytest.raises(KeyboardInterrupt), staging(out) as partial:
        append_journal(partial / JOURNAL, {"identity": 1})
        append_journal(partial / JOURNAL, {"block": 0})
        raise KeyboardInterrupt
    return partial


def test_left_work_is_not_thrown_away_unasked(tmp_path: Path) -> None:
    interrupted(out := tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"--resume.*--overwrite"), staging(out):
        pass
    with staging(out, resume=True) as partial:
        assert len(read_journal(partial / JOURNAL)) == 2
    with staging(out, overwrite=True) as partial:
        assert [p.name for p in partial.iterdir()] == ["lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_journal_is_not_thrown_away_unasked(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "out")
    (partial / JOURNAL).write_bytes(b"x\n" + (partial / JOURNAL).read_bytes())
    with pytest.raises(CheckpointError, match="--overwrite"), staging(tmp_path / "out"):
        pass
    assert partial.exists()


@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling", "no parent", "file as parent", "in source"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_bad_targets_are_refused_and_left_alone(tmp_path: Path, what: str, overwrite: bool) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    out = tmp_path / "out"
    if what == "folder":
        out.mkdir()
        (out / "thesis.tex").write_text("no model")
    elif what == "file":
        out.write_text("x")
    elif what == "link":
        out.symlink_to(source)
    elif what == "dangling":
        out.symlink_to(tmp_path / "nowhere")
    elif what == "no parent":
        out = tmp_path / "a" / "out"
    elif what == "file as parent":
        out = source / "config.json" / "out"
    else:
        out = source / "out"
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError), staging(out, overwrite=overwrite, source=source):
        pass
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("out", ["/", "source", "source/../source", "link", ".", "..", "source/.."])
def test_the_source_and_the_root_are_never_targets(tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "work" / "source"
    source.mkdir(parents=True)
    for folder in (source, *source.parents[:2]):
        (folder / "config.json").write_text("{}")
    (source.parent / "link").symlink_to(source)
    monkeypatch.chdir(source.parent)
    with pytest.raises(CheckpointError), staging(Path(out), overwrite=True, source=source):
        pass
    assert (source / "config.json").exists()


def test_a_path_up_from_a_link_or_from_nowhere_is_one_folder_from_the_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "deep")
    monkeypatch.chdir(tmp_path)
    for out, found in (("link/../out", "disk/out"), ("nowhere/../out", "out"), ("link/out", "disk/deep/out")):
        with staging(Path(out)) as partial:
            assert partial.parent == (tmp_path / found).parent  # one disk, so that a rename suffices
            write_atomic(partial / "config.json", b"{}")
            publish(partial, Path(out))
        assert (tmp_path / found / "config.json").exists()


def test_a_folder_whose_files_cannot_be_removed_is_not_begun_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "config.json").write_text("{}")
    monkeypatch.setattr(files, "is_writable", lambda folder: folder != out)  # root may write everywhere
    with pytest.raises(CheckpointError, match="out is not writable"), staging(out, overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="exists"), staging(out) as partial:
        write_atomic(partial / "config.json", b"{}")
        out.mkdir()
        publish(partial, out)
    assert list(out.iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from quantkit.io.staging import JOURNAL, append_journal
from quantkit.io.staging import staging
with staging(Path(sys.argv[1])) as partial:
    append_journal(partial / JOURNAL, {"identity": 1})
    append_journal(partial / JOURNAL, {"block": 1})
    print("ready", flush=True)
    time.sleep(60)
"""


def test_two_runs_at_once_and_the_lock_of_a_dead_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])}
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "ready\n"
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(CheckpointError, match=f"process {first.pid}"), staging(out, **options):
                pass
    finally:
        first.kill()
        first.wait()
    with staging(out, resume=True) as partial:
        assert len(read_journal(partial / JOURNAL)) == 2
        assert (partial / "lock").read_text() == f"{os.getpid()}\n"


def test_umask_is_respected(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        small_run(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "block-0").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("complete", [False, True])
def test_of_work_that_no_command_continues_nothing_stays(tmp_path: Path, complete: bool) -> None:
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out", resume=None) as partial:
        for line in range(0 if complete else 2):
            append_journal(partial / JOURNAL, {"line": line})
        write_atomic(partial / "config.json", b"{}")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOTEMPTY])
def test_a_last_rename_that_fails_leaves_nothing_that_no_command_publishes(tmp_path: Path, error: int) -> None:
    out = tmp_path / "out"

    def hook(operation: str, path: Path) -> None:
        if operation == "rename" and path == out:
            raise OSError(error, os.strerror(error), str(path))

    for resume in (None, False):
        with (
            pytest.raises(CheckpointError, match=f"out: {os.strerror(error).lower()}"),
            faults(hook),
            staging(out, resume=resume) as partial,
        ):
            append_journal(partial / JOURNAL, {"identity": 1})
            write_atomic(partial / "config.json", b"{}")
            publish(partial, out)
        assert [path.name for path in tmp_path.iterdir()] == ([] if resume is None else [partial.name])
    small_run(out, resume=True)
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_who_cannot_continue_another_run_does_not_throw_it_away(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "out")
    with pytest.raises(CheckpointError, match="if quantize or prune began it"), staging(tmp_path / "out", resume=None):
        pass
    assert len(read_journal(partial / JOURNAL)) == 2


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)


def without_folder_sync(operation: str, path: Path) -> None:
    if operation == "fsync" and path.is_dir():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("lacking", ["locks", "folder sync"])
def test_a_mount_that_lacks_a_call_gives_a_finished_output_and_one_notice(
    lacking: str, tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "locks":
        without_locks(monkeypatch)
    with faults(without_folder_sync if lacking == "folder sync" else None):
        made = call("quantize", small_llama, "-o", tmp_path / "out", "--method", "rtn")
        packed = call("pack", tmp_path / "out", "--layout", "marlin", "-o", tmp_path / "packed")
    for done in (made, packed):
        assert done.stderr.count("this file system") == 1
    assert "this file system" in str(load(tmp_path / "out")["notices"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "packed"]
    assert not {"lock", "soft-lock"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_without_locks_a_second_run_is_still_refused_and_a_stopped_one_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), staging(out) as partial:
        with pytest.raises(CheckpointError, match="is being written by process"), staging(out):
            pass
        for block in range(2):
            append_journal(partial / JOURNAL, {"block": block})
        raise KeyboardInterrupt
    small_run(out, resume=True)
    assert list(tmp_path.iterdir()) == [out]
