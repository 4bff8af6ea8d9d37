"""Quantities as short texts."""

from __future__ import annotations

from math import ceil, floor


def format_bytes(count: float) -> str:
    """Format a number of bytes as short text in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: object, noun: str) -> str:
    """Format a count of things, such as "1 window" or "2 windows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration as short text: seconds, minutes and seconds, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_range(low: float, high: float) -> str:
    """Format an estimated duration as short text, such as "about 3 to 5 min"."""
    unit, seconds = ("s", 1) if high < 100 else ("min", 60) if high < 6000 else ("h", 3600)
    first, last = max(1, floor(low / seconds)), max(1, ceil(high / seconds))
    return f"about {first} to {last} {unit}" if first < last else f"about {last} {unit}"


def format_percent(ratio: float) -> str:
    """Format a ratio in percent, to three significant digits."""
    return f"{100 * ratio:#.3g}".rstrip(".") + " %"
