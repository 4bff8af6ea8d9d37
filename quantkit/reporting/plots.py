"""Drawings of a report: error per layer, time per phase, size before and after, as a page or a picture.

And of the speeds of kernels, as a picture.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, RecipeError
from quantkit.io import files
from quantkit.reporting.report import figures, ratios, size, summary

Bars = list[tuple[str, float, str]]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw error per layer, time per phase, size before and after into `path`, a .png or a self-contained .html.

    RecipeError for another kind of file; CheckpointError if a PNG is asked for and matplotlib is not installed.
    """
    charts = [(title, bars) for title, bars in _charts(report) if bars]
    if path.suffix == ".html":
        files.write_atomic(path, _page(report, charts).encode())
    elif path.suffix == ".png":
        files.write_atomic(path, _picture(charts))
    else:
        raise RecipeError(f"{path}: a report is drawn as .html or .png: give a file name that ends so")


def _charts(report: Mapping[str, Any]) -> list[tuple[str, Bars]]:
    layers, totals = report.get("layers", []), report.get("totals", {})
    sizes = [(name, totals.get(key)) for name, key in (("before", "source_bytes"), ("after", "bytes"))]
    return [
        (
            "Relative weight error of each linear",
            [(name, value, f"{value:.4f}") for value, name in figures(layers, "relative_error")],
        ),
        ("Output loss over rounding's", [(name, ratio, f"{ratio:.3f}") for ratio, name in ratios(layers)]),
        ("Time", [(str(name), float(s), f"{s:.1f} s") for name, s in report.get("phases", {}).items()]),
        ("Size of the weights", [(name, float(count), size(count)) for name, count in sizes if count]),
    ]


def _page(report: Mapping[str, Any], charts: list[tuple[str, Bars]]) -> str:
    title = html.escape(f"{report.get('source', {}).get('name')}, {report.get('scheme')}, {report.get('layout')}")
    style = "body{font:14px sans-serif;max-width:1000px;margin:2em auto}text{font-size:11px}rect{fill:#4477aa}"
    body = "".join(f"<h2>{html.escape(name)}</h2>{_svg(bars)}" for name, bars in charts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{style}</style></head><body><h1>{title}</h1><pre>{html.escape(summary(report))}</pre>{body}</body></html>\n"
    )


def _svg(bars: Bars) -> str:
    top = max(value for _, value, _ in bars) or 1.0
    rows = "".join(
        f'<text x="395" y="{16 * i + 12}" text-anchor="end">{html.escape(name)}</text>'
        f'<rect x="400" y="{16 * i + 2}" width="{500 * value / top:.1f}" height="12"/>'
        f'<text x="{405 + 500 * value / top:.1f}" y="{16 * i + 12}">{html.escape(label)}</text>'
        for i, (name, value, label) in enumerate(bars)
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{16 * len(bars) + 6}">{rows}</svg>'


def pictures() -> Any:
    """Return matplotlib's Figure, which draws PNGs; CheckpointError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointError(
            "a PNG is drawn by matplotlib, which is not installed: pip install 'quantkit[plot]', or do without --png"
        ) from error
    return Figure


def speedups(panels: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]], path: Path) -> None:
    """Draw speedups over cuBLAS against the number of tokens into a .png or .svg; CheckpointError without matplotlib.

    `panels` are title -> line -> points (tokens, speedup, the floor's speedup, which is drawn dashed).
    """
    rows = (len(panels) + 1) // 2
    figure = pictures()(figsize=(14, 5 * rows), layout="constrained")
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
    for axis in axes:  # a place that no panel took
        axis.remove()
    files.write_atomic(path, _drawn(figure, path.suffix.removeprefix(".")))


def _drawn(figure: Any, kind: str) -> bytes:
    """Return a figure as `png` or `svg`, the same bytes for the same drawing."""
    from matplotlib import rc_context

    drawing = io.BytesIO()
    unsaid = {"png": {"Software": None}, "svg": {"Date": None}}[kind]
    with rc_context({"svg.hashsalt": "quantkit", "svg.fonttype": "none"}):
        figure.savefig(drawing, format=kind, dpi=120, metadata=unsaid)
    return drawing.getvalue()


def _picture(charts: list[tuple[str, Bars]]) -> bytes:
    heights = [max(1.2, 0.18 * len(bars)) for _, bars in charts]
    figure = pictures()(figsize=(10, sum(heights) + 0.8 * len(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(charts) or 1, 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axis, (title, bars) in zip(axes, charts, strict=False):
        drawn = axis.barh([name for name, _, _ in bars], [value for _, value, _ in bars], color="#4477aa")
        axis.bar_label(drawn, [label for _, _, label in bars], fontsize=7, padding=2)
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.1)
    return _drawn(figure, "png")
