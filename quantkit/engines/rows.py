"""The types of the tables of engines: the known facts of a folder, and the rows that
apply to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.engines.joined import fused_groups, is_expert

if TYPE_CHECKING:
    from quantkit.core.scheme import Scheme

#: The source of rows about programs that nobody ran, and the remark behind their names.
PUBLISHED = "docs/layouts.md 10, from the programs' published documentation; not tried here"
UNTRIED = " (by its documentation, not tried)"


@dataclass(frozen=True)
class Folder:
    """The facts of a quantized folder on which its readers depend.

    `linears` has the scheme and the stored shape `[n, k]` of each quantized linear. `dense` names
    the other linears, or has patterns `re:...`. `padded` tells whether weights are filled up with
    zeros. `config` is config.json. `is_half` tells whether the model is stored in float16.
    `outside` names modules that the model of transformers does not have.
    """

    layout: str
    linears: Mapping[str, tuple[Scheme, tuple[int, int]]]
    dense: Collection[str] = ()
    padded: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    is_half: bool = True
    outside: Collection[str] = ()

    @property
    def model_types(self) -> set[Any]:
        """The model type in config.json, and that of the language model inside a wrapper."""
        text = self.config.get("text_config")
        return {
            self.config.get("model_type"),
            text.get("model_type") if isinstance(text, Mapping) else None,
        }

    @property
    def schemes(self) -> set[Scheme]:
        """The different schemes."""
        return {scheme for scheme, _ in self.linears.values()}

    @property
    def mixed_groups(self) -> list[tuple[str, set[str]]]:
        """Groups of linears that engines join although their treatments differ: members and
        treatments.
        """
        found = []
        for joined, members in fused_groups({**self.linears, **dict.fromkeys(self.dense)}).items():
            labels = {
                self.linears[member][0].label if member in self.linears else "dense"
                for member in members
            }
            if len(labels) > 1:
                parent = joined.rpartition(".")[0]
                names = ", ".join(m.removeprefix(f"{parent}.") for m in members)
                expert = is_expert(members[0])
                found.append((f"{joined}: its linears" if expert else f"{parent}: {names}", labels))
        return found


@dataclass(frozen=True)
class Trait:
    """A property of a folder that some readers refuse: in words, how to avoid it, and its test.

    If it `is_unknown`, they were not asked about it.
    """

    words: str
    way_out: str
    holds: Callable[[Folder], bool]
    is_unknown: bool = False


@dataclass(frozen=True)
class Reader:
    """A program that opens folders of some layouts, unless they have one of the traits `refuses`.

    Traits are identified by name. No `layouts` stand for all. `only` is a trait without which the
    row says nothing. If `is_own`, the linears in memory are quantkit's.
    """

    name: str
    layouts: tuple[str, ...]
    refuses: tuple[str, ...]
    source: str
    only: str | None = None
    is_own: bool = False

    @property
    def label(self) -> str:
        """The name, and whether the program was not asked."""
        return f"{self.name}{UNTRIED}" if self.source == PUBLISHED else self.name


@dataclass(frozen=True)
class Kernel:
    """The kernel that an engine chooses for these weights; None if the engine has none.

    `capabilities` are compute capabilities of GPUs, None for any. `bits` are widths of integers; a
    row with `zeros` is about zero points only. `n_unit` and `k_unit` divide the shape of the joined
    weight. `why` describes the engine without a kernel.
    """

    layouts: tuple[str, ...]
    kernel: str | None
    source: str
    capabilities: tuple[tuple[int, int], ...] | None = None
    is_float: bool = False
    bits: tuple[int, ...] = (4,)
    zeros: bool = False
    groups: tuple[int | None, ...] = (128, 64, 32, None)  # None: one scale per row
    experts: bool = False
    n_unit: int = 1
    k_unit: int = 1
    why: str | None = None

    def covers(
        self,
        layout: str,
        capability: tuple[int, int],
        scheme: Scheme,
        n: int,
        k: int,
        experts: bool,
    ) -> bool:
        """Return True if this row is about an `[n, k]` weight of a layout and a scheme on such a
        GPU.
        """
        here = self.capabilities is None or capability in self.capabilities
        alike = (self.is_float, self.experts) == (scheme.format.is_float, experts)
        fits = scheme.group_size in self.groups and not n % self.n_unit and not k % self.k_unit
        fits &= self.is_float or scheme.format.bits in self.bits
        fits &= not (self.zeros and scheme.symmetric)
        return alike and here and fits and layout in self.layouts and scheme.sparsity is None


@dataclass(frozen=True)
class Limit:
    """A use in which a program miscomputes folders of some layouts, with a way to avoid it."""

    layouts: tuple[str, ...]
    words: str
    way_out: str
    source: str


@dataclass(frozen=True)
class Engine:
    """A program that runs packed models. The first row of `kernels` that covers a weight is the
    answer.

    `target` is its name for `plan --target`, None if it has none. `uses` maps names of readers to a
    title, a language and the commands that open FOLDER. `joins` tells whether it joins linears, and
    `signed` its limit with negative scales.
    """

    target: str | None
    readers: tuple[Reader, ...]
    kernels: tuple[Kernel, ...] = ()
    uses: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    joins: bool = False
    signed: Limit | None = None
