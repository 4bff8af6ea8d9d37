"""A disk that is full, or refuses, ends a run in one line; plan's bytes are those of the disk (D1 to D3)."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from quantkit.calibration import budget
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import Ended, command, run
from tests.reliability.jobs import Job, Jobs, at_operation, case, chosen, continued, hooked, same
from tests.reliability.samples import one_line, quantkit, text
from tests.tiny_models import write_model

#: CLONE_NEWNS of Linux.
NEW_MOUNTS = 0x00020000
#: The line of a full disk names the bytes that it lacks and those that are free.
SPACE = re.compile(r"no space left \(([\d,]+) more bytes needed, ([\d,]+) free\)")
#: The line of a plan for a disk that is too small.
TOO_SMALL = re.compile(r"the run takes .* of disk and .* are free")
#: Injected by D2: error number -> words of its line.
ERRORS = {
    errno.EIO: "input/output error",
    errno.EDQUOT: "no space left",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
}


class Fault:
    """A hook of `files` that fails at operation `step`, once or from then on; `fired` has what it failed.

    Deleting works on a full disk, so `spared` operations never fail.
    """

    def __init__(self, step: int, error: int, once: bool, spared: Sequence[str] = ()) -> None:
        self.step, self.error, self.once, self.spared = step, error, once, spared
        self.seen = 0

    def __call__(self, operation: str, path: Path) -> None:
        self.seen += 1
        if operation not in self.spared and (self.seen == self.step or (self.seen > self.step and not self.once)):
            raise OSError(self.error, os.strerror(self.error), str(path))


def after_fault(job: Job, step: int, out: Path, scratch: Path) -> None:
    """Ask as `continued`. If the sync after the last rename failed, the output is complete, and only not yet durable.

    So it is if the last operation of all failed, which deletes an older output.
    """
    if out.exists() and step >= job.operations - 1:
        same(job, out)
    else:
        go_on(job, out, scratch)


def go_on(job: Job, out: Path, scratch: Path) -> None:
    """Ask as `continued`, and that a command which cannot resume left nothing."""
    assert job.resumes or not list(out.parent.glob(f"{out.name}*")), "something is left of a command that cannot resume"
    continued(job, out, scratch)


def refused(ended: Ended, out: Path) -> str:
    """Ask for exit code 1 and one line that names the output, its partial folder or a file in it."""
    one_line(ended)
    assert ended.code == 1, f"exit {ended.code}"
    assert str(out.parent) in ended.stderr, ended.stderr
    return ended.stderr


# D1: a full disk


def full(found: Run) -> None:
    """Fail with ENOSPC at each operation, and on a real tmpfs fill it, shrink it and take its inodes."""
    known = Jobs(found.folder)
    rounded, solved, packed, mapped = made = [known[name] for name in ("rounded", "calibrated", "pack", "mapped")]
    found.facts["operations"] = {job.name: job.operations for job in made}
    steps = [(i, k, once) for i in (0, 1) for k in range(1, made[i].operations + 1) for once in (True, False)]
    found.facts["real tmpfs"] = real = may_mount()
    for i, k, once in chosen(found, steps, 8 if real else 16, "hook"):
        injected_full(found, (rounded, solved)[i], k, once)
    if not real:
        return
    steps = [(i, k) for i in (0, 1, 2) for k in range(1, (solved, packed, mapped)[i].operations + 1)]
    if found.column == "nightly":  # a release tries all
        steps = steps[::2]
    for i, k in chosen(found, steps, 4, "fill"):
        filled(found, (solved, packed, mapped)[i], k)
    for job, share in chosen(found, list(product((1, 2), range(5, 125, 5))), 2, "size"):
        too_small(found, made[job], share / 100)
    for inodes in chosen(found, list(range(2, 30)), 2, "inodes"):
        without_inodes(found, packed, inodes)


def injected_full(found: Run, job: Job, step: int, once: bool) -> None:
    out = found.folder / "out"
    with case(found, f"{job.name}: ENOSPC {'once' if once else 'from'} {step}", out):
        hook = Fault(step, errno.ENOSPC, once, spared=("unlink",))
        budget.BESIDE["cpu"] = step % 2 == 0  # as on a GPU, or not
        ended = run(hooked(command(*job.line(out)), hook), found.folder)
        if ended.code == 0:
            same(job, out)  # the operation was a deletion, or one whose failure has no effect
            return
        assert SPACE.search(refused(ended, out)), ended.stderr
        after_fault(job, step, out, found.folder)


def may_mount() -> bool:
    """Give this process mounts of its own, which end with it however it ends; False where that is not allowed."""
    tool, libc = shutil.which("mount"), ctypes.CDLL(None)
    if tool is None or not hasattr(libc, "unshare") or libc.unshare(NEW_MOUNTS):
        return False
    return not subprocess.run([tool, "--make-rprivate", "/"], capture_output=True, check=False).returncode


@contextmanager
def disk(found: Run, size: str, *options: str) -> Iterator[Path]:
    """Yield an output folder on a tmpfs of `size`, which is unmounted however the block ends."""
    at, stated = found.folder / "disk", ",".join((f"size={size}", *options))
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", stated, "quantkit-test", str(at)], capture_output=True, check=True)
    try:
        yield at / "out"
    finally:
        subprocess.run(["umount", str(at)], capture_output=True, check=True)


def enlarged(out: Path) -> None:
    """Make the disk of an output large enough for everything."""
    stated = "remount,size=64m,nr_inodes=1000"
    subprocess.run(["mount", "-o", stated, str(out.parent)], capture_output=True, check=True)


def filled(found: Run, job: Job, step: int) -> None:
    """Fill the disk to its last byte before one operation; then free it."""
    with found.case(f"{job.name}: disk filled before {step}"), disk(found, "16m") as out:
        ballast = out.parent / "ballast"

        def fill() -> None:
            with suppress(OSError), io.FileIO(ballast, "w") as file:
                while file.write(bytes(65536)):
                    pass

        ended = run(at_operation(step, fill, command(*job.line(out))), found.folder)
        ballast.unlink()
        if ended.code == 0:
            same(job, out)  # no byte was written after this operation
            return
        needed = SPACE.search(refused(ended, out))
        assert needed is not None, ended.stderr
        assert int(needed[2].replace(",", "")) < 65536, f"not what is free: {ended.stderr}"
        go_on(job, out, found.folder)


def too_small(found: Run, job: Job, share: float) -> None:
    """Run on a disk that has a share of the bytes that the output takes; then enlarge it."""
    size = sum(path.stat().st_size for path in (found.folder / f"{job.name}-reference").iterdir())
    with found.case(f"{job.name}: disk of {share:.0%} of the output"), disk(found, f"{int(share * size)}") as out:
        ended = quantkit(found.folder, *job.line(out), code=None)
        if ended.code == 0:
            assert share > 0.95, "a disk this small cannot hold the output"
            same(job, out)
            return
        line = refused(ended, out)
        assert TOO_SMALL.search(line) or SPACE.search(line), line
        enlarged(out)
        go_on(job, out, found.folder)


def without_inodes(found: Run, job: Job, inodes: int) -> None:
    """Run on a disk that has a number of inodes; then give it more."""
    with found.case(f"{job.name}: {inodes} inodes"), disk(found, "16m", f"nr_inodes={inodes}") as out:
        ended = quantkit(found.folder, *job.line(out), code=None)
        if ended.code == 0:
            assert inodes > len(job.files), "more files than inodes"
            same(job, out)
            return
        assert "no inodes left" in refused(ended, out), ended.stderr
        enlarged(out)
        go_on(job, out, found.folder)


# D2: a disk that refuses


def refusing(found: Run) -> None:
    """Fail with each other error at each operation, write short at each write, and limit the sizes of files."""
    known = Jobs(found.folder)
    made = known["rounded"], known["calibrated"]
    solved = made[1]
    found.facts["operations"] = {job.name: job.operations for job in made}
    steps = [(error, i, k) for error in ERRORS for i in (0, 1) for k in range(1, made[i].operations + 1)]
    if found.column == "nightly":  # of the longer command every other one; a release tries all
        steps = [step for step in steps if step[1] == 0 or (step[0] + step[2]) % 2]
    for error, i, k in chosen(found, steps, 10, "error"):
        once = k % 2 == 0
        injected(found, made[i], error, k, once)
    writes = range(1, counted_writes(solved, found.folder) + 1)
    found.facts["writes"] = len(writes)
    for k in chosen(found, list(writes), 5, "short"):
        short(found, solved, k)
    largest = max(path.stat().st_size for path in (found.folder / "calibrated-reference").iterdir())
    limits = [(limit, ignored) for limit in range(2048, largest + 8192, 8192) for ignored in (True, False)]
    found.facts["largest file"] = largest
    for limit, ignored in chosen(found, limits, 8, "limit"):
        limited(found, solved, limit, ignored, limit > largest)


def injected(found: Run, job: Job, error: int, step: int, once: bool) -> None:
    out = found.folder / "out"
    with case(found, f"{job.name}: {errno.errorcode[error]} {'once' if once else 'from'} {step}", out):
        # A disk that fails, or is read-only, deletes nothing either.
        spared = ("unlink",) if error == errno.EDQUOT else ()
        ended = run(hooked(command(*job.line(out)), Fault(step, error, once, spared)), found.folder)
        if ended.code == 0:
            same(job, out)
            return
        assert ERRORS[error] in refused(ended, out), ended.stderr
        after_fault(job, step, out, found.folder)


class Short(io.FileIO):
    """A file of which write `at` of the process stores half of its bytes; `record` gets the number of writes so far."""

    at = seen = 0
    record: Path | None = None

    def write(self, data: Any, /) -> int:
        Short.seen += 1
        if Short.record is not None:
            Short.record.write_text(f"{Short.seen}")
        return super().write(data[: max(1, len(data) // 2)] if Short.seen == Short.at else data)


def shortened(words: Sequence[object], at: int, record: Path | None = None) -> int | None:
    """Run a command line of which write number `at` is short."""
    fdopen = os.fdopen

    def opened(fd: int, mode: str = "r", *args: Any, **options: Any) -> Any:
        return Short(fd, "r+b") if mode == "r+b" else fdopen(fd, mode, *args, **options)

    Short.at, Short.record, os.fdopen = at, record, opened
    return command(*words)()


def counted_writes(job: Job, folder: Path) -> int:
    """Count the writes of a job."""
    out = folder / "out"
    ended = run(partial(shortened, job.line(out), 0, folder / "writes"), folder)
    assert ended.code == 0, ended.stderr
    shutil.rmtree(out)
    return int((folder / "writes").read_text())


def short(found: Run, job: Job, at: int) -> None:
    """Store half of one write, as a network file system may; the rest must follow."""
    out = found.folder / "out"
    with case(found, f"{job.name}: write {at} is short", out):
        ended = run(partial(shortened, job.line(out), at), found.folder)
        assert ended.code == 0, ended.stderr
        same(job, out)


def limited(found: Run, job: Job, limit: int, ignored: bool, enough: bool) -> None:
    """Run with RLIMIT_FSIZE. Python ignores SIGXFSZ; a program that does not is killed, and resumes as after a kill."""
    out = found.folder / "out"
    with case(found, f"{job.name}: files of at most {limit} bytes, signal {'ignored' if ignored else 'kills'}", out):

        def work() -> int | None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN if ignored else signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return command(*job.line(out))()

        ended = run(work, found.folder)
        if ended.code == 0:
            assert enough, "a file of this size was not allowed"
            same(job, out)
            return
        assert not enough, ended.stderr
        if ignored:
            assert "file too large" in refused(ended, out), ended.stderr
        else:
            assert ended.code == -signal.SIGXFSZ, f"exit {ended.code}: {ended.stderr}"
        go_on(job, out, found.folder)


# D3: plan's bytes

#: Model, and options of quantize: every layout, format, group size and kind of exception.
COMBINATIONS: list[tuple[str, str]] = [
    ("llama", "--method rtn"),
    ("llama", "--method rtn --group-size 32"),
    ("llama", "--method rtn --group-size channel --asym"),
    ("llama", "--method rtn --layout gptq"),
    ("llama", "--method rtn --layout gptq --group-size 64"),
    ("llama", "--method rtn --layout gptq-v2 --asym --group-size 32"),
    ("llama", "--method rtn --layout awq --asym"),
    ("llama", "--method rtn --layout quick --asym"),
    ("llama", "--method rtn --layout marlin"),
    ("llama", "--method rtn --layout marlin --group-size channel"),
    ("llama", "--method rtn --prune 2:4 --layout marlin24"),
    ("llama", "--method rtn --prune 2:4 --layout marlin24-ct --group-size channel"),
    ("llama", "--format fp6 --method rtn"),
    ("llama", "--format fp6 --method rtn --layout tcfpx"),
    ("llama", "--format fp5 --method rtn"),
    ("llama", "--format fp5 --method rtn --layout compressed-tensors"),
    ("llama", "--format fp6-e2m3 --method rtn"),
    ("llama", "--format fp5-e2m2 --method rtn"),
    ("llama", "--calib TEXT --samples 2 --max-length 32"),
    ("llama", "--calib TEXT --samples 2 --max-length 32 --layout marlin"),
    ("llama", "--calib TEXT --samples 2 --max-length 32 --prune 2:4 --layout marlin24"),
    ("llama", "--method rtn --skip down_proj --min-share 0"),
    ("llama", "--method rtn --override .*k_proj=int4:g32 --override .*mlp.*=int4:channel"),
    ("odd", "--method rtn --layout marlin --set pad=true"),
    ("odd", "--format fp6 --method rtn --layout tcfpx --set pad=true"),
    ("qwen2", "--method rtn"),
    ("qwen2", "--format fp5 --method rtn --set fused_alike=true"),
    ("opt", "--method rtn --asym"),
    ("gpt2", "--method rtn --layout gptq"),
    ("mixtral", "--method rtn"),
    ("qwen3_moe", "--method rtn --group-size 64"),
    ("gemma2", "--format fp6 --method rtn"),
]


def planned(found: Run) -> None:
    """Compare the bytes of each file that a plan lists with those on the disk."""
    small = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    written = {
        "llama": write_model("llama", found.folder / "llama", **small | {"hidden_size": 256}),
        "odd": write_model("llama", found.folder / "odd", **small | {"intermediate_size": 352}),
        "qwen2": write_model("qwen2", found.folder / "qwen2", **small),
        "opt": write_model("opt", found.folder / "opt", num_hidden_layers=1),
        "gemma2": write_model("gemma2", found.folder / "gemma2", num_hidden_layers=1),
        **{name: write_model(name, found.folder / name) for name in ("gpt2", "mixtral", "qwen3_moe")},
    }
    words = text(found.folder / "text.txt")
    most = 0
    for name, options in COMBINATIONS:
        out = found.folder / "out"
        with case(found, f"{name} {options}", out):
            given = [words if word == "TEXT" else word for word in (*options.split(), "--set", "clip=none")]
            stated = json.loads(quantkit(found.folder, "plan", written[name], *given, "--json").stdout)
            quantkit(found.folder, "quantize", written[name], *given, "-o", out, "-q")
            most = max(most, compared(stated["files"], out, stated["bytes"]))
    found.facts["most bytes that a JSON file differs"] = most


def compared(stated: dict[str, Any], out: Path, tensors: int) -> int:
    """Ask for equal bytes of weight files; returns the most bytes by which another file differs."""
    real = {path.name: path.stat().st_size for path in out.iterdir()}
    beside = real.pop("quantkit_report.json") + real.pop("README.md")
    assert beside <= stated["report_and_card"], f"report and card take {beside}, at most {stated['report_and_card']}"
    named = {entry["name"]: entry["bytes"] for entry in stated["each"]}
    assert named.keys() == real.keys(), f"other files: {named.keys() ^ real.keys()}"
    wrong = {name: real[name] - size for name, size in named.items() if real[name] != size}
    assert not any(name.endswith(".safetensors") for name in wrong), wrong
    assert all(abs(by) <= 4096 for by in wrong.values()), wrong
    stored = sum(entry[1] - entry[0] for entry in offsets(out))
    assert stored == tensors, f"{stored} bytes of tensors, {tensors} planned"
    return max((abs(by) for by in wrong.values()), default=0)


def offsets(out: Path) -> Iterator[list[int]]:
    """Read where each tensor begins and ends, from the headers alone."""
    for path in out.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        yield from (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")


FAMILIES: list[Family] = [
    Family("D1", "a full disk ends a run in one line, and with space the same bytes follow", (16, 600, 800), full),
    Family("D2", "a disk that refuses ends a run in one line, and the same bytes follow", (20, 800, 1000), refusing),
    Family("D3", "plan's bytes are those of the disk", (30, 30, 30), planned),
]
