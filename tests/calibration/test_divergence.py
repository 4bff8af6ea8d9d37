"""Estimated loss increases are those of gradients through the whole model, for the weights that a folder has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration import divergence
from quantkit.calibration.loop import new_run
from quantkit.calibration.stages.gradients import drawn_tokens
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models import block_runner
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import sequences
from tests.tiny_models import write_model

TOKENS = sum(map(len, sequences()))


def seen_in_the_whole_model(folder: Path, seed: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return inputs `[t, k]` and gradients by outputs `[t, n]` of each linear, by document, by autograd."""
    model, seen = load_dense_model(Checkpoint(folder)), dict[str, list[tuple[Tensor, Tensor]]]()

    def watch(linear: str, module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(lambda g: seen.setdefault(linear, []).append((args[0][0].detach(), g[0])))

    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head", "embed_tokens")):
            module.register_forward_hook(partial(watch, name))
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output.requires_grad_(), prepend=True
    )
    generator = torch.Generator()
    for number, tokens in enumerate(sequences()):
        generator.manual_seed(seed + number)
        logits = model(tokens[None], use_cache=False).logits[0]
        drawn = drawn_tokens(logits.detach().softmax(-1), generator)
        (-logits.log_softmax(-1).gather(1, drawn).sum()).backward()
    return seen


def measured(
    folder: Path, **keys: Any
) -> tuple[Checkpoint, Checkpoint, dict[str, float], dict[str, list[tuple[Tensor, Tensor]]]]:
    """Return a model, what rounding makes of it, its estimated loss increases, and inputs and gradients by autograd."""
    recipe = from_mapping({"method": "rtn", "scheme": {"group_size": 32}, **keys})
    quantize(folder, folder.with_name("made"), recipe, run=RunOptions(min_share=0.0))
    src, made, work = Checkpoint(folder), Checkpoint(folder.with_name("made")), folder.with_name("work")
    work.mkdir()
    found = divergence.loss_increases(new_run(recipe, BlockRunner(src, device="cpu"), sequences(), work), made)
    return src, made, dict(found), seen_in_the_whole_model(folder, recipe.calibration.seed)


def test_a_loss_increase_weighs_the_errors_of_a_folder_by_inputs_and_gradients_of_the_same_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_runner, "is_fast_in_bfloat16", lambda device: False)
    folder = write_model("llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    src, made, found, seen = measured(folder, skip=[r".*1\.self_attn\.o_proj"])
    assert found.keys() == seen.keys() - {"model.layers.1.self_attn.o_proj", "model.embed_tokens"}
    for linear, increase in found.items():
        x, g = (torch.cat(parts).double() for parts in zip(*seen[linear], strict=True))
        error = (made.quantized(linear).dequantize() - src.get(f"{linear}.weight")).double()
        expected = (x @ error.T * g).sum(1).square().sum() / TOKENS / 2
        assert increase == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize(("family", "scale"), [("llama", 1), ("qwen2", 1), ("gemma", 8)])  # the last two are tied
def test_the_loss_increase_of_a_packed_tensor_counts_its_uses_as_embeddings_and_as_head(
    family: str, scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_runner, "is_fast_in_bfloat16", lambda device: False)
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder = write_model(family, tmp_path / "model", **shape)
    keys = {"embeddings": "int4:g32"} | ({"head": "int4:g32"} if family == "llama" else {})
    src, made, found, seen = measured(folder, **keys)
    table, head = "model.embed_tokens", "lm_head" if family == "llama" else "model.embed_tokens"
    error = {name: (made.dense(f"{name}.weight", torch.float32) - src.get(f"{name}.weight")) for name in (table, head)}
    expected = dict.fromkeys((table, head), 0.0)
    hidden, g = (torch.cat(parts) for parts in zip(*seen["lm_head"], strict=True))
    expected[head] += float((hidden @ error[head].T * g).sum(1).square().sum()) / TOKENS / 2
    ids, g = (torch.cat(parts) for parts in zip(*seen[table], strict=True))
    expected[table] += float((scale * error[table][ids] * g).sum(1).square().sum()) / TOKENS / 2
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)
