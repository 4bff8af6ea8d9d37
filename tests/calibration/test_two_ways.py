"""Two ways to run give the same bytes: where activations are, what runs together, and whether passes wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.census import families
from quantkit.calibration import budget
from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import State
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import COARSE, digests, quantized, sequences


#: One of each kind: plain blocks, parallel attention, experts and tensors that blocks pass on, tokens before the text.
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm_moe_dsa", "cpmant"])
def test_on_disk_without_waiting_or_one_by_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run, folder = list[int](), BlockRunner.run, families.write(family, tmp_path / "model")

    def counted(model: BlockRunner, *args: Any) -> State | None:
        calls[-1] += 1
        return run(model, *args)

    def once(**options: Any) -> tuple[dict[str, str], list[Any]]:
        calls.append(0)
        items, commits = quantized(folder, from_mapping(COARSE), tmp_path, **options)
        return digests(items), [commit.get("activations") for commit in commits]

    monkeypatch.setattr(BlockRunner, "run", counted)
    whole = once()
    assert once(act_budget=0) == whole
    assert (tmp_path / "activations-live.bin").exists()
    assert any(tmp_path.glob("activations-passed-0-*.bin")) == (family == "glm_moe_dsa")
    monkeypatch.setattr(budget, "PASSES_BYTES", 0)
    assert once() == whole and torch.is_grad_enabled()
    assert family not in ("llama", "gpt_neox") or calls[0] < 0.4 * calls[-1]  # a pass waits instead of beginning anew


@pytest.mark.parametrize("moe", ["routed", "all"])
def test_experts_in_any_number_of_passes(
    moe: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = from_mapping({**COARSE, "calibration": {"moe": moe}})
    at_once, _ = quantized(folders["qwen3_moe"], recipe, tmp_path)
    monkeypatch.setattr(budget, "HESSIAN_BYTES", 1)
    monkeypatch.setattr(budget, "SOLVED_WEIGHTS", 1)
    assert digests(quantized(folders["qwen3_moe"], recipe, tmp_path)[0]) == digests(at_once)
    experts = [item.facts for name, item in at_once.items() if ".experts." in name and item.facts]
    assert len(experts) == 24 and {facts["method"] for facts in experts} == {"gptq"}
    assert all(facts["moe"] in (moe, "all") for facts in experts)
    assert all(isinstance(item.value, Tensor) for name, item in at_once.items() if name.endswith("mlp.gate.weight"))
    assert moe == "routed" or {facts["tokens"] for facts in experts} == {sum(map(len, sequences()))}


@pytest.mark.gpu
def test_on_a_gpu_that_is_nearly_full_or_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.calibration import activations
    from quantkit.calibration.run import Stream

    folder, recipe = families.write("llama", tmp_path / "model"), from_mapping({})
    here = digests(quantized(folder, recipe, tmp_path, "cuda")[0])
    assert digests(quantized(folder, recipe, tmp_path, "cuda", act_budget=0)[0]) == here
    monkeypatch.setattr(activations, "stays_on_gpu", lambda size, free: False)
    assert digests(quantized(folder, recipe, tmp_path, "cuda")[0]) == here
    monkeypatch.setattr(Stream, "may_wait", lambda *_: False)
    assert digests(quantized(folder, recipe, tmp_path, "cuda")[0]) == here
