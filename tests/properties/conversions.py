"""What tests of conversions share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantkit.io.safetensors_files import read_header


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quantkit")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
    assert not threads()


def damage(folder: Path, name: str) -> None:
    for path in folder.glob("*.safetensors"):
        if (info := read_header(path)[0].get(name)) is not None:
            data = bytearray(path.read_bytes())
            data[info.start + 5] ^= 0x10
            path.write_bytes(bytes(data))
