"""A number format and a layout from outside the package: two entries, and everything works with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.core.formats import FORMATS, Format, floating
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.arrangement import OnRows
from quantkit.layouts.base import Layout, Stored, matrix
from quantkit.layouts.schemes import Schemes
from tests.command_line import call
from tests.layouts.laws import obeys
from tests.layouts.samples import record

FP4 = floating("fp4", ebits=2, mbits=1, layout="bytes")


class BytesConfig(msgspec.Struct):
    """Its config."""

    format: str
    ignore: list[str]


class Bytes(Layout):
    """One byte a code, and one scale per row."""

    NAME = "bytes"
    QUANT_METHODS = ("bytes",)
    CONFIG = BytesConfig
    HOLDS = "every format"
    TENSORS = ("codes", "scales")
    MARKER = "codes"
    TITLE, MULTIPLES, WAY_OUT = "the layout of bytes", (1, 1), "--skip the weight"

    def holds(self, fmt: Format) -> bool:
        return True

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.group_size is not None or not scheme.symmetric:
            raise LayoutError("the layout of bytes has one scale per row")

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        return {"codes": (torch.uint8, (n, k)), "scales": (torch.float16, (n, 1))}

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        return matrix(shapes, "codes")

    def packer(
        self,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        shape: tuple[int, int],
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        tensors["scales"].copy_(scales)

        def add(first: int, codes: Tensor) -> None:
            tensors["codes"][first : first + len(codes)] = codes

        return add

    def unpacker(
        self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        def fill(first: int, codes: Tensor) -> None:
            codes.copy_(tensors["codes"][first : first + len(codes)])

        return tensors["scales"], None, fill

    def config(self, schemes: Schemes) -> BytesConfig:
        return BytesConfig(schemes.default.format.name, list(schemes.ignore))

    def schemes(self, config: BytesConfig) -> Schemes:
        return Schemes(Scheme(FORMATS[config.format]), ignore=tuple(config.ignore))


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toys, by all that this takes."""
    monkeypatch.setitem(FORMATS, FP4.name, FP4)
    monkeypatch.setitem(LAYOUTS, Bytes.NAME, Bytes())


@pytest.mark.parametrize(
    ("layout", "label"), [("bytes", "fp4"), ("bytes", "int4:channel"), ("bytes", "fp6"), ("compressed-tensors", "fp4")]
)
def test_the_laws_hold(layout: str, label: str) -> None:
    for n, k in ((64, 128), (7, 96)):
        obeys(layout, record(Scheme.parse(label), n, k))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "compressed-tensors"])
def test_layouts_without_a_place_for_a_format_refuse_it(layout: str) -> None:
    with pytest.raises(LayoutError, match="not fp4: "):
        LAYOUTS[layout].check(Scheme(FP4), 128, 128)
    with pytest.raises(LayoutError, match="not fp4: "):
        LAYOUTS[layout].pack(record(Scheme(FP4), 128, 128))


@pytest.mark.parametrize("layout", ["bytes", "compressed-tensors"])
def test_a_model_is_planned_quantized_inspected_and_verified(layout: str, small_llama: Path, tmp_path: Path) -> None:
    options = {"format": "fp4", "method": "rtn"} | ({} if layout == "bytes" else {"layout": layout})
    out = tmp_path / "out"
    planned = quantkit.plan(small_llama, **options)
    assert (planned.layout, planned.scheme, planned.verdict.misfits) == (layout, "fp4:channel", ())
    quantkit.quantize(small_llama, out, **options)
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) == sum(
        size for name, size in planned.files.items() if name.endswith(".safetensors")
    )
    found = json.loads(call("inspect", out, "--json").stdout)
    assert (found["layout"], list(found["schemes"])) == (layout, ["fp4:channel"])
    assert "quantkit.load" in found["readers"]
    assert quantkit.verify(out, device="cpu").ok
    other = "compressed-tensors" if layout == "bytes" else "bytes"
    quantkit.pack(out, tmp_path / "other", other)
    assert quantkit.verify(tmp_path / "other", against=out, device="cpu").ok
