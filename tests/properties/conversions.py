"""What tests of conversions share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantkit.io.safetensors_files import read_header
from tests.command_line import RTN, call


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quantkit")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
    assert not threads()


@pytest.fixture(scope="module")
def packed(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "ct"
    call("quantize", small_llama, "-o", out, *RTN, "-q")
    return out


def damage(folder: Path, name: str) -> None:
    for path in folder.glob("*.safetensors"):
        if (info := read_header(path)[0].get(name)) is not None:
            data = bytearray(path.read_bytes())
            data[info.start + 5] ^= 0x10
            path.write_bytes(bytes(data))
