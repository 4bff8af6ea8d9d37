"""Quantities as short texts."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Format a number of bytes as short text in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Format a duration as short text: seconds, minutes and seconds, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_percent(ratio: float) -> str:
    """Format a ratio in percent, to three significant digits."""
    return f"{100 * ratio:#.3g}".rstrip(".") + " %"
