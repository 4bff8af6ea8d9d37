"""A part of a run's memory or disk that is left out of its sum ends the run in its middle."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

import pytest

from quantkit.algorithms.rtn import ROUNDING_BYTES
from quantkit.calibration.budget import GRADIENTS, Sizes
from quantkit.checkpoint.reader import Checkpoint
from quantkit.planning import needs
from quantkit.planning.needs import Memory, disk_peak, streamed_memory
from quantkit.planning.output import Files
from quantkit.planning.survey import plan
from quantkit.recipes.recipe import from_mapping
from tests.folders import gptq, restate

#: Hidden states of two documents of ten tokens take 40 bytes, the sum of a block's gradients 7.
MEMORY, LENGTHS, BLOCKS = Memory({}, token_bytes=2, sum_bytes=7), (10, 10), 3
LARGE = Files({"model.safetensors": 1000}, report_bytes=100, before_last=600)
SMALL = Files({"model.safetensors": 10}, report_bytes=0, before_last=0)


@pytest.mark.parametrize(
    ("files", "output_aware", "budget", "parts"),
    [
        (LARGE, False, None, (1100, 2 * 40, 0)),  # all files and two snapshots
        (LARGE, False, 10, (1100, 3 * 40, 0)),  # hidden states beyond the budget are a file too
        (LARGE, True, None, (1100, 2 * 40, BLOCKS * 7)),  # the sums of gradients stay to the end
        (LARGE, True, 10, (1100, 5 * 40, BLOCKS * 7)),  # and what the unquantized blocks pass on, and gradients by it
        (SMALL, True, None, (0, 0, BLOCKS * 40)),  # the gradients of all blocks, before the first is solved
    ],
)
def test_the_disk_holds_what_lies_there_at_once(
    files: Files, output_aware: bool, budget: int | None, parts: tuple[int, int, int]
) -> None:
    recipe = from_mapping({"output_aware": True, "tune": 200} if output_aware else {})
    found = disk_peak(files, MEMORY, recipe, LENGTHS, BLOCKS, budget)
    assert (found.get("output", 0), sum(found.values()) - found.get("output", 0) - found.get(GRADIENTS, 0)) == parts[:2]
    assert found.get(GRADIENTS, 0) == parts[2]


def test_rounding_needs_its_largest_linear_or_a_copy_of_its_largest_tensor(small_llama: Path) -> None:
    src = Checkpoint(small_llama)
    copied = 2 * max(prod(src.shape(name)) * src.dtype(name).itemsize for name in src.names())
    for n, k in ((1, 1), (4096, 4096)):
        largest = streamed_memory(src, [(n, k), (1, 1)]).ram["largest weight"]
        assert largest == max(copied, ROUNDING_BYTES * n * k)


def test_the_modules_of_many_experts_are_a_part_of_the_peak(small_llama: Path) -> None:
    src = Checkpoint(small_llama)
    few, many = (sum(streamed_memory(src, [(1, 1)] * count).ram.values()) for count in (1, 100_001))
    assert many - few > 2_700_000_000  # measured: 2.8 GB of 92,401


def test_of_a_layers_experts_a_pass_has_those_of_a_token_at_a_time(small_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_llama, tmp_path / "model")
    restate(folder / "config.json", num_experts_per_tok=8)
    linears = {f"model.layers.0.mlp.experts.{number}.up_proj": (100, 64) for number in range(512)}
    linears["model.layers.0.self_attn.q_proj"] = (64, 64)
    routed, every = (Sizes.of(Checkpoint(path), linears, from_mapping({}), "cpu") for path in (folder, small_llama))
    assert routed.passed == 64 + 512 * 2 and routed.outputs == 64 + 512 * 100  # 9 of 512, rounded up in each linear
    assert every.passed == every.outputs  # a config that does not say how many


def test_a_long_calibration_text_is_a_part_of_the_peak(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "SHORT_TEXT", 10_000)
    peaks = []
    for count in (9_000, 4_000_000):
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "x" * 1000}) for _ in range(count // 1000)))
        recipe = from_mapping(gptq(str(tmp_path / "a.jsonl")))
        peaks.append(plan(small_llama, recipe, probe=False).needs.memory.to_dict())
    assert "calibration text" not in peaks[0]["ram_parts"]
    assert peaks[1]["ram_parts"]["calibration text"] == 12 * 4_000_000 and peaks[1]["ram"] > peaks[0]["ram"]
