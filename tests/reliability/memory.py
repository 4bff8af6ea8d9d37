"""Little memory: plan's figure suffices, and less is refused at once (M1 to M4)."""

from __future__ import annotations

import json
import math
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.io.safetensors_files import SafetensorsWriter
from tests.promises.model import CONFIG, shapes, write_json
from tests.reliability.campaign import Family, Run
from tests.reliability.forks import command, run
from tests.reliability.jobs import Job, Jobs, Work, at_operation, case, chosen, survives
from tests.reliability.samples import model, one_line, quantkit, text, weights

MIB = 2**20
#: Bytes from which on M3 counts an allocation, and the most of them that fail in the nightly column.
LARGE, MOST = 64 * 2**10, 400
#: Runs of M1 and M2: the model, and options of quantize. `TEXT` is the calibration text.
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 2048, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 8}
SHORT, LONG = "--samples 8 --max-length 64", "--samples 32 --max-length 512"
RUNS = [
    ("small", "--method rtn"),
    ("wide", f"--calib TEXT {SHORT}"),
    ("wide", "--format fp6 --method rtn"),
    ("small", "--format fp6 --method rtn"),
    ("small", f"--calib TEXT {LONG}"),
    ("small", f"--calib TEXT {LONG} --prune 2:4 --layout marlin24"),
    ("wide", "--method rtn"),
    ("wide", "--method rtn --layout gptq-v2 --asym --group-size channel"),
    ("wide", f"--calib TEXT {SHORT} --format fp6 --method gptq"),
    ("wide", f"--calib TEXT {LONG}"),
    ("wide", f"--calib TEXT {LONG} --act-budget 1MB"),
    ("wide", f"--calib TEXT {SHORT} --prune 2:4 --layout marlin24"),
    ("small", f"--calib TEXT {LONG} --set tune=2 --set output_aware=true"),
]


def status(name: str) -> int:
    """Return a figure of this process in bytes, as VmHWM, the most RAM that it had."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def limit_data(more: int) -> None:
    """Let the system refuse memory as soon as this process takes `more` bytes than now, or make it do with fewer.

    RLIMIT_DATA counts private writable memory, whether used or not. Address space, which RLIMIT_AS counts, is no
    memory: torch reserves much that it never uses.
    """
    limit = max(0, status("VmData") + more)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def measured(words: tuple[object, ...], record: Path, most: int | None = None) -> Work:
    """Return the work of a command line that records the most RAM it had, and may have `most` bytes (None: any)."""

    def work() -> int | None:
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is that of now
        if most is not None:
            limit_data(max(0, most - status("VmRSS")))
        try:
            return command(*words)()
        finally:
            record.write_text(f"{status('VmHWM')}")

    return work


def each_run(found: Run) -> Iterator[tuple[str, tuple[object, ...], Path, int]]:
    """Count a case for each run; yields its name, its words, an output and the bytes of RAM that a plan states."""
    folder = found.folder
    calib = text(folder / "text.txt")
    models = {"small": model(folder / "small"), "wide": model(folder / "wide", 1, **WIDE)}
    for size, options in RUNS if found.column != "pr" else RUNS[:3]:
        words = (models[size], *(calib if word == "TEXT" else word for word in options.split()))
        with case(found, f"{size} {options}", folder / "out"):
            stated = json.loads(quantkit(folder, "plan", *words, "--json").stdout)
            yield f"{size} {options}", words, folder / "out", int(stated["peak_memory"]["ram"])


def sufficient(found: Run) -> None:
    """Run within 1.10 times the peak of the plan: the system refuses more, and the most RAM is measured beside it.

    The most RAM counts libraries and mapped files too.
    """
    ratios: dict[str, float] = {}
    record = found.folder / "most"
    for name, words, out, peak in each_run(found):
        allowed = int(1.10 * peak)
        ended = run(measured(("quantize", *words, "-o", out, "-q"), record, allowed), found.folder)
        assert ended.code == 0, ended.stderr
        most = int(record.read_text())
        ratios[name] = round(most / peak, 3)
        assert most <= allowed, f"{most} bytes of RAM, {allowed} were allowed"
    found.facts["most RAM, by plan's figure"] = ratios


def insufficient(found: Run) -> None:
    """Allow half of the peak of the plan: plan and quantize refuse within 5 seconds, and are never killed.

    A plan alone may take more than half of a small run's peak. Then the system may refuse memory before quantkit
    compares, and the line says so. The RAM of a fork does not count yet the pages of libraries that it
    has not touched, so a plan's is measured before.
    """
    slowest, compared, record = 0.0, 0, found.folder / "most"
    for _, words, out, peak in each_run(found):
        run(measured(("plan", *words, "--json", "-q"), record), found.folder)
        more = peak // 2 - int(record.read_text())
        for first in ("plan", "quantize"):
            ended = run(limited(partial(limit_data, more), (first, *words, "-o", out, "-q")), found.folder)
            one_line(ended, "memory")
            judged = "of memory, and ulimit -d allows" in ended.stderr
            assert ended.code == 1 and (judged or more < 0), ended.stderr
            assert judged or "not enough memory" in ended.stderr, ended.stderr
            compared += judged
            assert ended.seconds <= 5, f"{ended.seconds:.1f} seconds"
            assert not list(out.parent.glob("out*")), "something was written"
            slowest = max(slowest, ended.seconds)
    found.facts |= {"slowest refusal in seconds": round(slowest, 2), "refused by comparing": compared}


def limited(limit: Callable[[], None], words: tuple[object, ...]) -> Work:
    """Return the work of a command line behind a limit."""

    def work() -> int | None:
        limit()
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


def without_memory(found: Run) -> None:
    """Fail at each large allocation, and let the system refuse memory from a moment on.

    A process that gets not one more page is not tried: there Python's `Thread.start` waits for ever for a thread that
    has died before it began, in transformers' own pool.
    """
    known = Jobs(found)
    made = known["rounded"], known["calibrated"]
    record, out = found.folder / "allocations", found.folder / "out"
    steps: list[tuple[Job, int]] = []
    for job in made:
        ended = run(refusing(job.line(out), 0, record), found.folder)
        assert ended.code == 0, ended.stderr
        shutil.rmtree(out)
        found.facts[f"large allocations of {job.name}"] = count = int(record.read_text())
        steps += [(job, k) for k in range(1, count + 1)]
    if found.column == "nightly":
        steps = steps[:: math.ceil(len(steps) / MOST)]
    for job, k in chosen(found, steps, 8, "allocation"):
        with case(found, f"{job.name}: allocation {k}", out):
            ended = run(refusing(job.line(out), k, record), found.folder)
            survives(job, ended, out, found.folder, "(?i)memory")
    moments = [(job, k) for job in made for k in range(1, job.operations, 4)]
    limits = chosen(found, list(product(moments, (MIB // 4, MIB, 16 * MIB))), 8, "limit")
    completed = 0
    for (job, k), more in limits:
        with case(found, f"{job.name}: {more} bytes from operation {k}", out):
            ended = run(at_operation(k, partial(limit_data, more), command(*job.line(out))), found.folder)
            completed += ended.code == 0
            survives(job, ended, out, found.folder, "(?i)memory")
    found.facts["of those limited, completed"] = f"{completed} of {len(limits)}"


#: The model of M4: 18 blocks of 436 MB, and two matrices of the vocabulary, which are its largest tensors.
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 18, "vocab_size": 32000}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 32}


def large_model(folder: Path) -> int:
    """Write a Llama of more than 8 GB, a file a block, a tensor at a time; returns the bytes of its largest tensor."""
    folder.mkdir()
    wanted = shapes(CONFIG | LLAMA)
    largest = max(map(math.prod, wanted.values()))
    values = torch.randn(largest, generator=torch.Generator().manual_seed(0)).mul_(0.02).half()
    weight_map: dict[str, str] = {}
    for file, names in groupby(wanted, lambda name: f"model-{'.'.join(name.split('.')[:3])}.safetensors"):
        writer = SafetensorsWriter(folder / file)
        for name in names:
            writer.add(name, values[: math.prod(wanted[name])].view(wanted[name]))
            weight_map[name] = file
        writer.close()
    write_json(folder / "config.json", CONFIG | LLAMA)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return 2 * largest


def streaming(found: Run) -> None:
    """Quantize and repack a checkpoint of 8 GB, on a disk: the most RAM is that of a few tensors."""
    with tempfile.TemporaryDirectory() as scratch:  # memory has no space for it
        folder, record = Path(scratch), found.folder / "most"
        largest = large_model(folder / "model")
        size = sum(path.stat().st_size for path in weights(folder / "model"))
        allowed = 3 * largest + 600 * 10**6
        found.facts |= {"bytes of the checkpoint": size, "bytes of its largest tensor": largest, "allowed": allowed}
        rounding = ("quantize", folder / "model", "--method", "rtn", "--set", "clip=none", "-o", folder / "rounded")
        packing = ("pack", folder / "rounded", "--layout", "marlin", "-o", folder / "packed")
        for words in (rounding, packing):
            with found.case(words[0]):
                ended = run(measured((*words, "-q"), record), found.folder, limit=3600)
                assert ended.code == 0, ended.stderr
                found.facts[f"most RAM of {words[0]}"] = most = int(record.read_text())
                found.facts[f"seconds of {words[0]}"] = round(ended.seconds)
                assert most <= allowed, f"{most} bytes of RAM, {allowed} are allowed"


FAMILIES: list[Family] = [
    Family("M1", "memory of 1.10 times the peak that plan states suffices", (3, 12, 12), sufficient),
    Family("M2", "half of it is refused at once, by plan and by quantize", (3, 12, 12), insufficient),
    Family("M3", "memory that is refused ends a run in one line, or changes no byte", (16, 300, 500), without_memory),
    Family("M4", "a checkpoint of 8 GB streams through a few tensors' memory", (0, 1, 1), streaming),
]
