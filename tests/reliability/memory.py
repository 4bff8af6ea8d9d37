"""Little memory: plan's figure suffices, and less is refused at once (M1 to M4)."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.promises.model import CONFIG, shapes, write_json
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import Ended, command, run
from tests.reliability.jobs import Job, Jobs, Work, at_operation, case, chosen, continued, same
from tests.reliability.samples import model, one_line, quantkit, text

MIB = 2**20
#: Bytes from which on M3 counts an allocation, and the most of them that fail in the nightly column.
LARGE, MOST = 64 * 2**10, 400
#: Runs of M1 and M2: the model's changes, and options of quantize. `TEXT` is the calibration text.
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 2048, "num_attention_heads": 8}
SMALL: dict[str, object] = {}
SHORT, LONG = "--samples 8 --max-length 64", "--samples 32 --max-length 512"
RUNS: list[tuple[dict[str, Any], str]] = [
    (SMALL, "--method rtn"),
    (WIDE, f"--calib TEXT {SHORT}"),
    (WIDE, "--format fp6 --method rtn"),
    (SMALL, "--format fp6 --method rtn"),
    (SMALL, f"--calib TEXT {LONG}"),
    (SMALL, f"--calib TEXT {LONG} --prune 2:4 --layout marlin24"),
    (WIDE, "--method rtn"),
    (WIDE, "--method rtn --layout gptq-v2 --asym --group-size channel"),
    (WIDE, f"--calib TEXT {SHORT} --format fp6 --method gptq"),
    (WIDE, f"--calib TEXT {LONG}"),
    (WIDE, f"--calib TEXT {LONG} --act-budget 1MB"),
    (WIDE, f"--calib TEXT {SHORT} --prune 2:4 --layout marlin24"),
    (SMALL, f"--calib TEXT {LONG} --set tune=2 --set output_aware=true"),
]


def status(name: str) -> int:
    """Return a figure of this process in bytes, as VmHWM, the most RAM that it had."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def measured(words: tuple[object, ...], record: Path, room: int | None = None) -> Work:
    """Return the work of a command line that records the most RAM it had.

    With `room`, the system refuses memory as soon as the process has more than so many bytes: RLIMIT_DATA counts
    private writable memory, so what of it the process has now may grow by what `room` leaves above its RAM.
    """

    def work() -> int | None:
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is that of now
        if room is not None:
            limit = status("VmData") + max(0, room - status("VmRSS"))
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            return command(*words)()
        finally:
            record.write_text(f"{status('VmHWM')}")

    return work


class Bench:
    """The models and the text of M1 and M2, and the peak that a plan states for a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = text(folder / "text.txt")
        self.models = {0: model(folder / "small"), 1: model(folder / "wide", 1, **WIDE, num_key_value_heads=8)}
        #: The RAM of this process and so of every fork, with all imports.
        self.imported = status("VmRSS")

    def words(self, changes: dict[str, Any], options: str) -> tuple[object, ...]:
        given = [self.text if word == "TEXT" else word for word in options.split()]
        return (self.models[bool(changes)], *given)

    def peak(self, words: tuple[object, ...]) -> int:
        """Return the bytes of RAM that a plan states."""
        return int(json.loads(quantkit(self.folder, "plan", *words, "--json").stdout)["peak_memory"]["ram"])


def sufficient(found: Run) -> None:
    """Run within 1.10 times the peak of the plan: the system refuses more, and the most RAM is measured beside it.

    Address space, which RLIMIT_AS counts, is no memory: torch reserves much that it never uses. RLIMIT_DATA counts
    private writable memory, whether used or not. The most RAM counts libraries and mapped files too.
    """
    bench = Bench(found.folder)
    ratios: dict[str, float] = {}
    for changes, options in RUNS if found.column != "pr" else RUNS[:3]:
        out = found.folder / "out"
        words, name = bench.words(changes, options), f"{'wide' if changes else 'small'} {options}"
        with case(found, name, out):
            room = int(1.10 * bench.peak(words))
            ended = run(measured(("quantize", *words, "-o", out, "-q"), found.folder / "most", room), found.folder)
            assert ended.code == 0, ended.stderr
            most = int((found.folder / "most").read_text())
            ratios[name] = round(1.10 * most / room, 3)
            assert most <= room, f"{most} bytes of RAM, {room} were allowed"
    found.facts["most RAM, by plan's figure"] = ratios


def insufficient(found: Run) -> None:
    """Allow half of the peak of the plan: plan and quantize refuse within 5 seconds, and are never killed.

    Python and torch alone take more than half of a small run's peak. Then the system may refuse memory before quantkit
    compares, and the line says so.
    """
    bench = Bench(found.folder)
    slowest, compared = 0.0, 0
    for changes, options in RUNS if found.column != "pr" else RUNS[:3]:
        out = found.folder / "out"
        words, name = bench.words(changes, options), f"{'wide' if changes else 'small'} {options}"
        with case(found, name, out):
            half = bench.peak(words) // 2
            run(measured(("plan", *words, "--json", "-q"), found.folder / "most"), found.folder)
            taken = int((found.folder / "most").read_text())
            for first in ("plan", "quantize"):
                ended = run(halved((first, *words, "-o", out, "-q"), half - taken), found.folder)
                one_line(ended)
                judged = "of memory, and ulimit -d allows" in ended.stderr
                assert ended.code == 1 and (judged or half < bench.imported), ended.stderr
                assert judged or "not enough memory" in ended.stderr, ended.stderr
                compared += judged
                assert ended.seconds <= 5, f"{ended.seconds:.1f} seconds"
                assert not list(out.parent.glob("out*")), "something was written"
                slowest = max(slowest, ended.seconds)
    found.facts |= {"slowest refusal in seconds": round(slowest, 2), "refused by comparing": compared}


def halved(words: tuple[object, ...], more: int) -> Work:
    """Return the work of a command line that may take `more` bytes than now, or must do with fewer.

    The RAM of a fork does not count yet the pages of libraries that it has not touched, so a plan's is measured before.
    """

    def work() -> int | None:
        limit = max(0, status("VmData") + more)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return command(*words)()

    return work


class Refusing(TorchDispatchMode):
    """Fail as torch does without memory, at the allocation number `at` of those that are large; `record` counts them.

    `large` are the bytes from which on an operation's new result counts. A view allocates nothing.
    """

    def __init__(self, at: int, large: int, record: Path) -> None:
        super().__init__()
        self.at, self.large, self.record, self.seen = at, large, record, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            new = isinstance(one, torch.Tensor) and one.device.type == "cpu" and one._base is None
            if new and one.nbytes >= self.large and not any(one is given for given in args):
                self.seen += 1
                self.record.write_text(f"{self.seen}")
                if self.seen == self.at:
                    raise RuntimeError(
                        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                        f"tried to allocate {one.nbytes} bytes. Error code 12 (Cannot allocate memory)"
                    )
        return made


def refusing(words: tuple[object, ...], at: int, record: Path) -> Work:
    """Return the work of a command line whose large allocation number `at` fails (0: none)."""

    def work() -> int | None:
        with Refusing(at, LARGE, record):
            return command(*words)()

    return work


def squeezed(words: tuple[object, ...], step: int, more: int) -> Work:
    """Return the work of a command line that, from an operation on the disk on, may take `more` bytes and no others."""

    def squeeze() -> None:
        limit = status("VmData") + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return at_operation(step, squeeze, command(*words))


def without_memory(found: Run) -> None:
    """Fail at each large allocation, and let the system refuse memory from a moment on.

    A process that gets not one more page is not tried: there Python's `Thread.start` waits for ever for a thread that
    has died before it began, in transformers' own pool.
    """
    known = Jobs(found.folder)
    made = known["rounded"], known["calibrated"]
    record, out = found.folder / "allocations", found.folder / "out"
    counts = {}
    for job in made:
        ended = run(refusing(job.line(out), 0, record), found.folder)
        assert ended.code == 0, ended.stderr
        shutil.rmtree(out)
        counts[job.name] = int(record.read_text())
    found.facts["large allocations"] = counts
    steps = [(i, k) for i, job in enumerate(made) for k in range(1, counts[job.name] + 1)]
    if found.column == "nightly" and len(steps) > MOST:
        steps = steps[:: math.ceil(len(steps) / MOST)]
    for i, k in chosen(found, steps, 12, "allocation"):
        job = made[i]
        with case(found, f"{job.name}: allocation {k}", out):
            judged(job, run(refusing(job.line(out), k, record), found.folder), out, found.folder)
    limits = [
        (i, k, more) for i in (0, 1) for k in range(1, made[i].operations, 4) for more in (MIB // 4, MIB, 16 * MIB)
    ]
    limits = chosen(found, limits, 10, "limit")
    ended_well = 0
    for i, k, more in limits:
        job = made[i]
        with case(found, f"{job.name}: {more} bytes from operation {k}", out):
            ended = run(squeezed(job.line(out), k, more), found.folder)
            ended_well += ended.code == 0
            judged(job, ended, out, found.folder)
    found.facts["of those limited, completed"] = f"{ended_well} of {len(limits)}"


def judged(job: Job, ended: Ended, out: Path, scratch: Path) -> None:
    """Ask for the same bytes, or for exit code 1 in one line about memory and then the same bytes."""
    if ended.code == 0:
        same(job, out)
        return
    one_line(ended)
    assert ended.code == 1 and "memory" in ended.stderr.lower(), ended.stderr
    continued(job, out, scratch)


#: The model of M4: 18 blocks of 436 MB, and two matrices of the vocabulary, which are its largest tensors.
LLAMA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 18, "vocab_size": 32000},
    **{"num_attention_heads": 32, "num_key_value_heads": 32},
}


def large_model(folder: Path) -> int:
    """Write a Llama of more than 8 GB, a file a block, without holding it; returns the bytes of its largest tensor.

    One run of random values serves all tensors, each of which begins elsewhere in it.
    """
    folder.mkdir()
    config = CONFIG | LLAMA
    wanted = shapes(config)
    largest = max(2 * math.prod(shape) for shape in wanted.values())
    values = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).mul_(0.02).half()
    repeated = memoryview(values.view(torch.uint8).numpy().tobytes())
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in wanted.items():
        block = re.match(r"model\.layers\.(\d+)\.", name)
        parts.setdefault(f"model-{block[1] if block else 'rest'}.safetensors", {})[name] = shape
    for file, tensors in parts.items():
        header, end = {}, 0
        for name, shape in tensors.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
        stated = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(stated).to_bytes(8, "little") + stated)
            while end:
                end -= out.write(repeated[: min(end, len(repeated))])
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    write_json(folder / "config.json", config)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return largest


def streaming(found: Run) -> None:
    """Quantize and repack a checkpoint of 8 GB, on a disk: the most RAM is that of a few tensors."""
    with tempfile.TemporaryDirectory() as scratch:  # memory has no space for it
        folder = Path(scratch)
        largest = large_model(folder / "model")
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        allowed = 3 * largest + 600 * 10**6
        found.facts |= {"bytes of the checkpoint": size, "bytes of its largest tensor": largest, "allowed": allowed}
        rounding = (
            "quantize",
            folder / "model",
            "--method",
            "rtn",
            "--set",
            "clip=none",
            "-o",
            folder / "rounded",
            "-q",
        )
        packing = ("pack", folder / "rounded", "--layout", "marlin", "-o", folder / "packed", "-q")
        for words in (rounding, packing):
            with found.case(words[0]):
                ended = run(measured(words, found.folder / "most"), found.folder, limit=3600)
                assert ended.code == 0, ended.stderr
                most = int((found.folder / "most").read_text())
                found.facts[f"most RAM of {words[0]}"] = most
                found.facts[f"seconds of {words[0]}"] = round(ended.seconds)
                assert most <= allowed, f"{most} bytes of RAM, {allowed} are allowed"


FAMILIES: list[Family] = [
    Family("M1", "memory of 1.10 times the peak that plan states suffices", (3, 12, 12), sufficient),
    Family("M2", "half of it is refused at once, by plan and by quantize", (3, 12, 12), insufficient),
    Family("M3", "memory that is refused ends a run in one line, or changes no byte", (20, 300, 500), without_memory),
    Family("M4", "a checkpoint of 8 GB streams through a few tensors' memory", (0, 1, 1), streaming),
]
