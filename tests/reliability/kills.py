"""Runs that are killed at any moment continue to the same bytes, or left nothing (K1 to K5)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
