"""The figures of the papers: which rows they draw, that a drawing shows each point, and the committed drawings."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import paper
from benchmarks.bench_kernels import layers
from benchmarks.paper import PANELS, largest_batches, table
from benchmarks.paper_chart import Panel, draw
from benchmarks.paper_figures import FIGURES, MODELS, Kernels, Models, Sustained

SVG = "{http://www.w3.org/2000/svg}"
ROW = {"layer": "llama3-8b o", "N": "4096", "K": "4096", "kernel": "matmul", "cublas_us": "16", "time_us": "8"}
ROW |= {"speedup_vs_cublas": "2", "floor_speedup": "5", "tflops": "60", "pct_of_floor": "40", "gpu": "NVIDIA H200"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the results of earlier runs by an empty folder."""
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    monkeypatch.setattr(paper, "PEERS", (tmp_path / "peers.csv",))
    return tmp_path


def test_figures_name_what_bench_can_time() -> None:
    """A typing error in the data would end a run on a GPU."""
    for name, figure in FIGURES.items():
        assert type(figure) in PANELS
        if isinstance(figure, Models):
            assert all(model in MODELS for model in figure.models), name
        else:
            assert len(layers((), figure.shapes)) == len(set(figure.shapes)), name


def test_rows_of_the_figure_replace_those_of_earlier_runs_on_that_card(results: Path) -> None:
    figure = Kernels("T", (("marlin", "int4:g128"),), ("4096x4096",), (1, 8), ("theirs",))
    assert PANELS[Kernels]("own", figure) == []
    old = [ROW | {"scheme": "int4:g128", "M": m} for m in ("1", "8", "16")]
    paper.write(results / "kernels_a.csv", [*old, ROW | {"scheme": "fp6:channel", "M": "1"}])
    own = ROW | {"scheme": "int4:g128", "M": "8", "speedup_vs_cublas": "3"}
    paper.write(results / "paper_own.csv", [own, own | {"gpu": "NVIDIA H100 80GB HBM3", "speedup_vs_cublas": "9"}])
    peers = [{"N": "4096", "K": "4096", "M": "8", "kernel": "theirs", "speedup_vs_cublas": "1.5"}]
    paper.write(results / "peers.csv", [*peers, {"N": "4096", "K": "4096", "M": "", "kernel": "plain read"}])
    (panel,) = PANELS[Kernels]("own", figure)
    assert panel.lines == {
        "quantkit int4:g128": [(1, 2.0), (8, 3.0)],
        "quantkit int4:g128: floor": [(1, 5.0), (8, 5.0)],
        "quantkit int4:g128, H100": [(8, 9.0)],
        "quantkit int4:g128, H100: floor": [(8, 5.0)],
        "theirs": [(8, 1.5)],
    }, "a line of one card"
    assert panel.dashed == {"quantkit int4:g128: floor", "quantkit int4:g128, H100: floor"}


def test_busy_loops_stand_beside_timings_with_rests(results: Path) -> None:
    figure = Sustained("T", (("marlin", "int4:g128"),), ("4096x4096",), (8,))
    busy = {"N": "4096", "K": "4096", "M": "8", "sm_MHz": "1300"}
    paper.write(results / "kernels_a.csv", [ROW | {"scheme": "int4:g128", "M": "8"}])
    paper.write(
        results / "paper_own.csv",
        [busy | {"scheme": "", "speedup_vs_cublas": "1"}, busy | {"scheme": "int4:g128", "speedup_vs_cublas": "1.8"}],
    )
    speed, clocks = PANELS[Sustained]("own", figure)
    assert speed.lines == {"int4:g128, busy": [(8, 1.8)], "int4:g128, rested": [(8, 2.0)]}
    assert clocks.lines == {"cuBLAS": [(8, 1300.0)], "quantkit int4:g128": [(8, 1300.0)]}


def test_tokens_per_gpu_second_count_prompt_and_steps(results: Path) -> None:
    """A batch that did not fit has no time."""
    figure = Models("T", ("llama-13b",), ("tcfpx",), (1, 4, 64), 512, 1536)
    row = {"model": "llama-13b", "layout": "tcfpx", "scheme": "fp6:channel", "batch": "4", "new_tokens": "1536"}
    row |= {"prompt_ms": "500", "step_ms": "10", "prompt_tokens": "512", "read_bytes": "12e9", "copy_GBps": "4000"}
    paper.write(
        results / "paper_own.csv", [row, {"model": "llama-13b", "layout": "tcfpx", "batch": "64", "fits": "False"}]
    )
    rates, steps = PANELS[Models]("own", figure)
    assert rates.lines == {"tcfpx fp6:channel, 512 + 1536": [(4, pytest.approx(4 * 1536 / (0.5 + 15.36)))]}
    assert steps.lines["tcfpx fp6:channel, 512 + 1536: weights"] == [(4, pytest.approx(3.0))]


def test_what_fits_is_known_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/papers.md, here of a model with two blocks."""
    monkeypatch.setitem(MODELS, "llama-13b", MODELS["llama-13b"] | {"num_hidden_layers": 2})
    figure = FIGURES["fp6-12"]
    assert isinstance(figure, Models)
    rows = [list(largest_batches(figure, free)) for free in (1e9, 5e9)]
    assert rows[0][0].startswith("| FP6-LLM, Figure 12, 512 + 1536 tokens | dense |")
    assert [row[-1] for row in rows] == ["| llama-13b | none | none | none |", "| llama-13b | 8 | 16 | 16 |"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("log_y", [False, True])
def test_a_drawing_has_a_mark_for_each_point_inside_its_frame(named: bool, log_y: bool) -> None:
    xs = ["4096x4096", "8192x8192"] if named else [1, 64]
    lines = {"a <b>": [(xs[0], 0.5), (xs[1], 70.0)], "c": [(xs[0], 3.0)], "c: bound": [(xs[0], 4.0), (xs[1], 4.0)]}
    panel = Panel("title", "x", "y", lines, frozenset({"c: bound"}), log_y)
    root = ElementTree.fromstring(draw([panel, panel]))
    marks = [path for path in root.iter(f"{SVG}path") if path.get("transform")]
    assert len(marks) == 2 * 3, "bounds have a line only"
    for mark in marks:
        x, y = map(float, (mark.get("transform") or "").removeprefix("translate(").removesuffix(")").split())
        assert 60 <= x <= 470 and 36 <= y <= 350 and math.isfinite(x + y)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("a <b>") == 2 and texts.count("title") == 2
    strokes = [group.get("stroke") for group in root.iter(f"{SVG}g") if group.get("stroke")]
    assert strokes[1] == strokes[2] != strokes[0], "a bound has the colour of its line"


def test_the_table_names_the_cells_that_are_behind(results: Path) -> None:
    rows = [ROW | {"scheme": "fp5:channel", "M": m, "speedup_vs_cublas": s} for m, s in (("1", "2"), ("8", "4"))]
    peer = {"N": "4096", "K": "4096", "kernel": "humming_fp5_e3m1_per_channel"}
    paper.write(results / "peers.csv", [peer | {"M": m, "speedup_vs_cublas": "3"} for m in ("1", "8")])
    found = list(table(rows))
    assert "| 8 | 4.00 (40 %) |" in found
    assert found[-1] == "fp5:channel beside humming_fp5_e3m1_per_channel: 1 of 2 not slower; 4096x4096 M=1 0.667"


@pytest.mark.parametrize("name", FIGURES)
def test_committed_drawings_are_of_the_committed_rows(name: str) -> None:
    panels = PANELS[type(FIGURES[name])](name, FIGURES[name])
    drawing = paper.DRAWINGS / f"{name}.svg"
    assert drawing.exists() == bool(panels), f"python benchmarks/paper.py --figure {name}"
    if panels:
        assert drawing.read_text() == draw(panels), f"python benchmarks/paper.py --figure {name}"
        with (paper.POINTS / f"{name}.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == len(paper.points(panels))
