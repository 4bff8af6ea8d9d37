"""TC-FPx: the published bytes of every case, and damaged or foreign files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.evaluation.options import VerifyOptions
from quantkit.evaluation.verify import verify
from quantkit.layouts import LAYOUTS
from quantkit.layouts.schemes import Schemes
from tests.folders import edit
from tests.golden import both_ways, golden
from tests.layouts.samples import record, write_folder
from tests.tiny_models import write_model

FORMATS_BY_SPLIT = {fmt.split: fmt for fmt in FORMATS.values() if fmt.is_float}


def with_codes(scheme: Scheme, codes: Tensor, scales: Tensor | None = None) -> QuantizedTensor:
    scales = torch.ones(len(codes), dtype=torch.float16) if scales is None else scales
    return QuantizedTensor(scheme, codes, scales.view(-1, 1))


def test_published_bytes_and_values_in_both_directions() -> None:
    file = golden("fpx_tc")
    seen: dict[str, set[str]] = {}
    for case, info in file.cases.items():
        scheme = Scheme(FORMATS_BY_SPLIT[info["format"]])
        seen.setdefault(info["format"], set()).add(info["pattern"])
        q = with_codes(scheme, file(case, "codes"), file(case, "scales"))
        both_ways("tcfpx", q, {"weight": file(case, "packed"), "scales": q.scales.view(-1)})
        if (dense := file(case, "dequant")) is not None:
            assert torch.equal(q.dequantize(torch.float16).view(torch.int16), dense.view(torch.int16)), case
    assert seen["e3m2"] == {"random", "ramp", "min", "max", "negzero"}
    assert all(patterns >= {"random", "ramp"} for patterns in seen.values()) and len(seen) == 4


def test_weights_are_quantized_to_the_published_words_and_values() -> None:
    file = golden("fpx_quant")
    for case, info in file.cases.items():
        fmt = FORMATS_BY_SPLIT[info["format"]]
        codes, scales = rtn.published_codes(file(case, "weight").float(), fmt)
        assert torch.equal(scales, file(case, "scales_fp32")) and torch.equal(codes, file(case, "codes"))
        q = with_codes(Scheme(fmt), codes, scales.to(torch.float16))
        both_ways("tcfpx", q, {"weight": file(case, "packed"), "scales": file(case, "scales")})
        dense = file(case, "dequant")
        assert torch.isinf(dense).any()
        assert torch.equal(q.dequantize(torch.float16).view(torch.int16), dense.view(torch.int16)), case


@pytest.mark.parametrize("label", ["fp6", "fp5"])
def test_impossible_sizes_are_refused(label: str) -> None:
    q = record(Scheme.parse(label), 64, 192)
    packed = LAYOUTS["tcfpx"].pack(q)
    words, scales = packed["weight"], packed["scales"]
    raw = words.view(torch.uint8)
    for weight in (
        words[:, :-1], words[:32], words.view(-1), words.view(32, -1), words.view(128, -1), raw[:, :-1], raw[:, :-4],
        raw[:, :0], raw.view(-1), words.to(torch.int64), raw.view(torch.int8), torch.zeros(64, 0, dtype=torch.int32),
    ):  # fmt: skip
        with pytest.raises(LayoutError):
            LAYOUTS["tcfpx"].unpack({"weight": weight, "scales": scales}, q.scheme)
    for wrong in (scales[:-1], scales.view(1, -1), scales.view(2, -1), scales.view(torch.int16), scales[:0]):
        with pytest.raises(LayoutError):
            LAYOUTS["tcfpx"].unpack({"weight": words, "scales": wrong}, q.scheme)


def test_a_folder_of_bytes_has_the_right_sizes_and_verifies(tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "source", torch.float16, hidden_size=128, intermediate_size=256)
    schemes = Schemes(Scheme.parse("fp5-e2m2"), ignore=("lm_head",))
    records = write_folder(source, tmp_path / "bytes", "tcfpx", schemes, key=False)

    def as_bytes(tensors: dict[str, Tensor]) -> None:
        for module in records:
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"].view(torch.uint8)
            tensors[f"{module}.scales"] = tensors[f"{module}.scales"].view(-1, 1)

    edit(tmp_path / "bytes", as_bytes)
    src = Checkpoint(tmp_path / "bytes")
    assert set(src.modules()) == set(records)
    for module, q in records.items():
        assert src.size(module) == q.shape and src.quantized(module).equal(q)
    found = verify(tmp_path / "bytes", asked=VerifyOptions(unsealed=True))
    assert found.ok and "weight is stored as uint8, quantkit writes int32" in found.notices
    module = next(iter(records))
    edit(tmp_path / "bytes", lambda tensors: tensors.pop(f"{module}.weight"))
    with pytest.raises(CheckpointError, match=module):
        Checkpoint(tmp_path / "bytes").quantized(module)


@pytest.mark.parametrize("layout", ["tcfpx", "humming", "compressed-tensors"])
def test_packed_words_without_scales_are_not_read_as_dense(layout: str, tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "source", torch.float16, hidden_size=128, intermediate_size=256)
    records = write_folder(source, tmp_path / "packed", layout, Schemes(Scheme.parse("fp6"), ignore=("lm_head",)))
    module = next(iter(records))
    edit(tmp_path / "packed", lambda tensors: tensors.pop(f"{module}.{LAYOUTS[layout].MARKER}"))
    with pytest.raises(CheckpointError, match=rf"{module}\.weight is there, {module}\.\w*scales? is missing"):
        Checkpoint(tmp_path / "packed")
