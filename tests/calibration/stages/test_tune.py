"""Tuning of blocks: never worse on held-out text, the same bytes again and after a stop, and what it refuses."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration.budget import TUNED_AT_ONCE
from quantkit.calibration.loop import calibrated, new_run
from quantkit.calibration.stages import tune
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Commit, Item
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.errors import NumericError
from quantkit.models.block_runner import BlockRunner
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.calibration.runs import QUICK, continued, digests, interrupted, short_sequences, small
from tests.tiny_models import write_model

TUNED: dict[str, Any] = {**QUICK, "scheme": {"group_size": 32}, "tune": 4}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("two"))


def tuned(folder: Path, recipe: Recipe, work: Path, **options: Any) -> dict[str, Item]:
    src = Checkpoint(folder)
    found = calibrated(new_run(recipe, BlockRunner(src, device="cpu"), short_sequences(), work, **options), [])
    return {item.name: item for item in found if not isinstance(item, Commit)}


def take_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every held-out error be less than the one before."""
    falling = iter(range(10000, 0, -1))
    monkeypatch.setattr(tune.BlockTuning, "held_out_error", lambda self, weights: float(next(falling)))


def held_out_error(folder: Path, items: dict[str, Item]) -> float:
    """Compute the error of the only block on the eighth sequence, in float32, with the weights of `items`."""
    src = Checkpoint(folder)
    model = BlockRunner(src, device="cpu")
    model.prepare(embeddings=True)
    tokens = short_sequences()[7]
    state = model.embed(tokens)
    model.weights.load_block(0)
    target = model.run(0, tokens, state)
    for linear in model.targets(0):
        value = items[f"{linear}.weight"].value
        if isinstance(value, QuantizedTensor):
            model.weights.replace(linear, value.dequantize())
    found = model.run(0, tokens, state)
    assert target is not None and found is not None
    # Relative for each token: an attention sink counts as one token, however large it is.
    errors = (found.hidden - target.hidden).square().sum(-1) / target.hidden.square().sum(-1)
    return float(errors.mean())


def facts_of(items: dict[str, Item]) -> list[dict[str, Any]]:
    return [item.facts for item in items.values() if item.facts]


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", {"scheme": {"group_size": 32}, "signed": True, "gptq": {"descent": 1, "refit": True}}),
        ("opt", {"scheme": {"symmetric": False}, "clip": "none"}),
        ("gemma2", {"scheme": {"format": "fp6"}, "method": "gptq", "clip": "none"}),
        ("mixtral", {**QUICK, "scheme": {"group_size": 32}, "skip": ["lm_head", "k_proj"]}),
        ("llama", {"scheme": {"sparsity": "2:4"}, "clip": "none"}),
    ],
)
def test_a_tuned_block_is_never_worse_on_held_out_text(
    family: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "RATE", 0.001)
    monkeypatch.setattr("quantkit.models.block_runner.is_fast_in_bfloat16", lambda device: False)
    folder = write_model(family, tmp_path / "model", num_hidden_layers=1)
    plain = tuned(folder, from_mapping(recipe), tmp_path)
    items = tuned(folder, from_mapping({**recipe, "tune": 4}), tmp_path)
    found = facts_of(items)
    assert all(facts["tuned_error"] <= facts["untuned_error"] for facts in found)
    before_tuning, after = held_out_error(folder, plain), held_out_error(folder, items)
    assert found[0]["untuned_error"] == pytest.approx(before_tuning, rel=1e-3)
    assert found[0]["tuned_error"] == pytest.approx(after, rel=1e-3) and after < 1.0001 * before_tuning
    for name, item in items.items():
        before = plain[name].value
        if isinstance(item.value, QuantizedTensor) and item.facts and isinstance(before, QuantizedTensor):
            assert item.value.scheme == before.scheme and (item.facts["tuned_step"] > 0) == ("loss" not in item.facts)
        else:
            assert isinstance(item.value, Tensor) and isinstance(before, Tensor) and torch.equal(item.value, before)
    first = [name for name in digests(items) if ".0." in name]
    for name in first:  # the solver saw the same inputs
        a, b = items[name].value, plain[name].value
        assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and items[name].facts
        assert (items[name].facts or {})["tuned_changed"] == int((a.codes != b.codes).sum())
        if a.scheme.sparsity:
            assert bool((a.codes[b.codes == 8] == 8).all())


def test_steps_that_help_nowhere_leave_the_bytes_alone(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {**TUNED, "skip": ["lm_head", r"layers\.1\..*"]}  # a block without codes
    plain = tuned(two, from_mapping({**recipe, "tune": 0}), tmp_path)
    monkeypatch.setattr(tune, "RATE", 5.0)
    items = tuned(two, from_mapping(recipe), tmp_path)
    assert digests(items) == digests(plain)
    assert {facts["tuned_step"] for facts in facts_of(items)} == {0}
    assert [f["loss"] for f in facts_of(items)] == [f["loss"] for f in facts_of(plain)]


def test_the_same_seed_gives_the_same_bytes_and_a_stop_changes_none(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_the_last_step(monkeypatch)
    monkeypatch.setattr(tune, "BATCH", 2)
    recipe, src = from_mapping(TUNED), Checkpoint(two)
    torch.manual_seed(3)  # another state of torch's own generator
    whole = tuned(two, recipe, tmp_path)
    other = tuned(two, from_mapping({**TUNED, "calibration": {"seed": 1}}), tmp_path)
    assert digests(whole) != digests(other)
    (tmp_path / "spilled").mkdir()
    assert digests(tuned(two, recipe, tmp_path / "spilled", act_budget=0)) == digests(whole)
    first = interrupted(src, recipe, tmp_path / "partial", 1, short_sequences())
    assert continued(first, src, recipe, tmp_path / "partial", short_sequences()) == digests(whole)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_padded_sequences_have_the_error_and_the_gradients_of_single_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.models.block_runner.is_fast_in_bfloat16", lambda device: False)
    folder, generator = write_model(family, tmp_path / "model", num_hidden_layers=1), torch.Generator().manual_seed(7)
    documents = [torch.randint(256, (8 + 5 * (number % 7),), generator=generator) for number in range(17)]
    seen: list[list[int]] = []

    def run(at_once: int) -> tuple[list[dict[str, Any]], list[Tensor]]:
        monkeypatch.setitem(TUNED_AT_ONCE, "cpu", at_once)
        gradients, src = list[Tensor](), Checkpoint(folder)

        def descend(weight: tune.TunedWeight, gradient: Tensor, rate: float) -> None:
            gradients.append(gradient)

        monkeypatch.setattr(tune.TunedWeight, "descend", descend)
        model, recipe = BlockRunner(src, device="cpu"), from_mapping({**TUNED, "tune": 1, "output_aware": True})
        run_with = model.run_with

        def see(index: int, tokens: Tensor, *given: Any) -> Tensor:
            seen.append(list(tokens.shape))
            return run_with(index, tokens, *given)

        monkeypatch.setattr(model, "run_with", see)
        found = calibrated(new_run(recipe, model, documents, tmp_path), [])
        return facts_of({item.name: item for item in found if isinstance(item, Item)}), gradients

    (facts, gradients), alone = run(0), len(seen)
    (padded, others), together = run(120), seen[alone:]
    assert len(together) < alone / 2 and all(math.prod(shape) <= 120 for shape in together)
    assert padded[0]["untuned_error"] == pytest.approx(facts[0]["untuned_error"], rel=1e-5)
    for found, expected in zip(others, gradients, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize(
    ("of_ranks", "size"),
    [
        ([range(7)], 4),
        ([range(5), range(5, 12)], 4),
        ([range(3), range(3, 5), range(5, 9)], 6),
        ([range(3), [], range(5, 9)], 6),  # all documents of a rank are held out
    ],
)
def test_steps_take_all_sequences_of_a_rank_equally_often_and_equally_many_of_each_rank(
    of_ranks: list[range], size: int
) -> None:
    drawn = list(islice(tune.batches(of_ranks, torch.Generator().manual_seed(1)), 12))
    assert {len(batch) for batch in drawn} == {size}
    ranks = [set(numbers) for numbers in of_ranks if numbers]
    for numbers in ranks:
        seen = [number for batch in drawn for number in batch if number in numbers]
        first, second = seen[: len(numbers)], seen[len(numbers) : 2 * len(numbers)]
        assert set(first) == set(second) == numbers and (first != second or len(numbers) < 5)
        assert {sum(number in numbers for number in batch) for batch in drawn} == {size // len(ranks)}


def test_outputs_that_are_not_finite_end_the_run(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.BlockTuning, "error", lambda *given: torch.tensor(torch.nan))
    with pytest.raises(NumericError, match=r"layers\.0: its outputs on held-out sequences are not finite"):
        tuned(two, from_mapping(TUNED), tmp_path)
