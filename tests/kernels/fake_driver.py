"""A driver without a GPU, which records launches: for what happens in Python before a kernel starts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import kernels
from quantkit.kernels import driver, loader


class FakeDriver:
    """Does nothing, and records the arguments of each launch, the sizes of its grid, and whether it may start early.

    `stream` is torch's current one, and `graph` the number of the CUDA graph that it is captured into, or 0.
    """

    def __init__(self) -> None:
        self.stream, self.graph = 0, 0
        self.grids: list[tuple[int, ...]] = []
        self.early: list[bool] = []
        self.pointers: Any = None

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        status._obj.value = int(self.graph > 0)
        return 0

    def cuStreamGetCaptureInfo_v3(self, stream: Any, status: Any, number: Any, *rest: Any) -> int:
        status._obj.value, number._obj.value = int(self.graph > 0), self.graph
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, none: None) -> int:
        launch = config._obj
        self.grids.append(tuple(launch.sizes)[:3])
        asked = [attribute.id for attribute in launch.attributes[: launch.count]]
        self.early.append(driver.PROGRAMMATIC_STREAM_SERIALIZATION in asked)
        self.pointers = pointers
        return 0

    def nothing(self, *args: Any) -> int:
        return 0

    cuTensorMapEncodeTiled = cuDeviceGet = cuDevicePrimaryCtxRetain = nothing
    cuCtxGetCurrent = cuCtxPushCurrent_v2 = cuCtxPopCurrent_v2 = nothing

    def argument(self, index: int) -> int:
        """Read a pointer of the last launch."""
        return int.from_bytes(ctypes.string_at(self.pointers[index], 8), "little")


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Put a fake in the place of the driver."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


@pytest.fixture
def fake_gpu(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Let tensors on the CPU be multiplied as on a Hopper GPU, up to the launch."""

    def loaded(name: str, instances: Sequence[str], index: int) -> dict[str, driver.Function]:
        return {one: driver.Function(SimpleNamespace(ptr=7), 1 << 30) for one in instances}

    def allocated(device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
        return torch.empty(1), torch.zeros(1, dtype=torch.int32)

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(loader, "loaded", loaded)
    monkeypatch.setattr(loader, "uncompiled", lambda *args: [])
    monkeypatch.setattr(loader, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernels, "unusable", lambda device: None)
    monkeypatch.setattr(driver, "allocate", allocated)
    monkeypatch.setattr(driver, "WORKSPACES", {})
    monkeypatch.setattr(driver, "SHARED_BY_GRAPHS", {})
    return fake_driver
