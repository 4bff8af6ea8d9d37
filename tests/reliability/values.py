"""Odd numbers, odd Hessians and odd scales have the result that is written down (N1 to N3).

tests/algorithms has the odd weights and shapes of a solver. Here folders with them go through whole commands, and every
method meets random Hessians and all scales.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.algorithms import gptq, rtn
from quantkit.algorithms.hessian import Hessian
from quantkit.algorithms.numerics import half_precision
from quantkit.algorithms.options import Options
from quantkit.calibration.stages.solve import solve, solve_uncalibrated
from quantkit.core.formats import LARGEST_HALF, SMALLEST_SCALE
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import LayoutError, NumericError, QuantkitError
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.algorithms.inputs import loss
from tests.reliability.campaign import Family, Run
from tests.reliability.samples import calibrated, model, one_line, quantkit, text

SMALLEST_NORMAL = 2.0**-14  # of float16


@dataclass(frozen=True)
class Method:
    """A scheme and how weights get it, as the product does it for one linear."""

    name: str
    label: str
    method: str

    @property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.label)

    @property
    def recipe(self) -> Recipe:
        scheme = self.scheme
        parts = {"format": scheme.format.name, "symmetric": scheme.symmetric, "sparsity": scheme.sparsity}
        parts["group_size"] = scheme.group_size or "channel"
        return from_mapping({"scheme": {key: x for key, x in parts.items() if x is not None}, "method": self.method})

    @property
    def solved(self) -> bool:
        """Whether a Hessian decides the codes."""
        return self.method == "gptq"

    @property
    def signed(self) -> bool:
        """Whether scales may be negative: the extreme of a group is then eight steps from zero."""
        return self.solved and self.label.startswith("int4") and self.scheme.symmetric

    @property
    def published(self) -> bool:
        """Whether codes come from the unrounded scale, by the published rule of FP6 and FP5."""
        return self.scheme.format.is_float and not self.solved

    def quantize(self, weight: Tensor, tokens: Tensor) -> tuple[QuantizedTensor, dict[str, Any]]:
        """Quantize one linear as a run does; `tokens` `[t, k]` calibrate it."""
        if not self.solved:
            item = solve_uncalibrated("w", weight, self.scheme, self.recipe)
        else:
            hessian = Hessian(weight.shape[1], "cpu")
            hessian.add(tokens)
            (item,) = solve({"w": weight}, {"w": self.scheme}, hessian, self.recipe, Progress(quiet=True))
        assert isinstance(item.value, QuantizedTensor) and item.facts is not None
        return item.value, item.facts


METHODS = (
    Method("int4 rtn", "int4:g128", "rtn"),
    Method("int4 gptq", "int4:g128", "gptq"),
    Method("int4 asym rtn", "int4:g128:asym", "rtn"),
    Method("int4 asym gptq", "int4:g128:asym", "gptq"),
    Method("fp6 rtn", "fp6:channel", "rtn"),
    Method("fp6 gptq", "fp6:channel", "gptq"),
    Method("fp5 rtn", "fp5:channel", "rtn"),
    Method("fp5 gptq", "fp5:channel", "gptq"),
    Method("2:4 magnitude", "int4:g128:24", "rtn"),
    Method("2:4 sparsegpt", "int4:g128:24", "gptq"),
)
#: Those of the command line: options, and a weight of this layout fits every engine of it.
COMMANDS: dict[str, tuple[object, ...]] = {
    "int4 rtn": ("--method", "rtn"),
    "int4 gptq": (),
    "fp6 rtn": ("--format", "fp6", "--method", "rtn"),
    "fp5 rtn": ("--format", "fp5", "--method", "rtn"),
    "2:4 sparsegpt": ("--prune", "2:4"),
}
ROUNDING = ("int4 rtn", "fp6 rtn", "fp5 rtn")


def gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ordinary(k: int, tokens: int = 1024, seed: int = 1) -> Tensor:
    """Return tokens `[t, k]` whose channels correlate and differ in size."""
    mix = gauss(k, k, seed=seed + 1) / k**0.5 + 0.3
    return gauss(tokens, k, seed=seed) @ mix * torch.exp(0.7 * gauss(k, seed=seed + 2))


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


# --- N1 ---------------------------------------------------------------------------------------------------------------


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
        for method, options in methods:
            lines = [options]
            if name == "odd rows":
                layouts = holding(next(each for each in METHODS if each.name == method).scheme)
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


# --- N2 ---------------------------------------------------------------------------------------------------------------

#: log10 of the condition number.
CONDITIONS = range(17)


def random_hessians(found: Run) -> None:
    """N2: random Hessians of any condition and rank, in float32 and float64."""
    torch.set_num_threads(1)
    kinds, counts, rungs = Counter[str](), Counter[str](), Counter[str]()
    for case in range(max(found.least, 100)):
        dice = found.random("hessian", case)
        k = dice.choice((16, 32, 64, 128))
        dtype = dice.choice((torch.float32, torch.float64))
        condition, rank = dice.choice(CONDITIONS), dice.randint(1, k)
        method = METHODS[dice.choice([i for i, m in enumerate(METHODS) if m.solved])]
        scheme = replace(method.scheme, group_size=dice.choice((None, 16)) if "int4" in method.label else None)
        options = Options(
            damp=dice.choice((0.01, 0.1, 1e-4, 1e-9, 1e-15)),
            damp_kind=dice.choice(("median", "own", "mean")),
            act_order=dice.choice(("static", "off")),
            clip=dice.choice(("search", "none")),
            descent=dice.choice((0, 0, 1)),
            refit=dice.random() < 0.2,
        )
        weight = gauss(24, k, seed=case).to(dtype) * 10 ** dice.uniform(-4, 2)
        h = conditioned(k, rank, 10.0**condition, case, dtype) * 10 ** dice.uniform(-12, 12)
        name = f"{case}: {scheme.label}, {dtype}, condition 1e{condition}, rank {rank} of {k}, {options}"
        with found.case(name):
            try:
                solution = gptq.quantize(weight, scheme, h, options)
            except QuantkitError as error:
                assert isinstance(error, NumericError) and "\n" not in str(error), repr(error)
                kinds["refused"] += 1
                continue
            kinds["solved"] += 1
            exact = h.double()
            reached, rounding = loss(weight, solution.tensor, exact), solution.rtn_loss
            if options.clip == "none" and not scheme.sparsity:  # rounding as anybody can do it
                alone = loss(weight, rtn.quantize(weight, scheme)[0], exact)
                assert torch.allclose(alone, rounding, rtol=1e-9, atol=float(noise(weight, exact).max()))
            limit = rounding * (1 + 1e-9) + noise(weight, exact)
            assert bool((reached <= limit).all()), f"{int((reached > limit).sum())} rows worse than rounding"
            assert bool(torch.isfinite(solution.tensor.dequantize()).all())
            counts["rows"] += len(weight)
            counts["guard rows"] += solution.facts["guard_rows"]
            rungs[f"{solution.facts['damp']:.0e}"] += len(solution.facts["rungs"]) > 1
    found.facts |= {**kinds, **counts, "more damping was needed": {k: v for k, v in rungs.items() if v}}


def conditioned(k: int, rank: int, condition: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Return a symmetric matrix `[k, k]` of a rank, whose eigenvalues fall from 1 to 1 / condition."""
    basis = torch.linalg.qr(gauss(k, k, seed=seed).double()).Q[:, :rank]
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), rank, dtype=torch.float64)
    h = (basis * values) @ basis.T
    return ((h + h.T) / 2).to(dtype)


def noise(weight: Tensor, h: Tensor) -> Tensor:
    """Bound the rounding errors of a loss in float64, for rows whose loss is next to nothing."""
    return weight.double().square().sum(1) * h.diagonal().max() * 1e-12


# --- N3 ---------------------------------------------------------------------------------------------------------------


def scale_range(found: Run) -> None:
    """N3: a weight times 2^e has the codes of the weight, wherever float16 holds its scales."""
    torch.set_num_threads(1)
    base = gauss(16, 128).double() * torch.exp(gauss(16, 1, seed=5)).double()
    tokens = ordinary(128)
    reference = {m.name: m.quantize(base, tokens) for m in METHODS}
    states = Counter[str]()
    for e in range(-40, 41):
        with found.case(f"x 2^{e}"):
            for method in METHODS:
                try:
                    states[scaled(method, base, tokens, e, *reference[method.name])] += 1
                except AssertionError as error:
                    raise AssertionError(f"{method.name}: {error}") from error
    found.facts |= dict(states)


def counted(tensor: QuantizedTensor, facts: dict[str, Any], method: Method) -> None:
    """Ask that the report counts small scales, and that none is silently zero."""
    scales = tensor.scales.float().abs()
    assert facts["subnormal_scales"] == int((scales < SMALLEST_NORMAL).sum())
    assert facts["zero_scales"] == int((scales == 0).sum())
    assert method.published or float(scales.min()) >= SMALLEST_SCALE
    assert facts["floored_scales"] == int((scales == SMALLEST_SCALE).sum())


def too_large(method: Method, weight: Tensor) -> list[int]:
    """List the rows of a weight whose base scale, or its largest value, float16 cannot hold."""
    fmt, n = method.scheme.format, len(weight)
    parts = weight.view(n, method.scheme.groups(weight.shape[1]), -1)
    scale, largest = parts.abs().amax(-1) / (8 if method.signed else fmt.absmax), torch.tensor(fmt.largest)
    if not method.scheme.symmetric:
        low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
        scale = (high - low) / 15
        zero = (-low / scale.half().double()).round().clamp(0, 15)
        largest = torch.maximum(zero, 15 - zero)
    return (~(scale.half().double() * largest <= LARGEST_HALF)).any(1).nonzero().flatten().tolist()


def scaled(method: Method, base: Tensor, tokens: Tensor, e: int, one: QuantizedTensor, facts: dict[str, Any]) -> str:
    """Check one method at one exponent; returns the state that the scales are in."""
    weight = base * 2.0**e
    ideal = one.scales.double().abs() * 2.0**e
    largest = one.scheme.format.largest if one.zeros is None else 15.0
    try:
        tensor, counts = method.quantize(weight, tokens)
    except NumericError as error:
        rows = too_large(method, weight)
        named = f"row {', '.join(map(str, rows[:5]))}{' ...' if len(rows) > 5 else ''} has weights too large"
        assert rows and named in str(error), f"2^{e} is refused: {error}"
        return "refused, rows named"
    scales = tensor.scales.double().abs()
    # In the last binade candidates of the search pass the end, and so do 2:4 survivors that make up for others.
    if bool((ideal * largest > LARGEST_HALF / (2 if method.solved else 1)).any()):
        assert bool(torch.isfinite(tensor.dequantize(torch.float16)).all())
        return "near the end of float16"
    if bool((ideal >= SMALLEST_NORMAL).all()):
        assert torch.equal(tensor.codes, one.codes), f"{int((tensor.codes != one.codes).sum())} codes differ"
        assert torch.equal(tensor.scales.double(), one.scales.double() * 2.0**e) and not counts["subnormal_scales"]
        return "codes identical"
    counted(tensor, counts, method)
    if method.published:  # codes come from the unrounded scale, so they never change
        amax = weight.float().abs().amax(1, keepdim=True)
        exact = (amax >= 1e-12).expand_as(tensor.codes)
        assert torch.equal(tensor.codes[exact], one.codes[exact])
        half = half_precision((amax.clamp_min(1e-12) / one.scheme.format.largest), weight.dtype)
        assert torch.equal(tensor.scales.float(), half), "a stored scale is not the rounded one"
    else:
        finest = min(value for value in tensor.scheme.format.values if value > 0)
        if float(weight.abs().max()) < SMALLEST_SCALE * finest / 2:
            # GPTQ may gather the errors of many weights in one, and then refit its scale.
            assert method.signed or counts["floored_scales"] == scales.numel()
            assert method.solved or bool((tensor.dequantize() == 0).all())
            return "all at the floor"
    return "subnormal scales, counted"


FAMILIES: list[Family] = [
    Family("N1", "odd values in folders are quantized and verify, or are refused by name", (25, 75, 75), odd_values),
    Family("N2", "no row is worse than rounding, whatever the Hessian", (100, 6000, 6000), random_hessians),
    Family("N3", "weights keep their codes at every scale that float16 holds", (81, 81, 81), scale_range),
]
