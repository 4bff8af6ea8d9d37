"""A caller's settings of torch, whoever of several threads ends first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from quantkit.core.torch_settings import usual_settings


@pytest.fixture
def unusual() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("unusual")
def test_the_last_of_several_threads_gives_the_settings_of_the_process_back() -> None:
    begun, left = threading.Event(), threading.Event()

    def other() -> None:
        with usual_settings():
            begun.set()
            left.wait()

    for _ in range(2):
        thread = threading.Thread(target=other)
        with usual_settings():
            thread.start()
            begun.wait()
        assert torch.get_default_dtype() == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        left.set()
        thread.join()
        assert torch.get_default_dtype() == torch.float64 and torch.get_float32_matmul_precision() == "medium"
        begun.clear()
        left.clear()


@pytest.mark.usefixtures("unusual")
def test_an_exception_gives_them_back_too() -> None:
    with pytest.raises(ValueError, match="x"), usual_settings():
        raise ValueError("x")
    assert torch.get_default_dtype() == torch.float64
