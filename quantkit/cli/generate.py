"""The command generate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit, stream
from quantkit.cli.options import command
from quantkit.progress import Progress

_PROBABILITY = click.FloatRange(min=0, max=1, min_open=True)


@command(
    "generate", "quantkit generate ./model-int4 'The capital of France is' --max-new-tokens 32"
)
@click.argument("checkpoint", shell_complete=completers.folders)
@click.argument("prompt")
@options.flag("--chat", "Answer PROMPT, through the model's chat template.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, help="Most tokens to write [64]."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Draw tokens; below 1 the likelier [0].",
)
@options.text(
    "--top-p",
    "X",
    "Draw from the likeliest tokens that sum to this probability [1].",
    type=_PROBABILITY,
)
@click.option("--seed", type=int, help="Seed of the draws [0].")
@options.device
@options.source
@options.no_check
def generate(
    checkpoint: str, prompt: str, chat: bool, as_json: bool, progress: Progress, **asked: Any
) -> None:
    """Write on after PROMPT, or answer it.

    CHECKPOINT may be dense or quantized. The likeliest token is taken each time, unless
    --temperature or --top-p asks for a draw."""
    from quantkit.inference import generate as inference

    listener = None if as_json else stream if chat else _after(prompt)
    found = inference.generate(
        checkpoint, prompt, chat=chat, progress=progress, listener=listener, **asked
    )
    emit(show.as_json(asdict(found)) if as_json else "")
    rate = found.tokens / found.seconds
    progress.note(
        f"{found.tokens} tokens in {found.seconds:.1f} s, {rate:.1f} a second; {found.weights}"
    )


def _after(prompt: str) -> Any:
    """Make a listener that prints the prompt in front of the first piece."""
    pieces = iter([prompt])

    def listen(piece: str) -> None:
        stream(next(pieces, "") + piece)

    return listen
