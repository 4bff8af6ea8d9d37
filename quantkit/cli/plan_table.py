"""The text of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.cli import show
from quantkit.core.units import format_bytes, format_range
from quantkit.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quantkit.planning.output import Output
    from quantkit.planning.plan import Plan
    from quantkit.planning.serving import Kind, Serving

#: The files of an output whose bytes a plan only bounds: report and model card.
REPORT_AND_CARD = 2


def format_plan(found: Plan, progress: Progress) -> str:
    """Format a plan that nothing refuses: the output, the memory. -v lists every linear."""
    output = found.output
    bits = f", {found.bits_per_weight:.3f} bits/weight" if found.bits_per_weight else ""
    line = (
        f"plan: {_linears(output)}, {_schemes(output)}, {found.layout}; "
        f"{format_bytes(output.source_bytes)} before, {format_bytes(found.total)} after{bits}"
    )
    rows = [(row.module, list(row.shape), row.scheme or "dense", row.bytes) for row in output.rows]
    return show.of_level(
        progress, line, _plan(found), show.table(("linear", "shape", "scheme", "bytes"), rows)
    )


def _linears(output: Output) -> str:
    dense = len(output.rows) - len(output.quantized)
    return f"{len(output.quantized)} linears quantized, {dense} left dense"


def _schemes(output: Output) -> str:
    from quantkit.reporting import facts

    layers = [{"scheme": row.scheme} for row in output.quantized]
    return facts.schemes({"scheme": output.scheme, "layers": layers})


def _plan(found: Plan) -> str:
    """Format a plan: the output, the memory, the kernels that will serve it."""
    output, memory = found.output, found.needs.memory.to_dict()
    needs = [
        f"{format_bytes(memory[kind])} {kind.upper()}" for kind in ("ram", "vram") if kind in memory
    ]
    facts_, calibration, duration = output.to_dict(), found.calibration, found.needs.duration
    lines = show.facts(
        [
            ("scheme", _schemes(output)),
            ("layout", found.layout),
            ("linears", _linears(output).replace(" linears", "")),
            (
                "output",
                f"{format_bytes(found.total)} in {len(found.files) + REPORT_AND_CARD} files, "
                f"{output.bytes} bytes of tensors, source {format_bytes(output.source_bytes)}",
            ),
            (
                "share",
                f"{100 * found.share:.2f} % of the decoder's weights"
                if found.share is not None
                else None,
            ),
            (
                "bits/weight",
                f"{found.bits_per_weight:.3f} with scales" if found.bits_per_weight else None,
            ),
            (
                "calibration",
                f"{calibration['sequences']} sequences, {calibration['tokens']} tokens of "
                f"{calibration['source']}"
                if calibration
                else None,
            ),
            (
                "duration",
                f"{format_range(*duration)}, by a probe of one block" if duration else None,
            ),
            ("peak memory", f"about {' and '.join(needs)}"),
            ("disk free", format_bytes(found.needs.disk_free) if found.needs.disk_free else None),
            ("loads in", facts_["readers"]),
            ("kernel", facts_["kernel"] or "none of quantkit's own"),
            *(("note", notice) for notice in found.notices),
        ]
    )
    parts = [
        lines,
        _curve(found.fit) if found.fit else "",
        _serving(found.serving) if found.serving else "",
    ]
    return "\n\n".join(filter(None, parts))


def _curve(fit: Mapping[str, Any]) -> str:
    """Format the uniform schemes that a target size chooses from; a run mixes them by measured
    loss increase.
    """
    header = ("uniform scheme", "layout", "bytes", "bits/weight", "squared error", "fits")
    rows = [
        (
            row["scheme"],
            row["layout"],
            row["bytes"],
            f"{row['bits']:.3f}",
            f"{row['harm']:.2e}",
            fits,
        )
        for row in fit["curve"]
        for fits in [
            "no" if not row["fits"] else "best" if row["scheme"] == fit["best_uniform"] else "yes"
        ]
    ]
    return show.table(header, rows)


def _serving(found: Serving) -> str:
    """Format the kernels of a program: a row for each kind of linear, then the sources
    of the rows.
    """
    major, minor = found.capability
    sources = list(dict.fromkeys(kind.source for kind in found.kinds if kind.source))
    rows = [
        (
            kind.name,
            kind.count,
            f"{kind.shape[0]}x{kind.shape[1]}",
            kind.scheme or "-",
            _kernel(kind, sources),
        )
        for kind in found.kinds
    ]
    header = (
        f"{found.target} on {found.gpu} ({major}.{minor})",
        "count",
        "n x k",
        "scheme",
        "kernel",
    )
    lines = [show.table(header, rows)]
    lines += [f"[{number}] {source}" for number, source in enumerate(sources, start=1)]
    return "\n".join(lines)


def _kernel(kind: Kind, sources: list[str]) -> str:
    name = kind.kernel or ("" if kind.why in ("not known", "dense") else "none")
    text = ": ".join(filter(None, (name, kind.why)))
    return f"{text} [{sources.index(kind.source) + 1}]" if kind.source else text
