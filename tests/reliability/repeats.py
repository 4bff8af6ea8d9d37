"""The same bytes from run to run, whatever surrounds them (R1, R3)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
