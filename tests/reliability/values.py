"""Folders with odd numbers go through whole commands (N1); tests/algorithms has those of a solver."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.core.formats import LARGEST_HALF
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from tests.reliability.campaign import Family, Run
from tests.reliability.samples import calibrated, model, one_line, quantkit, text

#: Method -> its scheme and options.
COMMANDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "int4 rtn": ("int4:g128", ("--method", "rtn")),
    "int4 gptq": ("int4:g128", ()),
    "fp6 rtn": ("fp6:channel", ("--format", "fp6", "--method", "rtn")),
    "fp5 rtn": ("fp5:channel", ("--format", "fp5", "--method", "rtn")),
    "2:4 sparsegpt": ("int4:g128:24", ("--prune", "2:4")),
}
ROUNDING = ("int4 rtn", "fp6 rtn", "fp5 rtn")


def holding(scheme: Scheme) -> list[str]:
    """List the layouts that hold a weight of a scheme in the sizes of the model."""
    found = []
    for name, layout in LAYOUTS.items():
        try:
            layout.check(scheme, 256, 256)
        except LayoutError:
            continue
        found.append(name)
    return found


LINEAR = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
Tensors = dict[str, Tensor]


def edited(folder: Path, change: Callable[[Tensors], Tensors], dtype: torch.dtype) -> Path:
    """Write a model of one block in `dtype`, in one file, whose tensors are what `change` makes of them."""
    source = model(folder, 1, torch_dtype=str(dtype)[6:])
    files = sorted(source.glob("*.safetensors"))
    tensors = {name: tensor.to(dtype) for file in files for name, tensor in load_file(file).items()}
    for file in (*files, source / "model.safetensors.index.json"):
        file.unlink()
    save_file(change(tensors), source / "model.safetensors", metadata={"format": "pt"})
    return source


def with_values(name: str, rows: slice | int, value: float, tensors: Tensors) -> Tensors:
    tensors[name][rows] = value
    return tensors


def with_codes(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return tensors | {LINEAR: (tensors[LINEAR].clamp(-1, 1) * 100).to(dtype)}


def with_odd_rows(tensors: Tensors) -> Tensors:
    """Give a linear rows of zeros, of one value, of small and of large values, and a wide range."""
    weight = tensors[LINEAR]
    for row, value in enumerate((0.0, -0.0, 0.0, 0.25, 2**-24, 2**-15, 2**-24, 50000.0)):
        weight[row] = value
    weight[2, 9], weight[6, 3] = 0.5, 1000.0
    return tensors


def odd_folders() -> Iterator[tuple[str, Callable[[Tensors], Tensors], torch.dtype, tuple[str, ...], tuple[str, ...]]]:
    """Yield folders: name, change, dtype, words of the refusal (none: it has a result), and methods left out."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    module = LINEAR.removesuffix(".weight")
    for name, dtype, value, words in (
        ("NaN", half, torch.nan, "the first [3, 0] = nan"),
        ("infinity", brain, torch.inf, "the first [3, 0] = inf"),
        ("65504", half, LARGEST_HALF, "row 3 has weights too large"),
        ("3e38", brain, 3e38, "row 3 has weights too large"),
        ("3e38 in float32", single, 3e38, "row 3 has weights too large"),
    ):
        without = ("int4 gptq", "2:4 sparsegpt") if value == LARGEST_HALF else ()  # signed scales hold it
        yield name, partial(with_values, LINEAR, 3, value), dtype, (words, module), without
    for value, words in (
        (3e38, "calibration document 0: "),
        (1e25, "NaN or infinite"),
    ):  # rounding reads no activations
        said = (words, "model.layers.0.self_attn.q_proj")
        yield f"a norm of {value:g}", partial(with_values, NORM, slice(None), value), single, said, ROUNDING
    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield f"a linear in {dtype}", partial(with_codes, dtype), half, (module,), ()
    for dtype in (brain, single, torch.float64):  # float16 has every other folder
        yield f"all in {dtype}", dict, dtype, (), ()
    yield "odd rows", with_odd_rows, half, (), ()


def odd_values(found: Run) -> None:
    """N1: run commands on folders with odd values and dtypes; on each change by two methods drawn for a folder."""
    folder, words = found.folder, text(found.folder / "text.txt")
    out = folder / "out"
    for name, change, dtype, said, without in odd_folders():
        source = edited(folder / name, change, dtype)
        methods = [item for item in COMMANDS.items() if item[0] not in without]
        if found.column == "pr":
            methods = found.random(name).sample(methods, min(2, len(methods)))
        for method, (scheme, options) in methods:
            lines = [options]
            if name == "odd rows":
                layouts = holding(Scheme.parse(scheme))
                layouts = layouts[:1] if method == "int4 gptq" or found.column == "pr" else layouts  # as int4 rtn
                lines = [(*options, "--layout", layout, "--set", "clip=search") for layout in layouts]
            for line in lines:
                with found.case(f"{name}: {line}"):
                    ended = quantkit(folder, *calibrated(source, words, out, *line), code=int(bool(said)))
                    if said:
                        one_line(ended, *said)
                        assert not out.exists(), "something was written"
                    else:
                        quantkit(folder, "verify", out, "-q")
                shutil.rmtree(out, ignore_errors=True)


FAMILIES: list[Family] = [
    Family("N1", "odd values in folders are quantized and verify, or are refused by name", (25, 75, 75), odd_values),
]
