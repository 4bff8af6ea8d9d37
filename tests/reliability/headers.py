"""Damaged safetensors files are refused in one line, quickly and in bounded memory (H1, H2)."""

from __future__ import annotations

from tests.reliability.campaign import Family

FAMILIES: list[Family] = []
