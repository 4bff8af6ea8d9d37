"""The laws of packing, and faults planted for verify to find (B1, B2)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
