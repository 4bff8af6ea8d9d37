"""Time a calibrated quantization: seconds of each phase for a block, beside the least that the hardware allows.

The real `quantize` runs on a few blocks of random weights, made from a config.json alone. Its journal has the phases of
each block. The blocks between the first and the last one are alike, so the medians of their phases give an estimate for
the whole model. Ranks that torchrun starts share the run:

    torchrun --nproc-per-node 2 benchmarks/quantize.py --model llama3-8b --csv quantize.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import random_model, timing
from benchmarks.floors import floors, idle, measure_speeds
from benchmarks.random_model import Outline
from benchmarks.random_source import WORDS, blocks_of, draw_text, shortened, write_model
from quantkit import api
from quantkit.calibration.budget import SAVED_BLOCKS
from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.process import joined, silence_others
from quantkit.cli.show import table
from quantkit.core.quantized_tensor import label
from quantkit.core.ranks import ranks
from quantkit.io.staging import JOURNAL, read_journal
from quantkit.models.meta_model import skeleton
from quantkit.models.weights import CUDA_DEVICE, device_of
from quantkit.pipeline.publish import Measure
from quantkit.pipeline.quantize import quantize
from quantkit.planning.needs import OTHERS, Memory
from quantkit.planning.survey import plan
from quantkit.progress import QUIET, Progress
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import Recipe

#: Phases before the first block, which its commit records. The last two grow with the bytes of the source.
BEFORE = ("prepare", "hash", "check")
BY_BYTES = BEFORE[1:]
#: Columns of the printed table.
SHOWN = ("first_block_s", "block_s", "block_floor_s", "times_floor", "outside_blocks_s", "run_s")


def measure(
    model: Outline, recipe: Recipe, blocks: int, work: Path | None, device: str, progress: Progress
) -> list[dict[str, Any]]:
    """Time `quantize` on the first `blocks` of a model, in a temporary folder in `work`; returns the rows of a CSV.

    `recipe` says how many documents of how many tokens are drawn; its text is ignored. On several ranks all of them
    call this, and all return the rows of the first one.
    """
    here = ranks()
    device = here.device_name(device)
    every = blocks_of(model)  # imports the model's code on each rank
    if not 3 <= blocks <= every:
        raise SystemExit(f"--blocks {blocks}: the first and the last block are unlike others: use 3 to {every}")
    if here.first:
        with TemporaryDirectory(prefix="quantkit-bench-", dir=work) as folder:
            return here.broadcast(_measure(model, recipe, blocks, every, Path(folder), device, progress))
    led: tuple[Path, Path, Recipe] = here.broadcast(None)
    quantize(*led, run=RunOptions(device=device, min_share=0.0, progress=progress))
    return here.broadcast(None)


def _measure(
    model: Outline, recipe: Recipe, blocks: int, every: int, folder: Path, device: str, progress: Progress
) -> list[dict[str, Any]]:
    here, where = ranks(), device_of(device)
    short, whole = shortened(model, blocks), shortened(model, every)
    source, text = folder / "source", folder / "words.txt"
    source.mkdir()
    progress.note(f"writing {blocks} of {every} blocks with random weights")
    write_model(source, short, where)
    words = min(WORDS, short.config.get("text_config", short.config).get("vocab_size", WORDS))
    draw_text(text, recipe.calibration.samples, recipe.calibration.max_length, words)
    recipe = replace(recipe, calibration=replace(recipe.calibration, data=str(text)))
    lines: list[dict[str, Any]] = []

    def see(made: Checkpoint) -> dict[str, Any]:
        lines.extend(line["facts"] for line in read_journal(made.path / JOURNAL)[1:])
        return {}

    run = RunOptions(device=device, min_share=0.0, progress=progress)
    planned = _planned(plan(source, recipe, replace(run, progress=QUIET)).needs.memory)
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
    here.broadcast((source, folder / "out", recipe))
    report = quantize(source, folder / "out", recipe, run, Measure(see, 0))
    speeds = measure_speeds(where, folder)  # last, as pinned memory would count as the run's
    tokens = report["calibration"]["tokens"]
    least = floors(Checkpoint(source), device, recipe, tokens // here.count, speeds)
    least["solve"] /= here.count
    of_blocks = [line["phases"] for line in lines if type(line.get("block")) is int]
    ratio = _source_bytes(whole) / _source_bytes(short)
    rows = phases(of_blocks, report["phases"], every, ratio, least, SAVED_BLOCKS[where.type])
    same = {
        "model": model.name,
        "blocks": blocks,
        "all_blocks": every,
        "ranks": here.count,
        "tokens": tokens,
        "layout": recipe.layout,
        "scheme": label(recipe.scheme),
        "device": report["device"],
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        **{f"{key}_per_s": value for key, value in asdict(speeds).items()},
        **{f"peak_{kind}": size for kind, size in report["totals"]["peak_memory"].items()},
        **{f"planned_{kind}": size for kind, size in planned.items()},
        "not_computing_s": idle(report["phases"]),
    }
    return [row | same for row in rows]


def phases(
    blocks: list[dict[str, float]],
    run: Mapping[str, float],
    every: int,
    ratio: float,
    least: Mapping[str, float],
    saved: int,
) -> list[dict[str, Any]]:
    """Make a row of each phase from the seconds of each block and of the whole run; the last row is their sum.

    `estimate_all_blocks_s` is computed for a model of `every` blocks whose source is `ratio` times as large. `least`
    has the floor of a phase in one block. Activations are saved after each `saved` blocks: `save` of a block is its
    share, the floor if none was measured.
    """
    rows = []
    for name in dict.fromkeys([*run, *(["save"] if every > saved else [])]):
        seconds, floor = run.get(name, 0.0), least.get(name)
        of_blocks = [0.0 if name in BEFORE else block.get(name, 0.0) for block in blocks]
        block = median(of_blocks[1:-1])
        outside = max(0.0, seconds - sum(of_blocks))
        whole = (ratio if name in BY_BYTES else 1.0) * outside + sum(of_blocks) + (every - len(blocks)) * block
        if name == "save" and floor is not None:
            each = mean([taken for taken in of_blocks if taken] or [floor])
            block, floor, whole = each / saved, floor / saved, (every - 1) // saved * each
        rows.append(
            {
                "phase": name,
                "first_block_s": of_blocks[0],
                "block_s": block,
                "block_floor_s": floor,
                "times_floor": block / floor if floor else None,
                "outside_blocks_s": outside,
                "run_s": seconds,
                "estimate_all_blocks_s": whole,
            }
        )
    total = {key: sum(row[key] or 0.0 for row in rows) for key in rows[0] if key != "phase"}
    return [*rows, {"phase": "all"} | total | {"times_floor": total["block_s"] / total["block_floor_s"]}]


def _planned(memory: Memory) -> dict[str, int]:
    """Add up the planned peaks of this process; that of a GPU is without the runtime, which torch does not measure."""
    found = {"ram": sum(size for part, size in memory.ram.items() if part != OTHERS)}
    return found | ({"vram": sum(memory.vram.values()) - CUDA_DEVICE} if memory.vram else {})


def _source_bytes(model: Outline) -> int:
    return sum(parameter.nbytes for parameter in skeleton(model, torch.bfloat16).parameters())


def _print(rows: list[dict[str, Any]]) -> None:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    keys = (*SHOWN, "estimate_all_blocks_s")
    print(table(("phase", *keys), ((row["phase"], *(cell(row[key]) for key in keys)) for row in rows)))
    for key, value in rows[0].items():
        if key not in ("phase", *keys):
            print(f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}")


def main() -> None:
    """Read the arguments, print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="llama3-8b, llama2-70b or a config.json")
    parser.add_argument("--blocks", type=int, default=10, help="blocks that are run, of all [10]")
    parser.add_argument("--recipe", default="int4-marlin", help="name or YAML file [int4-marlin]")
    parser.add_argument("--samples", type=int, default=128, help="documents of random words [128]")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of each [2048]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, help="disk for source and output [the temporary one]")
    parser.add_argument("--csv", type=Path, help="file to write")
    args = parser.parse_args()
    recipe = api.build_recipe(args.recipe, samples=args.samples, max_length=args.max_length)
    if recipe.layout is None or not recipe.calibrated:
        raise SystemExit(f"{args.recipe}: uses no activations, and has no phases by block")
    silence_others()
    with joined() as together, together():
        rows = measure(random_model.read(args.model), recipe, args.blocks, args.work, args.device, Progress())
        if ranks().first:
            _print(rows)
            if args.csv:
                args.csv.write_bytes(timing.table(rows))


if __name__ == "__main__":
    main()
