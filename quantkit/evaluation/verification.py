"""The result of a verification, and `verify.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from quantkit.io import files, json_files
from quantkit.reporting.summary import ShortRepr

VERIFICATION = "verify.json"


@dataclass(frozen=True)
class Row:
    """The checks of one packed weight: True if passed, False if failed, None if there was nothing
    to compare with.

    `error` is the largest relative error of the kernel's products, None if no kernel ran or it is
    not finite.
    """

    module: str
    shape: tuple[int, ...]
    scheme: str
    bytes: int
    repack: bool | None
    digest: bool | None
    against: bool | None
    problem: str | None = None
    product: bool | None = None
    error: float | None = None


@dataclass(frozen=True)
class EngineProof:
    """The comparison with an engine: differences of log-probabilities in nats, and the largest that
    are allowed.

    `layers` has the counts of the methods and kernels that served each kind of layer.
    """

    engine: str
    version: str
    dtype: str
    tokens: int
    mean: float
    largest: float
    mean_bound: float
    largest_bound: float
    layers: Mapping[str, Mapping[str, int]]

    @property
    def ok(self) -> bool:
        """Whether both differences are within their bounds."""
        return self.mean <= self.mean_bound and self.largest <= self.largest_bound

    @property
    def note(self) -> str:
        """One line about the comparison, and about who served what."""
        served: dict[str, list[str]] = {}
        for kind, methods in self.layers.items():
            served.setdefault(" or ".join(methods), []).append(kind)
        by = "; ".join(f"{', '.join(kinds)} by {methods}" for methods, kinds in served.items())
        return (
            f"{self.engine} {self.version} in {self.dtype}: log-probabilities of {self.tokens} "
            "tokens differ by "
            f"{self.mean:.2g} nats on average (bound {self.mean_bound:.2g}), by {self.largest:.2g} "
            "at most (bound "
            f"{self.largest_bound:.2g}); {by}"
        )


@dataclass(frozen=True, repr=False)
class Verification(ShortRepr):
    """The result of `verify`: a row for each weight, the hash of each file, failures and notices as
    lines of text.

    `kernel` is the layout whose kernels multiplied on `device`, and `bound` limits their `errors`.
    If `kernel` is None, no kernel ran, and `unrun` gives the reason. The codes are `checked` if a
    report, digests in the weight files or another checkpoint could be compared with. `seconds` has
    the time of each phase. `engine` is None if none was asked.
    """

    layout: str | None
    rows: tuple[Row, ...]
    files: dict[str, str]
    failures: tuple[str, ...]
    notices: tuple[str, ...]
    against: str | None = None
    kernel: str | None = None
    device: str = "cpu"
    bound: float | None = None
    checked: bool = True
    unrun: str = "nothing could be multiplied"
    seconds: Mapping[str, float] = field(default_factory=dict)
    engine: EngineProof | None = None

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.failures

    @property
    def weights(self) -> int:
        """The number of elements whose codes were unpacked, repacked and compared."""
        return sum(prod(row.shape) for row in self.rows)

    @property
    def multiplied(self) -> int:
        """The number of elements that a kernel reproduced one by one."""
        return sum(prod(row.shape) for row in self.rows if row.product)

    @property
    def errors(self) -> list[float]:
        """The largest relative error of each weight that a kernel multiplied."""
        return [row.error for row in self.rows if row.error is not None]

    @property
    def note(self) -> str:
        """One line about the kernels, and the engine."""
        asked = "" if self.engine is None else f"; {self.engine.note}"
        if self.kernel is None:
            return f"no kernel ran, the bits alone are proved: {self.unrun}{asked}"
        worst = max(self.errors, default=0.0)
        return (
            f"the {self.kernel} kernels on {self.device} gave back {self.multiplied} weights "
            "exactly, products are off "
            f"by {worst:.1e} at most (bound {self.bound:g}){asked}"
        )

    def _shown(self) -> dict[str, Any]:
        facts = self.to_dict()
        shown = (
            "ok",
            "checked",
            "layout",
            "linears",
            "weights",
            "note",
            "against",
            "failures",
            "notices",
        )
        return {name: facts[name] for name in shown}

    def to_dict(self) -> dict[str, Any]:
        """Build the content of verify.json."""
        return {
            "ok": self.ok,
            "checked": self.checked,
            "layout": self.layout,
            "linears": len(self.rows),
            "weights": self.weights,
            "kernel": self.kernel,
            "device": self.device,
            "note": self.note,
            "multiplied": self.multiplied,
            "errors": self.errors,
            "bound": self.bound,
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "against": self.against,
            "failures": list(self.failures),
            "notices": list(self.notices),
            "engine": None if self.engine is None else asdict(self.engine),
            "hashes": self.files,
            "rows": [asdict(row) for row in self.rows],
        }


def write(verification: Verification, folder: Path) -> Path:
    """Write verify.json into the folder of the checkpoint, and return its path."""
    path = Path(folder) / VERIFICATION
    given = [Path(folder), *([Path(verification.against)] if verification.against else [])]
    names = {
        one: each.resolve().name
        for each in given
        for one in (each.resolve(), each.absolute(), each)
    }
    stated = json_files.without_folders(verification.to_dict(), names)
    files.write_atomic(path, json_files.dump_json(stated))
    return path
