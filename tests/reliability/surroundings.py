"""Poor surroundings: no home, no network, no temporary folder, few files, odd names (E1)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
