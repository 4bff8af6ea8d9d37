"""Charts: error per layer, time per phase and size from a report, and the speed of kernels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, RecipeError
from quantkit.io import files
from quantkit.reporting import facts
from quantkit.reporting.html import Bars, page
from quantkit.reporting.units import format_bytes


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the charts of a report into `path`, a .png or a self-contained .html.

    RecipeError for another suffix; CheckpointError for a .png if matplotlib is not installed.
    """
    charts = [(title, bars) for title, bars in _charts(report) if bars]
    if path.suffix == ".html":
        files.write_atomic(path, page(report, charts).encode())
    elif path.suffix == ".png":
        files.write_atomic(path, _draw_png(charts))
    else:
        raise RecipeError(f"{path}: a report is drawn as .html or .png: give a file name that ends so")


def _charts(report: Mapping[str, Any]) -> list[tuple[str, Bars]]:
    layers, totals = report.get("layers", []), report.get("totals", {})
    sizes = [(name, totals.get(key)) for name, key in (("before", "source_bytes"), ("after", "bytes"))]
    return [
        (
            "Relative weight error of each linear",
            [(name, value, f"{value:.4f}") for value, name in facts.figures(layers, "relative_error")],
        ),
        ("Output loss over rounding's", [(name, ratio, f"{ratio:.3f}") for ratio, name in facts.ratios(layers)]),
        ("Time", [(str(name), float(s), f"{s:.1f} s") for name, s in report.get("phases", {}).items()]),
        ("Size of the weights", [(name, float(count), format_bytes(count)) for name, count in sizes if count]),
    ]


def matplotlib_figure() -> Any:
    """Import the Figure class of matplotlib; CheckpointError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointError(
            "a PNG is drawn by matplotlib, which is not installed: pip install 'quantkit[plot]', or do without --png"
        ) from error
    return Figure


def draw_speedups(panels: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]], path: Path) -> None:
    """Draw speedups over cuBLAS against the number of tokens into a .png or .svg; CheckpointError without matplotlib.

    `panels` maps titles to lines, and lines to points (tokens, speedup, speedup of the floor). Floors are dashed.
    """
    rows = (len(panels) + 1) // 2
    figure = matplotlib_figure()(figsize=(14, 5 * rows), layout="constrained")
    axes = iter(figure.subplots(rows, 2, squeeze=False).flat)
    for (title, lines), axis in zip(panels.items(), axes, strict=False):
        for label, points in lines.items():
            tokens, reached, floor = zip(*points, strict=True)
            (line,) = axis.plot(tokens, reached, marker="o", markersize=3, label=label)
            axis.plot(tokens, floor, linestyle="--", linewidth=1, color=line.get_color())
        ticks = sorted({m for points in lines.values() for m, _, _ in points})
        axis.axhline(1, color="#888888", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, map(str, ticks))
        axis.set_ylim(bottom=0)
        axis.set(title=f"{title}; dashed: its floor", xlabel="tokens", ylabel="speedup over cuBLAS")
        axis.legend(fontsize=7)
    for axis in axes:  # an odd number of panels leaves one free
        axis.remove()
    files.write_atomic(path, _render(figure, path.suffix.removeprefix(".")))


def _render(figure: Any, kind: str) -> bytes:
    """Render a figure as `png` or `svg`, reproducibly."""
    from matplotlib import rc_context

    drawing = io.BytesIO()
    left_out = {"png": {"Software": None}, "svg": {"Date": None}}[kind]
    with rc_context({"svg.hashsalt": "quantkit", "svg.fonttype": "none"}):
        figure.savefig(drawing, format=kind, dpi=120, metadata=left_out)
    return drawing.getvalue()


def _draw_png(charts: list[tuple[str, Bars]]) -> bytes:
    heights = [max(1.2, 0.18 * len(bars)) for _, bars in charts]
    figure = matplotlib_figure()(figsize=(10, sum(heights) + 0.8 * len(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(charts) or 1, 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axis, (title, bars) in zip(axes, charts, strict=False):
        drawn = axis.barh([name for name, _, _ in bars], [value for _, value, _ in bars], color="#4477aa")
        axis.bar_label(drawn, [label for _, _, label in bars], fontsize=7, padding=2)
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.1)
    return _render(figure, "png")
