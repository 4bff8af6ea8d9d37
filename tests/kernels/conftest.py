"""Fixtures for tests of kernels: they skip where the GPU or CuPy is missing."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels import loader
from tests.kernels.fake_driver import fake_driver as fake_driver, fake_gpu as fake_gpu
from tests.kernels.on_cpu import cache_folder


@pytest.fixture
def nvrtc() -> None:
    """Skip without CuPy and NVRTC, which compile without a GPU."""
    problem = loader.toolchain()["problem"]
    if problem is not None:
        pytest.skip(f"needs CuPy: {problem}: {loader.install()}")


@pytest.fixture
def gpu(nvrtc: None) -> None:
    """Skip without a CUDA GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")


@pytest.fixture
def hopper_gpu(gpu: None) -> None:
    """Skip without a Hopper GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep compiled kernels between runs. Their names are hashes of sources, options and compiler."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(cache_folder()))
