"""Output gradients are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration.backward import parts
from quantkit.calibration.budget import TUNED_AT_ONCE
from quantkit.calibration.loop import new_run
from quantkit.calibration.run import Run, Stream, embedded
from quantkit.calibration.stages.gradients import carried_back, drawn_tokens, measure
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.models import block_runner
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import distance, short_sequences
from tests.tiny_models import write_model

AWARE: dict[str, Any] = {"scheme": {"group_size": 32}, "output_aware": True, "tune": 2}


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_runner, "is_fast_in_bfloat16", lambda device: False)


def start(folder: Path, work: Path, docs: Sequence[Tensor] | None = None, **changes: Any) -> tuple[Run, Stream]:
    """Return a run of the unquantized model, and the input of the first block."""
    work.mkdir(exist_ok=True)
    src = Checkpoint(folder)
    recipe = from_mapping({**AWARE, **changes})
    run = new_run(recipe, BlockRunner(src, device="cpu"), docs or short_sequences(8), work)
    return run, embedded(run, kind="unquantized-")


def whole_model_gradients(folder: Path, run: Run) -> list[Tensor]:
    """Return the gradients `[T, h]` by what each block passes on, by autograd."""
    model = load_dense_model(Checkpoint(folder))
    seen: dict[str, list[Tensor]] = {path: [] for path in run.model.blocks}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            tensor.register_hook(lambda found: seen[path].append(found.detach().flatten(0, -2).clone()))

        return hook

    for path in seen:
        model.get_submodule(path).register_forward_hook(watch(path))
    embedded = model.get_input_embeddings()
    embedded.register_forward_hook(lambda module, args, output: output.requires_grad_())
    generator = torch.Generator()
    for number, tokens in enumerate(run.sequences):
        generator.manual_seed(run.recipe.calibration.seed + number)
        logits = model(tokens[None], use_cache=False).logits[0]
        drawn = drawn_tokens(logits.detach().softmax(-1), generator)
        (-logits.log_softmax(-1).gather(1, drawn).sum()).backward()
    return [torch.cat(parts) for parts in seen.values()]


#: gpt2 has tied embeddings and weights of Conv1D, gemma2 scales its embeddings and caps its logits.
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma2", "mixtral"])
def test_gradients_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path / "model")
    run, stream = start(folder, tmp_path)
    found = {behind - 1: gradients.clone() for behind, gradients in carried_back(run, stream)}
    expected = whole_model_gradients(folder, run)
    assert len(expected) == len(found) == len(run.model.blocks)
    saved = measure(run, embedded(run, kind="unquantized-"))
    for block, g in enumerate(expected):
        assert distance(found[block], g) < 1e-4, block
        fisher = g.double().T @ g.double()
        fisher /= fisher.diagonal().mean()
        root = saved.root(block).double()
        assert distance(root @ root.T, (fisher + torch.eye(len(fisher))) / 2) < 1e-3, block


def test_tokens_are_drawn_as_often_as_they_are_probable_and_impossible_ones_never() -> None:
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.0625, 0.6875, 0.0]).expand(1 << 18, -1)
    drawn = drawn_tokens(probabilities, torch.Generator().manual_seed(3))
    assert drawn.shape == (1 << 18, 1)
    shares = drawn.flatten().bincount(minlength=6) / len(drawn)
    assert torch.equal(shares == 0, probabilities[0] == 0)
    assert distance(shares, probabilities[0]) < 5e-3


@pytest.mark.parametrize("damaged", [False, True])
def test_files_written_and_read_beside_other_work_and_padded_batches_have_the_same_gradients(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama", tmp_path / "model", num_hidden_layers=4)
    run, stream = start(folder, tmp_path / "plain")
    plain = measure(run, stream)
    monkeypatch.setitem(TUNED_AT_ONCE, "cpu", 60)
    run, _ = start(folder, tmp_path / "beside")
    run = replace(run, beside=True)
    if damaged:  # between writing and reading
        load, seen = files.load_tensor, list[Path]()

        def broken(path: Path, *given: Any) -> Tensor:
            if not seen:
                path.write_bytes(bytes(path.stat().st_size))
            seen.append(path)
            return load(path, *given)

        monkeypatch.setattr(files, "load_tensor", broken)
        with pytest.raises(CheckpointError, match="its bytes changed since they were written"):
            measure(run, embedded(run, kind="unquantized-"))
        return
    stream = embedded(run, kind="unquantized-")
    beside = measure(run, stream)
    assert any(len({len(stream.sequences[number]) for number in part}) > 1 for part in parts(stream, 0))
    for block in range(4):
        assert distance(beside.read(block), plain.read(block)) < 1e-5, block
