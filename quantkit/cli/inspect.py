"""The commands that read a checkpoint or its report: verify, inspect, report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options, show
from quantkit.cli.process import UNVERIFIED, emit, leave
from quantkit.core.units import counted, format_bytes
from quantkit.errors import CheckpointError
from quantkit.evaluation.options import VerifyOptions
from quantkit.names import VERIFICATION, JsonView
from quantkit.progress import Progress
from quantkit.recipes.options import LoadOptions

if TYPE_CHECKING:
    from quantkit.evaluation.verify import Verification

#: Rows of a table without -v.
MOST_ROWS = 40


@options.command("verify", "quantkit verify ./model-marlin --against ./model-int4")
@options.folder
@click.option(
    "--against",
    type=options.PATH,
    help="Quantized checkpoint whose codes, scales, zeros and dense tensors must be the same.",
)
@options.declared({"asked": VerifyOptions})
def verify(
    checkpoint: Path,
    against: Path | None,
    asked: VerifyOptions,
    as_json: bool,
    progress: Progress,
) -> None:
    """Prove the bits of CHECKPOINT.

    Every packed weight is unpacked and packed again and compared with its digest in the report, and
    on a GPU multiplied by its kernels; verify.json is written into the folder. Without a report,
    the digests in the weight files are compared. With --engine the engine opens the folder and
    reads the packaged text; its log-probabilities must be those of the decoded model, up to
    rounding."""
    from quantkit.evaluation import verify as evaluation
    from quantkit.io.files import is_writable

    found = evaluation.verify(checkpoint, against, asked, progress)
    emit(show.as_json(found.to_dict()) if as_json else format_verification(found, progress))
    if is_writable(checkpoint):
        evaluation.write(found, checkpoint)
    else:
        progress.warn(f"{checkpoint} is not writable: {VERIFICATION} is not written")
    if not found.ok:
        leave(UNVERIFIED, _failed(checkpoint, found.failures))


@options.command("inspect", "quantkit inspect ./model-marlin", computes=False)
@options.checkpoint
@options.flag("--check", "Compare the hash of every file with the recorded one, and end.", "checks")
@options.declared({"load": LoadOptions}, without=("device", "check"), section="")
def inspect(
    checkpoint: str, checks: bool, load: LoadOptions, as_json: bool, progress: Progress
) -> None:
    """Describe CHECKPOINT from its headers.

    Layout, scheme, bits per weight with scales, sizes and shapes, of checkpoints of any program.
    With --check, only hashes are compared: with those in the report, or without one with the
    digests in the weight files."""
    from quantkit.checkpoint.origin import resolve
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.pipeline.inspection import describe, tensors

    folder = resolve(checkpoint, load.revision, load.trust_remote_code, described=True)
    if checks:
        from quantkit.evaluation.verify import verify_files

        failures, notices = verify_files(folder)
        facts = {"path": str(folder), "ok": not failures, "failures": failures, "notices": notices}
        emit(
            show.as_json(facts)
            if as_json
            else format_checks(str(folder), failures, notices, progress)
        )
        if failures:
            leave(UNVERIFIED, _failed(folder, failures))
        return
    src = Checkpoint(folder, load.trust_remote_code)
    found = describe(src)
    emit(show.as_json(found) if as_json else format_description(found, tensors(src), progress))


def _failed(folder: Path, failures: Sequence[str]) -> str:
    return (
        f"Error: {folder} is not what it should be: {counted(len(failures), 'failure')}, see above"
    )


@options.command("report", "quantkit report ./model-int4 --html ./model-int4.html", computes=False)
@click.argument("folder", type=options.PATH)
@click.option("--html", type=options.PATH, help="Draw it into this .html file.")
def report(folder: Path, html: Path | None, as_json: bool, progress: Progress) -> None:
    """Print or draw a report.

    FOLDER is an output of quantkit. The page shows figures, proof, worst linears and their causes,
    error by depth, time, memory and notices."""
    from quantkit.checkpoint.report import REPORT, load as load_report
    from quantkit.io import files
    from quantkit.io.json_files import load_json
    from quantkit.io.model_folder import inside
    from quantkit.reporting.html import page

    found = load_report(folder)
    if not found:
        raise CheckpointError(f"{folder}: has no {REPORT}: give a folder that quantkit wrote")
    if html is not None:
        if html.suffix != ".html":
            raise click.UsageError(f"{html}: the file name must end in .html")
        proof = (
            load_json(inside(folder.resolve(), VERIFICATION))
            if (folder / VERIFICATION).exists()
            else None
        )
        files.write_atomic(html, page(found, proof).encode())
        progress.note(f"drawn: {html}")
    emit(show.as_json(found) if as_json else show.report(found, progress))


def format_verification(found: Verification, progress: Progress) -> str:
    """Format the outcome of `verify`: a row for each weight, or only for failed weights, then a
    verdict.

    -q prints failures and the verdict. -v prints every row, and the digest of each file.
    """
    verdict, layout = ("verified" if found.ok else "NOT verified"), found.layout or "unreadable"
    verdict += "" if found.checked else ", codes unchecked"
    last = f"{verdict}: {len(found.rows)} linears, {found.weights} weights, {layout}; {found.note}"
    failures = [f"FAILED: {failure}" for failure in found.failures]
    if progress.quiet:
        return "\n".join([*failures, last])
    shown = [row for row in found.rows if row.problem and not progress.verbose] or found.rows
    most = len(shown) if progress.verbose else MOST_ROWS
    marks = {True: "ok", False: "FAILED", None: "-"}
    proofs = ("repack", "digest", "against", *(("product",) if found.kernel else ()))
    rows = [
        (
            row.module,
            list(row.shape),
            row.scheme,
            *(marks[getattr(row, proof)] for proof in proofs),
        )
        for row in shown[:most]
    ]
    lines = [show.table(("weight", "shape", "scheme", *proofs), rows)] if rows else []
    lines += [f"... and {len(shown) - most} more, all with -v"] if len(shown) > most else []
    lines += (
        [f"file: {name} {digest}" for name, digest in found.files.items()]
        if progress.verbose
        else []
    )
    lines += failures
    lines += [f"note: {notice}" for notice in found.notices]
    return "\n".join([*lines, last])


def format_checks(
    path: str, failures: Sequence[str], notices: Sequence[str], progress: Progress
) -> str:
    """Format the outcome of `inspect --check`."""
    last = f"{path}: {'a file was changed' if failures else 'no file was changed'}"
    lines = [f"FAILED: {failure}" for failure in failures]
    return "\n".join(
        [*lines, *([] if progress.quiet else [f"note: {notice}" for notice in notices]), last]
    )


def format_description(
    found: JsonView, tensors: Iterable[Sequence[Any]], progress: Progress
) -> str:
    """Format the facts that `inspect` read from the headers of a checkpoint; -v lists `tensors`."""
    bits = found["bits_per_weight"]
    line = (
        f"{found['path']}: {_held(found)}, "
        + "".join(f"{label} ({count} linears), " for label, count in found["schemes"].items())
        + f"{found['parameters']} parameters, "
        + (f"{bits:.3f} bits/weight with scales, " if bits else "")
        + format_bytes(sum(found["files"].values()))
    )
    return show.of_level(
        progress, line, _description(found), show.table(("tensor", "shape", "held as"), tensors)
    )


def _held(found: JsonView) -> str:
    """Name the layout of a checkpoint, or how a dense model is stored."""
    low = found["dequantized_from"]
    return str(
        found["layout"]
        or (f"{low}, read as {found['dtype']}" if low else f"dense {found['dtype']}")
    )


def _description(found: JsonView) -> str:
    from quantkit.reporting import facts

    bits = found["bits_per_weight"]
    return show.facts(
        [
            ("path", found["path"]),
            ("model type", found["model_type"]),
            ("layout", _held(found)),
            (
                "schemes",
                ", ".join(
                    f"{label} ({count} linears)" for label, count in found["schemes"].items()
                ),
            ),
            (
                "among them",
                ", ".join(map(" ".join, found["embeddings_and_heads"].items())) or None,
            ),
            (
                "parameters",
                f"{found['parameters']}, {found['quantized_weights']} of them quantized",
            ),
            (
                "share",
                f"{100 * found['share']:.2f} % of the decoder's weights"
                if found["share"]
                else None,
            ),
            (
                "padded",
                f"{found['padded_linears']} linears, with zeros"
                if found["padded_linears"]
                else None,
            ),
            ("bits/weight", f"{bits:.3f} with scales" if bits else None),
            ("bits/parameter", f"{found['bits_per_parameter']:.3f} over the whole model"),
            ("size", format_bytes(sum(found["files"].values()))),
            ("tensors", format_bytes(found["bytes"]["total"])),
            *(
                (f"  {name}", format_bytes(count))
                for name, count in found["bytes"]["packed"].items()
            ),
            ("  dense", format_bytes(found["bytes"]["dense"])),
            *(("shape", f"{shape} x {count}") for shape, count in found["shapes"].items()),
            *(("file", f"{name} {format_bytes(count)}") for name, count in found["files"].items()),
            *facts.readers({"readers": re.split(r", (?!not tried)", found["readers"])}),
            *(("note", notice) for notice in found["notices"]),
        ]
    )
