"""A former place of the census' families, for scripts that import them from here."""

from benchmarks.census import families

__all__ = ["families"]
