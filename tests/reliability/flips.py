"""Every changed bit of a source, an output or a file beside them is found (H3 to H5)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
