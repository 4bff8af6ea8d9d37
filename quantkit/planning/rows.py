"""The linears of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One linear of a plan: shape `[n, k]`, the label of its scheme (None: dense), its bytes in the
    output.

    `padded` is the stored shape if zeros are added.
    """

    module: str
    shape: tuple[int, int]
    scheme: str | None
    bytes: int
    padded: tuple[int, int] | None = None

    @property
    def stored(self) -> tuple[int, int]:
        """The shape in the output, padding included."""
        return self.padded or self.shape
