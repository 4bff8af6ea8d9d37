"""A report as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from quantkit.reporting.summary import summary

#: The bars of one chart: name, value, label.
Bars = list[tuple[str, float, str]]


def page(report: Mapping[str, Any], charts: list[tuple[str, Bars]]) -> str:
    """Write the page: the closing table, then each chart (title, bars) as SVG."""
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
