"""Signals end a run in order, and two runs do not share an output (S1, S2)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
