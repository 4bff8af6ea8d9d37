"""Quantities as short texts."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Format a number of bytes as short text in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
