"""Calls of a block that are made again with another hidden state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.models.interception import Stop
from quantkit.models.passing import Passed
from quantkit.models.replay import Replay


def record(replay: Replay, mask: Any = None, *, passed: Passed | None = None, entering: Tensor | None = None) -> bool:
    """Record one call of a block on `passed`, and tell whether it was kept."""
    passed = passed or Passed(torch.zeros(3, 2), None, {})
    entering = passed.hidden[None] if entering is None else entering
    with replay.recording("key", passed, passed.hidden._version, entering, (entering,), {"mask": mask, "scale": 2.0}):
        pass
    return replay.find("key") is not None


def test_a_call_is_made_again_with_another_hidden_state() -> None:
    replay, mask = Replay(2**20), torch.ones(3, 3)
    assert record(replay, mask)
    call = replay.find("key")
    assert call is not None
    args, kwargs = call.on(torch.ones(3, 2))
    assert args[0].shape == (1, 3, 2) and args[0].eq(1).all()
    assert kwargs["mask"] is mask and kwargs["scale"] == 2.0
    replay.clear()
    assert replay.find("key") is None


def test_a_call_that_a_watcher_ends_counts() -> None:
    replay, hidden = Replay(2**20), torch.zeros(3, 2)
    entering = hidden[None]
    with pytest.raises(Stop), replay.recording("key", Passed(hidden, None, {}), 0, entering, (entering,), {}):
        raise Stop
    assert replay.find("key") is not None


def test_a_call_that_writes_over_its_arguments_is_not_kept() -> None:
    replay, hidden, mask = Replay(2**20), torch.zeros(3, 2), torch.zeros(3)
    entering = hidden[None]
    with replay.recording("key", Passed(hidden, None, {}), 0, entering, (entering, mask), {}):
        mask.add_(1)
    assert replay.find("key") is None


def test_what_cannot_be_repeated_is_not_kept() -> None:
    hidden = torch.zeros(3, 2)
    assert not record(Replay(0), torch.ones(1))  # no bytes
    assert not record(Replay(2**20), {"cache": 1})  # a value that a call can change
    assert not record(Replay(2**20), hidden[0], passed=Passed(hidden, None, {}))  # part of the hidden state
    assert not record(Replay(2**20), entering=torch.zeros(1, 3, 2))  # another hidden state than the stored one
    assert not record(Replay(2**20), passed=Passed(hidden, [torch.ones(1)], {}))
    assert not record(Replay(2**20), passed=Passed(hidden, None, {"cache": {0: torch.ones(1)}}))
    written = Passed(hidden, None, {})
    with (replay := Replay(2**20)).recording("key", written, hidden._version - 1, hidden[None], (hidden[None],), {}):
        pass
    assert replay.find("key") is None
