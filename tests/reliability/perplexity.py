"""The protocol of perplexity is held, or its breach is said (Q1)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
