"""Folders of random packed weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quantkit.core.quantized_tensor import Scheme
from quantkit.layouts.schemes import Schemes
from tests.inference.samples import Folders
from tests.kernels.fake_driver import fake_driver as fake_driver, fake_gpu as fake_gpu
from tests.layouts.samples import write_folder


@pytest.fixture(scope="module")
def folder(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Make folders of random packed weights, by layout and scheme; tests do not change them."""
    root = tmp_path_factory.mktemp("packed")

    def written(layout: str, label: str, key: bool = True) -> Path:
        out = root / f"{layout}-{label}-{key}".replace(":", "-")
        if not out.exists():
            schemes = Schemes(Scheme.parse(label), ignore=("lm_head",))
            write_folder(small_llama, out, layout, schemes, key=key)
        return out

    return written


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")


@pytest.fixture
def broken(folder: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder("marlin", "int4:g128"), tmp_path / "broken"))
