"""A disk that is full, or refuses, ends a run in one line; plan's bytes are those of the disk (D1 to D3)."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from quantkit.calibration import budget
from quantkit.io.safetensors_files import read_header
from tests.faults import failing
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import command, run
from tests.reliability.jobs import Job, Jobs, at_operation, case, chosen, continued, hooked, judged, survives
from tests.reliability.samples import quantkit, text, weights
from tests.tiny_models import write_model

#: CLONE_NEWNS of Linux.
NEW_MOUNTS = 0x00020000
#: The line of a plan for a disk that is too small.
TOO_SMALL = "the run takes .* of disk and .* are free"
#: Injected errors: error number -> a pattern of its line.
ERRORS = {
    errno.ENOSPC: r"no space left \([\d,]+ more bytes needed, [\d,]+ free\)",
    errno.EIO: "input/output error",
    errno.EDQUOT: "no space left",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
}


def attempts(found: Run, *names: str) -> list[Job]:
    """Return the jobs that a family disturbs, and state their operations."""
    known = Jobs(found)
    made = [known[name] for name in names]
    found.facts["operations"] = {job.name: job.operations for job in made}
    return made


def injected(found: Run, job: Job, error: int, step: int, once: bool) -> None:
    """Fail with an error at an operation, once or from then on."""
    out = found.folder / "out"
    with case(found, f"{job.name}: {errno.errorcode[error]} {'once' if once else 'from'} {step}", out):
        # Deleting works on a full disk. One that fails, or is read-only, deletes nothing either.
        spared = ("unlink",) if error in (errno.ENOSPC, errno.EDQUOT) else ()
        budget.BESIDE["cpu"] = step // 2 % 2 == 0  # as on a GPU, or not
        ended = run(hooked(command(*job.line(out)), failing(step, error, once, spared)), found.folder)
        survives(job, ended, out, found.folder, re.escape(str(found.folder)), ERRORS[error])


# D1: a full disk


def full(found: Run) -> None:
    """Fail with ENOSPC at each operation, and on a real tmpfs fill it, shrink it and take its inodes."""
    rounded, solved, packed, mapped = attempts(found, "rounded", "calibrated", "pack", "mapped")
    found.facts["real tmpfs"] = real = may_mount()
    steps = [(job, k, once) for job in (rounded, solved) for k in each_operation(job) for once in (True, False)]
    for job, k, once in chosen(found, steps, 8 if real else 16, "hook"):
        injected(found, job, errno.ENOSPC, k, once)
    if not real:
        return
    filled = [(job, k) for job in (solved, packed, mapped) for k in each_operation(job)]
    for job, k in chosen(found, filled[:: 2 if found.column == "nightly" else 1], 4, "fill"):  # a release tries all
        with disk(found, f"{job.name}: disk filled before {k}", "16m") as out:
            ballast = out.parent / "ballast"
            ended = run(at_operation(k, partial(fill, ballast), command(*job.line(out))), found.folder)
            ballast.unlink()
            # What the line says to be free has five digits.
            says = re.escape(str(out.parent)), r"no space left \([\d,]+ more bytes needed, [\d,]{1,6} free\)"
            survives(job, ended, out, found.folder, *says)
    for job, share in chosen(found, list(product((solved, packed), range(5, 125, 5))), 2, "size"):
        size = sum(path.stat().st_size for path in job.reference.iterdir())
        with disk(found, f"{job.name}: disk of {share} % of the output", f"{share * size // 100}") as out:
            small(found, job, out, f"{TOO_SMALL}|{ERRORS[errno.ENOSPC]}", share > 95)
    for inodes in chosen(found, list(range(2, 30)), 2, "inodes"):
        with disk(found, f"{packed.name}: {inodes} inodes", "16m", f"nr_inodes={inodes}") as out:
            small(found, packed, out, "no inodes left", inodes > len(packed.files))


def each_operation(job: Job) -> range:
    return range(1, job.operations + 1)


def may_mount() -> bool:
    """Give this process mounts of its own, which end with it however it ends; False where that is not allowed."""
    tool, libc = shutil.which("mount"), ctypes.CDLL(None)
    if tool is None or not hasattr(libc, "unshare") or libc.unshare(NEW_MOUNTS):
        return False
    return not subprocess.run([tool, "--make-rprivate", "/"], capture_output=True, check=False).returncode


@contextmanager
def disk(found: Run, name: str, size: str, *options: str) -> Iterator[Path]:
    """Count a case whose output folder is on a tmpfs of `size`, which is unmounted however the block ends."""
    at, stated = found.folder / "disk", ",".join((f"size={size}", *options))
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", stated, "quantkit-test", str(at)], capture_output=True, check=True)
    try:
        with found.case(name):
            yield at / "out"
    finally:
        subprocess.run(["umount", str(at)], capture_output=True, check=True)


def fill(ballast: Path) -> None:
    """Fill a disk to its last byte."""
    with suppress(OSError), io.FileIO(ballast, "w") as file:
        while file.write(bytes(65536)):
            pass


def small(found: Run, job: Job, out: Path, says: str, enough: bool) -> None:
    """Run on a disk that is too small unless `enough`; then enlarge it, and continue."""
    ended = quantkit(found.folder, *job.line(out), code=None)
    due = {"completes": None if enough else False}
    if judged(job, ended, out, found.folder, re.escape(str(out.parent)), says, **due):
        stated = "remount,size=64m,nr_inodes=1000"
        subprocess.run(["mount", "-o", stated, str(out.parent)], capture_output=True, check=True)
        continued(job, out, found.folder)


# D2: a disk that refuses


def refusing(found: Run) -> None:
    """Fail with each other error at each operation, and limit the sizes of files."""
    rounded, solved = attempts(found, "rounded", "calibrated")
    steps = [
        (error, job, k)
        for error in ERRORS
        for job in (rounded, solved)
        for k in each_operation(job)
        # At night of the longer command every other one; a release tries all.
        if error != errno.ENOSPC and (job is rounded or (error + k) % 2 or found.column != "nightly")
    ]
    for error, job, k in chosen(found, steps, 12, "error"):
        injected(found, job, error, k, once=k % 2 == 0)
    largest = max(path.stat().st_size for path in solved.reference.iterdir())
    found.facts["largest file"] = largest
    limits = list(product(range(2048, largest + 8192, 8192), (True, False)))
    for limit, ignored in chosen(found, limits, 8, "limit"):
        limited(found, solved, limit, ignored, limit > largest)


def limited(found: Run, job: Job, limit: int, ignored: bool, enough: bool) -> None:
    """Run with RLIMIT_FSIZE. Python ignores SIGXFSZ; a program that does not is killed, and resumes as after a kill."""
    out = found.folder / "out"
    with case(found, f"{job.name}: files of at most {limit} bytes, signal {'ignored' if ignored else 'kills'}", out):

        def work() -> int | None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN if ignored else signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return command(*job.line(out))()

        due: dict[str, Any] = {"code": 1 if ignored else -signal.SIGXFSZ, "completes": enough}
        survives(job, run(work, found.folder), out, found.folder, "file too large", **due)


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
    stored = sum(info.end - info.start for path in weights(out) for info in read_header(path)[0].values())
    assert stored == tensors, f"{stored} bytes of tensors, {tensors} planned"
    return max((abs(by) for by in wrong.values()), default=0)


FAMILIES: list[Family] = [
    Family("D1", "a full disk ends a run in one line, and with space the same bytes follow", (16, 600, 800), full),
    Family("D2", "a disk that refuses ends a run in one line, and the same bytes follow", (20, 800, 1000), refusing),
    Family("D3", "plan's bytes are those of the disk", (30, 30, 30), planned),
]
