"""The command generate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import command
from quantkit.progress import Progress


@command("generate", "quantkit generate ./model-int4 'The capital of France is' --max-new-tokens 32")
@click.argument("checkpoint", shell_complete=completers.folders)
@click.argument("prompt")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, help="Most tokens to write [64].")
@options.device
@options.source
def generate(checkpoint: str, prompt: str, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Write on after PROMPT.

    CHECKPOINT may be dense or quantized; the likeliest token is taken each time."""
    from quantkit.inference import generate as inference

    found = inference.generate(checkpoint, prompt, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else show.generated(found))
    rate = found.tokens / found.seconds
    progress.note(f"{found.tokens} tokens in {found.seconds:.1f} s, {rate:.1f} a second; {found.weights}")
