"""Calibrated runs of small models: whole, interrupted after some blocks, and resumed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.loop import calibrated
from quantkit.checkpoint.items import Item
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.layouts import LAYOUTS
from quantkit.models.block_runner import BlockRunner
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe


def sequences(lengths: tuple[int, ...] = (2, 100, 17, 80)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (n,), generator=generator) for n in lengths]


def digests(items: dict[str, Item]) -> dict[str, str]:
    return {name: item.value.digest() for name, item in items.items() if isinstance(item.value, QuantizedTensor)}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def interrupted(
    src: Checkpoint, recipe: Recipe, partial: Path, blocks: int, docs: list[Tensor] | None = None, device: str = "cpu"
) -> dict[str, Item]:
    """Run into a partial folder until `blocks` commits are made, then drop the generator."""
    writer = CheckpointWriter(partial, src, LAYOUTS[recipe.layout])
    writer.identify({"recipe": recipe.sha256()}, lambda before, now: None)
    items: dict[str, Item] = {}
    model = BlockRunner(src, device=device)
    for item in calibrated(src, recipe, model, docs or sequences(), partial, writer.done):
        if isinstance(item, Item):
            items[item.name] = item
            writer.add(item)
            continue
        writer.commit(item.facts)
        if len(writer.done) == blocks:
            break
    return items


def resumed(
    src: Checkpoint,
    recipe: Recipe,
    partial: Path,
    progress: Progress,
    docs: list[Tensor] | None = None,
    device: str = "cpu",
) -> dict[str, Item]:
    writer = CheckpointWriter(partial, src, LAYOUTS[recipe.layout])
    model = BlockRunner(src, device=device)
    found = calibrated(src, recipe, model, docs or sequences(), partial, writer.done, progress=progress)
    return {item.name: item for item in found if isinstance(item, Item)}
