"""A disk that is full, or refuses, ends a run in one line; plan's bytes are those of the disk (D1 to D3)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
