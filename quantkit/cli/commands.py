"""The group `quantkit`, to which every module of commands is added."""

from __future__ import annotations

import click

from quantkit import __version__
from quantkit.cli.bench import bench
from quantkit.cli.convert import convert, pack
from quantkit.cli.demo import demo
from quantkit.cli.doctor import doctor
from quantkit.cli.evaluate import evaluate
from quantkit.cli.generate import generate
from quantkit.cli.inspect import inspect, report, verify
from quantkit.cli.quantize import plan, prune, quantize, run

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(
    context_settings=HELP,
    epilog="\b\nExample:\n  quantkit quantize ./Llama-3.2-1B -o ./Llama-3.2-1B-int4 --calib wikitext2",
)
@click.version_option(__version__, prog_name="quantkit")
def quantkit() -> None:
    """Low-bit checkpoints from Hugging Face causal LMs: quantize, pack, convert and prove.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 verification failed, 4 a quality threshold was missed, 75 stopped and
    can be resumed, 130 interrupted.
    """


for _command in (
    quantize,
    prune,
    plan,
    run,
    pack,
    convert,
    verify,
    inspect,
    report,
    evaluate,
    generate,
    bench,
    demo,
    doctor,
):
    quantkit.add_command(_command)
