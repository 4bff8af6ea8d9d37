"""The commands `eval ppl` and `eval kld`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import MISSED, emit, leave
from quantkit.cli.options import command
from quantkit.cli.parsing import combined, section
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.evaluation.divergence import Divergence
    from quantkit.evaluation.perplexity import Perplexity

#: The options of an evaluation: text, windows, device.
protocol_options = combined(
    section(
        "Basic",
        click.option(
            "--data",
            default="wikitext2",
            metavar="NAME|FILE",
            shell_complete=completers.texts,
            help=f"Text: {options.DATA} [wikitext2].",
        ),
        click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Read the text's first N tokens [all]."),
        options.device,
    ),
    section(
        "Method",
        click.option(
            "--window", type=click.IntRange(min=2), help="Tokens per window [the model's context, at most 2048]."
        ),
        click.option("--stride", type=click.IntRange(min=1), help="Tokens from one window to the next [the window]."),
        click.option(
            "--bos/--no-bos", default=None, help="Put the BOS token in front of every window [as the tokenizer does]."
        ),
    ),
    section("Advanced", options.source, options.no_check),
)


@options.group("eval", "quantkit eval ppl ./Llama-3.2-1B-int4 --data wikitext2")
def evaluate() -> None:
    """Measure how good a checkpoint is."""


@command("ppl", "quantkit eval ppl ./model-int4 --data wikitext2 --window 2048", evaluate)
@click.argument("checkpoint", shell_complete=completers.folders)
@protocol_options
@section(
    "Output",
    click.option(
        "--max-perplexity", type=float, metavar="X", help="Leave with exit code 4 if the perplexity is above X."
    ),
)
def ppl(checkpoint: str, max_perplexity: float | None, as_json: bool, progress: Progress, **protocol: Any) -> None:
    """Measure perplexity.

    CHECKPOINT may be dense or quantized; the protocol is printed beside the figure."""
    from quantkit import api

    found = api.eval_ppl(checkpoint, progress=progress, **protocol)
    emit(show.as_json(asdict(found)) if as_json else format_perplexity(found, progress))
    if max_perplexity is not None and not found.perplexity <= max_perplexity:
        leave(MISSED, f"Error: perplexity {found.perplexity:.4f} is above --max-perplexity {max_perplexity:g}")


@command("kld", "quantkit eval kld ./model-int4 --against ./model --data wikitext2", evaluate)
@click.argument("checkpoint", shell_complete=completers.folders)
@section(
    "Basic",
    click.option(
        "--against",
        required=True,
        metavar="MODEL",
        shell_complete=completers.folders,
        help="The model that CHECKPOINT was made from.",
    ),
)
@protocol_options
@section(
    "Output",
    click.option(
        "--max-kld", type=float, metavar="X", help="Leave with exit code 4 if the divergence is above X nats."
    ),
)
def divergence(
    checkpoint: str, against: str, max_kld: float | None, as_json: bool, progress: Progress, **protocol: Any
) -> None:
    """Measure KL divergence.

    How far CHECKPOINT's next-token distributions are from MODEL's, and how often both prefer the same token."""
    from quantkit import api

    found = api.eval_kld(checkpoint, against, progress=progress, **protocol)
    emit(show.as_json(asdict(found)) if as_json else format_divergence(found, progress))
    if max_kld is not None and not found.kld <= max_kld:
        leave(MISSED, f"Error: KL divergence {found.kld:.6f} is above --max-kld {max_kld:g}")


def format_perplexity(found: Perplexity, progress: Progress) -> str:
    """Format a perplexity and its protocol."""
    figure, protocol = f"perplexity {found.perplexity:.4f}", _protocol(found)
    bits = found.nll / math.log(2)
    more = f"{found.nll:.6f} nats or {bits:.6f} bits a token, {found.nll * found.tokens:.1f} nats in all"
    return show.of_level(progress, f"{figure} {protocol}", f"{figure}\n{protocol}", more)


def format_divergence(found: Divergence, progress: Progress) -> str:
    """Format a KL divergence and its protocol."""
    figures = [f"KL divergence {found.kld:.6f} nats", f"top-1 agreement {100 * found.top1:.3f} %"]
    agreed, protocol = round(found.top1 * found.tokens), _protocol(found)
    more = f"{found.kld / math.log(2):.6f} bits a token; {agreed} of {found.tokens} tokens agree"
    return show.of_level(progress, f"{', '.join(figures)} {protocol}", "\n".join([*figures, protocol]), more)


def _protocol(found: Perplexity | Divergence) -> str:
    return (
        f"on {found.data}: {found.windows} windows of {found.window} tokens, stride {found.stride}, "
        f"{'BOS in front of each' if found.bos else 'no BOS'} ({found.bos_rule}), {found.tokens} predictions, "
        f"text of {found.text_tokens} tokens (a last short window is dropped); {found.weights}"
    )
