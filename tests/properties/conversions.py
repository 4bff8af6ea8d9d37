"""What tests of conversions share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("quantkit")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A run that a test before this one killed may still have a thread, until its traceback is freed."""
    before, running = torch.get_num_threads(), threads()
    yield
    assert torch.get_num_threads() == before
    assert not threads() - running
