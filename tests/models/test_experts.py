"""Experts one by one: the same function as the fused ones, under the names of the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.experts import Fused, ParallelExperts
from quantkit.models.weights import load_dense_model
from quantkit.recipes.recipe import from_mapping, goals_of
from tests.folders import NEWEST
from tests.models.folders import block_by_block

TOKENS = torch.arange(3, 60)[None] * 7 % 251
#: family -> the linears of an expert, as the output names them, and the number of linears in experts
FAMILIES = {
    "mixtral": ("model.layers.0.block_sparse_moe.experts.3.w1", 24),
    "qwen3_moe": ("model.layers.1.mlp.experts.0.down_proj", 24),
    "gpt_oss": ("model.layers.0.mlp.experts.2.gate_proj", 24),
    "llama4_text": ("model.layers.0.feed_forward.experts.1.up_proj", 24),
    "granitemoe": ("model.layers.0.block_sparse_moe.experts.0.down_proj", 24),
    "dbrx": ("transformer.blocks.0.ffn.experts.3.gate_proj", 24),
    "nemotron_h": ("backbone.layers.1.mixer.experts.3.up_proj", 8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_unfused_experts_compute_what_fused_ones_do(family: str, folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders[family]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=TOKENS).logits
        whole = load_dense_model(Checkpoint(folder))(input_ids=TOKENS).logits
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    model = BlockRunner(Checkpoint(folder), device="cpu")
    example, linears = FAMILIES[family]
    assert example in model.experts and len(model.experts) == linears
    assert sorted(set(model.kept_dense.values()) - {"fewer than 64 inputs or outputs"}) == ["a router"]
    *_, last = block_by_block(model, TOKENS[0])
    if family == "mixtral":
        reference = load_dense_model(Checkpoint(folder)).model
        with torch.no_grad():
            expected = reference(input_ids=TOKENS).last_hidden_state
            torch.testing.assert_close(reference.norm(last.hidden)[None], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (None, r"layers\.1\.mlp\.experts\.2\.down_proj\.weight is not in the checkpoint"),
        (torch.zeros(128, 32), r"experts\.2\.down_proj\.weight is \[128, 32\], .* asks for \[128, 64\]"),
    ],
)
def test_a_missing_or_misshapen_expert_is_named(
    tensor: torch.Tensor | None, says: str, changed: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=says):
        folder = changed("qwen3_moe", {"model.layers.1.mlp.experts.2.down_proj.weight": tensor})
        BlockRunner(Checkpoint(folder), device="cpu")


def test_a_second_model_of_one_source_transposes_nothing_twice(folders: dict[str, Path]) -> None:
    src, name = Checkpoint(folders["gpt2"]), "transformer.h.0.attn.c_proj.weight"  # square: no shape would tell
    stored = src.get(name)
    for _ in range(2):
        BlockRunner(src, device="cpu")
        assert torch.equal(src.get(name), stored.T) and torch.equal(src.as_stored(name, src.get(name)), stored)


def test_an_override_cannot_quantize_a_router(folders: dict[str, Path]) -> None:
    model = BlockRunner(Checkpoint(folders["qwen3_moe"]), device="cpu")
    with pytest.raises(RecipeError, match=r"names model\.layers\.0\.mlp\.gate, a router, which stays dense"):
        goals_of(from_mapping({"overrides": {r"mlp\.gate": "int4:g64"}}), model.paths, model.kept_dense)
    goals = goals_of(from_mapping({"overrides": {r"mlp\..*": "int4:g64"}}), model.paths, model.kept_dense)
    assert goals["model.layers.0.mlp.gate"] is None and goals["model.layers.0.mlp.experts.0.up_proj"] is not None


#: family -> an expert linear as the output names it, whose stored tensor has other names, rows or shapes in memory
STORED_OTHERWISE = {
    "inkling2_text": "model.llm.layers.1.mlp.experts.3.up_proj",
    "inkling_mm_model": "model.llm.layers.0.mlp.shared_experts.0.up_proj",
    "inkling_text": "model.layers.0.mlp.shared_experts.0.gate_proj",
    "jetmoe": "model.layers.1.self_attention.experts.output_linear.2.linear",
    "step3p7": "model.layers.1.moe.experts.0.gate_proj",
    "ernie4_5_vl_moe": "model.layers.1.mlp.experts.7.down_proj",
}


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[NEWEST] if "inkling2" in family else []) for family in STORED_OTHERWISE]
)
def test_experts_that_are_stored_otherwise_compute_the_same(family: str, tmp_path: Path) -> None:
    import transformers

    src = Checkpoint(families.write(family, tmp_path / "m"))
    cls = getattr(transformers, families.model_class(family))
    with torch.no_grad():
        expected = cls.from_pretrained(src.path, dtype=torch.float32)(input_ids=TOKENS).logits
        torch.testing.assert_close(load_dense_model(src)(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    model = BlockRunner(Checkpoint(src.path), device="cpu")
    assert STORED_OTHERWISE[family] in model.experts
    assert not [line for line in model.notices if "experts" in line or "_linear" in line]


def test_experts_beyond_the_number_are_copied_and_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    src = Checkpoint(families.write("longcat_flash", tmp_path / "m"))
    assert load_dense_model(src).config.zero_expert_num == 2
    (notice,) = [line for line in BlockRunner(src, device="cpu").notices if "not part of the model" in line]
    assert (
        notice.startswith("model.layers.0.mlp.experts.4.gate_proj.weight") and "(8 in all, 8 of them matrices" in notice
    )
    stored = load_file(src.path / "model.safetensors")
    save_file({**stored, "model.layers.0.mlp.experts.4.gate_proj.bias": torch.ones(8)}, tmp_path / "m.safetensors")
    shutil.move(tmp_path / "m.safetensors", src.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.4\.gate_proj\.bias is not part of the model \(1 in all\)"):
        load_dense_model(Checkpoint(src.path))


def test_an_expert_that_runs_on_all_tokens_changes_no_output() -> None:
    fused = nn.Module()
    fused.weight = nn.Parameter(torch.zeros(3, 4, 8))
    experts = ParallelExperts(
        fused, Fused(3, {"linear": (4, 8)}, {"weight": ("linear",)}, frozenset(), False), {"linear": "linear"}, ("", 0)
    )
    seen = []
    for number, expert in enumerate(experts.singles):
        expert.linear = nn.Linear(8, 4, bias=False)
        expert.linear.register_forward_pre_hook(lambda _m, args, number=number: seen.append((number, len(args[0]))))
    x, sizes = torch.randn(7, 8), [4, 0, 3]
    before = experts(x, sizes)
    experts.on_all_tokens = frozenset({1, 2})
    torch.testing.assert_close(experts(x, sizes), before)
    assert seen == [(0, 4), (1, 0), (2, 3), (0, 4), (1, 7), (2, 7)]
