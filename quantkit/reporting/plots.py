"""PNG drawings: errors by depth, time and sizes from a report, and the speed of kernels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, RecipeError
from quantkit.io import files
from quantkit.reporting import charts
from quantkit.reporting import layer_errors as errors
from quantkit.reporting.charts import LIGHT, MARKS, Bar
from quantkit.reporting.html import page
from quantkit.reporting.markup import printable

#: Colours of text, of grid lines and of bars, as on the page.
INK, GRID, FILL = "#17202a", "#dfe4e8", "#2b6cb0"


def draw(report: Mapping[str, Any], path: Path, verification: Mapping[str, Any] | None = None) -> None:
    """Draw a report into `path`, a .png or a self-contained .html, which shows the `verification` too.

    RecipeError for another suffix; CheckpointError for a .png if matplotlib is not installed.
    """
    if path.suffix == ".html":
        files.write_atomic(path, page(report, verification).encode())
    elif path.suffix == ".png":
        files.write_atomic(path, _draw_png(report))
    else:
        raise RecipeError(f"{path}: a report is drawn as .html or .png: give a file name that ends so")


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


def _draw_png(report: Mapping[str, Any]) -> bytes:
    """Draw the errors by depth above the bars of time and sizes; a panel without data is left out."""
    layers = report.get("layers", [])
    lines = [
        (title, series)
        for title, error in (("Output error", errors.output_error), ("Weight error", errors.weight_error))
        if (series := errors.by_depth(layers, error))
    ]
    bars = [
        (title, scale, unit, found)
        for title, scale, unit, found in (
            ("Size of the weights", 1e6, "MB", charts.sizes(report)),
            ("Time", 1, "s", charts.times(report)),
            ("Peak memory", 1e6, "MB", charts.memory(report)),
        )
        if found
    ]
    heights = [3.6] * len(lines) + [0.5 + 0.32 * len(found) for *_, found in bars]
    figure = matplotlib_figure()(figsize=(10, sum(heights) + 0.9 * len(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(heights) or 1, 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    if not heights:
        axes[0].set_axis_off()
    for axis, (title, series) in zip(axes, lines, strict=False):
        _draw_depth(axis, title, series)
    for axis, (title, scale, unit, found) in zip(axes[len(lines) :], bars, strict=False):
        _draw_bars(axis, title, scale, unit, found)
    return _render(figure, "png")


def _draw_depth(axis: Any, title: str, series: Sequence[errors.Series]) -> None:
    for i, line in enumerate(series):
        look: dict[str, Any] = {"color": LIGHT[i % len(LIGHT)], "marker": MARKS[i % len(MARKS)][1], "markersize": 5}
        look["linestyle"] = "none" if line.experts else "-"
        blocks, middles = ([getattr(p, key) for p in line.points] for key in ("block", "mid"))
        axis.plot(blocks, [100 * m for m in middles], label=_plain(line.kind), **look)
        if line.experts:
            lows, highs = ([100 * getattr(p, key) for p in line.points] for key in ("low", "high"))
            axis.vlines(blocks, lows, highs, color=look["color"], alpha=0.35, linewidth=3)
    axis.locator_params(axis="x", integer=True)
    _style(axis, f"{title}, relative", "block", "%")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _draw_bars(axis: Any, title: str, scale: float, unit: str, bars: Sequence[Bar]) -> None:
    drawn = axis.barh([_plain(bar.name) for bar in bars], [bar.value / scale for bar in bars], color=FILL, height=0.55)
    axis.bar_label(drawn, [bar.label for bar in bars], fontsize=8, padding=4, color=INK)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    _style(axis, title, unit, "")


def _style(axis: Any, title: str, below: str, beside: str) -> None:
    axis.set_title(title, fontsize=11, loc="left", color=INK, weight="bold")
    axis.set_xlabel(below, fontsize=9)
    axis.set_ylabel(beside, fontsize=9)
    axis.tick_params(labelsize=8, length=0)
    axis.grid(axis="y" if beside else "x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)


def _plain(name: str) -> str:
    """Keep matplotlib from reading a name as a formula."""
    return printable(name).replace("$", r"\$")
