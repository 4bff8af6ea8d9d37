from __future__ import annotations

import pytest
import torch

from quantkit.kernels import missing


@pytest.fixture
def gpu() -> torch.device:
    reason = missing("marlin", torch.device("cuda")) if torch.cuda.is_available() else "torch sees no CUDA GPU"
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())
