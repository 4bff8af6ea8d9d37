"""Odd numbers, odd Hessians and odd scales have the result that is written down (N1 to N3)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
