"""The command generate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from quantkit.cli import options, show
from quantkit.cli.exits import emit, stream
from quantkit.cli.options import command, declared
from quantkit.progress import Progress
from quantkit.recipes.options import LoadOptions, WriteOptions


@command(
    "generate", "quantkit generate ./model-int4 'The capital of France is' --max-new-tokens 32"
)
@options.checkpoint
@click.argument("prompt")
@declared({"asked": WriteOptions, "load": LoadOptions}, section="")
def generate(
    checkpoint: str,
    prompt: str,
    asked: WriteOptions,
    load: LoadOptions,
    as_json: bool,
    progress: Progress,
) -> None:
    """Write on after PROMPT, or answer it.

    CHECKPOINT may be dense or quantized. The likeliest token is taken each time, unless
    --temperature or --top-p asks for a draw."""
    from quantkit.inference import generate as inference

    listener = None if as_json else stream if asked.chat else _after(prompt)
    given: Any = {**vars(asked), **vars(load), "progress": progress, "listener": listener}
    found = inference.generate(checkpoint, prompt, **given)
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
