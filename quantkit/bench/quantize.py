"""Time a calibrated quantization: seconds of each phase for a block, beside the least that the hardware allows.

The real `quantize` runs on a few blocks of random weights (`source`). Its journal has the phases of each block. The
blocks between the first and the last one are alike, so the medians of their phases give an estimate for the whole
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quantkit.bench.random_model import Outline
from quantkit.bench.source import WORDS, blocks_of, draw_text, shortened, write_model
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.ranks import ranks
from quantkit.errors import RecipeError
from quantkit.io import files
from quantkit.io.journal import JOURNAL, read_journal
from quantkit.models.devices import device_of
from quantkit.models.meta_model import skeleton
from quantkit.pipeline.profile import Speeds, floors, measure_speeds
from quantkit.pipeline.quantize import plan, quantize
from quantkit.planning.memory import CUDA_DEVICE, OTHERS, Memory
from quantkit.progress import Progress
from quantkit.recipes.goals import label
from quantkit.recipes.recipe import Recipe

#: Phases before the first block, which its commit records; the last two grow with the bytes of the source.
BEFORE = ("prepare", "hash", "check")
BY_BYTES = BEFORE[1:]


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
    """The phases of a run of `blocks` of the model's `all_blocks`, on `ranks` devices with these speeds.

    `peak_memory` was measured, in bytes, and `planned_memory` is what `plan` says: `ram`, and `vram` on a GPU.
    """

    model: str
    blocks: int
    all_blocks: int
    ranks: int
    tokens: int
    layout: str
    scheme: str
    device: str
    speeds: Speeds
    peak_memory: Mapping[str, int]
    planned_memory: Mapping[str, int]
    phases: tuple[Phase, ...]

    def rows(self) -> list[dict[str, Any]]:
        """List the phases as rows of a CSV."""
        found = self.to_dict()
        same = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
        speeds = {f"{key}_per_s": value for key, value in found["speeds"].items()}
        memory = {f"peak_{kind}": size for kind, size in self.peak_memory.items()}
        memory |= {f"planned_{kind}": size for kind, size in self.planned_memory.items()}
        return [row | same | speeds | memory for row in found["phases"]]

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
        blocks_of(model)  # imports its code now, as the first rank does, which would wait for that in the run
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
    if recipe.layout is None or not recipe.calibrated:
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
        lines: list[dict[str, Any]] = []

        def see(made: Checkpoint) -> dict[str, Any]:
            lines.extend(line["facts"] for line in read_journal(made.path / JOURNAL)[1:])
            return {}

        options: Any = {"device": device, "act_budget": act_budget, "min_share": 0.0}
        planned = plan(source, _on(recipe, text), **options).memory
        if where.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(where)
        here.broadcast((source, Path(folder) / "out", _on(recipe, text)))
        report = quantize(source, Path(folder) / "out", _on(recipe, text), see, progress=progress, **options)
        speeds = measure_speeds(where, Path(folder))  # last, as pinned memory would count as the run's
        least = floors(Checkpoint(source), device, recipe, report["calibration"]["tokens"] // here.count, speeds)
        least["solve"] /= here.count
        ratio = _source_bytes(whole) / _source_bytes(short)
    of_blocks = [line for line in lines if type(line.get("block")) is int]
    found = _phases(of_blocks, report["phases"], every, ratio, least, SAVED_BLOCKS[where.type])
    return Calibrating(
        model.name,
        blocks,
        every,
        here.count,
        report["calibration"]["tokens"],
        recipe.layout,
        label(recipe.scheme),
        report["device"],
        speeds,
        report["totals"]["peak_memory"],
        _planned(planned),
        tuple(found),
    )


def _planned(memory: Memory) -> dict[str, int]:
    """Return the planned peaks of this process; that of a GPU is without the runtime, which torch does not measure."""
    found = {"ram": sum(size for part, size in memory.ram.items() if part != OTHERS)}
    return found | ({"vram": sum(memory.vram.values()) - CUDA_DEVICE} if memory.vram else {})


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
