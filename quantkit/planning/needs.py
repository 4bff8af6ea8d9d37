"""The needs of a run: its peak memory by part, its disk and its time, from shapes only.

A calibrated run peaks in its largest block. Each stage states its bytes in its largest step, from
measured runs. They are rounded up, so that the estimate is never too low.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.algorithms.hessian import Hessian
from quantkit.algorithms.rtn import ROUNDING_BYTES
from quantkit.calibration import divergence
from quantkit.calibration.budget import (
    ACTIVATIONS,
    DOCUMENT,
    GRADIENTS,
    LOADED,
    PART,
    PART_BYTES,
    PASS_STATES,
    READ,
    ROUNDED_BYTES,
    ROWS,
    SAVED_BLOCKS,
    SQUARES,
    TOKENS_AT_ONCE,
    UNQUANTIZED,
    WAITING,
    WHOLE,
    Peaks,
    Sizes,
    gradient_documents,
    most_waiting,
    stays_on_gpu,
)
from quantkit.calibration.scales import INSTEAD, tuning_bytes
from quantkit.calibration.stages import stages_of
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import QUEUED, WAITING_BYTES
from quantkit.core.memory_limits import free_memory, memory_limits
from quantkit.core.ranks import ranks
from quantkit.core.threads import MOST_BYTES, MOST_UNITS
from quantkit.core.units import format_bytes
from quantkit.errors import CheckpointError, Option, QuantkitError, Setting, Words
from quantkit.models.families import TOWER
from quantkit.models.weights import CUDA_DEVICE, PINNED, program_bytes
from quantkit.planning.output import Files
from quantkit.recipes.recipe import Recipe

#: The copy of activations on a GPU that is being saved.
SAVING = "activations that are saved"
#: Passes that wait in a block until linears are solved.
PASSES = "passes that wait"
#: The text that is drawn from, with its tokens, if it has more characters than `SHORT_TEXT`; and
#: the bytes for a character: measured are 3 to 11.
TEXT, TEXT_BYTES, SHORT_TEXT = "calibration text", 12, 2**23
#: The parts of weights that threads round on a GPU.
ROUNDED = "weights being rounded"
#: The other processes of a run on this machine.
OTHERS = "other processes"
#: Parts with values of all documents: a budget bounds them, and a GPU holds those that fit.
STORES = (ACTIVATIONS, UNQUANTIZED, GRADIENTS)
#: A run is refused if less than this share of its estimated peak can be had. Measured runs took
#: 0.74 to 0.93 of it.
CERTAINLY_NEEDED = 0.6
#: The options that reduce parts.
SMALLER = {
    ACTIVATIONS: Words("use a smaller", Option("act_budget")),
    DOCUMENT: Words("use a smaller", Setting("max_length")),
    WHOLE: INSTEAD,
    GRADIENTS: Words("use", Setting("output_aware", False)),
    READ: Words("use", Setting("output_aware", False)),
}
#: The parts on a GPU that cannot be less, and what takes them.
TAKEN = {WHOLE: "tuning scales takes", ROUNDED: "rounding takes"}


@dataclass(frozen=True)
class Memory:
    """Hold the estimated peak bytes of a run, by part, on the host (`ram`) and on the GPU (`vram`).

    `least_vram` is the fewest bytes that the GPU needs in any case. Sizes in bytes: `token_bytes`
    of a token's hidden state, `pass_bytes` of a token in a waiting pass, `sum_bytes` of the sum of
    a block's gradients. `gpu_memory` is the memory of another machine's GPU; None asks the GPU of
    this machine. `others` are the estimates of the run's other stages: one stage has the memory at
    a time.
    """

    ram: dict[str, int]
    vram: dict[str, int] = field(default_factory=dict)
    least_vram: int = 0
    token_bytes: int = 0
    pass_bytes: int = 0
    sum_bytes: int = 0
    gpu_memory: int | None = None
    others: tuple[Memory, ...] = ()

    def _peak(self) -> Memory:
        """Return the stage that needs most, on the host and on the GPU."""
        stages = (self, *self.others)
        ram = max((stage.ram for stage in stages), key=lambda parts: sum(parts.values()))
        vram = max((stage.vram for stage in stages), key=lambda parts: sum(parts.values()))
        least = max(stage.least_vram for stage in stages)
        return replace(self, ram=ram, vram=vram, least_vram=least, others=())

    def to_dict(self) -> dict[str, Any]:
        """Return totals and parts as plain data."""
        peak = self._peak()
        found: dict[str, Any] = {
            "ram": sum(peak.ram.values()),
            "ram_parts": peak.ram,
            "estimate": True,
        }
        if peak.vram:
            found |= {
                "vram": sum(peak.vram.values()),
                "vram_parts": peak.vram,
                "vram_least": peak.least_vram,
            }
        if self.gpu_memory is not None:
            found["gpu_memory"] = self.gpu_memory
        return found

    def notices(self) -> Iterator[str]:
        """Yield a warning for each kind of memory that may not suffice for the run."""
        peak, free = self._peak(), free_memory()
        ram, vram = sum(peak.ram.values()), sum(peak.vram.values())
        if free is not None and ram > free:
            yield f"peak memory is estimated at {_gb(ram)}, {_gb(free)} are free here"
        there = peak._gpu_memory()
        if there is not None and peak.least_vram <= there < vram:
            yield Words(
                f"peak GPU memory is estimated at {_gb(vram)},",
                self._there(there),
                ":",
                _smaller(peak.vram)
                or Words("use", Option("device", "cpu"), ", or a GPU with more memory"),
            )

    def of_sequences(self, tokens: int, act_budget: int | None) -> Memory:
        """Return the estimate for calibration sequences that have `tokens` tokens in all."""
        real = tokens * self.token_bytes
        most = real if act_budget is None else min(real, act_budget)

        def bounded(parts: Mapping[str, int], store: int) -> dict[str, int]:
            stores = dict.fromkeys((ACTIVATIONS, UNQUANTIZED, GRADIENTS, SAVING), store)
            bounds = {**stores, READ: real, PASSES: tokens * self.pass_bytes}
            return {part: min(size, bounds.get(part, size)) for part, size in parts.items()}

        return replace(
            self,
            ram=bounded(self.ram, most),
            vram=bounded(self.vram, real),
            others=tuple(stage.of_sequences(tokens, act_budget) for stage in self.others),
        )

    def of_text(self, characters: int) -> Memory:
        """Return the estimate for a calibration text of so many characters, which is in memory
        before the first block.
        """
        if characters <= SHORT_TEXT or "program" not in self.ram:
            return self
        drawing = Memory({"program": self.ram["program"], TEXT: TEXT_BYTES * characters})
        return replace(self, others=(*self.others, drawing))

    def of_processes(self, count: int) -> Memory:
        """Return the estimate for `count` processes of a run that share this machine, each with a
        GPU of its own.
        """
        others = (count - 1) * sum(self.ram.values())
        return replace(self, ram={**self.ram, OTHERS: others}) if others else self

    def require(self) -> None:
        """Raise QuantkitError if the run certainly needs more memory than it may use here, or than
        the GPU has.
        """
        least = min(memory_limits(), key=lambda limit: limit.bytes, default=None)
        needed = sum(self.ram.values())
        if least is not None and least.bytes < CERTAINLY_NEEDED * needed:
            raise QuantkitError(
                f"the run takes about {_gb(needed)} of memory, and {least.cause} allows "
                f"{_gb(max(0, least.bytes))}",
                Words(_smaller(self.ram), "or", least.remedy)
                if _smaller(self.ram)
                else least.remedy,
            )
        there = self._gpu_memory()
        if there is not None and there < self.least_vram:
            taken = (what for part, what in TAKEN.items() if part in self.vram)
            what = next(taken, "the weights of the largest block take")
            way = INSTEAD if WHOLE in self.vram else Words("use", Option("device", "cpu"))
            rule = Words(f"{what} {_gb(self.least_vram)} of GPU memory,", self._there(there))
            raise QuantkitError(rule, way, "a GPU with more memory")
        for stage in self.others:
            replace(stage, gpu_memory=self.gpu_memory).require()

    def _gpu_memory(self) -> int | None:
        """Return the bytes of the GPU; None if no GPU matters."""
        if self.gpu_memory is not None:
            return self.gpu_memory
        return torch.cuda.mem_get_info()[0] if self.vram and torch.cuda.is_available() else None

    def _there(self, there: int) -> str:
        return (
            f"{_gb(there)} are free here"
            if self.gpu_memory is None
            else Words(Option("gpu_memory"), f"is {_gb(there)}")
        )


def _smaller(parts: Mapping[str, int]) -> Words | None:
    """Name the option that reduces the largest part, if there is one."""
    return SMALLER.get(max(parts, key=lambda part: parts[part]))


@dataclass(frozen=True)
class Needs:
    """The needs of a run: peak memory, peak disk space by part, and free disk space.

    `duration` are the least and the most seconds by a measured probe.
    """

    memory: Memory
    disk: Mapping[str, int] = field(default_factory=dict)
    disk_free: int | None = None
    duration: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the needs as `plan --json` prints them."""
        return {
            "peak_memory": self.memory.to_dict(),
            "disk_free": self.disk_free,
            "duration": dict(zip(("low", "high"), self.duration, strict=True))
            if self.duration
            else None,
        }

    def disk_problem(self, out: Path | None, there: int = 0) -> str | None:
        """Say that the disk of `out` is too small, where `there` bytes of the run are already; None
        if it is not.
        """
        needed = sum(self.disk.values()) - there
        if self.disk_free is None or needed <= self.disk_free:
            return None
        ways = [Words("free some or use another", Option("out"))]
        gradients = self.disk.get(GRADIENTS, 0)
        if gradients and gradients == max(self.disk.values()):
            ways.append(
                Words(
                    "use",
                    Setting("output_aware", False),
                    f": {format_bytes(gradients)} are for gradients",
                )
            )
        return CheckpointError(
            f"the run takes {format_bytes(needed)} of disk and {format_bytes(self.disk_free)} are "
            "free",
            *ways,
            subject=out,
        ).typed


def free_disk(out: Path | None) -> int | None:
    """Count the free bytes of the disk of `out`; None if it is not known."""
    if out is None:
        return None
    existing = next((folder for folder in out.absolute().parents if folder.is_dir()), None)
    return shutil.disk_usage(existing).free if existing else None


def disk_peak(
    files: Files,
    memory: Memory,
    recipe: Recipe,
    lengths: Sequence[int],
    blocks: int,
    act_budget: int | None,
) -> dict[str, int]:
    """Add up the peak bytes of a run on the disk, by part; `lengths` are the tokens of all
    documents.

    Two snapshots of activations stay until the end, and a third exists while the older one is
    replaced. The gradients of each block give way to their sum, which stays to the end. Stores
    beyond the budget are files.
    """
    count = ranks().count
    graded = gradient_documents(lengths, ranks=count) if recipe.output_aware else 0
    activations, gradients = (
        memory.token_bytes * sum(each) for each in (lengths, lengths[:graded])
    )
    stores = (activations, activations if recipe.tune else 0, gradients)
    in_files = [size for size in stores if act_budget is not None and size > count * act_budget]
    saved = max(0, blocks - 1)
    again = files.total if recipe.tune_scales else 0
    written, kept = max(
        (files.before_last, min(saved, 3) * activations),  # at the last snapshot
        (files.total + again, min(saved, 2) * activations),  # at the end
        key=sum,
    )
    sums = count * memory.sum_bytes if graded else 0
    before, later = blocks * max(gradients, sums), blocks * sums
    if before > written + kept + later:
        return {ACTIVATIONS: sum(in_files), GRADIENTS: before}
    return {"output": written, ACTIVATIONS: kept + sum(in_files), GRADIENTS: later}


def streamed_memory(
    src: Checkpoint,
    linears: Iterable[tuple[int, int]],
    each: int = ROUNDING_BYTES,
    at_once: int = 1,
    on_gpu: int = 0,
) -> Memory:
    """Estimate the peak of rounding to nearest or repacking `linears` `(n, k)`, with `each` bytes
    for each weight; beyond MOST_BYTES one is in memory at a time, else `at_once`. Parts of weights
    are `on_gpu` at a time.
    """
    copied = max(
        (prod(src.shape(name)) * src.dtype(name).itemsize for name in src.names()), default=0
    )
    sizes = sorted((each * n * k for n, k in linears), reverse=True)
    largest = max([2 * copied, *sizes[:1]])
    beside = sizes if on_gpu else sizes[: at_once - 1]  # a GPU takes many small weights together
    others = min(sum(beside), max(0, MOST_BYTES - largest))
    part = PART_BYTES * min(PART, max(sizes, default=0) // each)
    one = ROUNDED_BYTES * sum(sizes[:1]) // each
    whole = max(one, ROUNDED_BYTES * min(sum(sizes), MOST_BYTES) // each)
    return Memory(
        {
            "program": program_bytes(cuda=on_gpu > 0, linears=len(sizes)),
            "largest weight": largest + others,
            WAITING: min(QUEUED, sum(sizes)),
        },
        {"CUDA": CUDA_DEVICE, ROUNDED: on_gpu * part + whole} if on_gpu else {},
        least_vram=part + one if on_gpu else 0,
    )


def calibrated_memory(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    device: str,
    act_budget: int | None,
    gpu_memory: int | None,
    *,
    sensitivities: bool = False,
) -> Memory:
    """Estimate the peak of a run with activations, on `device`, cpu or cuda.

    `gpu_memory` are the bytes of a GPU that is not here. With `sensitivities` their pass is one
    more stage.
    """
    sizes = Sizes.of(src, linears, recipe, device, gpu_memory)
    gpu_memory = sizes.gpu_memory
    peaks = [stage.bytes(sizes) for stage in stages_of(recipe)]
    passes = [each for peak in peaks for each in peak.before]
    passes += divergence.pass_bytes(sizes) if sensitivities else []
    program = program_bytes(sizes.on_gpu, bool(passes or recipe.tune_scales), len(linears))

    def placed(parts: Mapping[str, int]) -> Memory:
        """Divide parts between the host and a GPU, which holds the stores that fit."""
        stores = {part: size for part, size in parts.items() if part in STORES}
        host = {
            part: size if act_budget is None else min(size, act_budget)
            for part, size in stores.items()
        }
        if not sizes.on_gpu:
            return Memory({"program": program, **parts, **host}, token_bytes=sizes.token)
        fit = [
            part
            for part, size in stores.items()
            if host[part] == size and stays_on_gpu(size, gpu_memory)
        ]
        vram = {part: size for part, size in parts.items() if part not in stores or part in fit}
        host |= dict.fromkeys(fit, 0) | ({READ: parts[READ]} if READ in parts else {})
        return Memory(
            {"program": program, **host},
            {"CUDA": CUDA_DEVICE, **vram},
            token_bytes=sizes.token,
        )

    others = [placed(each) for each in passes]
    if recipe.tune_scales:
        tuning = placed(parts := tuning_bytes(sizes))
        others.append(replace(tuning, least_vram=parts[WHOLE] if sizes.on_gpu else 0))
    activations = sizes.tokens * sizes.token
    found = placed({ACTIVATIONS: activations, **_of_block(sizes, peaks)})
    passing = sizes.width * (PASS_STATES * sizes.hidden + sizes.channels)
    found = replace(
        found,
        others=tuple(others),
        pass_bytes=passing if recipe.true_sequential else 0,
        sum_bytes=Hessian.bytes(sizes.hidden),
    )
    waiting = found.pass_bytes * sizes.tokens
    if sizes.on_gpu:
        return _beside(sizes, found, waiting, gpu_memory)
    held = min(waiting, most_waiting(activations, act_budget, None))
    return replace(found, ram={**found.ram, PASSES: held})


def _of_block(sizes: Sizes, peaks: Sequence[Peaks]) -> dict[str, int]:
    """Add up the parts while the largest block is solved and tuned, and the stores."""
    parts = Counter({LOADED: sizes.block})
    for peak in peaks:
        parts.update(peak.at)
    work = {part: size for part, size in parts.items() if part not in STORES}
    # The documents that run together: about two copies of a block's outputs.
    document = 2 * sizes.width * max(sizes.longest, TOKENS_AT_ONCE[sizes.device]) * sizes.passed
    # The allocator of a GPU gives a document's memory to the solver.
    work[DOCUMENT] = max(0, document - (work[SQUARES] + work[ROWS] if sizes.on_gpu else 0))
    for part, size in (item for peak in peaks for item in peak.behind.items()):
        work[part] = max(0, size - (sum(work.values()) - sizes.block))  # solving has ended by then
    # The embeddings are in memory only before the first block is solved.
    before = sizes.width * max(sizes.outside, default=0) - sum(work.values())
    return {**parts, **work, "embeddings, before the blocks": max(0, before)}


def _beside(sizes: Sizes, found: Memory, waiting: int, gpu_memory: int | None) -> Memory:
    """Add to the estimate of a run on a GPU its work in the background, and passes of `waiting`
    bytes.
    """
    vram = dict(found.vram)
    if ACTIVATIONS in vram and len(sizes.blocks) > SAVED_BLOCKS["cuda"]:
        vram[SAVING] = vram[ACTIVATIONS]
    # Behind a snapshot, or while the source is hashed, solved blocks wait for the writer on the
    # GPU: as many units as its queue takes, beside the block that is being solved.
    block = WAITING_BYTES * max(sizes.blocks.values(), default=0)
    vram[WAITING] = block + min(MOST_BYTES, min(MOST_UNITS, len(sizes.blocks)) * block)
    if gpu_memory is not None:
        left = gpu_memory - sum(vram.values())
        vram[PASSES] = max(0, min(waiting, most_waiting(0, None, gpu_memory), left))
    # The next block is read ahead. A tensor outside the blocks is copied, and perhaps cast, beside
    # them; solved ones wait after the last block.
    outside = min(MOST_BYTES, sizes.width * sum(sizes.outside))
    host = {
        **found.ram,
        "loading": round(PINNED * sizes.block),
        WAITING: max(outside, 2 * sizes.width * max(sizes.outside, default=0)),
    }
    blocks = [size for block, size in sizes.blocks.items() if not TOWER.search(block)]
    return replace(found, ram=host, vram=vram, least_vram=sizes.width * max(blocks, default=0))


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
