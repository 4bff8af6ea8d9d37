from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.promises.outputs import prepare
from tests.promises.running import Work


@pytest.fixture(scope="module")
def work() -> Iterator[Work]:
    """A folder with the models and texts that the frozen commands name."""
    if torch.cuda.is_available():
        pytest.skip("the promises were frozen on a CPU, and the commands choose the GPU that is here")
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield prepare(Work(Path(folder)))
        torch.set_num_threads(before)


def memory() -> str | None:
    """Return a folder in memory if there is one with room: the commands flush every file to the disk otherwise."""
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK) or shutil.disk_usage(folder).free < 2**29:  # containers often have 64 MiB
        return None
    return folder
