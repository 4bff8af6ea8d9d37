"""A quantization scheme: format, group size, symmetry and sparsity of a weight."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

from quantkit.core import sparsity
from quantkit.core.formats import FORMATS, Format
from quantkit.errors import LayoutError, RecipeError, Setting, Words

Sparsity = Literal["2:4"] | None


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized: format, columns per scale (None: one scale per row), symmetry,
    sparsity.

    The constructor raises RecipeError for combinations that no layout holds.
    """

    format: Format
    group_size: int | None = None
    symmetric: bool = True
    sparsity: Sparsity = None

    def __post_init__(self) -> None:
        if self.format.is_float and not self.symmetric:
            raise RecipeError(
                f"{self.format.name} is symmetric only",
                Words("drop", Setting("asym", True), "or use", Setting("format", "int4")),
            )
        if self.sparsity is not None and (self.format.is_float or not self.symmetric):
            raise RecipeError(
                f"{self.sparsity} sparsity goes with symmetric integers only",
                Words("use int4 without", Setting("asym", True)),
            )
        if not self.format.takes(self.group_size):
            raise RecipeError(
                f"{self.format.name} has groups of {self.format.group_size}, not "
                f"{self.group_size or 'one scale per row'}",
                Words("use", Setting("group_size", self.format.group_size)),
            )
        if self.group_size is not None and self.group_size < 1:
            raise RecipeError(
                f"group size {self.group_size} is not positive", "use 128, 64, 32 or channel"
            )

    def groups(self, k: int) -> int:
        """Count the scales per row; raise LayoutError if the group size, or 4 for 2:4, does not
        divide `k`.
        """
        if self.sparsity is not None:
            sparsity.quads(k)
        if self.group_size is None:
            return 1
        if k % self.group_size:
            raise LayoutError(
                f"group size {self.group_size} does not divide k = {k}",
                Words(Setting("skip"), "the weight")
                if self.format.is_microscaled
                else Words("use", Setting("group_size", "channel"), "or a divisor"),
            )
        return k // self.group_size

    def padded_k(self, k: int) -> int:
        """Round `k` up to whole groups, and for 2:4 to a multiple of four."""
        unit = lcm(self.group_size or 1, sparsity.QUAD if self.sparsity else 1)
        return -(-k // unit) * unit

    @property
    def label(self) -> str:
        """A short name such as `int4:g128`, `int4:channel:asym` or `fp6:channel`, which
        `Scheme.parse` reads.
        """
        parts = [self.format.name, f"g{self.group_size}" if self.group_size else "channel"]
        parts += [] if self.symmetric else ["asym"]
        parts += [self.sparsity.replace(":", "")] if self.sparsity else []
        return ":".join(parts)

    @staticmethod
    def parse(label: str) -> Scheme:
        """Read a label such as `int4:g64:asym`, the form of `--override`; raise RecipeError for
        anything else.
        """
        name, *rest = label.split(":")
        if name not in FORMATS:
            raise RecipeError(
                f"unknown format {name!r} in {label!r}", f"use one of {', '.join(FORMATS)}"
            )
        options: dict[str, Any] = {}
        if FORMATS[name].is_microscaled:
            options["group_size"] = FORMATS[name].group_size
        for part in rest:
            if part == "channel":
                options["group_size"] = None
            elif part == "asym":
                options["symmetric"] = False
            elif part == "24":
                options["sparsity"] = "2:4"
            elif re.fullmatch("g[0-9]{1,9}", part):
                options["group_size"] = int(part[1:])
            else:
                raise RecipeError(
                    f"unknown part {part!r} in scheme {label!r}", "write it like int4:g64:asym"
                )
        return Scheme(FORMATS[name], **options)
