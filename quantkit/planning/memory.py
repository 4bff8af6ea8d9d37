"""Estimate the peak memory of a run, by part, from shapes alone.

A calibrated run peaks in its largest block. In memory are then the block's weights, the calibration activations, one
Hessian with its factor, and the solver's copies of the rows that share that Hessian. The constants count arrays that
exist at the same time, in the step of the solver that takes most. They come from measured runs and are rounded up: the
estimate should never be too low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from quantkit.algorithms.hessian import CHUNK, LONG_CHUNK
from quantkit.algorithms.numerics import factor_dtype
from quantkit.algorithms.scale_search import WIDEST_BLOCK
from quantkit.calibration.budget import (
    GRADIENT_TOKENS,
    HESSIAN_BYTES,
    SAVED_BLOCKS,
    TOKENS_AT_ONCE,
    TUNED_AT_ONCE,
    hessian_bytes,
    stays_on_gpu,
)
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.memory_limits import free_memory, memory_limits
from quantkit.core.ranks import ranks
from quantkit.core.work_queue import MOST_BYTES
from quantkit.errors import Option, QuantkitError, Setting, Words
from quantkit.models.devices import compute_dtype
from quantkit.models.families import BLOCK, EXPERT, TOWER
from quantkit.recipes.recipe import Recipe

MIB = 2**20
#: Python, torch, transformers and datasets imported, and the skeleton of the model (measured: 540 MB).
PROGRAM = 600 * MIB
#: Bytes that a torch built for CUDA adds where nothing is computed on a GPU (measured: 360 MB of its libraries).
CUDA_BUILD = 400 * MIB
#: Bytes that the CUDA runtime and its libraries add, on the host and on the device.
CUDA_HOST, CUDA_DEVICE = 1700 * MIB, 800 * MIB
#: Pinned memory that the block read ahead takes, as a multiple of its bytes: torch makes tensors of 2^n bytes there.
PINNED = 4 / 3
#: Bytes for each weight of the largest linear while it is rounded, packed or unpacked: the source, its float32 copy,
#: the scale search's scratch, the codes, the words (measured: 11.4).
STREAMED = 12
#: float32 matrices `[k, k]` while a Hessian is factored, by the dtype of factors: the sum, H, its copy, scratch, the
#: factor.
FACTORED = {torch.float32: 5, torch.float64: 8}
#: The same while rows are solved: the sum, H, its factor, that of the sweep, and H for the losses.
KEPT = {torch.float32: 4, torch.float64: 7}
#: float32 matrices of blocks of H that the scale search factors: the blocks, and three in float64.
SEARCHED = 7
#: float32 matrices `[rows, k]` while rows are solved: weights, targets, errors, both results, the search's scratch.
#: The kernels of a GPU need no more than 4 (benchmarks/gpu/quantize_llama2-70b_3.csv).
SOLVED = {"cpu": 11, "cuda": 4}
#: Bytes for each weight of a block while it is tuned: latent values, mean squares, steps, the dequantized weight, its
#: gradient, and the same in bfloat16; the best codes so far; the source.
TUNED = 28
#: float32 numbers for each token and output feature of a block's linears that are held for its gradient.
BACKWARD = 4
#: The part of the memory that grows with the length of a sequence, and the one that grows with all of their tokens.
DOCUMENT, ACTIVATIONS, WAITING = "one document", "activations", "waiting to be written"
#: The parts that only output gradients have: all of them, a block's file that is read, the matrices of a block.
GRADIENTS, READ, OUTPUTS = "output gradients", "file of gradients", "Hessians of outputs"
#: float32 matrices `[n, n]` while the Hessian of a linear's outputs is factored, by the dtype of factors: the sorted
#: one, its factor, that in order, and its float32 form.
OUTPUTS_FACTORED = {torch.float32: 3, torch.float64: 7}
#: float32 matrices `[rows, k]` meanwhile: weights and sorted weights, codes, errors.
SORTED = 3
#: The same while the losses of output-aware rows are compared: also the new codes, and of the largest weight its error,
#: products and their sum in float64.
REFINED = 10
#: float32 copies of the logits of one document while tokens are drawn and their gradient is made.
DRAWN = 4
#: The copy of activations on a GPU that is being saved.
SAVING = "activations that are saved"
#: Bytes for each weight of the blocks that wait to be written: a byte of codes, and the packed ones.
WAITING_BYTES = 2
#: The processes that share a run on this machine, but this one.
OTHERS = "other processes"
#: The second store of activations, if blocks are tuned or errors are weighed by gradients.
UNQUANTIZED = "activations of the unquantized model"
#: What torch imports for gradients and optimizers beside the program, and what the heap keeps of small matrices.
TRAINING = 100 * MIB
#: The parts that only tuning from end to end has.
WHOLE, STUDENT = "whole model", "quantized model"
#: Bytes for each weight whose code is learned: position, gradient, both moments of Adam, and the best position.
LEARNED = 20
#: float32 copies of the logits of one document while two models are compared and the gradient is made.
LOGITS = 10
#: A run is refused if less than this share of its estimated peak can be had. Measured runs took 0.74 to 0.93 of it.
CERTAINLY_NEEDED = 0.6


@dataclass(frozen=True)
class Memory:
    """Hold the estimated peak bytes of a run, by part, on the host (`ram`) and on the GPU (`vram`).

    `least_vram` are the bytes that the GPU needs without any doubt. `token_bytes` are those of one token's hidden
    state. `gpu_memory` is the memory of a GPU that is not here; None asks the one that is. `others` are the estimates
    of the run's other stages: one stage has the memory at a time.
    """

    ram: dict[str, int]
    vram: dict[str, int] = field(default_factory=dict)
    least_vram: int = 0
    token_bytes: int = 0
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
        found: dict[str, Any] = {"ram": sum(self.ram.values()), "ram_parts": self.ram, "estimate": True}
        if self.vram:
            found |= {"vram": sum(self.vram.values()), "vram_parts": self.vram, "vram_least": self.least_vram}
        if self.gpu_memory is not None:
            found["gpu_memory"] = self.gpu_memory
        return found

    def notices(self) -> list[str]:
        """Return a warning for each kind of memory of which the run may need more than is free."""
        if self.others:
            return self._peak().notices()
        found = []
        free = free_memory()
        if free is not None and sum(self.ram.values()) > free:
            found.append(f"peak memory is estimated at {_gb(sum(self.ram.values()))}, {_gb(free)} are free here")
        there = self._gpu_memory()
        if there is not None and not self.vram:
            found.append(Words("nothing of this run is computed on a GPU:", Option("gpu_memory"), "has no effect"))
        elif there is not None and self.least_vram <= there < sum(self.vram.values()):
            needed = _gb(sum(self.vram.values()))
            estimate = f"peak GPU memory is estimated at {needed},"
            found.append(Words(estimate, self._there(there), ":", self._way_out()))
        return found

    def of_sequences(self, tokens: int, act_budget: int | None) -> Memory:
        """Return the estimate for calibration sequences that have `tokens` tokens in all."""
        stores, real = (ACTIVATIONS, UNQUANTIZED, GRADIENTS, SAVING, READ), tokens * self.token_bytes
        most = real if act_budget is None else min(real, act_budget)
        ram = {part: min(size, real if part == READ else most) for part, size in self.ram.items() if part in stores}
        vram = {part: min(size, real) for part, size in self.vram.items() if part in stores}
        others = tuple(stage.of_sequences(tokens, act_budget) for stage in self.others)
        return replace(self, ram={**self.ram, **ram}, vram={**self.vram, **vram}, others=others)

    def of_processes(self, count: int) -> Memory:
        """Return the estimate for `count` processes of a run that share this machine, each with a GPU of its own."""
        others = (count - 1) * sum(self.ram.values())
        return replace(self, ram={**self.ram, OTHERS: others}) if others else self

    def require(self) -> None:
        """Raise QuantkitError if the run certainly needs more memory than it may use here, or than the GPU has."""
        if self.others:
            return self._peak().require()
        least = min(memory_limits(), key=lambda limit: limit.room, default=None)
        needed = sum(self.ram.values())
        if least is not None and least.room < CERTAINLY_NEEDED * needed:
            raise QuantkitError(
                f"the run takes about {_gb(needed)} of memory, and {least.cause} allows {_gb(max(0, least.room))}",
                Words(self._smaller(), least.remedy),
            )
        there = self._gpu_memory()
        if there is not None and there < self.least_vram:
            if WHOLE in self.vram:
                raise QuantkitError(
                    Words(
                        f"the whole model, unquantized and quantized, takes {_gb(self.least_vram)} of GPU memory,",
                        self._there(there),
                    ),
                    Words("use", Option("device", "cpu")),
                    "a GPU with more memory",
                )
            raise QuantkitError(
                Words(
                    f"the weights of the largest block take {_gb(self.least_vram)} of GPU memory,", self._there(there)
                ),
                Words("use", Option("device", "cpu")),
                "a GPU with more memory",
            )

    def _smaller(self) -> str:
        """Name the option that makes the largest part of the RAM smaller, if there is one."""
        ways = {
            ACTIVATIONS: Words("use a smaller", Option("act_budget"), "or"),
            DOCUMENT: Words("use a smaller", Setting("max_length"), "or"),
            **dict.fromkeys((GRADIENTS, READ, OUTPUTS), Words("use", Setting("output_aware", False), "or")),
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
        """Name the option that makes the largest part of the GPU memory smaller."""
        largest = max(self.vram, key=lambda part: self.vram[part])
        ways = {
            DOCUMENT: Words("use a smaller", Setting("max_length")),
            **dict.fromkeys((GRADIENTS, READ, OUTPUTS), Words("use", Setting("output_aware", False))),
        }
        return ways.get(largest, Words("use", Option("device", "cpu"), ", or a GPU with more memory"))


def streamed_memory(src: Checkpoint, linears: Mapping[str, tuple[int, int]]) -> Memory:
    """Estimate the peak of rounding to nearest or repacking: one tensor is in memory at a time."""
    copied = max((prod(src.shape(name)) * src.dtype(name).itemsize for name in src.names()), default=0)
    largest = max((n * k for n, k in linears.values()), default=0)
    return Memory({"program": _program(), "largest weight": max(STREAMED * largest, 2 * copied)})


def _program() -> int:
    """Return the bytes of Python and its libraries in a run on a CPU."""
    return PROGRAM + (CUDA_BUILD if torch.version.cuda else 0)


def calibrated_memory(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    device: str | None = None,
    act_budget: int | None = None,
    gpu_memory: int | None = None,
) -> Memory:
    """Estimate the peak of a run with activations, on `device` (None: as `auto` chooses).

    The number of tokens is an upper bound, because documents may be shorter than the maximum. `gpu_memory` are the
    bytes of a GPU that is not here.
    """
    here = torch.cuda.is_available()
    cuda = here if device in (None, "auto") else str(device).startswith("cuda")
    width = compute_dtype(src.dtype_of_model, torch.device("cuda" if cuda else "cpu")).itemsize
    inside = {module: (n, k) for module, (n, k) in linears.items() if BLOCK.match(module)}
    sequence = min(
        recipe.calibration.max_length, _stated(src, "max_position_embeddings") or recipe.calibration.max_length
    )
    hidden = _stated(src, "hidden_size") or max((min(n, k) for n, k in inside.values()), default=0)
    count = ranks().count
    documents = recipe.calibration.samples // count + (count > 1)  # a rank may have one more than another
    activations = documents * sequence * hidden * width
    kind = "cuda" if cuda else "cpu"
    tokens = max(sequence, TOKENS_AT_ONCE[kind])
    dtype = factor_dtype(torch.device("cuda")) if cuda and here else torch.float64
    solve = {
        "block": width * max(_blocks(src).values(), default=0),
        **_solving(inside, recipe, dtype, SOLVED[kind]),
        # A rank has those of its own documents, and the sums over all ranks that it will solve.
        "Hessians of experts": min(HESSIAN_BYTES, _of_experts(inside)) * (count + (count > 1)) // count,
        # While a document runs, a block holds about two copies of its linears' outputs.
        DOCUMENT: 2 * width * tokens * max(_outputs(inside).values(), default=0),
    }
    if cuda:
        solve["chunk of a Hessian"] = width * LONG_CHUNK * max((k for _, k in inside.values()), default=0)
        # The allocator gives a document's memory to the solver.
        solve[DOCUMENT] = max(0, solve[DOCUMENT] - solve["Hessian and factor"] - solve["rows being solved"])
    # What the tokens of one backward pass leave for it.
    joined, widest = max(sequence, TUNED_AT_ONCE[kind]), max(_outputs(inside).values(), default=0)
    backward = BACKWARD * 4 * joined * widest
    gradients = hidden * width * min(documents * sequence, GRADIENT_TOKENS + sequence) if recipe.output_aware else 0
    if gradients:
        solve[OUTPUTS] = 4 * max(_in_blocks({name: n * n for name, (n, _) in inside.items()}).values(), default=0)
    if recipe.tune:
        tuning = TUNED * max(_weights(inside).values(), default=0) + max(backward, gradients)
        solving = sum(size for part, size in solve.items() if part != "block")  # it has ended by then
        solve["tuning"] = max(0, tuning - solving)
    # The embeddings are in memory only before the first block is solved.
    outside = [width * prod(src.shape(name)) for name in src.names() if not BLOCK.match(name)]
    solve["embeddings, before the blocks"] = max(0, max(outside, default=0) - sum(solve.values()))
    if cuda and gpu_memory is None and here:
        gpu_memory = torch.cuda.mem_get_info()[0]

    training = TRAINING if gradients else 0

    def stage(stores: Mapping[str, int], parts: Mapping[str, int]) -> Memory:
        """Return the estimate of a stage with some stores of activations, and parts where it computes."""
        in_ram = {part: size if act_budget is None else min(size, act_budget) for part, size in stores.items()}
        if not cuda:
            return Memory({"program": _program() + training, **in_ram, **parts}, token_bytes=hidden * width)
        fit = (part for part, size in stores.items() if in_ram[part] == size and stays_on_gpu(size, gpu_memory))
        on_gpu = {part: stores[part] for part in fit}
        host = {"program": PROGRAM + training + CUDA_HOST, **in_ram, **dict.fromkeys(on_gpu, 0)}
        host |= {READ: parts[READ]} if READ in parts else {}
        return Memory(host, {"CUDA": CUDA_DEVICE, **parts, **on_gpu}, token_bytes=hidden * width)

    stores, others = {ACTIVATIONS: activations}, tuple[Memory, ...]()
    if recipe.tune or gradients:
        stores[UNQUANTIZED] = activations if recipe.tune else gradients
    if gradients:
        both = {UNQUANTIZED: gradients, GRADIENTS: gradients}
        logits = DRAWN * 4 * sequence * (_stated(src, "vocab_size") or 0)
        # Where a GPU has no flash attention, attention is computed by plain products.
        scores = 2 * width * (_stated(src, "num_attention_heads") or 1) * joined * sequence if cuda else 0
        block = {"block": solve["block"], READ: gradients, "backward pass": backward + scores}
        sums = solve[OUTPUTS] + (width * LONG_CHUNK if cuda else 4 * CHUNK) * widest
        head = {"output head": max(outside, default=0), DOCUMENT: logits}
        others = (stage(both, head), stage(both, block), stage(stores, {**block, OUTPUTS: sums}))
    found = replace(stage(stores, solve), others=others)
    if not cuda:
        return found
    largest = max(_blocks(src).values(), default=0)
    saved = ACTIVATIONS in found.vram and len(_blocks(src)) > SAVED_BLOCKS[kind]
    vram = {**found.vram, **({SAVING: activations} if saved else {}), WAITING: min(MOST_BYTES, WAITING_BYTES * largest)}
    host = {
        **found.ram,
        "loading": round(PINNED * solve["block"]),  # the next one is read ahead; torch keeps what it has pinned
        WAITING: min(MOST_BYTES, sum(outside)),  # the tensors outside the blocks, behind the last one
    }
    least = width * max((size for block, size in _blocks(src).items() if not TOWER.search(block)), default=0)
    return replace(found, ram=host, vram=vram, least_vram=least)


def tuning_memory(
    src: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    quantized: Mapping[str, tuple[int, int]],
    longest: int,
    codes: bool,
    device: str | None = None,
) -> Memory:
    """Estimate the peak of distilling the `quantized` ones of a model's `linears`, on documents of `longest` tokens.

    In memory are the whole model, the quantized one, and what one document leaves for the backward pass. `codes` says
    whether codes are learned.
    """
    here = torch.cuda.is_available()
    cuda = here if device in (None, "auto") else str(device).startswith("cuda")
    width = compute_dtype(src.dtype_of_model, torch.device("cuda" if cuda else "cpu")).itemsize
    tokens = min(longest, _stated(src, "max_position_embeddings") or longest)
    shared = sum(n * k for name, (n, k) in linears.items() if f"{name}.weight" not in src.names())
    whole = width * (sum(prod(src.shape(name)) for name in src.names()) + shared)
    # Of each weight its dense form, the gradient of that, and its code; one weight at a time is decoded.
    each = 2 * width + 1 + (LEARNED if codes else 0)
    student = each * sum(n * k for n, k in quantized.values())
    computed = width if cuda else compute_dtype(torch.bfloat16, torch.device("cpu")).itemsize
    heads = _stated(src, "num_attention_heads") or 1
    scores = 2 * width * heads * tokens * len(_blocks(src)) if cuda else 0
    # Inputs and outputs of linears, and what norms, activations and attention hold.
    token = 3 * computed * sum(n + k for n, k in linears.values()) + scores
    parts = {
        WHOLE: whole,
        STUDENT: student + STREAMED * max((n * k for n, k in quantized.values()), default=0),
        DOCUMENT: tokens * (token + 4 * LOGITS * (_stated(src, "vocab_size") or 0)),
    }
    if not cuda:
        return Memory({"program": _program() + TRAINING, **parts})
    host = {"program": PROGRAM + TRAINING + CUDA_HOST}
    return Memory(host, {"CUDA": CUDA_DEVICE, **parts}, least_vram=whole + student)


def _stated(src: Checkpoint, key: str) -> int | None:
    """Return a size of the text model from config.json, None if it is not a positive number."""
    text = src.config.get("text_config")
    value = (text if isinstance(text, dict) else src.config).get(key)
    return value if type(value) is int and value > 0 else None


def _blocks(src: Checkpoint) -> dict[str, int]:
    """Return block path -> the number of its parameters."""
    found: dict[str, int] = {}
    for name in src.names():
        if block := BLOCK.match(name):
            found[block[1]] = found.get(block[1], 0) + prod(src.shape(name))
    return found


def _solving(linears: Mapping[str, tuple[int, int]], recipe: Recipe, dtype: torch.dtype, solved: int) -> dict[str, int]:
    """Return the bytes of the solver, by part, in the step that takes most.

    Factors have `dtype`; `solved` float32 matrices `[rows, k]` are in memory while rows are solved.
    """
    searched = recipe.clip == "search" and recipe.metric == "block"
    wide = max(scheme.group_size or WIDEST_BLOCK for scheme in recipe.schemes) if searched else 0
    most = {"Hessian and factor": 0, "rows being solved": 0}
    for (_, k), outputs in _sharing(linears).items():
        square, rows = 4 * k * k, 4 * k * sum(outputs)
        blocks = SEARCHED * 4 * k * wide if wide < WIDEST_BLOCK else SEARCHED * square if k <= WIDEST_BLOCK else 0
        for squares, copies in (
            (FACTORED[dtype] * square, rows),
            ((2 + dtype.itemsize // 4) * square + blocks, 2 * rows),
            (KEPT[dtype] * square, solved * rows),
            *(_refining(KEPT[dtype] * square, rows, outputs, dtype) if recipe.output_aware else ()),
        ):
            if squares + copies > sum(most.values()):
                most = {"Hessian and factor": squares, "rows being solved": copies}
    return most


def _refining(squares: int, rows: int, outputs: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return the bytes of matrices, and of copies of `rows`, in each step that solves rows by Hessians of `outputs`."""
    factors = squares + 4 * sum(n * n for n in outputs)
    return [
        (factors + 4 * OUTPUTS_FACTORED[dtype] * max(outputs) ** 2, SORTED * rows),
        (factors, REFINED * rows),
    ]


def _sharing(linears: Mapping[str, tuple[int, int]]) -> dict[tuple[str, int], list[int]]:
    """Return the outputs of linears that may share one Hessian, as an upper bound: those of one parent with equal k."""
    found: dict[tuple[str, int], list[int]] = {}
    for module, (n, k) in linears.items():
        found.setdefault((module.rpartition(".")[0], k), []).append(n)
    return found


def _of_experts(linears: Mapping[str, tuple[int, int]]) -> int:
    """Return the bytes of the Hessians of all experts of one layer, for the inputs of one projection."""
    groups = {(found[1], found[2], k) for module, (_, k) in linears.items() if (found := EXPERT.match(module))}
    sizes: Counter[tuple[str, int]] = Counter()
    for layer, _, k in groups:
        sizes[layer, k] += hessian_bytes(k)
    return max(sizes.values(), default=0)


def _weights(linears: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return block path -> the number of weights of all its linears."""
    return _in_blocks({module: n * k for module, (n, k) in linears.items()})


def _outputs(linears: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return block path -> the output features of all its linears."""
    return _in_blocks({module: n for module, (n, _) in linears.items()})


def _in_blocks(counts: Mapping[str, int]) -> dict[str, int]:
    """Add up counts of linears by the path of their block."""
    found: dict[str, int] = {}
    for module, count in counts.items():
        block = BLOCK.match(module)
        if block is not None:
            found[block[1]] = found.get(block[1], 0) + count
    return found


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
