"""The command generate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import emit, stream
from quantkit.cli.options import command
from quantkit.cli.parsing import needed_unless
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.inference.generate import Generated

_PROBABILITY = click.FloatRange(min=0, max=1, min_open=True)


@command("generate", "quantkit generate ./model-int4 'The capital of France is' --max-new-tokens 32")
@click.argument("checkpoint", shell_complete=completers.folders)
@click.argument("prompt", required=False, callback=needed_unless("chat"))
@options.flag("--chat", "Converse through the model's chat template.", is_eager=True)
@options.text("--system", "TEXT", "With --chat: the instruction that the conversation begins with.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, help="Most tokens to write [64].")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="X", help="Draw tokens; below 1 the likelier [0].")
@options.text("--top-p", "X", "Draw from the likeliest tokens that sum to this probability [1].", type=_PROBABILITY)
@click.option("--seed", type=int, help="Seed of the draws [0].")
@options.device
@options.source
@options.no_check
def generate(
    checkpoint: str, prompt: str | None, chat: bool, system: str | None, as_json: bool, progress: Progress, **asked: Any
) -> None:
    """Write on after PROMPT, or converse.

    CHECKPOINT may be dense or quantized. The likeliest token is taken each time, unless --temperature or --top-p asks
    for a draw. With --chat each line of the input is a turn, up to its end (Ctrl-D), or PROMPT is the only one."""
    from quantkit.inference import generate as inference

    if system is not None and not chat:
        raise click.UsageError("--system begins a conversation: add --chat")
    asked |= {"progress": progress, "listener": None if as_json else stream}
    if not chat:
        assert prompt is not None
        found = inference.generate(checkpoint, prompt, **asked | {"listener": None if as_json else _after(prompt)})
        emit(show.as_json(asdict(found)) if as_json else "")
        _note(found, progress)
        return
    turns = _lines() if prompt is None else iter([prompt])
    answers = []
    for found in inference.chat(checkpoint, turns, system=system, **asked):
        answers.append(asdict(found))
        if not as_json:
            emit("")
        _note(found, progress)
    if as_json:
        emit(show.as_json({"turns": answers}))


def _after(prompt: str) -> Any:
    """Make a listener that prints the prompt in front of the first piece."""
    pieces = iter([prompt])

    def listen(piece: str) -> None:
        stream(next(pieces, "") + piece)

    return listen


def _lines() -> Iterator[str]:
    """Yield the lines of the input that are not empty, and ask for each on a terminal."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            click.echo("> ", err=True, nl=False)
        line = sys.stdin.readline()
        if not line:
            break
        if line.strip():
            yield line.strip()
    if asks:
        click.echo(err=True)


def _note(found: Generated, progress: Progress) -> None:
    rate = found.tokens / found.seconds
    progress.note(f"{found.tokens} tokens in {found.seconds:.1f} s, {rate:.1f} a second; {found.weights}")
