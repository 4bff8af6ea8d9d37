"""The figures of the papers name shapes that can be timed, and the committed drawings are of the committed rows."""

from __future__ import annotations

import csv

import pytest

from benchmarks import paper
from benchmarks.bench_kernels import layers
from benchmarks.paper import PANELS
from benchmarks.paper_chart import draw
from benchmarks.paper_figures import FIGURES, MODELS, Models


def test_figures_name_what_bench_can_time() -> None:
    """A typing error in the data would end a run on a GPU."""
    for name, figure in FIGURES.items():
        assert type(figure) in PANELS
        if isinstance(figure, Models):
            assert all(model in MODELS for model in figure.models), name
        else:
            assert len(layers((), figure.shapes)) == len(set(figure.shapes)), name


@pytest.mark.parametrize("name", FIGURES)
def test_committed_drawings_are_of_the_committed_rows(name: str) -> None:
    panels = PANELS[type(FIGURES[name])](name, FIGURES[name])
    drawing = paper.DRAWINGS / f"{name}.svg"
    assert drawing.exists() == bool(panels), f"python benchmarks/paper.py --figure {name}"
    if panels:
        assert drawing.read_text() == draw(panels), f"python benchmarks/paper.py --figure {name}"
        with (paper.POINTS / f"{name}.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == len(paper.points(panels))
