"""Add up the peak memory of a run, by part, from shapes only.

A calibrated run peaks in its largest block. Each part states its bytes in its largest step, from
measured runs. They are rounded up, so that the estimate is never too low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from quantkit.algorithms.block_tuning import TUNING_BYTES
from quantkit.algorithms.hessian import Hessian
from quantkit.algorithms.numerics import factor_dtype
from quantkit.algorithms.rtn import ROUNDING_BYTES
from quantkit.calibration.activations import Activations
from quantkit.calibration.backward import backward_bytes
from quantkit.calibration.budget import (
    PART_OF_GPU,
    PASS_STATES,
    PASSES_BYTES,
    SAVED_BLOCKS,
    TUNED_AT_ONCE,
    gradient_tokens,
    stays_on_gpu,
)
from quantkit.calibration.run import Stream
from quantkit.calibration.self_generated import CACHE_BYTES, INSTEAD, LOGIT_BYTES, LONGEST, SPARE
from quantkit.calibration.sensitivity import TOKENS
from quantkit.calibration.stages.gradients import DRAWING_BYTES, Fisher
from quantkit.calibration.stages.hessians import Hessians
from quantkit.calibration.stages.solve import Solve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import WAITING_BYTES
from quantkit.core.memory_limits import free_memory, memory_limits
from quantkit.core.ranks import ranks
from quantkit.core.threads import MOST_BYTES
from quantkit.errors import Option, QuantkitError, Setting, Words
from quantkit.models.devices import CUDA_DEVICE, compute_dtype, program_bytes
from quantkit.models.families import BLOCK, EXPERT, TOWER
from quantkit.models.weights import PINNED
from quantkit.recipes.calibration_options import Calib
from quantkit.recipes.recipe import Recipe

#: The part of the memory that grows with the longest sequence, and the part that grows with all
#: tokens.
DOCUMENT, ACTIVATIONS, WAITING = "one document", "activations", "waiting to be written"
#: The parts that only gradients have: all of them, a block's file that is read, and errors whose
#: harm is measured.
GRADIENTS, READ, ERRORS = "output gradients", "file of hidden states", "errors of a block"
#: The copy of activations on a GPU that is being saved.
SAVING = "activations that are saved"
#: Passes that wait in a block until linears are solved.
PASSES = "passes that wait"
#: The other processes of a run on this machine.
OTHERS = "other processes"
#: The second store of activations, if blocks are tuned.
UNQUANTIZED = "activations of the unquantized model"
#: The part of a model that writes its calibration text.
AUTHOR = "whole model, to write text"
#: A run is refused if less than this share of its estimated peak can be had. Measured runs took
#: 0.74 to 0.93 of it.
CERTAINLY_NEEDED = 0.6


@dataclass(frozen=True)
class Memory:
    """Hold the estimated peak bytes of a run, by part, on the host (`ram`) and on the GPU (`vram`).

    `least_vram` is the fewest bytes that the GPU needs in any case. `token_bytes` is the size of
    one token's hidden state, `pass_bytes` that of one token in a pass that waits, `sum_bytes` that
    of the sum of a block's gradients. `gpu_memory` is the memory of a GPU that is not here; None
    asks the one that is. `others` are the estimates of the run's other stages: one stage has the
    memory at a time.
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
        if self.others:
            return self._peak().to_dict()
        found: dict[str, Any] = {
            "ram": sum(self.ram.values()),
            "ram_parts": self.ram,
            "estimate": True,
        }
        if self.vram:
            found |= {
                "vram": sum(self.vram.values()),
                "vram_parts": self.vram,
                "vram_least": self.least_vram,
            }
        if self.gpu_memory is not None:
            found["gpu_memory"] = self.gpu_memory
        return found

    def notices(self) -> list[str]:
        """Return a warning for each kind of memory that may not suffice for the run."""
        if self.others:
            return self._peak().notices()
        found = []
        free = free_memory()
        if free is not None and sum(self.ram.values()) > free:
            found.append(
                f"peak memory is estimated at {_gb(sum(self.ram.values()))}, {_gb(free)} are free "
                "here"
            )
        there = self._gpu_memory()
        if there is not None and not self.vram:
            found.append(
                Words(
                    "nothing of this run is computed on a GPU:",
                    Option("gpu_memory"),
                    "has no effect",
                )
            )
        elif there is not None and self.least_vram <= there < sum(self.vram.values()):
            needed = _gb(sum(self.vram.values()))
            estimate = f"peak GPU memory is estimated at {needed},"
            found.append(Words(estimate, self._there(there), ":", self._way_out()))
        return found

    def of_sequences(self, tokens: int, act_budget: int | None) -> Memory:
        """Return the estimate for calibration sequences that have `tokens` tokens in all."""
        stores, real = (
            (ACTIVATIONS, UNQUANTIZED, GRADIENTS, SAVING, READ),
            tokens * self.token_bytes,
        )
        most = real if act_budget is None else min(real, act_budget)
        ram = {
            part: min(size, real if part == READ else most)
            for part, size in self.ram.items()
            if part in stores
        }
        vram = {part: min(size, real) for part, size in self.vram.items() if part in stores}
        for parts, found in ((self.ram, ram), (self.vram, vram)):
            found |= (
                {PASSES: min(parts[PASSES], tokens * self.pass_bytes)} if PASSES in parts else {}
            )
        others = tuple(stage.of_sequences(tokens, act_budget) for stage in self.others)
        return replace(self, ram={**self.ram, **ram}, vram={**self.vram, **vram}, others=others)

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
        for stage in (self, *self.others):
            replace(stage, others=(), gpu_memory=self.gpu_memory)._require()

    def _require(self) -> None:
        least = min(memory_limits(), key=lambda limit: limit.bytes, default=None)
        needed = sum(self.ram.values())
        if least is not None and least.bytes < CERTAINLY_NEEDED * needed:
            raise QuantkitError(
                f"the run takes about {_gb(needed)} of memory, and {least.cause} allows "
                f"{_gb(max(0, least.bytes))}",
                Words(self._smaller(), least.remedy),
            )
        there = self._gpu_memory()
        if there is not None and there < self.least_vram:
            on_cpu = Words("use", Option("device", "cpu"))
            what, ways = "the weights of the largest block take", (on_cpu, "a GPU with more memory")
            if AUTHOR in self.vram:
                what, ways = (
                    "the whole model, which writes its calibration text, takes",
                    (INSTEAD, on_cpu),
                )
            raise QuantkitError(
                Words(f"{what} {_gb(self.least_vram)} of GPU memory,", self._there(there)), *ways
            )

    def _smaller(self) -> str:
        """Name the option that reduces the largest part of the RAM, if there is one."""
        ways = {
            ACTIVATIONS: Words("use a smaller", Option("act_budget"), "or"),
            AUTHOR: Words(INSTEAD, "or"),
            DOCUMENT: Words("use a smaller", Setting("max_length"), "or"),
            **dict.fromkeys((GRADIENTS, READ), Words("use", Setting("output_aware", False), "or")),
        }
        return ways.get(max(self.ram, key=lambda part: self.ram[part]), "")

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

    def _way_out(self) -> str:
        """Name the option that reduces the largest part of the GPU memory."""
        largest = max(self.vram, key=lambda part: self.vram[part])
        ways = {
            DOCUMENT: Words("use a smaller", Setting("max_length")),
            AUTHOR: INSTEAD,
            **dict.fromkeys((GRADIENTS, READ), Words("use", Setting("output_aware", False))),
        }
        return ways.get(
            largest, Words("use", Option("device", "cpu"), ", or a GPU with more memory")
        )


def streamed_memory(src: Checkpoint, linears: Mapping[str, tuple[int, int]]) -> Memory:
    """Estimate the peak of rounding to nearest or repacking: one tensor is in memory at a time."""
    copied = max(
        (prod(src.shape(name)) * src.dtype(name).itemsize for name in src.names()), default=0
    )
    largest = max((n * k for n, k in linears.values()), default=0)
    return Memory(
        {
            "program": program_bytes(cuda=False),
            "largest weight": max(ROUNDING_BYTES * largest, 2 * copied),
        }
    )


class _Sizes:
    """Hold the sizes of a calibrated run: `width` bytes a number, blocks by path, and documents of
    equal length.

    The number of tokens is an upper bound, because documents may be shorter than the maximum.
    """

    def __init__(
        self,
        src: Checkpoint,
        linears: Mapping[str, tuple[int, int]],
        recipe: Recipe,
        device: str | None,
    ) -> None:
        self.here = torch.cuda.is_available()
        self.cuda = self.here if device in (None, "auto") else str(device).startswith("cuda")
        self.kind = "cuda" if self.cuda else "cpu"
        self.width = compute_dtype(src.dtype_of_model, torch.device(self.kind)).itemsize
        self.factors = (
            factor_dtype(torch.device("cuda")) if self.cuda and self.here else torch.float64
        )
        self.linears = {module: shape for module, shape in linears.items() if BLOCK.match(module)}
        self.blocks = _in_blocks({name: prod(src.shape(name)) for name in src.names()})
        self.block = self.width * max(self.blocks.values(), default=0)
        self.outputs = self.most(lambda n, _: n)
        self.outside = [
            self.width * prod(src.shape(name)) for name in src.names() if not BLOCK.match(name)
        ]
        asked = recipe.calibration.max_length
        self.longest = min(asked, _stated(src, "max_position_embeddings") or asked)
        self.heads, self.vocabulary = (
            _stated(src, "num_attention_heads") or 1,
            _stated(src, "vocab_size") or 0,
        )
        self.hidden = _stated(src, "hidden_size") or max(
            (min(n, k) for n, k in self.linears.values()), default=0
        )
        self.ranks = ranks().count
        # A rank may have one document more than another.
        documents = recipe.calibration.samples // self.ranks + (self.ranks > 1)
        self.tokens = documents * self.longest
        self.activations = Activations.bytes(self.tokens, self.hidden, self.width)
        widest = max((k for _, k in self.linears.values()), default=0)
        self.passing = self.width * (PASS_STATES * self.hidden + widest)
        of_all = (
            gradient_tokens(documents * self.ranks * self.longest, self.longest)
            if recipe.output_aware
            else 0
        )
        tokens = of_all // self.ranks + (self.longest if self.ranks > 1 and of_all else 0)
        self.gradients = Activations.bytes(tokens, self.hidden, self.width)

    def most(self, count: Callable[[int, int], int]) -> int:
        """Add up the counts of linears `[n, k]` in each block; return the largest sum."""
        return max(
            _in_blocks({module: count(*shape) for module, shape in self.linears.items()}).values(),
            default=0,
        )


def calibrated_memory(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    device: str | None = None,
    act_budget: int | None = None,
    gpu_memory: int | None = None,
    *,
    sensitivities: bool = False,
) -> Memory:
    """Estimate the peak of a run with activations, on `device` (None: as `auto` chooses).

    `gpu_memory` are the bytes of a GPU that is not here. With `sensitivities` their pass is one
    more stage.
    """
    sizes = _Sizes(src, linears, recipe, device)
    if sizes.cuda and gpu_memory is None and sizes.here:
        gpu_memory = torch.cuda.mem_get_info()[0]

    def stage(stores: Mapping[str, int], parts: Mapping[str, int]) -> Memory:
        """Return the estimate of a stage with some stores of activations, and parts where it
        computes.
        """
        in_ram = {
            part: size if act_budget is None else min(size, act_budget)
            for part, size in stores.items()
        }
        host = {"program": program_bytes(sizes.cuda, training=sizes.gradients > 0), **in_ram}
        token_bytes = sizes.hidden * sizes.width
        if not sizes.cuda:
            return Memory({**host, **parts}, token_bytes=token_bytes)
        fit = (
            part
            for part, size in stores.items()
            if in_ram[part] == size and stays_on_gpu(size, gpu_memory)
        )
        on_gpu = {part: stores[part] for part in fit}
        host |= {**dict.fromkeys(on_gpu, 0), **({READ: parts[READ]} if READ in parts else {})}
        return Memory(host, {"CUDA": CUDA_DEVICE, **parts, **on_gpu}, token_bytes=token_bytes)

    stores = {ACTIVATIONS: sizes.activations}
    if recipe.tune:
        stores[UNQUANTIZED] = sizes.activations
    others = tuple(stage(*parts) for parts in _of_gradients(sizes)) if sizes.gradients else ()
    if recipe.calibration.is_written:
        others = (*others, writing_memory(src, recipe.calibration, sizes.kind))
    found = replace(stage(stores, _of_solving(sizes, recipe)), others=others)
    if sensitivities:
        tokens = gradient_tokens(recipe.calibration.samples * sizes.longest, sizes.longest, TOKENS)
        sizes.gradients = Activations.bytes(tokens, sizes.hidden, sizes.width)
        head, (held, block) = _of_gradients(sizes)
        once = max(sizes.longest, TUNED_AT_ONCE[sizes.kind])
        block[ERRORS] = 4 * sizes.most(lambda n, k: n * k + once * (n + k))
        found = replace(found, others=(*others, stage(*head), stage(held, block)))
    passing = sizes.passing if recipe.true_sequential else 0
    found = replace(found, pass_bytes=passing, sum_bytes=Hessian.bytes(sizes.hidden))
    waiting = found.pass_bytes * sizes.tokens
    if not sizes.cuda:
        most = (
            PASSES_BYTES
            if act_budget is None
            else min(PASSES_BYTES, max(0, act_budget - sizes.activations))
        )
        return replace(found, ram={**found.ram, PASSES: min(most, waiting)})
    saved = ACTIVATIONS in found.vram and len(sizes.blocks) > SAVED_BLOCKS[sizes.kind]
    writing = min(MOST_BYTES, WAITING_BYTES * max(sizes.blocks.values(), default=0))
    vram = {**found.vram, **({SAVING: sizes.activations} if saved else {}), WAITING: writing}
    if gpu_memory is not None:
        vram[PASSES] = max(
            0, min(waiting, round(PART_OF_GPU * gpu_memory), gpu_memory - sum(vram.values()))
        )
    # The next block is read ahead. The tensors outside the blocks wait behind the last one.
    loading = round(PINNED * sizes.block)
    host = {**found.ram, "loading": loading, WAITING: min(MOST_BYTES, sum(sizes.outside))}
    least = sizes.width * max(
        (size for block, size in sizes.blocks.items() if not TOWER.search(block)), default=0
    )
    return replace(found, ram=host, vram=vram, least_vram=least)


def _of_solving(sizes: _Sizes, recipe: Recipe) -> dict[str, int]:
    """Add up the parts while a block is solved and tuned."""
    width, linears = sizes.width, sizes.linears
    squares, rows = Solve.bytes(_sharing(linears), recipe, sizes.factors, sizes.kind)
    parts = {
        "block": sizes.block
        * (2 if recipe.tune else 1),  # tuning begins from the weights before solving
        "Hessian and factor": squares,
        "rows being solved": rows,
        "Hessians of experts": Hessians.bytes(_of_experts(linears), sizes.ranks),
        DOCUMENT: Stream.bytes(sizes.outputs, sizes.longest, width, sizes.kind),
    }
    if sizes.cuda:
        channels = max((k for _, k in linears.values()), default=0)
        parts["chunk of a Hessian"] = Hessian.chunk_bytes(channels, sizes.kind, width)
        # The allocator gives a document's memory to the solver.
        parts[DOCUMENT] = max(0, parts[DOCUMENT] - squares - rows)
    if recipe.tune:
        backward, _ = backward_bytes(sizes.outputs, sizes.heads, sizes.longest, width, sizes.kind)
        root = Fisher.root_bytes(sizes.hidden) if sizes.gradients else 0
        tuning = TUNING_BYTES * sizes.most(lambda n, k: n * k) + max(backward, root)
        # Solving has ended by then.
        parts["tuning"] = max(0, tuning - (sum(parts.values()) - sizes.block))
    # The embeddings are in memory only before the first block is solved.
    before = max(sizes.outside, default=0) - sum(parts.values())
    return {**parts, "embeddings, before the blocks": max(0, before)}


def _of_gradients(sizes: _Sizes) -> list[tuple[dict[str, int], dict[str, int]]]:
    """List stores and parts of drawing tokens, and of going back through a block."""
    held = {UNQUANTIZED: sizes.gradients, GRADIENTS: sizes.gradients}
    backward = sum(
        backward_bytes(sizes.outputs, sizes.heads, sizes.longest, sizes.width, sizes.kind)
    )
    summing = Fisher.summing_bytes(sizes.hidden, sizes.width, sizes.kind)
    block = {"block": sizes.block, READ: sizes.gradients, "backward pass": max(backward, summing)}
    if sizes.cuda:  # the next file is read meanwhile, and copies wait to be written
        each = max(sizes.gradients, Hessian.bytes(sizes.hidden))
        block |= {READ: 2 * sizes.gradients, WAITING: min(MOST_BYTES, len(sizes.blocks) * each)}
    head = {
        "output head": max(sizes.outside, default=0),
        DOCUMENT: DRAWING_BYTES * sizes.longest * sizes.vocabulary,
    }
    return [(held, head), (held, block)]


def writing_memory(src: Checkpoint, calib: Calib, device: str) -> Memory:
    """Estimate the peak of a model that writes its calibration text, on a `device` of a kind, cpu
    or cuda.
    """
    width = compute_dtype(src.dtype_of_model, torch.device(device)).itemsize
    layers, hidden = (
        len(_in_blocks({name: 1 for name in src.names()})),
        _stated(src, "hidden_size") or 0,
    )
    rows = calib.samples + calib.samples // SPARE
    row = 2 * width * layers * hidden * min(calib.max_length, LONGEST)
    parts = {
        AUTHOR: width * sum(prod(src.shape(name)) for name in src.names()),
        "keys and values": max(row, min(CACHE_BYTES[device], rows * row)),
        "logits": LOGIT_BYTES * rows * (_stated(src, "vocab_size") or 0),
    }
    return _where_it_computes(device == "cuda", parts, least=sum(parts.values()))


def _where_it_computes(cuda: bool, parts: dict[str, int], least: int) -> Memory:
    program = {"program": program_bytes(cuda)}
    return (
        Memory(program, {"CUDA": CUDA_DEVICE, **parts}, least)
        if cuda
        else Memory({**program, **parts})
    )


def _stated(src: Checkpoint, key: str) -> int | None:
    """Return a size of the text model from config.json, None if it is not a positive number."""
    text = src.config.get("text_config")
    value = (text if isinstance(text, dict) else src.config).get(key)
    return value if type(value) is int and value > 0 else None


def _sharing(linears: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """List k and the rows of linears that may share one Hessian; as an upper bound, all linears of
    one parent.
    """
    found: Counter[tuple[str, int]] = Counter()
    for module, (n, k) in linears.items():
        found[module.rpartition(".")[0], k] += n
    return [(k, rows) for (_, k), rows in found.items()]


def _of_experts(linears: Mapping[str, tuple[int, int]]) -> int:
    """Compute the bytes of one layer's Hessians: one for each expert, for the inputs of one
    projection.
    """
    groups = {
        (found[1], found[2], k)
        for module, (_, k) in linears.items()
        if (found := EXPERT.match(module))
    }
    sizes: Counter[tuple[str, int]] = Counter()
    for layer, _, k in groups:
        sizes[layer, k] += Hessian.bytes(k) + Hessian.chunk_bytes(k)
    return max(sizes.values(), default=0)


def _in_blocks(counts: Mapping[str, int]) -> dict[str, int]:
    """Add up counts of linears by the path of their block."""
    found: Counter[str] = Counter()
    for module, count in counts.items():
        if block := BLOCK.match(module):
            found[block[1]] += count
    return found


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
