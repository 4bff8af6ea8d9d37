"""The output head, which is solved behind the last block on what the quantized blocks pass on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.census import families
from quantkit.calibration import budget
from quantkit.calibration.budget import ROWS, Sizes
from quantkit.calibration.stages.solve import Solve, solve_uncalibrated
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import Item
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.models.block_runner import BlockRunner
from quantkit.models.weights import load_dense_model
from quantkit.progress import Progress
from quantkit.recipes.recipe import from_mapping
from tests.calibration.runs import PLAIN_SUM, digests, interrupted, plain_hessian, quantized, resumed, sequences
from tests.tiny_models import write_model

#: All linears have one scale a row, the head has more, so that it is solved apart from them.
PACKED: dict[str, Any] = {**PLAIN_SUM, "overrides": {"lm_head|embed_out": "int4:g32"}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama whose head has three units of rows, the last one short."""
    return write_model("llama", tmp_path_factory.mktemp("head") / "model", vocab_size=600)


@pytest.fixture(scope="module")
def whole(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Item]:
    return quantized(llama, from_mapping(PACKED), tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt_neox", "embed_out"),
        ("llava", "language_model.lm_head"),
        ("gemma", "model.embed_tokens"),  # tied: the table by the inputs of the head
    ],
)
def test_a_head_is_closer_than_rounding_on_the_outputs_of_quantized_blocks(
    family: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its name in the checkpoint differs from its module's path in two of them."""
    folder = folders[family] if family in folders else families.write(family, tmp_path / "model")
    items, commits = quantized(
        folder, from_mapping({**PACKED, "gptq": {"first_token": 0}, "overrides": {name: "int4:g32"}}), tmp_path
    )
    src = Checkpoint(folder)
    model, reference = BlockRunner(src, device="cpu"), load_dense_model(src)
    assert model.head == name and [commit["block"] for commit in commits] == [0, 1, "rest"]
    for block in (0, 1):
        for linear in model.targets(block):
            value = items[f"{linear}.weight"].value
            assert isinstance(value, QuantizedTensor)
            reference.get_submodule(model.paths[linear]).weight.data = value.dequantize()
    head = items[f"{name}.weight"]
    assert isinstance(head.value, QuantizedTensor) and head.facts is not None
    h, w = plain_hessian(reference, model.places[name], sequences()), src.get(f"{name}.weight").double()
    d = w - head.value.dequantize().double()
    for fact, x, within in (("norm", w, 1e-5), ("loss", d, 1e-3)):
        assert head.facts[fact] == pytest.approx(float(((x @ h) * x).sum()), rel=within)
    assert head.facts["method"] == "gptq" and "reason" not in head.facts
    assert head.facts["tokens"] == sum(map(len, sequences())) and head.facts["loss"] < 0.6 * head.facts["rtn_loss"]


def test_a_head_solved_in_slices_of_rows_is_that_of_one_piece(
    llama: Path, whole: dict[str, Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(budget.AT_ONCE, "cpu", 1)
    assert budget.rows_at_once(128, "cpu") == 256
    items, _ = quantized(llama, from_mapping(PACKED), tmp_path)
    assert digests(items) == digests(whole)
    facts, expected = ({**(found["lm_head.weight"].facts or {}), "seconds": 0} for found in (items, whole))
    assert facts == expected and facts["tokens"]


@pytest.mark.parametrize("damage", ["none", "gone"])
def test_a_run_stopped_within_its_head_continues_with_the_same_bits(
    damage: str, llama: Path, whole: dict[str, Item], tmp_path: Path
) -> None:
    src, recipe, partial = Checkpoint(llama), from_mapping(PACKED), tmp_path / "partial"
    first = interrupted(src, recipe, partial, 3, before_commit=True)  # blocks and head are done, the commit is not
    for path in partial.glob("activations-*") if damage == "gone" else ():
        path.unlink()
    second = resumed(src, recipe, partial, Progress())
    assert sorted(digests(second)) == ["lm_head.weight"]
    assert digests(first) | digests(second) == digests(whole)


def test_held_out_text_measures_a_head_and_changes_no_bit_of_it(
    llama: Path, whole: dict[str, Item], tmp_path: Path
) -> None:
    held_out = {"far": sequences((40,))}
    items, _ = quantized(llama, from_mapping(PACKED), tmp_path, held_out=held_out)
    assert digests(items) == digests(whole)
    facts = items["lm_head.weight"].facts
    assert facts is not None and 0 < facts["held_out"]["far"] < 1


def test_a_large_head_or_table_takes_no_float32_copy_of_all_its_weights(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve bytes for each weight of 152,000 rows would be more than all else in a run."""
    n, k = 152_064, 1536
    sizes = Sizes.of(Checkpoint(llama), {"lm_head": (n, k)}, from_mapping({}), "cpu")
    assert Solve().bytes(sizes).at[ROWS] < 12 * n * k < 44 * n * k
    rows, plain = list[int](), QuantizedTensor.dequantize

    def counted(self: QuantizedTensor, *args: Any) -> torch.Tensor:
        rows.append(len(self.codes))
        return plain(self, *args)

    monkeypatch.setattr(QuantizedTensor, "dequantize", counted)
    weight = torch.randn(3 * 2**11, 512, dtype=torch.bfloat16)
    [item] = solve_uncalibrated({"x": weight}, Scheme.parse("int8:g64"), from_mapping({"method": "rtn"}))
    assert max(rows) <= len(weight) / 8 and sum(rows) >= len(weight)
    value, error = item.value, (item.facts or {})["relative_error"]
    assert isinstance(value, QuantizedTensor)
    exact = (plain(value).double() - weight.double()).norm() / weight.double().norm()
    assert error == pytest.approx(float(exact), rel=1e-3)
