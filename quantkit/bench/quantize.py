"""Time a calibrated quantization: seconds of each phase for a block, beside the least that the hardware allows.

The real `quantize` runs on a few blocks of random weights (`source`). Its journal has the phases of each block. The
blocks between the first and the last one are alike, so the medians of their phases give an estimate for the whole
model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from quantkit.bench.random_model import Outline
from quantkit.bench.source import WORDS, blocks_of, draw_text, shortened, write_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.ranks import ranks
from quantkit.errors import RecipeError
from quantkit.io import files
from quantkit.io.journal import JOURNAL, read_journal
from quantkit.layouts import LAYOUTS
from quantkit.models.block_runner import BlockRunner
from quantkit.models.devices import device_of
from quantkit.models.meta_model import skeleton
from quantkit.pipeline.calibrate import SAVED_BLOCKS
from quantkit.pipeline.quantize import quantize
from quantkit.pipeline.recipe import Recipe
from quantkit.progress import Progress

#: Phases before the first block, which its commit records; the last two grow with the bytes of the source.
BEFORE = ("prepare", "hash", "check")
BY_BYTES = BEFORE[1:]
#: Sides of the square products and bytes of the copies that give the speeds, on a GPU and on a CPU.
SQUARE, COPIED = {"cuda": 8192, "cpu": 1024}, {"cuda": 2**29, "cpu": 2**26}
#: Calls of which the median counts.
ROUNDS = 5
#: Candidate scales of a weight of integers, and the products that each costs a weight in a group of g: g.
CANDIDATES = 76


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of a product in the dtype of the model and in float32, and bytes/s to the device and to the disk."""

    dtype: float
    float32: float
    to_device: float
    to_disk: float


@dataclass(frozen=True)
class Phase:
    """Seconds of one phase: of the first block, of one in the middle (median), outside of blocks, and of the whole run.

    `floor` is the least for one block at the measured speeds, None where none is known.
    """

    name: str
    first: float
    block: float
    outside: float
    run: float
    estimate: float
    floor: float | None

    def row(self) -> dict[str, Any]:
        """Build the row of a CSV; `estimate_all_blocks_s` is computed, the others are measured."""
        return {
            "phase": self.name,
            "first_block_s": self.first,
            "block_s": self.block,
            "block_floor_s": self.floor,
            "times_floor": self.block / self.floor if self.floor else None,
            "outside_blocks_s": self.outside,
            "run_s": self.run,
            "estimate_all_blocks_s": self.estimate,
        }


@dataclass(frozen=True)
class Calibrating:
    """The phases of a run of `blocks` of the model's `all_blocks`, on `ranks` devices with these speeds."""

    model: str
    blocks: int
    all_blocks: int
    ranks: int
    tokens: int
    layout: str
    scheme: str
    device: str
    speeds: Speeds
    peak_memory: Mapping[str, Any]
    phases: tuple[Phase, ...]

    def rows(self) -> list[dict[str, Any]]:
        """List the phases as rows of a CSV."""
        found = self.to_dict()
        same = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
        speeds = {f"{key}_per_s": value for key, value in found["speeds"].items()}
        return [row | same | speeds for row in found["phases"]]

    def to_dict(self) -> dict[str, Any]:
        """Build one JSON object; the last of its phases is their sum, with the floor of those that have one."""
        rows = [phase.row() for phase in self.phases]
        total = {key: sum(row[key] or 0.0 for row in rows) for key in rows[0] if key != "phase"}
        total["times_floor"] = total["block_s"] / total["block_floor_s"]
        found = asdict(self) | {"phases": [*rows, {"phase": "all"} | total]}
        return found | {"torch": str(torch.__version__), "transformers": version("transformers")}


def measure(
    model: Outline,
    recipe: Recipe,
    *,
    blocks: int,
    work: Path | None = None,
    device: str = "auto",
    act_budget: int | None = None,
    progress: Progress | None = None,
) -> Calibrating:
    """Time `quantize` on the first `blocks` of a model with random weights, in a temporary folder in `work`.

    `recipe` says how many documents of how many tokens; its text is ignored. RecipeError for fewer than three
    blocks, more than the model has, or a recipe that uses no activations.

    The ranks of a process group share the run, and all return the figures of the first one.
    """
    here = ranks()
    device = here.device_name(device)
    with here.together():
        if here.first:
            return here.broadcast(_measure(model, recipe, blocks, work, device, act_budget, progress))
        led: tuple[Path, Path, Recipe] = here.broadcast(None)
        quantize(*led, device=device, act_budget=act_budget, min_share=0.0, progress=progress)
        return here.broadcast(None)


def _measure(
    model: Outline,
    recipe: Recipe,
    blocks: int,
    work: Path | None,
    device: str,
    act_budget: int | None,
    progress: Progress | None,
) -> Calibrating:
    here = ranks()
    every = blocks_of(model)
    if not 3 <= blocks <= every:
        raise RecipeError(
            f"--blocks {blocks}: {model.name} has {every}, the first and the last are unlike others: use 3 to {every}"
        )
    if not recipe.calibrated:
        raise RecipeError("the recipe uses no activations, and has no phases by block: use --method gptq")
    where, progress = device_of(device), progress or Progress(quiet=True)
    short, whole = shortened(model, blocks), shortened(model, every)
    with TemporaryDirectory(prefix="quantkit-bench-", dir=work) as folder:
        source, text = Path(folder) / "source", Path(folder) / "words.txt"
        files.make_folder(source)
        progress.note(f"writing {blocks} of {every} blocks with random weights")
        write_model(source, short, where)
        words = min(WORDS, short.config.get("text_config", short.config).get("vocab_size", WORDS))
        draw_text(text, recipe.calibration.samples, recipe.calibration.max_length, words)
        speeds = _speeds(where, Path(folder))
        lines: list[dict[str, Any]] = []

        def see(made: Checkpoint) -> dict[str, Any]:
            lines.extend(line["facts"] for line in read_journal(made.path / JOURNAL)[1:])
            return {}

        here.broadcast((source, Path(folder) / "out", _on(recipe, text)))
        report = quantize(
            source,
            Path(folder) / "out",
            _on(recipe, text),
            see,
            device=device,
            act_budget=act_budget,
            min_share=0.0,
            progress=progress,
        )
        floors = _floors(source, device, recipe, report["calibration"]["tokens"] // here.count, speeds)
        floors["solve"] /= here.count
        ratio = _source_bytes(whole) / _source_bytes(short)
    of_blocks = [line for line in lines if type(line.get("block")) is int]
    found = _phases(of_blocks, report["phases"], every, ratio, floors, SAVED_BLOCKS[where.type])
    return Calibrating(
        model.name,
        blocks,
        every,
        here.count,
        report["calibration"]["tokens"],
        recipe.layout,
        recipe.scheme.label,
        report["device"],
        speeds,
        report["totals"]["peak_memory"],
        tuple(found),
    )


def _on(recipe: Recipe, text: Path) -> Recipe:
    return replace(recipe, calibration=replace(recipe.calibration, data=str(text), chosen=True))


def _phases(
    lines: list[dict[str, Any]],
    total: Mapping[str, float],
    every: int,
    ratio: float,
    floors: Mapping[str, float],
    saved: int,
) -> list[Phase]:
    """Return the phases of the commits of blocks, of the run in all, and of a model of `every` blocks.

    Activations are saved after each `saved` blocks: `save` of a block is its share. Without a measured one it is the
    floor.
    """
    found = []
    for name in dict.fromkeys([*total, *(["save"] if every > saved else [])]):
        seconds, floor = total.get(name, 0.0), floors.get(name)
        of_blocks = [0.0 if name in BEFORE else line["phases"].get(name, 0.0) for line in lines]
        block = median(of_blocks[1:-1])
        outside = max(0.0, seconds - sum(of_blocks))
        whole = (ratio if name in BY_BYTES else 1.0) * outside + sum(of_blocks) + (every - len(lines)) * block
        if name == "save" and floor is not None:
            each = mean([taken for taken in of_blocks if taken] or [floor])
            block, floor, whole = each / saved, floor / saved, (every - 1) // saved * each
        found.append(Phase(name, of_blocks[0], block, outside, seconds, whole, floor))
    return found


def _source_bytes(model: Outline) -> int:
    return sum(parameter.nbytes for parameter in skeleton(model, torch.bfloat16, False).parameters())


def _floors(source: Path, device: str, recipe: Recipe, drawn: int, speeds: Speeds) -> dict[str, float]:
    """Return the least seconds of the phases of a block on `drawn` tokens: its products and the bytes that move.

    `forward` is one pass, `hessian` one triangle of each, `solve` one factor, sweep and search.
    """
    src = Checkpoint(source)
    runner = BlockRunner(src, device=device)
    runner.prepare(embeddings=True)
    runner.load_block(0)
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
    group = recipe.scheme.group_size
    solve = sum(k**3 / 3 for k in widths) + sum(n * k * k for n, k in called.values())
    solve += sum(n * k * CANDIDATES * (group if isinstance(group, int) else k) for n, k in called.values())
    packed = sum(
        tensor.itemsize * prod(shape)
        for n, k in called.values()
        for tensor, shape in LAYOUTS[recipe.layout].stored(recipe.scheme, n, k).values()
    )
    return {
        "load": sum(map(src.nbytes, runner.stored(0))) / speeds.to_device,
        "forward": forward / speeds.dtype,
        "hessian": drawn * sum(k * k for k in widths) / speeds.dtype,
        "solve": solve / speeds.float32,
        "save": drawn * state.hidden[0].nbytes / speeds.to_disk,
        "write": packed / speeds.to_disk,
    }


def _speeds(device: torch.device, work: Path) -> Speeds:
    """Measure the speeds of a device and of the disk of a folder."""
    side, size = SQUARE[device.type], COPIED[device.type]
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {}
    for kind in {dtype, torch.float32}:
        a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
        found[kind] = 2 * side**3 / _seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    copied = size / _seconds(lambda: there.copy_(host, non_blocking=True), device)

    def save() -> None:
        path = work / "speed.bin"
        with files.guarded(path), files.create(path) as file:
            files.write(file, host.numpy().data, path)
            files.sync(file, path)
        files.remove(path)

    return Speeds(found[dtype], found[torch.float32], copied, size / _seconds(save, device))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Measure the median seconds of a call, after one that warms up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
