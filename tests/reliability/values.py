"""Folders with odd numbers go through whole commands (N1), and the solver meets random Hessians (N2)."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.algorithms import gptq
from quantkit.algorithms.options import Options
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import LayoutError
from quantkit.layouts import LAYOUTS
from tests.algorithms.inputs import loss
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
        ("65504", half, 65504.0, "row 3 has weights too large"),
        ("3e38", brain, 3e38, "row 3 has weights too large"),
        ("3e38 in float32", single, 3e38, "row 3 has weights too large"),
    ):
        without = ("int4 gptq", "2:4 sparsegpt") if value == 65504.0 else ()  # signed scales hold it
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


#: Schemes that a Hessian decides.
SOLVED = ("int4:channel", "int4:g16", "int4:g16:asym", "fp6:channel", "fp5:channel", "int4:g16:24")


def random_hessians(found: Run) -> None:
    """N2: random Hessians of any condition, rank and size, in float32 and float64."""
    torch.set_num_threads(1)
    facts = Counter[str]()
    for case in range(max(found.least, 100)):
        dice, generator = found.random("hessian", case), torch.Generator().manual_seed(case)
        k, dtype = dice.choice((16, 32, 64, 128)), dice.choice((torch.float32, torch.float64))
        condition, rank = 10.0 ** dice.randrange(17), dice.randint(1, k)
        scheme = Scheme.parse(dice.choice(SOLVED))
        options = Options(
            damp=dice.choice((0.01, 0.1, 1e-4, 1e-9, 1e-15)),
            damp_kind=dice.choice(("median", "own", "mean")),
            act_order=dice.choice(("static", "off")),
            clip=dice.choice(("search", "none")),
            descent=dice.choice((0, 0, 1)),
            refit=dice.random() < 0.2,
        )
        weight = torch.randn(24, k, generator=generator, dtype=dtype) * 10 ** dice.uniform(-4, 2)
        h = conditioned(k, rank, condition, generator).to(dtype) * 10 ** dice.uniform(-12, 12)
        with found.case(f"{case}: {scheme.label}, {dtype}, condition {condition:g}, rank {rank} of {k}, {options}"):
            solution = gptq.quantize(weight, scheme, h, options)
            reached, exact = loss(weight, solution.tensor, h.double()), weight.double().square().sum(1)
            # The rounding errors of a loss in float64, for rows whose loss is next to nothing.
            limit = solution.rtn_loss * (1 + 1e-9) + exact * h.double().diagonal().max() * 1e-12
            assert bool((reached <= limit).all()), f"{int((reached > limit).sum())} rows are worse than rounding"
            assert bool(torch.isfinite(solution.tensor.dequantize()).all())
            more = len(solution.facts["rungs"]) > 1
            facts.update({"guard rows": solution.facts["guard_rows"], "more damping was needed": more})
    found.facts |= dict(facts)


def conditioned(k: int, rank: int, condition: float, generator: torch.Generator) -> Tensor:
    """Return a symmetric matrix `[k, k]` of a rank, whose eigenvalues fall from 1 to 1 / condition, in float64."""
    basis = torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64)).Q[:, :rank]
    h = (basis * torch.logspace(0, -math.log10(condition), rank, dtype=torch.float64)) @ basis.T
    return (h + h.T) / 2


FAMILIES: list[Family] = [
    Family("N1", "odd values in folders are quantized and verify, or are refused by name", (25, 75, 75), odd_values),
    Family("N2", "no row is worse than rounding, whatever the Hessian", (300, 6000, 6000), random_hessians),
]
