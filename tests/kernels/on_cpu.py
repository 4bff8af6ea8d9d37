"""Compile device code with an ordinary C++ compiler, as a library for Python, to test it without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from quantkit.kernels.loader import source_dir


def library(folder: Path, text: str) -> ctypes.CDLL:
    """Compile `text`, which includes headers of kernels/, in a folder; skips without a compiler that has _Float16."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++ to compile parts of the kernels for the CPU")
    (folder / "part.cpp").write_text(text)
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", f"-I{source_dir()}"]
    command = [compiler, *flags, folder / "part.cpp", "-o", folder / "part.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "_Float16" in done.stderr:
        pytest.skip(f"needs a compiler that has _Float16: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "part.so"))
