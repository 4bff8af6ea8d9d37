"""`verify` finds every bit that flipped before the files were hashed, in the layouts with kernels.

On a GPU weights are unpacked, packed again and multiplied; on a CPU only unpacked and packed again.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT
from quantkit.evaluation.verification import Verification
from quantkit.evaluation.verify import verify
from quantkit.io.files import hash_of_file
from quantkit.kernels import loader
from quantkit.pipeline import convert, quantize
from quantkit.recipes.recipe import from_mapping
from tests.evaluation.folders import edit, recorded
from tests.reporting.samples import write_report
from tests.tiny_models import write_model

RECIPES: dict[str, dict[str, object]] = {
    "marlin": {"scheme": {"format": "int4"}},
    "marlin24": {"scheme": {"format": "int4", "sparsity": "2:4"}, "prune": "magnitude"},
    "marlin24-ct": {"scheme": {"format": "int4", "sparsity": "2:4"}, "prune": "magnitude"},
    "tcfpx": {"scheme": {"format": "fp6"}},
    "quick": {"scheme": {"format": "int4", "symmetric": False}},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODULE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}
    return write_model("llama", tmp_path_factory.mktemp("dense") / "model", num_hidden_layers=1, **shapes)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """The device to run on; skips if it is missing."""
    device = str(request.param)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")
    if device == "cuda" and loader.toolchain()["problem"] is not None:
        pytest.skip(f"needs CuPy: {loader.install()}")
    return device


def packed(layout: str, model: Path, out: Path) -> Path:
    recipe = from_mapping({**RECIPES[layout], "method": "rtn", "clip": "none", "layout": layout})
    quantize.quantize(model, out, recipe, device="cpu")
    return out


def with_flipped(folder: Path, suffix: str, place: float, device: str) -> Verification:
    """Flip one bit of a tensor, write the new hashes to the report, and verify."""

    def change(part: dict[str, Tensor]) -> None:
        data = part[suffix].view(torch.uint8).reshape(-1)
        bit = int(place * 8 * data.numel())
        data[bit // 8] ^= 1 << bit % 8
        part[suffix] = data.view(part[suffix].dtype).view(part[suffix].shape)

    before = (folder / REPORT).read_bytes()
    edit(folder, MODULE, change)
    report = recorded(folder)
    report["files"] |= {p.name: hash_of_file(p) for p in folder.glob("*.safetensors")}
    write_report(folder, report)
    found = verify(folder, device=device)
    edit(folder, MODULE, change)
    (folder / REPORT).write_bytes(before)
    return found


@pytest.mark.parametrize("run", DEVICES, indirect=True)
@pytest.mark.parametrize("layout", RECIPES)
def test_a_flipped_bit_of_any_packed_tensor_fails_its_weight(
    layout: str, run: str, model: Path, tmp_path: Path
) -> None:
    folder = packed(layout, model, tmp_path / "out")
    good = verify(folder, device=run)
    assert good.ok, good.failures
    assert all(row.repack and row.digest for row in good.rows)
    assert (good.multiplied == good.weights) is (run == "cuda")
    places = random.Random(5)
    for suffix in Checkpoint(folder).parts(MODULE):
        for _ in range(3):
            found = with_flipped(folder, suffix, places.random(), run)
            assert [row.module for row in found.rows if row.problem] == [MODULE], suffix


@pytest.mark.parametrize("run", DEVICES, indirect=True)
def test_records_are_compared_whichever_device_holds_them(run: str, model: Path, tmp_path: Path) -> None:
    """`--against` reads the other folder, in another layout."""
    folder = packed("marlin", model, tmp_path / "out")
    convert.pack(folder, tmp_path / "other", "gptq")
    found = verify(folder, against=tmp_path / "other", device=run)
    assert found.ok, found.failures
    assert all(row.against for row in found.rows)
    edit(tmp_path / "other", MODULE, lambda part: part["qweight"][:1, :1].bitwise_xor_(1))
    found = verify(folder, against=tmp_path / "other", device=run)
    assert [row.module for row in found.rows if row.against is False] == [MODULE]
    assert "1 of 131072 codes differ" in found.failures[0]


@pytest.mark.parametrize("run", DEVICES, indirect=True)
def test_the_seconds_of_every_phase_are_reported(run: str, model: Path, tmp_path: Path) -> None:
    found = verify(packed("marlin", model, tmp_path / "out"), device=run).to_dict()["seconds"]
    assert {"files", "read", "repack", "digest"} <= found.keys() and all(value >= 0 for value in found.values())
    assert ({"reference", "naive kernel", "fast kernel"} <= found.keys()) is (run == "cuda")
