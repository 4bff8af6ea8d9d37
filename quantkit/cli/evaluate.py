"""The group `eval`, and its commands `ppl` and `kld`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import click

from quantkit.cli import completers, options, show
from quantkit.cli.exits import MISSED, emit, leave
from quantkit.cli.options import command, count, text
from quantkit.cli.parsing import Commands, Range, combined, section
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.evaluation.divergence import Divergence
    from quantkit.evaluation.perplexity import Perplexity

window = click.option(
    "--window",
    type=click.IntRange(min=2),
    help="Tokens per window [the model's context, at most 2048].",
)
#: The options of an evaluation: text, windows, device.
protocol_options = combined(
    section(
        "Basic",
        text(
            "--data",
            "NAME|FILE",
            f"Text: {options.DATA} [wikitext2].",
            completers.texts,
            default="wikitext2",
        ),
        count("--tokens", "Read the text's first N tokens [all].", least=2),
        options.device,
    ),
    section(
        "Method",
        window,
        click.option(
            "--stride",
            type=click.IntRange(min=1),
            help="Tokens from one window to the next [the window].",
        ),
        click.option(
            "--bos/--no-bos",
            default=None,
            help="Put the BOS token in front of every window [as the tokenizer does].",
        ),
    ),
    section("Advanced", options.source, options.no_check),
)


#: Command -> the module and the variable that hold it.
PLACES = {
    "ppl": "quantkit.cli.evaluate:ppl",
    "kld": "quantkit.cli.evaluate:divergence",
    "tasks": "quantkit.cli.scores:tasks",
}


@options.group(
    "eval",
    "quantkit eval ppl ./Llama-3.2-1B-int4 --data wikitext2",
    commands=cast(Any, Commands(PLACES)),
)
def evaluate() -> None:
    """Measure how good a checkpoint is."""


@command("ppl", "quantkit eval ppl ./model-int4 --data wikitext2 --window 2048")
@click.argument("checkpoint", shell_complete=completers.folders)
@protocol_options
@section(
    "Output",
    text(
        "--max-perplexity",
        "X",
        "Leave with exit code 4 if the perplexity is above X.",
        type=Range(1),
    ),
)
def ppl(
    checkpoint: str,
    max_perplexity: float | None,
    as_json: bool,
    progress: Progress,
    **protocol: Any,
) -> None:
    """Measure perplexity.

    CHECKPOINT may be dense or quantized; the protocol is printed beside the figure."""
    from quantkit import api

    found = api.eval_ppl(checkpoint, progress=progress, **protocol)
    emit(show.as_json(asdict(found)) if as_json else format_perplexity(found, progress))
    if max_perplexity is not None and not found.perplexity <= max_perplexity:
        leave(
            MISSED,
            f"Error: perplexity {found.perplexity:.4f} is above --max-perplexity "
            f"{max_perplexity:g}",
        )


@command("kld", "quantkit eval kld ./model-int4 --against ./model --data wikitext2")
@click.argument("checkpoint", shell_complete=completers.folders)
@section(
    "Basic",
    text(
        "--against",
        "MODEL",
        "The model that CHECKPOINT was made from.",
        completers.folders,
        required=True,
    ),
)
@protocol_options
@section(
    "Output",
    text(
        "--max-kld", "X", "Leave with exit code 4 if the divergence is above X nats.", type=Range(0)
    ),
)
def divergence(
    checkpoint: str, max_kld: float | None, as_json: bool, progress: Progress, **asked: Any
) -> None:
    """Measure KL divergence.

    How far CHECKPOINT's next-token distributions are from MODEL's: the mean with a 95 % interval by
    bootstrap over windows, the tails, and how often both prefer the same token."""
    from quantkit import api

    found = api.eval_kld(checkpoint, progress=progress, **asked)
    emit(show.as_json(asdict(found)) if as_json else format_divergence(found, progress))
    if max_kld is not None and not found.kld <= max_kld:
        leave(MISSED, f"Error: KL divergence {found.kld:.6f} is above --max-kld {max_kld:g}")


def format_perplexity(found: Perplexity, progress: Progress) -> str:
    """Format a perplexity and its protocol."""
    figure, protocol = f"perplexity {found.perplexity:.4f}", _protocol(found)
    bits = found.nll / math.log(2)
    more = (
        f"{found.nll:.6f} nats or {bits:.6f} bits a token, {found.nll * found.tokens:.1f} nats in "
        "all"
    )
    return show.of_level(progress, f"{figure} {protocol}", f"{figure}\n{protocol}", more)


def format_divergence(found: Divergence, progress: Progress) -> str:
    """Format a KL divergence with its tails and its protocol."""
    from quantkit.reporting.facts import tails

    mean, protocol = f"KL divergence {found.kld:.6f} nats", _protocol(found)
    top1 = f"top-1 agreement {100 * found.top1:.3f} %"
    agreed = round(found.top1 * found.tokens)
    more = f"{found.kld / math.log(2):.6f} bits a token; {agreed} of {found.tokens} tokens agree"
    figures = [mean, ", ".join(map(" ".join, tails(asdict(found)))), top1, protocol]
    return show.of_level(progress, f"{mean}, {top1} {protocol}", "\n".join(figures), more)


def _protocol(found: Perplexity | Divergence) -> str:
    return (
        f"on {found.data}: {found.windows} windows of {found.window} tokens, stride "
        f"{found.stride}, "
        f"{'BOS in front of each' if found.bos else 'no BOS'} ({found.bos_rule}), {found.tokens} "
        "predictions, "
        f"text of {found.text_tokens} tokens (a last short window is dropped); {found.weights}"
    )
