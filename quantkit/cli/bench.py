"""The commands `bench kernels` and `bench generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.bench.workloads import BATCHES, CONFIGS, MODELS, TOKENS
from quantkit.cli import options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import choice, command
from quantkit.cli.parsing import combined
from quantkit.core.units import format_bytes
from quantkit.names import ACTIVATIONS, KERNELS
from quantkit.progress import Progress

if TYPE_CHECKING:
    import torch

    from quantkit.core.scheme import Scheme

#: The head of each column of a table, and how it is written from a row.
SPEEDS = (
    *(
        ("layout", "{layout}"),
        ("scheme", "{scheme}"),
        ("kernel", "{path}"),
        ("layer", "{layer}"),
        ("NxK", "{N}x{K}"),
    ),
    *(
        ("M", "{M}"),
        ("us", "{time_us:.2f}"),
        ("floor us", "{floor_us:.2f}"),
        ("of floor", "{pct_of_floor:.0f} %"),
    ),
    *(
        ("cuBLAS us", "{cublas_us:.2f}"),
        ("speedup", "{speedup_vs_cublas:.2f}"),
        ("GB/s", "{weight_GBps:.0f}"),
    ),
    ("TFLOP/s", "{tflops:.1f}"),
)
MEANS = (
    *(("layout", "{layout}"), ("scheme", "{scheme}"), ("model", "{model}"), ("M", "{M}")),
    *(("speedup_vs_cublas", "{speedup_vs_cublas:.3f}"), ("floor_speedup", "{floor_speedup:.3f}")),
)
PACES = (
    *(("layout", "{layout}"), ("scheme", "{scheme}"), ("batch", "{batch}")),
    *(("prompt tok/s", "{prompt_tokens_per_s:.0f}"), ("x dense", "{prompt_vs_dense}")),
    *(("decode tok/s", "{decode_tokens_per_s:.1f}"), ("x dense", "{decode_vs_dense}")),
    *(("floor tok/s", "{floor_tokens_per_s:.1f}"), ("of floor", "{pct_of_floor:.0f} %")),
    *(("weights", "{weight_bytes}"), ("packed size", "{packed_bytes}"), ("peak", "{peak_bytes}")),
)


def _joined(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


_packed_options = combined(
    click.option(
        "--layout", multiple=True, type=choice(KERNELS), help="Whose kernel; repeatable [all]."
    ),
    click.option(
        "--scheme",
        multiple=True,
        metavar="SCHEME",
        help="Like int4:g128; repeatable [the layout's usual].",
    ),
    click.option("--dtype", type=choice(ACTIVATIONS), default="float16", help="[float16]."),
)

#: The options of `bench kernels`: layouts, shapes, tokens.
timing_options = combined(
    _packed_options,
    click.option(
        "--model",
        multiple=True,
        type=choice(MODELS),
        help="Its layers' shapes; repeatable [llama3-8b].",
    ),
    click.option(
        "--shape", multiple=True, metavar="NxK", help="Output by input features; repeatable."
    ),
    click.option(
        "--m",
        multiple=True,
        type=click.IntRange(1, 2**20),
        help=f"Tokens; repeatable [{_joined(TOKENS)}].",
    ),
)

#: The options of `bench generate`: model, layouts, prompts.
generating_options = combined(
    options.text(
        "--model",
        "NAME|PATH",
        f"{', '.join(CONFIGS)} or a config.json [llama3-8b].",
        default="llama3-8b",
    ),
    _packed_options,
    options.skip,
    click.option(
        "--batch",
        multiple=True,
        type=click.IntRange(1, 2**12),
        help=f"Prompts; repeatable [{_joined(BATCHES)}].",
    ),
    click.option(
        "--prompt-tokens",
        type=click.IntRange(1, 2**20),
        default=512,
        help="Tokens of each prompt [512].",
    ),
    click.option(
        "--new-tokens",
        type=click.IntRange(1, 2**20),
        default=64,
        help="Tokens written after it [64].",
    ),
    options.flag("--eager", "Do not fuse small operations with torch.compile."),
)


@options.group("bench", "quantkit bench kernels --layout marlin")
def bench() -> None:
    """Measure how fast kernels and packed models are."""


@command(
    "kernels", "quantkit bench kernels --layout marlin --model llama3-8b --csv kernels.csv", bench
)
@timing_options
@click.option(
    "--kernel",
    type=choice(("fastest", "portable")),
    default="fastest",
    help="Portable: those for sm_80 and newer [fastest].",
)
@click.option("--csv", type=options.PATH, help="Write the figures into this .csv file.")
def kernels(kernel: str, csv: Path | None, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Time the kernels of packed weights.

    Beside cuBLAS on weights that were never quantized, a copy and the floor that these set; a wrong
    product is an error."""
    from quantkit.bench import roofline
    from quantkit.bench.kernels import default_layouts, kernels as time_kernels
    from quantkit.io import files

    _require_writable(csv)
    models = asked["model"] or (() if asked["shape"] else ("llama3-8b",))
    found = time_kernels(
        layers=roofline.layers(models, asked["shape"]),
        tokens=sorted(set(asked["m"] or TOKENS)),
        layouts=list(dict.fromkeys(asked["layout"] or default_layouts())),
        schemes=_schemes(asked),
        dtype=_dtype(asked),
        progress=progress,
        portable=kernel == "portable",
    )
    if csv is not None:
        files.write_atomic(csv, roofline.table(found["rows"]))
    emit(show.as_json(found) if as_json else format_speeds(found))


@command(
    "generate",
    "quantkit bench generate --model llama2-70b --layout tcfpx --csv generate.csv",
    bench,
)
@generating_options
@click.option("--csv", type=options.PATH, help="Write the figures into this .csv file.")
def generate(csv: Path | None, as_json: bool, progress: Progress, **asked: Any) -> None:
    """Time whole models.

    Prompts and new tokens a second and GPU memory, packed beside dense, with random weights:
    nothing is downloaded."""
    from quantkit.bench import random_model, roofline
    from quantkit.bench.generate import measure
    from quantkit.io import files

    _require_writable(csv)
    named, batches = (
        random_model.read(asked["model"]),
        tuple(sorted(set(asked["batch"] or BATCHES))),
    )
    variants = random_model.variants(
        named, list(dict.fromkeys(asked["layout"])), _schemes(asked), asked["skip"]
    )
    work = random_model.Workload(
        batches, asked["prompt_tokens"], asked["new_tokens"], _dtype(asked), asked["eager"]
    )
    found = measure(named, variants, work, progress)
    if csv is not None:
        files.write_atomic(csv, roofline.table(found["rows"]))
    emit(show.as_json(found) if as_json else format_paces(found))


def _schemes(asked: dict[str, Any]) -> list[Scheme]:
    from quantkit.core.scheme import Scheme

    return list(dict.fromkeys(map(Scheme.parse, asked["scheme"])))


def _dtype(asked: dict[str, Any]) -> torch.dtype:
    import torch

    return {"float16": torch.float16, "bfloat16": torch.bfloat16}[asked["dtype"]]


def _require_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written or does not end in .csv, before the hours of work that
    make it.
    """
    if path is not None and (path.suffix != ".csv" or not path.absolute().parent.is_dir()):
        raise click.UsageError(
            f"{path}: give a file name that ends in .csv, in a folder that exists"
        )


def format_speeds(found: Mapping[str, Any]) -> str:
    """Format the table of `bench kernels` and the machine."""
    lines = [_table(SPEEDS, found["rows"]), ""]
    if found["means"]:
        lines += ["geometric means over the layers of a model", _table(MEANS, found["means"]), ""]
    device = found["device"]
    lines.append(
        f"{device['gpu']}, torch {device['torch']}, CUDA {device['cuda']}, {device['dtype']}: copy "
        f"{device['copy'] / 1e9:.0f} GB/s, dense product {device['rate'] / 1e12:.0f} TFLOP/s, "
        "which make the floor"
    )
    return "\n".join(lines)


def format_paces(found: Mapping[str, Any]) -> str:
    """Format the table of `bench generate`, what was left out, and the machine."""
    first, device = found["rows"][0], found["device"]
    computed = dict.fromkeys(
        (row["layout"], row["scheme"], row["weights"]) for row in found["rows"]
    )
    mode = "compiled" if first["fused"] else "not compiled"
    shown = [
        {
            **row,
            **{
                key: "-" if row[key] is None else f"{row[key]:.2f}"
                for key in ("prompt_vs_dense", "decode_vs_dense")
            },
            **{
                key: format_bytes(row[key])
                for key in ("weight_bytes", "packed_bytes", "peak_bytes")
            },
        }
        for row in found["rows"]
    ]
    lines = [_table(PACES, shown), ""]
    lines += [f"{' '.join(filter(None, names))}: {how}" for *names, how in computed]
    lines += [f"note: {notice}" for notice in found["notices"]]
    lines.append(
        f"{first['model']}, random weights, prompts of {first['prompt_tokens']} tokens, then "
        f"{first['new_tokens']} new "
        f"ones each, in CUDA graphs over a static cache, {mode}; {device['gpu']}, torch "
        f"{device['torch']}, "
        f"transformers {first['transformers']}, CUDA {device['cuda']}, {device['dtype']}; "
        f"the floor is to read all weights once a step at the {device['copy'] / 1e9:.0f} GB/s of a "
        "copy"
    )
    return "\n".join(lines)


def _table(columns: Sequence[tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> str:
    return show.table(
        [head for head, _ in columns], [[form.format(**row) for _, form in columns] for row in rows]
    )
