"""What tests of conversions share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quantkit")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
    assert not threads()
