"""Time the loss increases and the programme of a target size for a shape, by random weights of one and of two blocks.

    python -m benchmarks.target_size --shape llama3-8b --blocks 32 --device cuda -o target_size_8b.jsonl

The seconds of all blocks are computed. The second block is a copy of the first one, and the head has the weights of the
embeddings, so that little is written. Files are in memory (/dev/shm) if 8 GB are free there.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import random_model
from benchmarks.random_source import WORDS, draw_text, random_weight, shortened, word_tokenizer
from quantkit import api
from quantkit.calibration import divergence
from quantkit.calibration.loop import new_run
from quantkit.checkpoint.reader import Checkpoint
from quantkit.io import files
from quantkit.io.json_files import dump_json
from quantkit.layouts import LAYOUTS
from quantkit.models.meta_model import skeleton
from quantkit.models.weights import device_of
from quantkit.pipeline import quantize as pipeline
from quantkit.planning import survey as surveys
from quantkit.planning.fit import Group, Space, expected_increase, groups_of, schemes_of
from quantkit.recipes.options import RunOptions

SAMPLES, LENGTH = 8, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    begun = time.perf_counter()

    def say(**facts: object) -> None:
        line = json.dumps({"at": round(time.perf_counter() - begun, 1), **facts})
        print(line, flush=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > 8e9
    with TemporaryDirectory(dir=memory if in_memory else None) as temporary:
        folder, device = Path(temporary), device_of(args.device)
        sources = write_sources(folder, args.shape, device)
        text = folder / "words.txt"
        draw_text(text, SAMPLES, LENGTH, WORDS)
        rounded = api.build_recipe(None, method="rtn", group_size=64)
        pipeline.quantize(sources[2], folder / "made", rounded, run=RunOptions(device=args.device, min_share=0.0))
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        say(what="the folder is rounded", where=str(memory) if in_memory else "disk", device=name)
        seconds: dict[int, float] = {}
        for turn, blocks in enumerate((1, 1, 2)):  # the first turn also loads kernels
            facts, increases, linears = measured(folder, sources[blocks], text, args.device)
            seconds[blocks] = facts["seconds"]
            say(turn=turn, blocks=blocks, **facts)
            if not turn:
                for facts in programme(increases, linears, args.blocks):
                    say(**facts)
        block = seconds[2] - seconds[1]
        say(measured_block_s=block, blocks=args.blocks, computed_s=seconds[1] + (args.blocks - 1) * block)


def write_sources(folder: Path, shape: str, device: torch.device) -> dict[int, Path]:
    """Write a source of one block and one of two, which share the files of weights."""
    outline = shortened(random_model.read(shape), 2)
    outline.config["tie_word_embeddings"] = True
    drawn = torch.Generator(device).manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {"first": {}, "rest": {}}
    for name, like in skeleton(outline, torch.bfloat16).named_parameters():
        if ".layers.1." not in name and name != "lm_head.weight":
            shards["first" if ".layers.0." in name else "rest"][name] = random_weight(like, drawn).cpu()
    shards["second"] = {name.replace(".0.", ".1."): tensor for name, tensor in shards["first"].items()}
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    found = {}
    for blocks in (1, 2):
        config = shortened(outline, blocks).config
        found[blocks] = source = folder / f"source-{blocks}"
        source.mkdir()
        chosen = [name for name in shards if name != "second" or blocks == 2]
        for name in chosen:
            (source / f"{name}.safetensors").hardlink_to(folder / f"{name}.safetensors")
        index = {key: f"{name}.safetensors" for name in chosen for key in shards[name]}
        written: dict[str, dict[str, Any]] = {
            "config.json": config,
            "model.safetensors.index.json": {"metadata": {}, "weight_map": index},
            "tokenizer.json": word_tokenizer(min(WORDS, config["vocab_size"])),
            "tokenizer_config.json": {"tokenizer_class": "TokenizersBackend", "eos_token": "w0"},
        }
        for name, value in written.items():
            files.write_atomic(source / name, dump_json(value, special_floats=True))
    return found


def measured(folder: Path, source: Path, text: Path, device: str) -> tuple[dict[str, Any], Any, Any]:
    """Measure how much the rounded linears increase the loss; return seconds and sizes, the increases, the linears."""
    recipe = api.build_recipe(None, calib=str(text), samples=SAMPLES, max_length=LENGTH, group_size=64)
    options = RunOptions(device=device, min_share=0.0)
    src = surveys.dense_source(source, options, recipe)
    job = surveys.survey(src, recipe, None, options)
    drawn = surveys.calibration_text(job, recipe.calibration, options).sequences
    on_gpu = job.model.device.type == "cuda"
    with TemporaryDirectory(dir=folder) as work:
        run = new_run(recipe, job.model, drawn, Path(work))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        since = time.perf_counter()
        increases = divergence.loss_increases(run, Checkpoint(folder / "made"))
        if on_gpu:
            torch.cuda.synchronize()
        facts = {
            "tokens": min(sum(map(len, drawn)), divergence.TOKENS),
            "linears": len(increases),
            "seconds": time.perf_counter() - since,
            "phases": run.clock.take(),
            "peak_vram": torch.cuda.max_memory_allocated() if on_gpu else 0,
        }
    return facts, increases, job.model.linears


def programme(increases: dict[str, float], linears: dict[str, tuple[int, int]], blocks: int) -> list[dict[str, Any]]:
    """Time the programme of many blocks, whose loss increases are those of the first one times lognormal factors."""
    draw, whole, many = random.Random(0), dict[str, tuple[int, int]](), dict[str, float]()
    for number in range(blocks):
        for linear, increase in increases.items():
            if ".layers.0." in linear:
                name = linear.replace(".layers.0.", f".layers.{number}.")
                whole[name], many[name] = linears[linear], increase * draw.lognormvariate(0, 1)
    recipe = api.build_recipe(None)
    layout = LAYOUTS["compressed-tensors"]
    held = [each for each in schemes_of(None, recipe) if each is not None and layout.holds(each.format)]
    groups = groups_of(whole, dict.fromkeys(whole, recipe.scheme), lambda name: 0, held, layout, recipe)
    space, expected = Space(layout.NAME, groups), partial(expected_increase, recipe)

    def harm_in(group: Group, label: str) -> float:
        return sum(many[linear] for linear in group.linears) * expected(group, label) / group.weights

    found: list[dict[str, Any]] = []
    harm_in(groups[0], "int4:g64")  # imports
    for bits in (4.25, 4.5):
        since = time.perf_counter()
        choice = space.choose(harm_in, space.budget(bits)) or {}
        seconds = time.perf_counter() - since
        found.append(
            {
                "groups": len(groups),
                "schemes": len(held),
                "programme_s": seconds,
                "bits": space.bits(space.size(choice)),
            }
        )
    since = time.perf_counter()
    space.curve(harm_in, mixes=True)
    return [*found, {"curve_s": time.perf_counter() - since}]


if __name__ == "__main__":
    main()
