from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.promises.outputs import prepare
from tests.promises.running import Work


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """A folder with the models and texts that the frozen commands name."""
    if torch.cuda.is_available():
        pytest.skip("the promises were frozen on a CPU, and the commands choose the GPU that is here")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield prepare(Work(tmp_path_factory.mktemp("promises")))
    torch.set_num_threads(before)
