"""A GPU gives the layouts, codes and perplexity of a CPU, and the same bytes in each run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.algorithms import rtn
from quantkit.calibration import budget
from quantkit.core import sparsity
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts import LAYOUTS
from quantkit.names import Clip
from quantkit.pipeline.quantize import quantize
from quantkit.planning.survey import plan
from quantkit.recipes.options import RunOptions
from quantkit.recipes.recipe import from_mapping, pruning_from_mapping
from tests.folders import hashes
from tests.layouts.samples import HELD, record
from tests.tiny_models import write_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")


def test_masks_are_those_of_a_cpu() -> None:
    ties = torch.randint(0, 4, (512, 512), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(sparsity.mask(ties), sparsity.mask(ties.cuda()).cpu())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_rounding_has_the_bits_of_a_cpu(fmt: object) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(fmt.encode(x), fmt.encode(x.cuda()).cpu())  # type: ignore[attr-defined]
    assert torch.equal(fmt.nearest(x), fmt.nearest(x.cuda()).cpu())  # type: ignore[attr-defined]


@pytest.mark.parametrize("clip", ["none", "search"])
@pytest.mark.parametrize(
    "label", ["int4:g128", "int4:g32:asym", "int4:channel", "int2:g64", "int8:g128:asym", "fp6:channel", "nvfp4"]
)
def test_scales_are_those_of_a_cpu_where_the_order_of_a_sum_could_decide(label: str, clip: Clip) -> None:
    weight = (torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    here, _ = rtn.quantize(weight, Scheme.parse(label), clip=clip)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    there, _ = rtn.quantize(weight.cuda(), Scheme.parse(label), clip=clip)
    assert here.digest() == there.digest()
    assert torch.cuda.max_memory_allocated() - before <= budget.PART_BYTES * weight.numel()


@pytest.mark.parametrize(
    ("dtype", "asked"),
    [
        (torch.bfloat16, {"scheme": {"format": "int4"}}),
        (torch.float16, {"scheme": {"format": "int4", "group_size": 32, "symmetric": False}, "layout": "awq"}),
        (
            torch.float32,
            {"scheme": {"format": "int8"}, "clip": "none", "embeddings": "int4:g64", "head": "fp6:channel"},
        ),
        (torch.bfloat16, {"scheme": {"format": "fp6"}}),
        (torch.float16, {"scheme": {"format": "fp5"}, "clip": "search"}),
        (torch.bfloat16, {"scheme": {"format": "nvfp4"}, "clip": "search"}),
        (torch.float32, {"scheme": {"format": "mxfp4"}, "clip": "search"}),
        (torch.bfloat16, {"scheme": {"format": "int4", "sparsity": "2:4"}, "layout": "marlin24", "pad": True}),
        (torch.float16, None),
    ],
    ids=lambda given: str(given.get("scheme", "pruned") if isinstance(given, dict) else given).replace("'", ""),
)
def test_a_folder_that_is_rounded_has_the_bytes_of_a_cpu(
    dtype: torch.dtype, asked: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "PART", 2**18)  # all weights have several parts
    sizes = {"hidden_size": 544 if asked and "pad" in asked else 512, "intermediate_size": 1536}
    model = write_model("llama", tmp_path / "model", dtype, **sizes, num_hidden_layers=1)
    recipe = (
        pruning_from_mapping({"method": "magnitude"}) if asked is None else from_mapping({"method": "rtn", **asked})
    )
    for device in ("cpu", "cuda"):
        held = torch.cuda.memory_allocated()  # by earlier tests
        torch.cuda.reset_peak_memory_stats()
        report = quantize(model, tmp_path / device, recipe, run=RunOptions(device=device))
    here, there = (hashes(tmp_path / device) for device in ("cpu", "cuda"))
    assert {**there, "README.md": ""} == {**here, "README.md": ""}  # the card names the report's hash
    planned = plan(model, recipe, run=RunOptions(device="cuda")).needs.memory.vram
    used = report["totals"]["peak_memory"]["vram"] - held
    assert 0 < used <= sum(planned.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_gives_the_bytes_of_a_cpu(name: str) -> None:
    layout = LAYOUTS[name]
    for label in HELD[name][0]:
        q = record(Scheme.parse(label), 256, 512, lowest_zero=1)
        there = QuantizedTensor(q.scheme, q.codes.cuda(), q.scales.cuda(), None if q.zeros is None else q.zeros.cuda())
        packed = layout.pack(q)
        for suffix, tensor in layout.pack(there).items():
            assert torch.equal(tensor.cpu().view(torch.uint8), packed[suffix].view(torch.uint8)), label
        back = layout.unpack({suffix: tensor.cuda() for suffix, tensor in packed.items()}, q.scheme)
        assert back.digest() == q.digest(), label
