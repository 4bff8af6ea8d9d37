"""`bench kernels`: shapes, copies, floors without a GPU; on one all layouts and wrong products."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.bench import kernels, roofline, timing
from quantkit.bench.roofline import Device, Layer, floor, layers, row_of
from quantkit.cli.bench import format_speeds
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError, RecipeError
from quantkit.kernels import LAUNCHERS, MATMULS, missing, proof
from quantkit.kernels.launcher import Launcher
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress
from tests.command_line import call, refused

ROOT = Path(__file__).resolve().parents[2]
H200 = Device("H200", "2.11", "13.0", "13.0", "float16", copy=4.24e12, rate=740e12)
MODEL = ("llama3-8b", "llama2-70b", "large")
QKV = layers(["llama3-8b"], [])[0]


def timed(us: float = 8.0, layer: Layer = QKV, m: int = 16, scheme: str = "int4:g128", size: int = 12_976_128) -> Any:
    figures: Any = {"times": (us, 16.0, 20.0), "floor_us": 3.2, "weight_bytes": size}
    more = {"relative_error": 2e-4, "copies": 26, "calls": 260, "rounds": 9}
    return row_of(layer, m, H200, layout="marlin", scheme=scheme, path="hopper", **figures, **more)


def test_the_shapes_are_those_of_the_published_figures(shared: Path) -> None:
    with (shared / "bench" / "peers_h200.csv").open(newline="") as file:
        published = {(int(row["N"]), int(row["K"])): row["layer"] for row in csv.DictReader(file)}
    ours = {(layer.n, layer.k): layer.name for layer in layers(MODEL, [])}
    assert ours.keys() == published.keys() and len(ours) == 9
    assert all(published[shape] == name for shape, name in ours.items() if not name.startswith("large"))
    assert max(ours) == (73728, 18432)


def test_a_shape_is_timed_once_and_n_comes_first() -> None:
    found = layers(["llama3-8b"], ["4096x14336", "512X128", "512x128", "8192x8192"])
    assert [(layer.name, layer.n, layer.k) for layer in found[3:]] == [
        ("llama3-8b down", 4096, 14336),
        ("512x128", 512, 128),
        ("llama2-70b o", 8192, 8192),
    ]


@pytest.mark.parametrize("text", ["", "4096", "4096x", "0x64", "-64x64", "64x64x64", "64 x 64", "1e3x64", "٦٤x64"])
def test_malformed_shapes_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="is no shape"):
        layers([], [text])


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(RecipeError, match="llama3-8b"):
        layers(["llama9"], [])


@pytest.mark.parametrize("layout", MATMULS)
def test_every_kernel_has_default_schemes_that_fit_all_published_shapes(layout: str) -> None:
    for label in LAUNCHERS[layout].schemes:
        for layer in layers(MODEL, []):
            LAYOUTS[layout].check(Scheme.parse(label), layer.n, layer.k)


@pytest.mark.parametrize("layout", MATMULS)
def test_random_weights_are_valid_signed_and_reproducible(layout: str) -> None:
    for label in LAUNCHERS[layout].schemes:
        q, again = (kernels.random_record(Scheme.parse(label), 256, 512, torch.device("cpu")) for _ in range(2))
        back = LAYOUTS[layout].unpack(LAYOUTS[layout].pack(q), q.scheme)
        assert back.equal(q) and again.equal(q)
        values = q.dequantize()
        negative = (values < 0).float().mean() / (values != 0).float().mean()
        assert 0.4 < negative < 0.6 and len(q.codes.unique()) == 2**q.scheme.format.bits
        assert (values != 0).float().mean() > (0.4 if q.scheme.sparsity else 0.9)


@pytest.mark.parametrize("size", [1_000_000, 8_650_752, 2**25, 10**9])
@pytest.mark.parametrize("l2", [0, 6 * 2**20, 60 * 2**20, 200 * 2**20])
def test_copies_just_exceed_the_cache(size: int, l2: int) -> None:
    count = timing.copies(size, l2)
    assert count * size >= max(5 * l2, 330e6) > (count - 1) * size or count == timing.MOST_COPIES


def test_copies_of_a_tiny_weight_are_limited() -> None:
    assert timing.copies(4096, 2**26) == timing.MOST_COPIES


@pytest.mark.parametrize("least", [0.001, 3.0, 400.0, 1e5])
@pytest.mark.parametrize("factor", [1, 30, 1e4])
@pytest.mark.parametrize("count", [1, 39, 1024])
def test_a_fast_kernel_uses_all_copies_and_a_slow_one_stays_in_the_budget(
    least: float, factor: float, count: int
) -> None:
    seen = max(least, 3.0) * factor
    calls, rounds = timing.repetitions(least, seen, count)
    assert calls >= 1 and rounds % 2 == 1 and 1 <= rounds <= timing.ROUNDS
    assert calls * rounds * seen <= timing.BUDGET_US or calls == rounds == 1
    if calls % count:
        assert (calls + 1) * seen > timing.BUDGET_US, "cut short without need"
    if factor == 1 and count * least < 1e4:
        assert calls % count == 0 and calls * max(least, 2.0) >= 2000 and rounds >= 3


def test_the_floor_is_the_longer_of_moving_and_multiplying() -> None:
    assert floor(4_240_000, 0, 4.24e12, 740e12) == pytest.approx(1.0)
    assert floor(4_240_000, 740e6 * 3, 4.24e12, 740e12) == pytest.approx(3.0)


def test_a_compressed_weight_leaves_half_of_the_products() -> None:
    assert kernels.flops("marlin", 64, 128, 3) == 2 * 3 * 64 * 128
    assert kernels.flops("marlin24", 64, 128, 3) == kernels.flops("marlin24-ct", 64, 128, 3) == 3 * 64 * 128


def test_figures_of_a_row_come_from_its_times() -> None:
    row = timed()
    assert (row["N"], row["K"], row["M"], row["layer"]) == (6144, 4096, 16, "llama3-8b qkv")
    assert row["cublas_us"] == 16.0 and row["speedup_vs_cublas"] == 2.0, "of the faster order"
    assert row["pct_of_floor"] == 40.0 and row["floor_speedup"] == 5.0
    assert row["weight_GBps"] == pytest.approx(12_976_128 / 8e-6 / 1e9)
    assert row["pct_of_copy_bandwidth"] == pytest.approx(100 * row["weight_GBps"] / 4240)
    assert row["tflops"] == pytest.approx(2 * 16 * 6144 * 4096 / 8e-6 / 1e12)


def test_means_are_of_whole_models_only_and_of_one_layout_and_token_count() -> None:
    us = dict(zip(layers(["llama3-8b"], []), (8.0, 4.0, 8.0, 2.0), strict=True))
    rows = [timed(time, layer, m) for layer, time in us.items() for m in (1, 16)]
    rows += [timed(scheme="int4:channel"), timed(1.0, Layer("512x512", 512, 512))]
    rows += [timed(1.0, layers(["large"], [])[0])]
    found = roofline.means(rows)
    assert [(row["model"], row["M"], row["scheme"]) for row in found] == [
        ("llama3-8b", 1, "int4:g128"),
        ("llama3-8b", 16, "int4:g128"),
    ]
    assert all(row["speedup_vs_cublas"] == pytest.approx((2 * 4 * 2 * 8) ** 0.25) for row in found)
    assert all(row["floor_speedup"] == pytest.approx(5.0) for row in found)


def test_figures_agree_with_published_ones_of_the_same_times(shared: Path) -> None:
    with (shared / "bench" / "peers_h200.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kernel"] == "marlin_int4_g128"]
    assert len(rows) == 72
    for row in rows:
        n, k, m = (int(row[key]) for key in "NKM")
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in _stored(n, k))
        ours = timed(float(row["time_us"]), Layer("", n, k), m, size=size)
        for key in ("weight_GBps", "pct_of_copy_bandwidth", "tflops"):
            assert ours[key] == pytest.approx(float(row[key]), rel=0.01, abs=0.06), (row, key)


def _stored(n: int, k: int) -> Any:
    return LAYOUTS["marlin"].stored(Scheme.parse("int4:g128"), n, k).values()


def test_a_csv_has_every_figure_and_the_device(tmp_path: Path) -> None:
    rows = [timed(8.0), timed(9.87654321)]
    back = list(csv.DictReader(io.StringIO(roofline.table(rows).decode())))
    assert [float(row["time_us"]) for row in back] == [8.0, 9.87654]
    assert back[0]["gpu"] == "H200" and back[0]["dtype"] == "float16" and float(back[0]["copy_GBps"]) == 4240
    assert back[0].keys() == rows[0].keys()


def test_the_table_has_all_cells_and_the_means_of_whole_models() -> None:
    text = format_speeds({"device": asdict(H200), "rows": [timed(), timed(16.0, m=64)], "means": []})
    assert len([line for line in text.splitlines() if line.startswith("marlin ")]) == 2
    assert "6144x4096" in text and "4240 GB/s" in text and "means" not in text
    rows = [timed(8.0, layer) for layer in layers(["llama3-8b"], [])]
    assert "geometric means" in format_speeds({"device": asdict(H200), "rows": rows, "means": roofline.means(rows)})


def test_without_a_gpu_nothing_is_timed() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA GPU")
    assert "torch sees no CUDA GPU" in refused("bench", "kernels", "--json")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--shape 64x100", "64x100 in int4:g128 cannot be timed as marlin"),
        ("--layout tcfpx --scheme int4:g128", "cannot be timed as tcfpx"),
        ("--layout marlin24 --scheme int4:g128 --shape 128x128", "2:4"),
    ],
)
def test_shapes_and_schemes_are_checked_before_anything_is_timed(args: str, said: str) -> None:
    assert said in refused("bench", "kernels", *args.split())


@pytest.mark.parametrize(
    "args",
    [
        "--shape 4096",
        "--scheme int9",
        "--model gpt2",
        "--dtype float32",
        "--csv {tmp}/no-folder/k.csv",
    ],
)
def test_wrong_usage_is_refused_before_anything_is_timed(args: str, tmp_path: Path) -> None:
    result = call("bench", "kernels", *args.format(tmp=tmp_path).split(), code=2)
    assert "Error: " in result.stderr and result.stdout == ""
    assert not list(tmp_path.iterdir())


def _needs_kernels() -> None:
    reason = missing("marlin", torch.device("cuda")) if torch.cuda.is_available() else "torch sees no CUDA GPU"
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_layouts_are_timed_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    _needs_kernels()
    options = ("--shape", "512x1024", "--m", 1, "--m", 33, "--dtype", dtype, "--csv", tmp_path / "k.csv")
    found = json.loads(call("bench", "kernels", *options, "--json", "-q").stdout)
    device, rows = found["device"], found["rows"]
    pairs = [(layout, label) for layout in kernels.default_layouts() for label in LAUNCHERS[layout].schemes]
    assert [(row["layout"], row["scheme"], row["M"]) for row in rows] == [(*pair, m) for pair in pairs for m in (1, 33)]
    assert device["copy"] > 1e10 and device["rate"] > 1e12 and device["dtype"] == dtype
    for row in rows:
        assert row["floor_us"] > 0 and 0.5 < row["time_us"] < 1e5 and 0.5 < row["cublas_us"] < 1e5, row
        assert row["cublas_us"] == min(row["cublas_w_us"], row["cublas_wt_us"])
        assert 0 <= row["relative_error"] < proof.BOUND
    assert len((tmp_path / "k.csv").read_text().splitlines()) == len(rows) + 1


@pytest.mark.gpu
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_kernels()
    right = Launcher.matmul

    def matmul(self: Launcher, *args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        right(self, *args, out=out, **options)[0, 0].fill_(100)  # one of 512 outputs
        return out

    monkeypatch.setattr(Launcher, "matmul", matmul)
    with pytest.raises(KernelError, match=r"marlin, int4:g128, 512x1024, 1 float16 tokens: the product is off"):
        kernels.kernels(layers([], ["512x1024"]), [1], ["marlin"], [], torch.float16, Progress(quiet=True))
