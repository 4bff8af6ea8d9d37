"""Compile device code with an ordinary C++ compiler, as a library for Python, to test it without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quantkit.kernels.loader import source_dir

FLAGS = ("-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC")


def cache_folder() -> Path:
    """Find the folder of what tests compile, which survives between runs: QUANTKIT_TEST_CACHE, or build/test-cache."""
    return Path(os.environ.get("QUANTKIT_TEST_CACHE") or Path(__file__).parents[2] / "build" / "test-cache")


def library(text: str) -> ctypes.CDLL:
    """Compile `text`, which includes headers of kernels/; skips without a compiler that has _Float16."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++ to compile parts of the kernels for the CPU")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    headers = [path.read_text() for path in sorted(source_dir().glob("*.cuh"))]
    key = hashlib.sha256(repr((version, FLAGS, text, headers)).encode()).hexdigest()
    built = cache_folder() / f"{key}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        part, own = built.with_suffix(f".{os.getpid()}.cpp"), built.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        command = [compiler, *FLAGS, f"-I{source_dir()}", part, "-o", own]
        done = subprocess.run(command, capture_output=True, text=True)
        part.unlink()
        if done.returncode != 0 and not _has_float16(compiler):
            pytest.skip(f"needs a compiler that has _Float16: {version.splitlines()[0]}")
        assert done.returncode == 0, done.stderr
        own.replace(built)
    return ctypes.CDLL(str(built))


def _has_float16(compiler: str) -> bool:
    command = [compiler, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input="_Float16 x;", capture_output=True, text=True).returncode == 0
