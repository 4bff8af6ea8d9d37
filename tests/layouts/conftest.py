"""Layouts are packed in two ways, which must not show: by torch, and by compiled loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantkit.core import cpu_dispatch as dispatch


@pytest.fixture(scope="module", params=["torch", "compiled"])
def both_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """However small or large a tensor is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "LARGE", 2**60 if request.param == "torch" else 0)
        yield
