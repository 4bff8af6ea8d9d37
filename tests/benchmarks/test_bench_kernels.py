"""`bench_kernels`: refusals without a GPU; on one all layouts and wrong products."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_kernels
from benchmarks.bench_kernels import SCHEMES, layers
from quantkit.errors import KernelError
from quantkit.kernels import proof
from quantkit.kernels.launcher import Launcher
from quantkit.progress import Progress


def ended(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["bench_kernels", *map(str, words)])
    with pytest.raises(SystemExit) as info:
        bench_kernels.main()
    return str(info.value)


def test_shapes_and_files_are_checked_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "64x100 in int4:g128 cannot be timed as marlin" in ended(monkeypatch, "--shape", "64x100")
    assert "folder does not exist" in ended(monkeypatch, "--csv", tmp_path / "none" / "k.csv")
    if not torch.cuda.is_available():
        assert "torch sees no CUDA GPU" in ended(monkeypatch, "--json")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_layouts_are_timed_on_a_gpu(
    dtype: str, gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--shape", "512x1024", "--m", 1, "--m", 33, "--dtype", dtype, "--csv", tmp_path / "k.csv")
    monkeypatch.setattr(sys, "argv", ["bench_kernels", *map(str, options), "--json", "-q"])
    bench_kernels.main()
    found = json.loads(capsys.readouterr().out)
    device, rows = found["device"], found["rows"]
    pairs = [(layout, label) for layout, labels in SCHEMES.items() for label in labels]
    assert [(row["layout"], row["scheme"], row["M"]) for row in rows] == [(*pair, m) for pair in pairs for m in (1, 33)]
    assert device["copy"] > 1e10 and device["rate"] > 1e12 and device["dtype"] == dtype
    for row in rows:
        assert row["floor_us"] > 0 and 0.5 < row["time_us"] < 1e5 and 0.5 < row["cublas_us"] < 1e5, row
        assert row["cublas_us"] == min(row["cublas_w_us"], row["cublas_wt_us"])
        assert 0 <= row["relative_error"] < proof.BOUND
    assert len((tmp_path / "k.csv").read_text().splitlines()) == len(rows) + 1


@pytest.mark.gpu
def test_a_wrong_product_is_not_timed(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Launcher.matmul

    def matmul(self: Launcher, *args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        right(self, *args, out=out, **options)[0, 0].fill_(100)  # one of 512 outputs
        return out

    monkeypatch.setattr(Launcher, "matmul", matmul)
    with pytest.raises(KernelError, match=r"marlin, int4:g128, 512x1024, 1 float16 tokens: the product is off"):
        bench_kernels.kernels(layers([], ["512x1024"]), [1], ["marlin"], [], torch.float16, Progress(quiet=True))
