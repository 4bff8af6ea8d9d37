"""The commands `bench kernels` and `bench generate`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.bench.workloads import BATCHES, CONFIGS, MODELS, TOKENS
from quantkit.cli import options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import choice, command
from quantkit.cli.parsing import combined
from quantkit.names import ACTIVATIONS, KERNELS
from quantkit.progress import Progress

if TYPE_CHECKING:
    import torch

    from quantkit.bench.random_model import Outline, Variant, Workload
    from quantkit.core.scheme import Scheme


def _joined(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


_packed_options = combined(
    click.option("--layout", multiple=True, type=choice(KERNELS), help="Whose kernel; repeatable [all]."),
    click.option("--scheme", multiple=True, metavar="SCHEME", help="Like int4:g128; repeatable [the layout's usual]."),
    click.option("--dtype", type=choice(ACTIVATIONS), default="float16", help="[float16]."),
)

#: The options of `bench kernels`: layouts, shapes, tokens.
timing_options = combined(
    _packed_options,
    click.option("--model", multiple=True, type=choice(MODELS), help="Its layers' shapes; repeatable [llama3-8b]."),
    click.option("--shape", multiple=True, metavar="NxK", help="Output by input features; repeatable."),
    click.option("--m", multiple=True, type=click.IntRange(1, 2**20), help=f"Tokens; repeatable [{_joined(TOKENS)}]."),
)

#: The options of `bench generate`: model, layouts, prompts.
generating_options = combined(
    click.option(
        "--model", default="llama3-8b", metavar="NAME|PATH", help=f"{', '.join(CONFIGS)} or a config.json [llama3-8b]."
    ),
    _packed_options,
    options.skip,
    click.option(
        "--batch", multiple=True, type=click.IntRange(1, 2**12), help=f"Prompts; repeatable [{_joined(BATCHES)}]."
    ),
    click.option("--prompt-tokens", type=click.IntRange(1, 2**20), default=512, help="Tokens of each prompt [512]."),
    click.option("--new-tokens", type=click.IntRange(1, 2**20), default=64, help="Tokens written after it [64]."),
    click.option("--eager", is_flag=True, help="Do not fuse small operations with torch.compile."),
)


@options.group("bench", "quantkit bench kernels --layout marlin")
def bench() -> None:
    """Measure how fast kernels and packed models are."""


@command("kernels", "quantkit bench kernels --layout marlin --model llama3-8b --csv kernels.csv", bench)
@timing_options
@click.option("--csv", type=options.PATH, help="Write the figures into this .csv file.")
@click.option("--against", type=options.PATH, metavar="CSV", help="Figures of other kernels, or of an earlier run.")
@click.option("--peer", multiple=True, metavar="NAME", help="The kernel in it to compare with, the best of several.")
def kernels(
    csv: Path | None,
    against: Path | None,
    peer: tuple[str, ...],
    as_json: bool,
    progress: Progress,
    **asked: Any,
) -> None:
    """Time the kernels of packed weights.

    Beside cuBLAS on weights that were never quantized, a copy and the floor that these set; a wrong product is an
    error."""
    from quantkit.bench import roofline
    from quantkit.bench.kernels import kernels as time_kernels
    from quantkit.io import files

    _require_writable(csv, ".csv")
    if peer and against is None:
        raise click.UsageError("--peer names a kernel of --against: give both")
    peers = roofline.read_peers(against, peer) if against is not None else None
    measured = time_kernels(**_kernel_arguments(asked), progress=progress)
    rows = measured.rows()
    found = measured.to_dict() | ({"against": roofline.compare(measured.cells, peers)} if peers is not None else {})
    if csv is not None:
        files.write_atomic(csv, roofline.table(rows))
    emit(show.as_json(found) if as_json else show.speeds(found))


@command("generate", "quantkit bench generate --model llama2-70b --layout tcfpx --csv generate.csv", bench)
@generating_options
@click.option("--csv", type=options.PATH, help="Write the figures into this .csv file.")
def generate(csv: Path | None, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Time whole models.

    Prompts and new tokens a second and GPU memory, packed beside dense, with random weights: nothing is downloaded."""
    from quantkit.bench import roofline
    from quantkit.bench.generate import measure
    from quantkit.io import files

    _require_writable(csv, ".csv")
    found = measure(*_generate_arguments(asked), progress)
    if csv is not None:
        files.write_atomic(csv, roofline.table(found.rows()))
    emit(show.as_json(found.to_dict()) if as_json else show.paces(found.to_dict()))


def _kernel_arguments(asked: dict[str, Any]) -> dict[str, Any]:
    """Make the arguments of `bench.kernels.kernels`: each value once, the usual ones where none is given."""
    from quantkit.bench.kernels import default_layouts
    from quantkit.bench.roofline import layers

    models = asked["model"] or (() if asked["shape"] else ("llama3-8b",))
    return {
        "layers": layers(models, asked["shape"]),
        "tokens": sorted(set(asked["m"] or TOKENS)),
        "layouts": list(dict.fromkeys(asked["layout"] or default_layouts())),
        "schemes": _schemes(asked),
        "dtype": _dtype(asked),
    }


def _generate_arguments(asked: dict[str, Any]) -> tuple[Outline, list[Variant], Workload]:
    """Make the arguments of `bench.generate.measure`."""
    from quantkit.bench import random_model
    from quantkit.bench.random_model import Workload

    named = random_model.read(asked["model"])
    found = random_model.variants(named, list(dict.fromkeys(asked["layout"])), _schemes(asked), asked["skip"])
    batches = tuple(sorted(set(asked["batch"] or BATCHES)))
    return named, found, Workload(batches, asked["prompt_tokens"], asked["new_tokens"], _dtype(asked), asked["eager"])


def _schemes(asked: dict[str, Any]) -> list[Scheme]:
    from quantkit.core.scheme import Scheme

    return list(dict.fromkeys(map(Scheme.parse, asked["scheme"])))


def _dtype(asked: dict[str, Any]) -> torch.dtype:
    import torch

    return {"float16": torch.float16, "bfloat16": torch.bfloat16}[asked["dtype"]]


def _require_writable(path: Path | None, suffix: str) -> None:
    """Refuse a file that cannot be written or does not end in `suffix`, before the hours of work that make it."""
    if path is not None and (path.suffix != suffix or not path.absolute().parent.is_dir()):
        raise click.UsageError(f"{path}: give a file name that ends in {suffix}, in a folder that exists")
