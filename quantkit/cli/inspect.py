"""The commands that read a checkpoint or its report: verify, inspect, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import UNVERIFIED, emit, leave
from quantkit.cli.options import command
from quantkit.errors import CheckpointError
from quantkit.progress import Progress


@command("verify", "quantkit verify ./model-marlin --against ./model-int4")
@options.checkpoint
@click.option(
    "--against",
    type=options.PATH,
    help="Quantized checkpoint whose codes, scales, zeros and dense tensors must be the same.",
)
@options.device
@click.option("--unsealed", is_flag=True, help="Accept codes that nothing can be compared with.")
def verify(
    checkpoint: Path, against: Path | None, device: str, unsealed: bool, as_json: bool, progress: Progress
) -> None:
    """Prove the bits of CHECKPOINT.

    Every packed weight is unpacked and packed again and compared with its digest in the report, and on a GPU multiplied
    by its kernels; verify.json is written into the folder. Without a report, the digests in the weight files are
    compared."""
    from quantkit.evaluation import verification
    from quantkit.evaluation.verify import verify as verify_checkpoint

    found = verify_checkpoint(checkpoint, against, progress, device, unsealed)
    emit(show.as_json(found.to_dict()) if as_json else show.verification(found, progress))
    verification.write(found, checkpoint)
    if not found.ok:
        leave(UNVERIFIED, _failed(checkpoint, found.failures))


@command("inspect", "quantkit inspect ./model-marlin", computes=False)
@click.argument("checkpoint", shell_complete=completers.folders)
@click.option("--check", is_flag=True, help="Compare the hash of every file with the recorded one, and end.")
@options.source
def inspect(
    checkpoint: str, check: bool, revision: str | None, trust_remote_code: bool, as_json: bool, progress: Progress
) -> None:
    """Describe CHECKPOINT from its headers.

    Layout, scheme, bits per weight with scales, sizes and shapes, of checkpoints of any program. With --check, only
    hashes are compared: with those in the report, or without one with the digests in the weight files."""
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.checkpoint.resolve import resolve
    from quantkit.pipeline.inspection import describe, tensors

    folder = resolve(checkpoint, revision)
    if check:
        from quantkit.evaluation.verify import verify_files

        failures, notices = verify_files(folder)
        facts = {"path": str(folder), "ok": not failures, "failures": failures, "notices": notices}
        emit(show.as_json(facts) if as_json else show.checks(str(folder), failures, notices, progress))
        if failures:
            leave(UNVERIFIED, _failed(folder, failures))
        return
    src = Checkpoint(folder, trust_remote_code)
    found = describe(src)
    emit(show.as_json(found) if as_json else show.description(found, tensors(src), progress))


def _failed(folder: Path, failures: Sequence[str]) -> str:
    count = f"{len(failures)} failure{'s' if len(failures) > 1 else ''}"
    return f"Error: {folder} is not what it should be: {count}, see above"


@command("report", "quantkit report ./model-int4 --html ./model-int4.html", computes=False)
@click.argument("folder", type=options.PATH)
@click.option("--html", type=options.PATH, help="Draw it into this .html file.")
def report(folder: Path, html: Path | None, as_json: bool, progress: Progress) -> None:
    """Print or draw a report.

    FOLDER is an output of quantkit. The page shows figures, proof, worst linears and their causes, error by depth,
    time, memory and notices."""
    from quantkit.checkpoint.report import REPORT
    from quantkit.checkpoint.report import load as load_report
    from quantkit.evaluation import verification
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
        proof = folder / verification.VERIFICATION
        verified = load_json(inside(folder.resolve(), proof.name)) if proof.exists() else None
        files.write_atomic(html, page(found, verified).encode())
        progress.note(f"drawn: {html}")
    emit(show.as_json(found) if as_json else show.report(found, progress))
