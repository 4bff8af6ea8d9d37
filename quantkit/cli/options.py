"""What commands share: the decorator that makes one, the options of `quantize`, the types of their values.

Choices come from the tables (formats, layouts, the recipe's own types), so a new entry there is a new choice here. An
option that is not given is None and leaves the recipe's key alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import torch

from quantkit.algorithms.gptq import Options
from quantkit.api import build_recipe
from quantkit.bench import random_model
from quantkit.bench.generate import BATCHES
from quantkit.bench.kernels import default_layouts
from quantkit.bench.random_model import CONFIGS, Load, Outline, Variant
from quantkit.bench.roofline import MODELS, TOKENS, layers
from quantkit.cli.exits import exits
from quantkit.core.formats import FORMATS
from quantkit.core.scheme import Scheme
from quantkit.core.sparsity import Rule
from quantkit.core.tensors import dtype_name
from quantkit.kernels import MATMULS
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.layouts import LAYOUTS
from quantkit.models.calibration_data import NAMED
from quantkit.pipeline.recipe import Calib, Clip, Method, Metric, Recipe
from quantkit.progress import Progress

Command = Callable[..., Any]

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
BINARY_UNITS = {f"{unit}I": 1024**power for power, unit in enumerate(UNITS) if unit}
_TOKENS = " ".join(map(str, TOKENS))
_BATCHES = " ".join(map(str, BATCHES))
DATA = f"{', '.join(NAMED)}, or a .txt, .jsonl or .parquet file"


class _Bytes(click.ParamType):
    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(value).upper())
        units = UNITS | BINARY_UNITS
        if found is None or found[2] not in units:
            self.fail(f"{value!r} is no number of bytes: write it like 8GB or 512MiB", param, ctx)
        return int(float(found[1]) * units[found[2]])


class _GroupSize(click.ParamType):
    name = "columns"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value != "channel" and not str(value).isdigit():
            self.fail(f"{value!r} is no group size: use 128, 64, 32 or channel", param, ctx)
        return value if value == "channel" else int(value)


class _Override(click.ParamType):
    name = "regex=scheme"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        pattern, equals, scheme = str(value).rpartition("=")
        if not (pattern and equals and scheme):
            self.fail(f"{value!r} is no override: write it like '.*down_proj=int4:g64'", param, ctx)
        return pattern, scheme


def command(
    group: click.Group, name: str, example: str, *, as_json: bool = False
) -> Callable[[Command], click.Command]:
    """Make a function a command of `group`: its help ends with `example`, its errors end in one line and an exit code.

    The function is handed a `progress`, and with `as_json` a flag of that name.
    """

    def decorate(function: Command) -> click.Command:
        @wraps(function)
        def run(quiet: bool, verbose: bool, **options: Any) -> None:
            with exits():
                _deterministic()
                function(progress=Progress(quiet=quiet, verbose=verbose), **options)

        shared = [click.option("-v", "--verbose", is_flag=True, help="Say more about what is done.")]
        shared += [click.option("-q", "--quiet", is_flag=True, help="No progress and no notes, only warnings.")]
        if as_json:
            shared += [click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")]
        own = vars(run).pop("__click_params__", [])
        for option in shared:
            run = option(run)
        vars(run)["__click_params__"] += own  # click reads this list from its end: the command's own come first
        return group.command(name, epilog=f"\b\nExample:\n  {example}", no_args_is_help=False)(run)

    return decorate


def _deterministic() -> None:
    """Set what makes equal runs give equal bytes and costs nothing (ALGORITHMS 13)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A debugging aid that writes every new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _choice(values: Any) -> click.Choice:
    return click.Choice(list(values))


def _of(kind: Any, field: str) -> click.Choice:
    return _choice(get_args(get_type_hints(kind)[field]))


PATH = click.Path(path_type=Path)
model = click.argument("model")
checkpoint = click.argument("checkpoint", type=PATH)
device = click.option("--device", default="auto", help="Where to compute: auto, cpu, cuda, cuda:1 ... [auto].")
overwrite = click.option("--overwrite", is_flag=True, help="Replace OUT when the new folder is complete.")
source = _options(
    click.option("--revision", help="Branch, tag or commit of a hub model."),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
)


def out(*, required: bool = True) -> Callable[[Command], Command]:
    return click.option("-o", "--out", type=PATH, required=required, help="Folder to write; it must not exist yet.")


def layout(*, required: bool = False) -> Callable[[Command], Command]:
    default = "" if required else " [fp6/fp5: humming, else compressed-tensors]"
    return click.option("--layout", type=_choice(LAYOUTS), required=required, help=f"Layout to write{default}.")


_solving = _options(
    click.option("--act-order", type=_of(Options, "act_order"), help="Columns by activation, or as they are [static]."),
    click.option("--damp", type=float, help="Damping of the Hessian [0.01]."),
    click.option("--damp-kind", type=_of(Options, "damp_kind"), help="By each channel's diagonal, or the mean [own]."),
)
_calibrating = _options(
    click.option(
        "--true-sequential/--no-true-sequential",
        default=None,
        help="Calibrate each linear behind those of its block that are done already [on].",
    ),
    click.option("--calib", metavar="NAME|FILE", help=f"Calibration text: {DATA} [c4]."),
    click.option("--samples", type=click.IntRange(min=1), help="Calibration sequences [256]."),
    click.option("--max-length", type=click.IntRange(min=2), help="Their longest length in tokens [4096]."),
    click.option("--lengths", type=_of(Calib, "lengths"), help="Documents whole, or windows of max-length [own]."),
    click.option("--seed", type=int, help="Seed of the draw of calibration text [0]."),
)
_PAD = "Fill weights up with zeros to shapes that the layout holds"
_skip = click.option("--skip", multiple=True, metavar="REGEX", help="Linears left dense, besides lm_head; repeatable.")

#: What decides the bytes of a pruned model; the names are those of `quantkit.prune`.
pruning = _options(
    click.option("--method", type=_choice(get_args(Rule)), help="Which two of four stay [sparsegpt]."),
    _solving,
    _calibrating,
    _skip,
)

#: What decides the bytes of the output; the names are those of `quantkit.quantize`.
recipe = _options(
    click.option("--recipe", metavar="FILE|NAME", help="Recipe that the options below are laid over."),
    click.option("--format", type=_choice(FORMATS), help="Number format [int4]."),
    click.option("--group-size", type=_GroupSize(), help="Columns per scale, or channel [int4: 128, fp: channel]."),
    click.option("--asym/--sym", default=None, help="Zero points, or none [sym]."),
    click.option("--method", type=_choice(get_args(Method)), help="How codes are chosen [int4: gptq, fp: rtn]."),
    click.option("--clip", type=_choice(get_args(Clip)), help="Search for scales [fp rtn: none, else search]."),
    click.option("--metric", type=_choice(get_args(Metric)), help="What the search minimises [gptq: block, rtn: mse]."),
    _solving,
    click.option("--on-unsolvable", type=_of(Options, "on_unsolvable"), help="If no damping suffices [stop]."),
    click.option("--signed/--unsigned", default=None, help="Scales with a sign, for symmetric int4 [unsigned]."),
    click.option("--descent", type=click.IntRange(min=0), metavar="N", help="Passes that move codes after gptq [0]."),
    click.option("--refit/--no-refit", default=None, help="Least-squares scales after gptq [off]."),
    click.option("--prune", type=_choice(["2:4"]), help="Keep two of each four weights, int4 only [all]."),
    click.option("--prune-method", type=_choice(get_args(Rule)), help="Which two [gptq: sparsegpt, rtn: magnitude]."),
    _calibrating,
    layout(),
    click.option("--pad/--no-pad", default=None, help=f"{_PAD} [off]."),
    _skip,
    click.option(
        "--override",
        multiple=True,
        type=_Override(),
        help="A scheme for some: '.*down_proj=int4:g64'; repeatable.",
    ),
)

#: What a run needs to know besides its recipe.
running = _options(
    click.option("--resume", is_flag=True, help="Continue the interrupted run that left OUT.partial-*."),
    overwrite,
    device,
    click.option("--act-budget", type=_Bytes(), help="Calibration activations kept in RAM, like 8GB; more go to disk."),
    source,
)
RUNNING = ("resume", "overwrite", "device", "act_budget", "revision", "trust_remote_code")

#: How far a checkpoint may be changed to fit another layout.
repacking = _options(
    click.option("--pad", is_flag=True, help=f"{_PAD}."),
    click.option("--requantize", is_flag=True, help="Round again what has no lossless way (lossy; it is reported)."),
    click.option("--max-shard-size", type=_Bytes(), default="2GiB", help="Most bytes of one weight file [2GiB]."),
    overwrite,
)

#: How an evaluation is made.
protocol = _options(
    click.option("--data", default="wikitext2", metavar="NAME|FILE", help=f"Text: {DATA} [wikitext2]."),
    click.option("--window", type=click.IntRange(min=2), help="Tokens per window [the model's context, at most 2048]."),
    click.option("--stride", type=click.IntRange(min=1), help="Tokens from one window to the next [the window]."),
    click.option("--bos/--no-bos", default=False, help="Put the BOS token in front of every window [no]."),
    device,
    source,
)


_timed = _options(
    click.option("--layout", multiple=True, type=_choice(MATMULS), help="Whose kernel; repeatable [all]."),
    click.option("--scheme", multiple=True, metavar="SCHEME", help="Like int4:g128; repeatable [the layout's usual]."),
    click.option("--dtype", type=_choice(map(dtype_name, ACTIVATIONS)), default="float16", help="[float16]."),
)

#: Which kernels are timed, and with what.
timing = _options(
    _timed,
    click.option("--model", multiple=True, type=_choice(MODELS), help="Its layers' shapes; repeatable [llama3-8b]."),
    click.option("--shape", multiple=True, metavar="NxK", help="Output by input features; repeatable."),
    click.option("--m", multiple=True, type=click.IntRange(1, 2**20), help=f"Tokens; repeatable [{_TOKENS}]."),
)

#: Which model is timed, packed how, and what it does.
generating = _options(
    click.option(
        "--model", default="llama3-8b", metavar="NAME|PATH", help=f"{', '.join(CONFIGS)} or a config.json [llama3-8b]."
    ),
    _timed,
    _skip,
    click.option("--batch", multiple=True, type=click.IntRange(1, 2**12), help=f"Prompts; repeatable [{_BATCHES}]."),
    click.option("--prompt-tokens", type=click.IntRange(1, 2**20), default=512, help="Tokens of each prompt [512]."),
    click.option("--new-tokens", type=click.IntRange(1, 2**20), default=64, help="Tokens written after it [64]."),
    click.option("--eager", is_flag=True, help="Do not fuse small operations with torch.compile."),
)


def timed(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what `bench.kernels` takes, of the options `timing`: each value once, the usual ones where none is."""
    models = asked["model"] or (() if asked["shape"] else ("llama3-8b",))
    return {
        "layers": layers(models, asked["shape"]),
        "tokens": sorted(set(asked["m"] or TOKENS)),
        "layouts": list(dict.fromkeys(asked["layout"] or default_layouts())),
        "schemes": _schemes(asked),
        "dtype": _dtype(asked),
    }


def generated(asked: dict[str, Any]) -> tuple[Outline, list[Variant], Load]:
    """Return what `decoding.measure` takes, of the options `generating`."""
    named = random_model.read(asked["model"])
    found = random_model.variants(named, list(dict.fromkeys(asked["layout"])), _schemes(asked), asked["skip"])
    batches = tuple(sorted(set(asked["batch"] or BATCHES)))
    return named, found, Load(batches, asked["prompt_tokens"], asked["new_tokens"], _dtype(asked), asked["eager"])


def _schemes(asked: dict[str, Any]) -> list[Scheme]:
    return list(dict.fromkeys(map(Scheme.parse, asked["scheme"])))


def _dtype(asked: dict[str, Any]) -> torch.dtype:
    return next(dtype for dtype in ACTIVATIONS if dtype_name(dtype) == asked["dtype"])


def writable(path: Path | None, suffix: str) -> None:
    """Refuse, before hours of work, a file that could not be written after them or does not end in `suffix`."""
    if path is not None and (path.suffix != suffix or not path.absolute().parent.is_dir()):
        raise click.UsageError(f"{path}: give a file name that ends in {suffix}, in a folder that exists")


def split(given: dict[str, Any]) -> tuple[dict[str, Any], Recipe]:
    """Return the options of a run as they are, and the recipe that the others make."""
    running = {name: given.pop(name) for name in RUNNING}
    given["override"] = dict(given["override"])
    return running, build_recipe(given.pop("recipe"), **given)
