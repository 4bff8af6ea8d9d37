"""A block that is called by itself, where batches of one shape repeat, gives what the whole model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.census import families
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.block_runner import BlockRunner
from quantkit.models.interception import HIDDEN, KEPT, REPEATED, Given, Repeated, independent
from quantkit.models.passing import State
from tests.models.folders import outputs, plain
from tests.tiny_models import FAMILIES

SHAPE = torch.Size((1, 4, 2))
X = torch.ones(SHAPE)


def of_equal_length(count: int = REPEATED + 2, length: int = 20) -> list[Tensor]:
    """Draw documents; the last one has the tokens 0 and 1, which may be special, at many places."""
    generator = torch.Generator().manual_seed(6)
    documents = [torch.randint(2, 256, (length,), generator=generator) for _ in range(count)]
    documents[-1][::3], documents[-1][1::3] = 0, 1
    return documents


def compare(folder: Path) -> list[bool]:
    """Run each block on all documents; return whether it ran alone on the last one."""
    model, whole, docs = BlockRunner(Checkpoint(folder), device="cpu"), plain(folder), of_equal_length()
    model.prepare(embeddings=True)
    states: list[State | None] = [model.embed(tokens) for tokens in docs]
    model.drop_embeddings()
    expected, alone = [outputs(whole, model.blocks, tokens)[0] for tokens in docs], []
    for index in range(len(model.blocks)):
        model.load_block(index)
        for document, tokens in enumerate(docs):
            state = states[document]
            assert state is not None
            states[document] = found = model.run(index, tokens, state)
            assert found is not None
            reference = expected[document][index]
            torch.testing.assert_close(found.hidden, reference.reshape(found.hidden.shape), rtol=1e-5, atol=1e-5)
        alone.append(model.ran_alone)
        model.unload_block(index)
    return alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_block_gives_what_the_whole_model_gives(family: str, folders: dict[str, Path]) -> None:
    alone = compare(folders[family])
    if family in ("llama", "mistral", "opt", "gpt2", "mixtral"):
        assert all(alone)


@pytest.mark.parametrize("family", ["gemma4", "zamba2", "zaya", "glm_moe_dsa", "deepseek_v4", "xlnet", "bloom"])
def test_what_a_block_takes_from_tokens_or_earlier_blocks_is_new_in_each_pass(family: str, tmp_path: Path) -> None:
    compare(families.write(family, tmp_path / "m", torch.float32))


def test_a_batch_with_gradients_runs_alone_and_another_shape_does_not(folders: dict[str, Path]) -> None:
    runs = []
    for repeats in (True, False):
        model = BlockRunner(Checkpoint(folders["llama"]), device="cpu")
        model.prepare(embeddings=True)
        model.load_block(0)
        name = next(name for name in model.paths if "gate" in name)
        model.run(0, torch.arange(5), model.embed(torch.arange(5)))
        for seed in range(REPEATED + 1) if repeats else [REPEATED]:
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(256, (3, 9), generator=generator)
            hidden = torch.randn(3, 9, model.module.config.hidden_size, generator=generator)
            weight = model.weights.source(name).float().requires_grad_()
            out = model.run_with(0, tokens, State(hidden), {name: weight})
            out.square().sum().backward()
            assert model.takes_batches(0)
        assert model.ran_alone == repeats
        runs.append((out.detach(), weight.grad))
        model.run_with(0, tokens[:2], State(hidden[:2]), {})
        assert not model.ran_alone
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    ("first", "second", "may"),
    [
        ((HIDDEN, torch.ones(3), None), (HIDDEN, torch.ones(3), None), True),
        ((HIDDEN, (torch.ones(3), 2, "sdpa")), (HIDDEN, (torch.ones(3), 2, "sdpa")), True),
        ((HIDDEN, torch.ones(3)), (HIDDEN, torch.zeros(3)), False),
        ((HIDDEN, torch.ones(3)), (HIDDEN, torch.ones(3).double()), False),
        ((HIDDEN, torch.ones(17)), (HIDDEN, torch.ones(17)), False),  # larger than twice the hidden state
        ((HIDDEN, 1), (HIDDEN, 2), False),
        ((HIDDEN, 1), (HIDDEN, True), False),
        ((HIDDEN, {}), (HIDDEN, {}), False),  # the block may leave entries there
        ((HIDDEN, []), (HIDDEN, []), False),
        ((HIDDEN, torch.ones(3).requires_grad_()), (HIDDEN, torch.ones(3)), False),
    ],
)
def test_only_arguments_that_stay_are_kept(first: Any, second: Any, may: bool) -> None:
    one, other = (Given(args[:1], dict(enumerate(args[1:])), SHAPE, True) for args in (first, second))  # type: ignore[arg-type]
    assert independent(one, other, X) == may
    assert not independent(one._replace(is_stored=False), other, X)
    assert not independent(None, other, X) and not independent(one, None, X)


def test_arguments_are_kept_for_one_block_and_some_shapes_until_they_change() -> None:
    mask, repeated, asked = torch.ones(3), Repeated(), list[int]()

    def found() -> Given:
        asked.append(1)
        return Given((HIDDEN, mask), {}, SHAPE, True)

    assert [repeated.get(0, "a", found) is not None for _ in range(REPEATED + 2)] == [False] * (REPEATED - 1) + [
        True
    ] * 3
    mask.add_(1)
    assert [repeated.get(0, "a", found) for _ in range(REPEATED + 2)] == [None] * (REPEATED + 2) and len(asked) == 1
    for shape in range(KEPT + 1):
        last = [repeated.get(0, shape, found) for _ in range(REPEATED)][-1]
        assert (last is None) == (shape == KEPT)
    assert repeated.get(1, 0, found) is None
