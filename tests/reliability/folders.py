"""Hostile folders reach nothing outside of themselves, and run nothing (P1 to P3)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
