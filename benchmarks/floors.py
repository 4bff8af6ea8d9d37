"""Floors of the phases of a calibrated run: the least seconds that this machine needs, and the speeds behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.budget import BESIDE
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.quantized_tensor import Scheme
from quantkit.io import files
from quantkit.models.block_runner import BlockRunner
from quantkit.recipes.recipe import Recipe

#: Phases in which a device computes. In the others it waits for files or for Python.
COMPUTING = ("forward", "hessian", "gradients", "solve", "tune", "evaluate")
#: Sides of the square products and bytes of the copies that give the speeds, on a GPU and on a CPU.
SQUARE, COPIED = {"cuda": 8192, "cpu": 1024}, {"cuda": 2**28, "cpu": 2**26}
#: Calls whose median counts.
ROUNDS = 5
#: Candidate scales of a group of integers; each costs a weight in a group of g columns g products.
CANDIDATES = 76


@dataclass(frozen=True)
class Speeds:
    """Hold FLOP/s of a product in the model's dtype and in float32, and bytes/s to the device and to the disk."""

    dtype: float
    float32: float
    to_device: float
    to_disk: float


def idle(phases: Mapping[str, float]) -> float:
    """Add up the seconds of the phases in which nothing was computed."""
    return sum(seconds for name, seconds in phases.items() if name not in COMPUTING)


def floors(src: Checkpoint, device: str, recipe: Recipe, drawn: int, speeds: Speeds) -> dict[str, float]:
    """Compute the least seconds of each phase of the first block, from its products on `drawn` tokens and its bytes.

    `forward` is one pass, `hessian` one triangle of each, `solve` one factor, sweep and search. Files that are written
    by a thread beside the computing have no floor.
    """
    runner = BlockRunner(src, device=device)
    runner.prepare(embeddings=True)
    runner.weights.load_block(0)
    tokens = torch.arange(8)
    shared: dict[int, list[str]] = {}
    inputs: list[Tensor] = []  # references, so that no two inputs share an id

    def see(linear: str, x: Tensor) -> bool:
        inputs.append(x)
        shared.setdefault(id(x), []).append(linear)
        return False

    state = runner.embed(tokens)
    with runner.watching(runner.targets(0), see):
        runner.run(0, tokens, state)
    called = {linear: runner.linears[linear] for group in shared.values() for linear in group}
    widths = [runner.linears[group[0]][1] for group in shared.values()]
    text: Any = runner.text.config.get_text_config()
    attention = 2 * drawn * (drawn // recipe.calibration.samples) * text.hidden_size
    forward = 2 * drawn * sum(n * k for n, k in called.values()) + attention
    scheme, layout = recipe.scheme, recipe.output_layout
    assert layout is not None and isinstance(scheme, Scheme)
    solve = sum(k**3 / 3 for k in widths) + sum(n * k * k for n, k in called.values())
    solve += sum(n * k * CANDIDATES * (scheme.group_size or k) for n, k in called.values())
    packed = sum(
        tensor.itemsize * prod(shape)
        for n, k in called.values()
        for tensor, shape in layout.stored(scheme, n, k).values()
    )
    written = {"save": drawn * state.hidden[0].nbytes / speeds.to_disk, "write": packed / speeds.to_disk}
    return {
        "load": sum(map(src.nbytes, runner.stored(0))) / speeds.to_device,
        "forward": forward / speeds.dtype,
        "hessian": drawn * sum(k * k for k in widths) / speeds.dtype,
        "solve": solve / speeds.float32,
        **({} if BESIDE[runner.device.type] else written),
    }


def measure_speeds(device: torch.device, work: Path) -> Speeds:
    """Measure the speeds of a device and of the disk of a folder."""
    side, size = SQUARE[device.type], COPIED[device.type]
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {}
    for kind in {dtype, torch.float32}:
        a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
        found[kind] = 2 * side**3 / median_seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    copied = size / median_seconds(lambda: there.copy_(host, non_blocking=True), device)

    def save() -> None:
        path = work / "speed.bin"
        with files.guarded(path), files.create(path) as file:
            files.write(file, host.numpy().data, path)
            files.sync(file, path)
        files.remove(path)

    return Speeds(found[dtype], found[torch.float32], copied, size / median_seconds(save, device))


def median_seconds(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Measure the median seconds of a call, after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
