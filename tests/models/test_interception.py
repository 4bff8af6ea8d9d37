"""A toy model's own forward, taken over block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.models.interception import (
    HIDDEN as HIDDEN_STATE,
    MOST_SHAPES,
    REPEATED,
    Given,
    Interception,
    Needed,
    NotReached,
    Pass,
    Passed,
    Repeated,
    Unused,
    independent,
)

HIDDEN = torch.arange(6.0).view(3, 2)


class Block(nn.Module):
    """Add 1 and what `cache` has, leave its own number there, and return a mask beside the hidden state."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(2, 2, bias=False)
        self.linear.weight.data = torch.eye(2)

    def forward(self, hidden_states: Tensor, mask: Any, cache: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = self.linear(hidden_states) + 1 + sum(cache.values())
        cache[str(self.number)] = torch.tensor(10.0**self.number)
        return out, torch.full((3,), float(self.number))


class Model(nn.Module):
    """Three blocks; between them `between` is applied to what one returns beside its hidden state, and 1 is added."""

    def __init__(self, between: Callable[[Any], Any] = lambda extra: None, calls: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(3)))
        self.between, self.calls = between, calls

    def forward(self, hidden: Tensor) -> Tensor:
        cache, extra = dict[str, Tensor](), None
        for block in self.blocks[: self.calls]:
            hidden, extra = block(hidden, mask=self.between(extra), cache=cache)
            hidden.add_(1)
        return hidden * 2


def stored() -> Passed:
    return Passed(HIDDEN.clone(), [torch.zeros(3)], {})


def entered(model: Model) -> tuple[Interception, Callable[[], Tensor]]:
    return Interception([*model.blocks]), lambda: model(HIDDEN[None].clone())


@pytest.mark.parametrize("between", [lambda extra: extra, lambda extra: None if extra is None else extra + 1])
def test_a_value_that_was_not_stored_is_missed_only_if_it_is_used(between: Callable[[Any], Any]) -> None:
    passed = Passed(HIDDEN.clone(), [Unused.of(7)], {})
    unused, forward = entered(Model())
    assert unused.run(forward, Pass(1, passed)).output is not None
    used, forward = entered(Model(between))
    with pytest.raises(Needed) as caught:
        used.run(forward, Pass(1, passed))
    assert caught.value.number == 7


def test_a_block_that_is_never_called_is_told() -> None:
    blocks, forward = entered(Model(calls=2))
    with pytest.raises(NotReached):
        blocks.run(forward, Pass(2, stored()))


SHAPE = torch.Size((1, 4, 2))
X = torch.ones(SHAPE)


@pytest.mark.parametrize(
    ("first", "second", "may"),
    [
        ((HIDDEN_STATE, torch.ones(3), None), (HIDDEN_STATE, torch.ones(3), None), True),
        ((HIDDEN_STATE, (torch.ones(3), 2, "sdpa")), (HIDDEN_STATE, (torch.ones(3), 2, "sdpa")), True),
        ((HIDDEN_STATE, torch.ones(3)), (HIDDEN_STATE, torch.zeros(3)), False),
        ((HIDDEN_STATE, torch.ones(3)), (HIDDEN_STATE, torch.ones(3).double()), False),
        ((HIDDEN_STATE, torch.ones(17)), (HIDDEN_STATE, torch.ones(17)), False),  # larger than twice the hidden state
        ((HIDDEN_STATE, 1), (HIDDEN_STATE, 2), False),
        ((HIDDEN_STATE, 1), (HIDDEN_STATE, True), False),
        ((HIDDEN_STATE, {}), (HIDDEN_STATE, {}), False),  # the block may leave entries there
        ((HIDDEN_STATE, []), (HIDDEN_STATE, []), False),
        ((HIDDEN_STATE, torch.ones(3).requires_grad_()), (HIDDEN_STATE, torch.ones(3)), False),
    ],
)
def test_only_arguments_that_stay_are_kept(first: Any, second: Any, may: bool) -> None:
    one, other = (Given(args[:1], dict(enumerate(args[1:])), SHAPE, True) for args in (first, second))  # type: ignore[arg-type]
    assert independent(one, other, X) == may
    assert not independent(one._replace(is_stored=False), other, X)


def test_arguments_are_kept_for_one_block_and_some_shapes_until_they_change() -> None:
    mask, repeated, asked = torch.ones(3), Repeated(), list[int]()

    def found() -> Given:
        asked.append(1)
        return Given((HIDDEN_STATE, mask), {}, SHAPE, True)

    assert [repeated.get(0, "a", found) is not None for _ in range(REPEATED + 2)] == [False] * (REPEATED - 1) + [
        True
    ] * 3
    mask.add_(1)
    assert [repeated.get(0, "a", found) for _ in range(REPEATED + 2)] == [None] * (REPEATED + 2) and len(asked) == 1
    for shape in range(MOST_SHAPES + 1):
        last = [repeated.get(0, shape, found) for _ in range(REPEATED)][-1]
        assert (last is None) == (shape == MOST_SHAPES)
    assert repeated.get(1, 0, found) is None
