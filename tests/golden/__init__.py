"""Read the golden vectors: bytes of the published packers, which nothing of quantkit made (README.md beside this)."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts import LAYOUTS

HERE = Path(__file__).resolve().parent
#: The full set, of which this folder has a part. Tests read it where it is.
FULL = HERE.parents[2] / "shared" / "golden"


class Golden:
    """A golden file: its cases, and tensors by case and name (None for one that the case lacks)."""

    def __init__(self, cases: dict[str, dict], tensors: dict[str, Tensor]) -> None:
        self.cases, self.tensors = cases, tensors

    def __call__(self, case: str, name: str) -> Tensor | None:
        return self.tensors.get(f"{case}.{name}")


def here(name: str) -> Golden:
    """Read the file of this folder."""
    data = gzip.decompress((HERE / f"{name}.safetensors.gz").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return Golden(json.loads(header["__metadata__"]["cases"]), safetensors.torch.load(data))


def full(name: str) -> Golden:
    """Read the file of the full set."""
    with safe_open(FULL / f"{name}.safetensors", "pt") as file:
        return Golden(
            json.loads(file.metadata()["cases"]),
            {key: file.get_tensor(key) for key in file.keys()},  # noqa: SIM118
        )


@functools.cache
def golden(name: str) -> Golden:
    """Read a file of the full set, or where that is missing the one of this folder. Tests must not change it."""
    return full(name) if FULL.is_dir() else here(name)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].is_contiguous()
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def both_ways(layout: str, q: QuantizedTensor, expected: dict[str, Tensor]) -> None:
    """Pack `q` to the expected bytes, unpack those to `q`, and pack the result again."""
    same(LAYOUTS[layout].pack(q), expected)
    back = LAYOUTS[layout].unpack(expected, q.scheme)
    assert back.equal(q)
    same(LAYOUTS[layout].pack(back), expected)


def scheme_of(case: dict) -> Scheme:
    group = case["group_size"]
    return Scheme(INT4, None if group == -1 else group, symmetric=case.get("sym", case.get("symmetric", True)))
