"""A launch may only fetch weights early that an earlier one has read, and that nobody has written since."""

from __future__ import annotations

import torch

from quantkit.kernels.hopper import Reads


def test_only_a_tensor_that_was_read_and_not_written_since_may_be_read_early() -> None:
    reads, a, b = Reads(), torch.zeros(4), torch.zeros(4)
    assert not reads.valid([a, b])
    reads.remember([a, b])
    assert reads.valid([a, b]) and reads.valid([b])
    b.add_(1)
    assert not reads.valid([a, b]) and not reads.valid([b])
    reads.remember([a, b])
    assert reads.valid([a, b])
    assert not reads.valid([a, a.clone()])
    b.data = torch.ones(4)  # as a module does that is moved to a GPU; its version stays
    assert not reads.valid([a, b])
    with torch.inference_mode():
        c = torch.zeros(4)  # has no version that would tell of a write
    reads.remember([c])
    assert not reads.valid([c])
    assert len(reads.seen) == 2
    del a
    assert len(reads.seen) == 1
