"""The result of a run that wrote a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.reporting import summary
from quantkit.reporting.short_repr import ShortRepr


@dataclass(frozen=True, repr=False, eq=False)
class Result(ShortRepr, Mapping[str, Any]):
    """The folder `path` that a run wrote, and its `report`, which is the content of
    quantkit_report.json.

    A result is a mapping of the report too: `result["totals"]`. `notices` are the report's. Those
    of this run name options as keywords. Those of its source stay as the source's report has them.
    `print` shows the closing table of the command line.
    """

    path: Path
    report: dict[str, Any]
    notices: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The layout that was written; "dense" for a pruned model."""
        return str(self.report["layout"])

    @property
    def scheme(self) -> str:
        """The scheme of most linears, such as int4:g128."""
        return str(self.report["scheme"])

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The facts of each linear that was changed: name, shape, scheme,
        relative_error and more.
        """
        return list(self.report["layers"])

    @property
    def bits_per_weight(self) -> float | None:
        """The stored bits per quantized weight, scales and zero points included; None for a pruned
        model.
        """
        bits: float | None = self.report["totals"]["bits_per_weight"]
        return bits

    @property
    def bytes(self) -> int:
        """The bytes of the weight files."""
        return int(self.report["totals"]["bytes"])

    @property
    def share(self) -> float | None:
        """The share of the decoder's weights that were changed; None if no blocks were found."""
        share: float | None = self.report["totals"]["share"]
        return share

    @property
    def seconds(self) -> float:
        """The duration of the run."""
        return float(self.report["totals"]["seconds"])

    def __getitem__(self, key: str) -> Any:
        return self.report[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.report)

    def __len__(self) -> int:
        return len(self.report)

    def __str__(self) -> str:
        return summary.summary(self.report)

    def _shown(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "layout": self.layout,
            "scheme": self.scheme,
            "linears": len(self.layers),
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes,
            "share": self.share,
            "seconds": round(self.seconds, 3),
            "notices": list(self.notices),
        }
