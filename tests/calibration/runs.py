"""Calibrated runs of small models: whole, interrupted after some blocks, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.loop import calibrated, new_run
from quantkit.calibration.run import embedded
from quantkit.calibration.stages.base import LoadedBlock
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter, Commit, Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.layouts import LAYOUTS
from quantkit.models.block_runner import BlockRunner
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.folders import edit
from tests.tiny_models import write_model

#: Without the descent, which takes half of a short run: tests/algorithms and tests/promises have it.
QUICK: dict[str, Any] = {"clip": "none", "gptq": {"descent": 0}}
COARSE: dict[str, Any] = {**QUICK, "scheme": {"group_size": "channel"}}
#: Its Hessians can be computed in one line.
PLAIN_SUM: dict[str, Any] = {**COARSE, "gptq": {**QUICK["gptq"], "first_token": 0}}
#: Families whose blocks differ in code, and their groups that share an input, by the last part of the names, in the
#: order in which a block calls them.
GROUPS = {
    "llama": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "qwen2": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "gemma2": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "opt": ["q_proj k_proj v_proj", "out_proj", "fc1", "fc2"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


def sequences(lengths: tuple[int, ...] = (2, 100, 17, 80)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (n,), generator=generator) for n in lengths]


def digests(items: dict[str, Item]) -> dict[str, str]:
    return {name: item.value.digest() for name, item in items.items() if isinstance(item.value, QuantizedTensor)}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Compare the values of two runs bit for bit."""

    def equal(a: Any, b: Any) -> bool:
        return bool(a.equal(b) if isinstance(a, QuantizedTensor) else torch.equal(a, b))

    return first.keys() == second.keys() and all(equal(value, second[name]) for name, value in first.items())


def short_sequences(count: int = 9) -> list[Tensor]:
    """Return sequences of 20 and 28 tokens in turns."""
    return sequences(tuple(20 + 8 * (number % 2) for number in range(count)))


def interrupted(
    src: Checkpoint,
    recipe: Recipe,
    partial: Path,
    blocks: int,
    docs: list[Tensor] | None = None,
    device: str = "cpu",
    *,
    before_commit: bool = False,
    **options: Any,
) -> dict[str, Item]:
    """Run into a partial folder until `blocks` commits are made, or `before_commit` the last is due; then drop the
    generator.
    """
    partial.mkdir(exist_ok=True)
    writer = CheckpointWriter(partial, src, LAYOUTS[recipe.layout])
    writer.identify({"recipe": recipe.sha256()}, lambda before, now: None)
    items: dict[str, Item] = {}
    model = BlockRunner(src, device=device)
    for item in calibrated(new_run(recipe, model, docs or sequences(), partial, **options), writer.done):
        if isinstance(item, Item):
            items[item.name] = item
            writer.add(item)
            continue
        if before_commit and len(writer.done) == blocks - 1:
            break
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
    **options: Any,
) -> dict[str, Item]:
    writer = CheckpointWriter(partial, src, LAYOUTS[recipe.layout])
    model = BlockRunner(src, device=device)
    found = calibrated(new_run(recipe, model, docs or sequences(), partial, progress=progress, **options), writer.done)
    return {item.name: item for item in found if isinstance(item, Item)}


def continued(
    first: dict[str, Item],
    src: Checkpoint,
    recipe: Recipe,
    partial: Path,
    docs: list[Tensor] | None = None,
    **more: Any,
) -> dict[str, str]:
    """Resume a run that has yielded `first`, and return the digests of all; nothing is yielded twice."""
    second = resumed(src, recipe, partial, Progress(), docs, **more)
    assert not first.keys() & second.keys()
    return digests(first) | digests(second)


def start(folder: Path, recipe: Recipe, work: Path, docs: list[Tensor] | None = None) -> LoadedBlock:
    """Load the first block of a run, with its input activations."""
    src = Checkpoint(folder)
    model = BlockRunner(src, device="cpu")
    run = new_run(recipe, model, docs or sequences(), work)
    stream = embedded(run)
    model.weights.load_block(0)
    return LoadedBlock(run, stream, 0, run.goals(model.targets(0)), {})


def quantized(
    folder: Path, recipe: Recipe, work: Path, device: str = "cpu", **options: Any
) -> tuple[dict[str, Item], list[dict[str, Any]]]:
    """Return all that a whole run yields: items by name, and the facts of its commits."""
    src = Checkpoint(folder)
    items: dict[str, Item] = {}
    commits: list[dict[str, Any]] = []
    for item in calibrated(new_run(recipe, BlockRunner(src, device=device), sequences(), work, **options), []):
        if isinstance(item, Commit):
            commits.append(item.facts)
        else:
            assert item.name not in items
            items[item.name] = item
    assert sorted(items) == sorted(src.names())
    return items, commits


def plain_hessian(reference: Any, linear: str, docs: list[Tensor]) -> Tensor:
    """Return `2/T sum x^T x` of a linear's input in float64, from forwards of the whole model."""
    seen: list[Tensor] = []
    hook = reference.get_submodule(linear).register_forward_pre_hook(
        lambda _m, args: seen.append(args[0].flatten(0, -2).double())
    )
    with torch.no_grad():
        for tokens in docs:
            reference(tokens[None], use_cache=False)
    hook.remove()
    x = torch.cat(seen)
    return 2 / len(x) * x.T @ x


def broken(folder: Path, work: Path, name: str, index: Any, value: float) -> Path:
    """Copy a model with another number in one of its weights, or in all entries by the index `...`."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] = value

    return edit(Path(shutil.copytree(folder, work)), change)


def small(folder: Path, **changes: Any) -> Path:
    """Write a Llama of two small blocks."""
    changes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, **changes}
    return write_model("llama", folder / "model", **changes)


def solved(folder: Path, device: str, work: Path, **chosen: Any) -> tuple[dict[str, Any], bool]:
    """Quantize on random tokens; return all values by name, and whether attention was fused to the end."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(256, (32,), generator=generator) for _ in range(9)]
    src = Checkpoint(folder)
    model = BlockRunner(src, device=device)
    work.mkdir()
    recipe = from_mapping({"scheme": {"group_size": 32}, **chosen})
    items = calibrated(new_run(recipe, model, sequences, work), [])
    found = {item.name: item.value for item in items if isinstance(item, Item)}
    return found, model.fuses_attention
