"""The names that options and tables share: formats, layouts, and the values of the recipe's keys.

This module imports only types, so that `--help` and completion need no torch. A test compares it
with the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

#: An object of JSON, such as a config or a report, and one that is only read.
Json = dict[str, Any]
JsonView = Mapping[str, Any]
#: The keys of `core.formats.FORMATS`.
FORMATS = (
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int8",
    "fp6",
    "fp5",
    "fp6-e2m3",
    "fp5-e2m2",
    "nvfp4",
    "mxfp4",
)
#: The keys of `layouts.LAYOUTS`.
LAYOUTS = (
    "compressed-tensors",
    "gptq",
    "gptq-v2",
    "awq",
    "humming",
    "tcfpx",
    "quick",
    "marlin",
    "marlin24",
    "marlin24-ct",
)
#: Layout with a kernel -> the family of `kernels.launcher` that launches it.
KERNELS = {
    "marlin": "marlin",
    "marlin24": "marlin24",
    "marlin24-ct": "marlin24",
    "tcfpx": "tcfpx",
    "quick": "quick",
}

#: File of an output that holds the outcome of `verify`.
VERIFICATION = "verify.json"

#: Package that only some uses need -> its lowest version, as pyproject.toml has it, and its use.
OPTIONAL = {
    "compressed-tensors": ("0.15", "for transformers to load our default INT4 output"),
    "gguf": ("0.18", "to quantize GGUF files"),
    "lm-eval": ("0.4.13", "for eval tasks"),
    "vllm": ("0.26", "on Linux, to serve, and for verify by an engine"),
    "cupy-cuda12x": ("13.6", "for kernels on a GPU, CUDA 12"),
    "cupy-cuda13x": ("13.6", "for kernels on a GPU, CUDA 13"),
}

#: The most tokens of text that an output is measured on before it is published: 16 windows of 2048.
MOST_TOKENS = 32768

Method = Literal["gptq", "rtn"]
#: Rules that choose two of four values. `sparsegpt` also updates these, to compensate for the
#: removed ones.
Rule = Literal["magnitude", "wanda", "sparsegpt"]
Clip = Literal["none", "search"]
Metric = Literal["mse", "diag", "block"]


def install(*packages: str) -> str:
    """Write the command that installs optional packages.

    The command names no extra of quantkit: quantkit itself may come from a wheel or a repository.
    """
    return " ".join(["pip install", *(f"'{name}>={OPTIONAL[name][0]}'" for name in packages)])
