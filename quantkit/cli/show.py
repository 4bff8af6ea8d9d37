"""Format results as text for people. `--json` prints the same facts for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.core.units import format_bytes
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.evaluation.divergence import Divergence
    from quantkit.evaluation.perplexity import Perplexity
    from quantkit.evaluation.verification import Verification
    from quantkit.layouts.compatibility import Conversion
    from quantkit.planning.plan import Plan
    from quantkit.planning.serving import Kind, Serving

MOST_ROWS = 40
#: The files of an output whose bytes a plan only bounds: report and model card.
REPORT_AND_CARD = 2
TIMES = ("us", "floor us", "of floor", "cuBLAS us", "speedup", "GB/s", "TFLOP/s")
SPEEDS = ("layout", "scheme", "kernel", "layer", "NxK", "M", *TIMES)
RATES = ("prompt tok/s", "x dense", "decode tok/s", "x dense", "floor tok/s", "of floor")
PACES = ("layout", "scheme", "batch", *RATES, "weights", "packed size", "peak")
DEMO = ("format", "method", "layout", "bits/weight", "size", "perplexity", "change")


def as_json(result: Mapping[str, Any]) -> str:
    """Format a result as one JSON object."""
    return json.dumps(result, indent=1, allow_nan=False)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Align columns: to the right if all cells are numbers, else to the left."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(row[i][:1] in "+-0123456789" for row in cells) for i in range(len(header))]
    widths = [max(len(row[i]) for row in (list(header), *cells)) for i in range(len(header))]
    lines = []
    for row in (list(header), *cells):
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Format one `label  value` line for each pair. Pairs with an empty value are left out."""
    return "\n".join(f"{label:<14} {value}" for label, value in pairs if value not in (None, "", [], {}))


def of_level(progress: Progress, line: str, text: str, more: str = "") -> str:
    """Choose how much of a result is printed: one line (-q), its text, or more below it (-v)."""
    if progress.quiet:
        return line
    return f"{text}\n\n{more}" if progress.verbose and more else text


def report(found: Mapping[str, Any], progress: Progress) -> str:
    """Format the report of a run."""
    from quantkit.reporting import summary

    header = ("linear", "shape", "scheme", "error", "loss/rtn", "seconds")
    return of_level(progress, summary.line(found), summary.summary(found), table(header, summary.rows(found)))


def plan(found: Plan, progress: Progress) -> str:
    """Format a plan: the output, the memory, the weights that do not fit. -v lists every linear."""
    dense = sum(row.scheme is None for row in found.rows)
    bits = f", {found.bits_per_weight:.3f} bits/weight" if found.bits_per_weight else ""
    misfits = f", {len(found.misfits)} misfits" if found.misfits else ""
    after = found.total if found.files else found.bytes
    line = (
        f"plan: {len(found.quantized)} linears quantized, {dense} left dense{misfits}, {found.scheme}, {found.layout}; "
        f"{format_bytes(found.source_bytes)} before, {format_bytes(after)} after{bits}"
    )
    rows = [(row.module, list(row.shape), row.scheme or "dense", row.bytes) for row in found.rows]
    return of_level(progress, line, _plan(found), table(("linear", "shape", "scheme", "bytes"), rows))


def _plan(found: Plan) -> str:
    """Format a plan: the output, the memory, the weights that do not fit, the kernels that will serve it."""
    memory = found.memory.to_dict()
    needs = [f"{format_bytes(memory[kind])} {kind.upper()}" for kind in ("ram", "vram") if kind in memory]
    facts_ = found.to_dict()
    dense = [row.module for row in found.rows if row.scheme is None]
    calibration = found.calibration
    lines = facts(
        [
            ("scheme", found.scheme),
            ("layout", found.layout),
            ("linears", f"{len(found.quantized)} quantized, {len(dense)} left dense"),
            ("misfits", f"{len(found.misfits)} of them, counted as dense" if found.misfits else None),
            (
                "output",
                (f"{format_bytes(found.total)} in {len(found.files) + REPORT_AND_CARD} files, " if found.files else "")
                + f"{found.bytes} bytes of tensors, source {format_bytes(found.source_bytes)}",
            ),
            ("share", f"{100 * found.share:.2f} % of the decoder's weights" if found.share is not None else None),
            ("bits/weight", f"{found.bits_per_weight:.3f} with scales" if found.bits_per_weight else None),
            (
                "calibration",
                f"{calibration['sequences']} sequences, {calibration['tokens']} tokens of {calibration['source']}"
                if calibration
                else None,
            ),
            ("peak memory", f"about {' and '.join(needs)}"),
            ("disk free", format_bytes(found.disk_free) if found.disk_free else None),
            ("loads in", facts_["readers"]),
            ("kernel", facts_["kernel"] or "none of quantkit's own"),
            *(("note", notice) for notice in found.notices),
        ]
    )
    return lines if found.serving is None else f"{lines}\n\n{_serving(found.serving)}"


def _serving(found: Serving) -> str:
    """Format the kernels of a program: a row for each kind of linear, then the sources of the rows."""
    major, minor = found.capability
    sources = list(dict.fromkeys(kind.source for kind in found.kinds if kind.source))
    rows = [
        (
            kind.name,
            kind.count,
            f"{kind.shape[0]}x{kind.shape[1]}",
            kind.scheme or "-",
            _kernel(kind, sources),
            "not known" if kind.gpus is None else ", ".join(map(str, kind.gpus)),
        )
        for kind in found.kinds
    ]
    split = [name for name in ("GPUs",) if any(kind.gpus is not None for kind in found.kinds)]
    header = (f"{found.target} on {found.gpu} ({major}.{minor})", "count", "n x k", "scheme", "kernel", *split)
    lines = [table(header, [row[: len(header)] for row in rows])]
    lines += [f"[{number}] {source}" for number, source in enumerate(sources, start=1)]
    copied = sorted({count for kind in found.kinds for count in kind.copied})
    if copied:
        lines.append(f"over {', '.join(map(str, copied))} GPUs key and value heads are copied")
    return "\n".join(lines)


def _kernel(kind: Kind, sources: list[str]) -> str:
    name = kind.kernel or ("" if kind.why in ("not known", "dense") else "none")
    text = ": ".join(filter(None, (name, kind.why)))
    return f"{text} [{sources.index(kind.source) + 1}]" if kind.source else text


def description(found: Mapping[str, Any], tensors: Iterable[Sequence[Any]], progress: Progress) -> str:
    """Format the facts that `inspect` read from the headers of a checkpoint; -v lists `tensors`."""
    bits = found["bits_per_weight"]
    line = (
        f"{found['path']}: {found['layout'] or 'dense ' + found['dtype']}, "
        + "".join(f"{label} ({count} linears), " for label, count in found["schemes"].items())
        + f"{found['parameters']} parameters, "
        + (f"{bits:.3f} bits/weight with scales, " if bits else "")
        + format_bytes(sum(found["files"].values()))
    )
    return of_level(progress, line, _description(found), table(("tensor", "shape", "held as"), tensors))


def _description(found: Mapping[str, Any]) -> str:
    bits = found["bits_per_weight"]
    return facts(
        [
            ("path", found["path"]),
            ("model type", found["model_type"]),
            ("layout", found["layout"] or f"dense {found['dtype']}"),
            ("schemes", ", ".join(f"{label} ({count} linears)" for label, count in found["schemes"].items())),
            ("parameters", f"{found['parameters']}, {found['quantized_weights']} of them quantized"),
            ("share", f"{100 * found['share']:.2f} % of the decoder's weights" if found["share"] else None),
            ("padded", f"{found['padded_linears']} linears, with zeros" if found["padded_linears"] else None),
            ("bits/weight", f"{bits:.3f} with scales" if bits else None),
            ("bits/parameter", f"{found['bits_per_parameter']:.3f} over the whole model"),
            ("size", format_bytes(sum(found["files"].values()))),
            ("tensors", format_bytes(found["bytes"]["total"])),
            *((f"  {name}", format_bytes(count)) for name, count in found["bytes"]["packed"].items()),
            ("  dense", format_bytes(found["bytes"]["dense"])),
            *(("shape", f"{shape} x {count}") for shape, count in found["shapes"].items()),
            *(("file", f"{name} {format_bytes(count)}") for name, count in found["files"].items()),
            ("loads in", found["readers"]),
            *(("note", notice) for notice in found["notices"]),
        ]
    )


def verification(found: Verification, progress: Progress) -> str:
    """Format the outcome of `verify`: a row for each weight, or only the failed ones, then a verdict.

    -q prints the verdict, below what failed. -v prints every row, and the digest of each file.
    """
    verdict, layout = ("verified" if found.ok else "NOT verified"), found.layout or "unreadable"
    verdict += "" if found.checked else ", codes unchecked"
    last = f"{verdict}: {len(found.rows)} linears, {found.weights} weights, {layout}; {found.note}"
    failures = [f"FAILED: {failure}" for failure in found.failures]
    if progress.quiet:
        return "\n".join([*failures, last])
    shown = [row for row in found.rows if row.problem and not progress.verbose] or found.rows
    most = len(shown) if progress.verbose else MOST_ROWS
    proofs = ("repack", "digest", "against", *(("product",) if found.kernel else ()))
    rows = [
        (row.module, list(row.shape), row.scheme, *(_passed(getattr(row, proof)) for proof in proofs))
        for row in shown[:most]
    ]
    lines = [table(("weight", "shape", "scheme", *proofs), rows)] if rows else []
    lines += [f"... and {len(shown) - most} more, all with -v"] if len(shown) > most else []
    lines += [f"file: {name} {digest}" for name, digest in found.files.items()] if progress.verbose else []
    lines += failures
    lines += [f"note: {notice}" for notice in found.notices]
    return "\n".join([*lines, last])


def checks(path: str, failures: Sequence[str], notices: Sequence[str], progress: Progress) -> str:
    """Format the outcome of `inspect --check`."""
    last = f"{path}: {'a file was changed' if failures else 'no file was changed'}"
    lines = [f"FAILED: {failure}" for failure in failures]
    return "\n".join([*lines, *([] if progress.quiet else [f"note: {notice}" for notice in notices]), last])


def perplexity(found: Perplexity, progress: Progress) -> str:
    """Format a perplexity and its protocol."""
    figure, protocol = f"perplexity {found.perplexity:.4f}", _protocol(found)
    bits = found.nll / math.log(2)
    more = f"{found.nll:.6f} nats or {bits:.6f} bits a token, {found.nll * found.tokens:.1f} nats in all"
    return of_level(progress, f"{figure} {protocol}", f"{figure}\n{protocol}", more)


def divergence(found: Divergence, progress: Progress) -> str:
    """Format a KL divergence and its protocol."""
    figures = [f"KL divergence {found.kld:.6f} nats", f"top-1 agreement {100 * found.top1:.3f} %"]
    agreed, protocol = round(found.top1 * found.tokens), _protocol(found)
    more = f"{found.kld / math.log(2):.6f} bits a token; {agreed} of {found.tokens} tokens agree"
    return of_level(progress, f"{', '.join(figures)} {protocol}", "\n".join([*figures, protocol]), more)


def matrix(found: Iterable[Conversion]) -> str:
    """Format the table of `convert --list`."""
    return table(("conversion", "verdict"), [(f"{c.source}-to-{c.target}", c.verdict) for c in found])


def diagnosis(found: Mapping[str, Any]) -> str:
    """Format the diagnosis of `doctor`, with the commands that fix it."""
    marks = {True: "ok", False: "MISSING", None: "-"}
    rows = [
        (marks[check["ok"]], check["name"], check["found"] or "not found", check["needs"]) for check in found["checks"]
    ]
    machine = found["machine"]
    gpus = [
        f"{gpu['name']}, {format_bytes(gpu['memory'])}, sm_{gpu['compute_capability'].replace('.', '')}"
        + (f" ({gpu['problem']})" if gpu["problem"] else "")
        for gpu in found["gpus"]
    ]
    threads = f" ({machine['threads']} threads used)" if machine["threads"] else ""
    lines = [
        table(("", "what", "found", "needed"), rows),
        "",
        facts(
            [
                ("machine", machine["platform"]),
                ("cores", f"{machine['cores']}{threads}"),
                ("free memory", format_bytes(machine["free_memory"]) if machine["free_memory"] else "unknown"),
                ("free disk", format_bytes(machine["free_disk"])),
                ("GPU", "; ".join(gpus) or "none that torch sees"),
                ("kernels", found["kernels"]["note"]),
                *(("fix", fix) for fix in found["fixes"]),
            ]
        ),
    ]
    return "\n".join(lines)


def speeds(found: Mapping[str, Any]) -> str:
    """Format the table of `bench kernels`, the machine, and the cells in which a peer is faster."""
    lines = [table(SPEEDS, (_speed(row) for row in found["rows"])), ""]
    keys = ("layout", "scheme", "model", "M", "speedup_vs_cublas", "floor_speedup")
    averages = [_cells(row, keys) for row in found["means"]]
    lines += ["geometric means over the layers of a model", table(keys, averages), ""] if averages else []
    device = found["device"]
    lines.append(
        f"{device['gpu']}, torch {device['torch']}, CUDA {device['cuda']}, {device['dtype']}: copy "
        f"{device['copy'] / 1e9:.0f} GB/s, dense product {device['rate'] / 1e12:.0f} TFLOP/s, which make the floor"
    )
    against = found.get("against")
    if against is None:
        return "\n".join(lines)
    names = ("layout", "scheme", "layer", "M", "speedup_vs_cublas", "peer", "peer_speedup", "ratio")
    slower = [_cells(row, names) for row in against["slower"]]
    lines += ["", table(names, slower)] if slower else []
    mean = f", geometric mean {against['mean']:.3f} of its speedup" if against["compared"] else ""
    lines.append(f"compared: {against['compared']} cells, {len(slower)} slower{mean}; no figure: {against['missing']}")
    return "\n".join(lines)


def paces(found: Mapping[str, Any]) -> str:
    """Format the table of `bench generate`, what was left out, and the machine."""
    first, device = found["rows"][0], found["device"]
    computed = dict.fromkeys((row["layout"], row["scheme"], row["weights"]) for row in found["rows"])
    mode = "compiled" if first["fused"] else "not compiled"
    lines = [table(PACES, (_pace(row) for row in found["rows"])), ""]
    lines += [f"{' '.join(filter(None, names))}: {how}" for *names, how in computed]
    lines += [f"note: {notice}" for notice in found["notices"]]
    lines.append(
        f"{first['model']}, random weights, prompts of {first['prompt_tokens']} tokens, then {first['new_tokens']} new "
        f"ones each, in CUDA graphs over a static cache, {mode}; {device['gpu']}, torch {device['torch']}, "
        f"transformers {first['transformers']}, CUDA {device['cuda']}, {device['dtype']}; "
        f"the floor is to read all weights once a step at the {device['copy'] / 1e9:.0f} GB/s of a copy"
    )
    return "\n".join(lines)


def _pace(row: Mapping[str, Any]) -> tuple[Any, ...]:
    ratios = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("prompt_vs_dense", "decode_vs_dense")]
    return (
        row["layout"],
        row["scheme"],
        row["batch"],
        f"{row['prompt_tokens_per_s']:.0f}",
        ratios[0],
        f"{row['decode_tokens_per_s']:.1f}",
        ratios[1],
        f"{row['floor_tokens_per_s']:.1f}",
        f"{row['pct_of_floor']:.0f} %",
        *(format_bytes(row[key]) for key in ("weight_bytes", "packed_bytes", "peak_bytes")),
    )


def _cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    return [f"{value:.3f}" if isinstance(value, float) else value for value in map(row.get, keys)]


def _speed(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        row["layout"],
        row["scheme"],
        row["kernel"],
        row["layer"],
        f"{row['N']}x{row['K']}",
        row["M"],
        f"{row['time_us']:.2f}",
        f"{row['floor_us']:.2f}",
        f"{row['pct_of_floor']:.0f} %",
        f"{row['cublas_us']:.2f}",
        f"{row['speedup_vs_cublas']:.2f}",
        f"{row['weight_GBps']:.0f}",
        f"{row['tflops']:.1f}",
    )


def demo(found: Mapping[str, Any], progress: Progress) -> str:
    """Format the table of the demo and its protocol."""
    changes = [
        f"{row['format']} {row['method']} {row['perplexity']:.3f} ({100 * row['change']:+.2f} %)"
        for row in found["rows"][1:]
    ]
    line = f"verified; perplexity {found['rows'][0]['perplexity']:.3f}, {', '.join(changes)}"
    return of_level(progress, line, _demo(found))


def _demo(found: Mapping[str, Any]) -> str:
    rows = [
        (
            row["format"],
            row["method"],
            row["layout"],
            f"{row['bits_per_weight']:.3f}",
            format_bytes(row["bytes"]),
            f"{row['perplexity']:.3f}",
            "" if row["change"] is None else f"{100 * row['change']:+.2f} %",
        )
        for row in found["rows"]
    ]
    return f"{table(DEMO, rows)}\n\n{found['protocol']}"


def _protocol(found: Perplexity | Divergence) -> str:
    return (
        f"on {found.data}: {found.windows} windows of {found.window} tokens, stride {found.stride}, "
        f"{'BOS in front of each' if found.bos else 'no BOS'}, {found.tokens} predictions, "
        f"text of {found.text_tokens} tokens (a last short window is dropped); {found.weights}"
    )


def _passed(value: bool | None) -> str:
    return {True: "ok", False: "FAILED", None: "-"}[value]


def _cell(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
