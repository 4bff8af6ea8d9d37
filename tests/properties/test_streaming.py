"""Conversion with one weight in memory: the same bytes, order and errors, and no thread that outlives it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import load
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import CheckpointError
from quantkit.io.json_files import dump_json
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.schemes import Schemes
from quantkit.pipeline.convert import pack
from tests.command_line import call
from tests.faults import faults
from tests.properties.conversions import nothing_is_left
from tests.reliability.forks import run

__all__ = ["nothing_is_left"]


def test_digests_are_those_of_what_was_written_not_of_what_was_read(int4: Path, tmp_path: Path) -> None:
    """A weight that is stated in another scheme has another digest than its source's report says."""
    pack(int4, tmp_path / "sparse", "marlin24", requantize=True)
    pack(tmp_path / "sparse", tmp_path / "out", "gptq")
    for folder in ("sparse", "out"):
        out, layers = Checkpoint(tmp_path / folder), load(tmp_path / folder)["layers"]
        assert {layer["name"]: layer["digest"] for layer in layers} == {
            module: out.quantized(module).digest() for module in out.modules()
        }


def most_memory(source: Path, out: Path, layout: str, scratch: Path) -> int:
    """Pack a folder in a fork of this process; returns by how many bytes its RAM rose."""

    def ram(figure: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(figure))) * 1024

    def work() -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is that of now
        before = ram("VmRSS")
        pack(source, out, layout)
        print(ram("VmHWM") - before)

    ended = run(work, scratch)
    assert ended.code == 0, ended.stderr
    return int(ended.stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs a peak that begins anew")
def test_the_memory_of_a_conversion_does_not_grow_with_the_number_of_weights(tmp_path: Path) -> None:
    """What little stays of each must not keep the memory of the rest from being used again."""
    scheme, layout, most = Scheme.parse("fp6:channel"), LAYOUTS["compressed-tensors"], []
    q = QuantizedTensor(scheme, torch.zeros(256, 1024, dtype=torch.uint8), torch.ones(256, 1, dtype=torch.float16))
    parts = layout.pack(q).items()
    public = layout.write_config(Schemes(scheme)) | {"quantkit": quantkit_key(layout.NAME, Schemes(scheme), "0", None)}
    for count in (50, 200):
        folder = tmp_path / str(count)
        folder.mkdir()
        tensors = {f"model.layers.{i}.up_proj.{suffix}": part.clone() for i in range(count) for suffix, part in parts}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_bytes(dump_json({"dtype": "float16", "quantization_config": public}))
        most.append(most_memory(folder, tmp_path / f"{count}-out", "humming", tmp_path) >> 20)
    assert most[1] < most[0] + 15  # of 37 MB more


def another(shard: Path) -> None:
    """Put another file in the place of a shard; at no moment is there none."""
    data, other = shard.read_bytes(), shard.with_suffix(".other")
    other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    other.replace(shard)


@pytest.mark.parametrize("what", ["the last shard", "config.json"])
def test_a_source_that_changes_after_its_last_weight_is_refused(what: str, int4: Path, tmp_path: Path) -> None:
    call("pack", int4, "--layout", "compressed-tensors", "-o", tmp_path / "ct", "-q")
    src = Checkpoint(tmp_path / "ct")

    def hook(operation: str, path: Path) -> None:
        if operation == "fsync" and path.suffix == ".safetensors":
            another(src.files()[-1] if what == "the last shard" else src.path / "config.json")

    with faults(hook), pytest.raises(CheckpointError, match="changed while it was in use"):
        pack(tmp_path / "ct", tmp_path / "out", "gptq")
    assert not any(tmp_path.glob("out*"))
