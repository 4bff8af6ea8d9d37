"""Linears whose rows transformers splits or stacks: the model has the stored ones, and computes the same."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.models.block_runner import BlockRunner
from quantkit.models.meta_model import skeleton
from quantkit.models.state_names import Merged, Rows, StateNames, rows_of, select
from quantkit.models.stored_rows import LinearRows, StoredLinear, follow_storage
from tests.models.folders import block_by_block, documents, outputs

#: family -> a stored linear and the number of modules that read its rows
STORED = {
    "molmo2": ("model.transformer.blocks.1.self_attn.att_proj", 3),
    "hrm_text": ("model.H_module.layers.0.attn.gqkv_proj", 4),
    "minimax_m3_vl": ("language_model.model.layers.0.block_sparse_moe.shared_experts.up_proj", 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("rows")

    def written(family: str) -> Path:
        return root / family if (root / family).exists() else families.write(family, root / family)

    return written


@pytest.mark.parametrize("family", ["molmo2", "minimax_m3_vl"])
def test_blocks_compute_the_same_and_call_each_stored_linear_once(family: str, folder: Callable[[str], Path]) -> None:
    src = Checkpoint(folder(family))
    model = BlockRunner(src, device="cpu")
    model.dtype = torch.float32
    name, _ = STORED[family]
    assert name in model.linears and not [line for line in model.notices if "other stored tensors" in line]
    tokens = documents()[1]
    import transformers

    plain = getattr(transformers, families.model_class(family)).from_pretrained(src.path, dtype=torch.float32)
    expected, _ = outputs(plain.eval(), model.blocks, tokens)
    calls = Counter[str]()
    inside = [linear for index in range(len(model.blocks)) for linear in model.targets(index)]
    with model.watching(inside, lambda linear, x: bool(calls.update([linear]))):
        for state, wanted in zip(block_by_block(model, tokens), expected, strict=True):
            torch.testing.assert_close(state.hidden, wanted, rtol=1e-4, atol=1e-4)
    assert {linear for linear, count in calls.items() if count > 1} == set() and calls[name] == 1


@pytest.mark.parametrize("family", STORED)
def test_a_stored_linear_has_its_stored_name_and_shape(family: str, folder: Callable[[str], Path]) -> None:
    src = Checkpoint(folder(family))
    names = StateNames(skeleton(src, torch.float32))
    name, readers = STORED[family]
    stored = follow_storage(names, src, names.match(src).merged)
    (found,) = [linear for path, linear in stored.items() if name.endswith(".".join(path.split(".")[-2:]))][-1:]
    assert found.readers == readers and found.linear.get_parameter("weight").shape == src.shape(f"{name}.weight")
    names.refresh()
    assert follow_storage(names, src, names.match(src).merged) == {}  # nothing is left to follow


def test_a_rule_is_followed_everywhere_or_nowhere(folder: Callable[[str], Path]) -> None:
    src = Checkpoint(folder("molmo2"))
    module = skeleton(src, torch.float32)
    names = StateNames(module)
    module.get_submodule("model.language_model.layers.1.self_attn").att_proj = nn.Identity()
    names.refresh()
    found = follow_storage(names, src, names.match(src).merged)
    assert {path.rpartition(".")[2] for path in found} == {"ff_proj"}


def test_a_copy_of_a_model_has_linears_of_its_own() -> None:
    owner = nn.Module()
    owner.whole = nn.Linear(4, 6)
    stored = StoredLinear(owner.whole)
    owner.first, owner.last = LinearRows([(stored, slice(0, 4, 1))]), LinearRows([(stored, slice(4, 6, 1))])
    other, x = copy.deepcopy(owner), torch.ones(1, 4)
    expected = owner.whole(x)
    nn.init.zeros_(other.whole.weight)
    nn.init.zeros_(other.whole.bias)
    with torch.no_grad():
        assert torch.equal(torch.cat([owner.first(x), owner.last(x)], -1), expected)
        assert not other.first(x).any() and not other.last(x).any()
    assert list(owner.state_dict()) == ["whole.weight", "whole.bias"]


def merged(convert: Callable[[list[Tensor]], dict[str, Tensor]], names: str, states: str) -> Merged:
    return Merged(tuple(states), tuple(names), lambda given: convert(list(given)), ("rule",))


def test_rows_are_found_on_an_example() -> None:
    split = merged(lambda g: {"q": g[0][:4], "k": g[0][4:]}, "a", "qk")
    assert rows_of(split, lambda _: (6, 8)) == {"q": (Rows("a", slice(0, 4, 1)),), "k": (Rows("a", slice(4, 6, 1)),)}
    stacked = merged(lambda g: {"x": torch.cat(g)}, "ab", "x")
    assert rows_of(stacked, lambda _: (3,)) == {"x": (Rows("a", slice(0, 3, 1)), Rows("b", slice(0, 3, 1)))}
    apart = merged(lambda g: {"x": torch.cat([g[0][:, ::2], g[0][:, 1::2]], 1)}, "a", "x")
    rows = rows_of(apart, lambda _: (2, 6, 8))
    assert rows == {"x": (Rows("a", slice(0, 6, 2)), Rows("a", slice(1, 7, 2)))}
    assert select(rows["x"], slice(3, 6)) == Rows("a", slice(1, 7, 2)) and select(rows["x"], slice(2, 4)) is None


@pytest.mark.parametrize(
    "convert",
    [
        lambda g: {"x": g[0].T},
        lambda g: {"x": g[0].flip(1)},
        lambda g: {"x": g[0].flip(0)},
        lambda g: {"x": g[0] * 2},
        lambda g: {"x": g[0][:4]},
        lambda g: {"x": torch.cat([g[0], g[0]])},
        lambda g: {"x": g[0].view(3, 2, 2)},
        lambda g: {"y": g[0]},
        lambda g: {"x": g[1]},  # fails
        lambda g: {"x": g[0].float()},
        lambda g: {"x": [g[0]]},
        lambda g: {"x": g[0][:0]},
        lambda g: {"x": g[0][:, :0]},
    ],
)
def test_anything_but_rows_is_left_to_transformers(convert: Any) -> None:
    assert rows_of(merged(convert, "a", "x"), lambda _: (6, 8)) is None


def test_a_model_whose_layers_are_no_blocks_is_refused_in_one_line(folder: Callable[[str], Path]) -> None:
    model = BlockRunner(Checkpoint(folder("xlm")), device="cpu")
    with pytest.raises(CheckpointError, match=r"parts in transformer\.attentions and in transformer\.ffns.*rtn$"):
        model.prepare(embeddings=True)
