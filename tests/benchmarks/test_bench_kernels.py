"""`bench_kernels`: shapes, copies and figures without a GPU; on one all layouts and wrong products."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_kernels, timing
from benchmarks.bench_kernels import MODELS, SCHEMES, Layer, layers, row_of
from benchmarks.timing import Device
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import KernelError, RecipeError
from quantkit.kernels import proof
from quantkit.kernels.launcher import Launcher
from quantkit.layouts import LAYOUTS
from quantkit.names import KERNELS
from quantkit.progress import Progress

H200 = Device("H200", "2.11", "13.0", "13.0", "float16", copy=4.24e12, rate=740e12)
QKV = layers(["llama3-8b"], [])[0]


def timed(us: float = 8.0, layer: Layer = QKV, m: int = 16, scheme: str = "int4:g128", size: int = 12_976_128) -> Any:
    figures: Any = {"times": (us, 16.0, 20.0), "floor_us": 3.2, "weight_bytes": size}
    more = {"relative_error": 2e-4, "copies": 26, "calls": 260, "rounds": 9}
    return row_of(layer, m, H200, layout="marlin", scheme=scheme, path="hopper", **figures, **more)


def test_shapes_are_those_of_the_published_figures_and_fit_each_layout(shared: Path) -> None:
    with (shared / "bench" / "peers_h200.csv").open(newline="") as file:
        published = {(int(row["N"]), int(row["K"])) for row in csv.DictReader(file)}
    ours = layers(list(MODELS), [])
    assert {(layer.n, layer.k) for layer in ours} == published and len(ours) == 9
    assert {KERNELS[layout] for layout in KERNELS} == SCHEMES.keys()
    for layout, labels in SCHEMES.items():
        for layer in ours:
            for label in labels:
                LAYOUTS[layout].check(Scheme.parse(label), layer.n, layer.k)


def test_a_shape_is_timed_once_and_n_comes_first() -> None:
    found = layers(["llama3-8b"], ["4096x14336", "512X128", "512x128", "8192x8192"])
    assert [(layer.name, layer.n, layer.k) for layer in found[3:]] == [
        ("llama3-8b down", 4096, 14336),
        ("512x128", 512, 128),
        ("llama2-70b o", 8192, 8192),
    ]
    with pytest.raises(RecipeError, match="is no shape"):
        layers([], ["4096x"])


@pytest.mark.parametrize("layout", SCHEMES)
def test_random_weights_have_every_code_and_both_signs(layout: str) -> None:
    """Zeros draw less power, and one sign fewer toggles: the clocks would be higher than in use."""
    for label in SCHEMES[layout]:
        q = bench_kernels.random_record(Scheme.parse(label), 256, 512, torch.device("cpu"))
        values = q.dequantize()
        negative = (values < 0).float().mean() / (values != 0).float().mean()
        assert 0.4 < negative < 0.6 and len(q.codes.unique()) == 2**q.scheme.format.bits
        assert (values != 0).float().mean() > (0.4 if q.scheme.sparsity else 0.9)


@pytest.mark.parametrize("size", [4096, 8_650_752, 10**9])
@pytest.mark.parametrize("l2", [0, 60 * 2**20])
def test_copies_just_exceed_the_cache(size: int, l2: int) -> None:
    count = timing.copies(size, l2)
    assert count * size >= max(5 * l2, 330e6) > (count - 1) * size or count == timing.MOST_COPIES


@pytest.mark.parametrize("least", [3.0, 1e5])
@pytest.mark.parametrize("factor", [1, 1e4])
@pytest.mark.parametrize("count", [1, 39, 1024])
def test_a_fast_kernel_uses_all_copies_and_a_slow_one_stays_in_the_budget(
    least: float, factor: float, count: int
) -> None:
    seen = least * factor
    calls, rounds = timing.repetitions(least, seen, count)
    assert calls >= 1 and rounds % 2 == 1 and 1 <= rounds <= timing.ROUNDS
    assert calls * rounds * seen <= timing.BUDGET_US or calls == rounds == 1
    if factor == 1 and count * least < 1e4:
        assert calls % count == 0 and calls * least >= 2000 and rounds >= 3


def test_figures_agree_with_published_ones_of_the_same_times(shared: Path) -> None:
    row = timed()
    assert row["cublas_us"] == 16.0 and row["speedup_vs_cublas"] == 2.0, "of the faster order"
    assert row["pct_of_floor"] == 40.0 and row["floor_speedup"] == 5.0
    with (shared / "bench" / "peers_h200.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kernel"] == "marlin_int4_g128"]
    assert len(rows) == 72
    for row in rows:
        n, k, m = (int(row[key]) for key in "NKM")
        stored = LAYOUTS["marlin"].stored(Scheme.parse("int4:g128"), n, k).values()
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in stored)
        ours = timed(float(row["time_us"]), Layer("", n, k), m, size=size)
        for key in ("weight_GBps", "pct_of_copy_bandwidth", "tflops"):
            assert ours[key] == pytest.approx(float(row[key]), rel=0.01, abs=0.06), (row, key)


def test_the_floor_is_the_longer_of_moving_and_multiplying() -> None:
    assert timing.floor(4_240_000, 0, 4.24e12, 740e12) == pytest.approx(1.0)
    work = bench_kernels.flops("marlin24", 64, 128, 3)
    assert timing.floor(1, work, 1.0, work / 3) == pytest.approx(3e6) and work == 3 * 64 * 128, "half is multiplied"


def test_means_are_of_whole_models_and_the_table_has_all_cells() -> None:
    us = dict(zip(layers(["llama3-8b"], []), (8.0, 4.0, 8.0, 2.0), strict=True))
    whole = [timed(time, layer, m) for layer, time in us.items() for m in (1, 16)]
    rows = [*whole, timed(scheme="int4:channel"), timed(1.0, layers(["large"], [])[0])]
    found = bench_kernels.means(rows)
    assert [(row["model"], row["M"], row["scheme"]) for row in found] == [
        ("llama3-8b", 1, "int4:g128"),
        ("llama3-8b", 16, "int4:g128"),
    ]
    assert all(row["speedup_vs_cublas"] == pytest.approx((2 * 4 * 2 * 8) ** 0.25) for row in found)
    text = bench_kernels.format_speeds({"device": asdict(H200), "rows": rows, "means": found})
    assert "geometric means" in text and "4240 GB/s" in text
    assert len([line for line in text.splitlines() if "6144x4096" in line]) == 3
    back = list(csv.DictReader(io.StringIO(timing.table(rows).decode())))
    assert back[0].keys() == rows[0].keys() and float(back[0]["copy_GBps"]) == 4240


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
