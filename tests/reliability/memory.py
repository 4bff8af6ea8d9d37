"""Little memory: plan's figure suffices, and less is refused at once (M1 to M4)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
