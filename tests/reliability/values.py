"""Odd numbers, odd Hessians and odd scales have the result that is written down (N1 to N3)."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.algorithms import gptq, rtn
from quantkit.algorithms.hessian import Hessian, row_losses
from quantkit.algorithms.numerics import LARGEST_HALF, SMALLEST_SCALE, half_precision
from quantkit.algorithms.options import Options
from quantkit.calibration.stages.solve import solve
from quantkit.calibration.uncalibrated import solve_uncalibrated
from quantkit.core import sparsity
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError, NumericError, QuantkitError
from quantkit.layouts import LAYOUTS
from quantkit.progress import Progress
from quantkit.recipes.recipe import Recipe, from_mapping
from tests.reliability.campaign import Family, Run
from tests.reliability.samples import calibrated, model, one_line, quantkit, text

N = K = 256
SMALLEST_NORMAL = 2.0**-14  # of float16
#: The largest step of a format relative to the largest magnitude of a group.
STEP = {"int4": 2 / 15, "fp6": 4 / 28, "fp5": 8 / 24, "fp6-e2m3": 0.5 / 7.5, "fp5-e2m2": 1 / 7}


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
        return self.solved and self.label.startswith("int4") and self.scheme.symmetric and not self.scheme.sparsity

    @property
    def published(self) -> bool:
        """Whether codes come from the unrounded scale, by the published rule of FP6 and FP5."""
        return self.scheme.format.is_float and not self.solved

    def quantize(self, weight: Tensor, tokens: Tensor | None = None) -> tuple[QuantizedTensor, dict[str, Any]]:
        """Quantize one linear as a run does; `tokens` `[t, k]` calibrate it."""
        if not self.solved:
            item = solve_uncalibrated("w", weight, self.scheme, self.recipe)
        else:
            hessian = Hessian(weight.shape[1], "cpu")
            hessian.add(ordinary(weight.shape[1]) if tokens is None else tokens)
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


@functools.cache
def ordinary(k: int, tokens: int = 1024, seed: int = 1) -> Tensor:
    """Return tokens `[t, k]` whose channels correlate and differ in size."""
    mix = gauss(k, k, seed=seed + 1) / k**0.5 + 0.3
    return gauss(tokens, k, seed=seed) @ mix * torch.exp(0.7 * gauss(k, seed=seed + 2))


def unrelated(k: int) -> Tensor:
    """Return tokens whose Hessian is diagonal: GPTQ is then plain rounding."""
    return 3 * torch.eye(k)


def holding(scheme: Scheme, n: int = N, k: int = K) -> list[str]:
    """List the layouts that hold an `[n, k]` weight of a scheme."""
    found = []
    for name, layout in LAYOUTS.items():
        try:
            layout.check(scheme, n, k)
        except LayoutError:
            continue
        found.append(name)
    return found


def survives(layout: str, tensor: QuantizedTensor) -> None:
    """Pack and unpack; every bit must come back. GPTQ v1 has no zero point of 0, and must say so."""
    if layout == "gptq" and tensor.zeros is not None and bool((tensor.zeros == 0).any()):
        refuses("a zero point of 0", lambda: LAYOUTS[layout].pack(tensor))
        return
    packed = LAYOUTS[layout].pack(tensor)
    assert LAYOUTS[layout].unpack(packed, tensor.scheme).equal(tensor), "packing changed the weight"


def refuses(words: str, call: Callable[[], object]) -> None:
    """Ask for an error of one line that has `words` in it."""
    try:
        call()
    except QuantkitError as error:
        assert words in str(error) and "\n" not in str(error), str(error)
    else:
        raise AssertionError(f"accepted, expected: {words}")


# --- N1 ---------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A weight, its record, the facts of the record, and how it was made."""

    weight: Tensor
    tensor: QuantizedTensor
    facts: dict[str, Any]
    method: Method


Check = Callable[[Result], None]


def half_a_step(result: Result, rows: slice | int | list[int] = 7) -> None:
    """Ask that no weight of some rows errs by more than half a step of its group's largest, if it survived.

    With signed scales the grid ends a step short of the largest on one side, so that its code may err by a step.
    """
    weight, tensor, _, method = result
    w, q = weight[rows].float().view(-1, K), tensor.dequantize()[rows].view(-1, K)
    groups = tensor.scales.shape[1]
    kept = torch.ones_like(q, dtype=torch.bool)
    if tensor.scheme.sparsity:
        codes = tensor.codes[rows].view(-1, K)
        kept = codes != tensor.scheme.format.zero_code
        filled, two = (x.view(len(kept), -1, 4).sum(-1) for x in (w != 0, kept))
        assert bool((two == filled.clamp_max(2)).all()), "a quad does not keep two"
    span = w.view(len(w), groups, -1).abs().amax(-1)
    if tensor.zeros is not None:
        parts = w.view(len(w), groups, -1)
        span = (parts.amax(-1).clamp_min(0) - parts.amin(-1).clamp_max(0)).maximum(span) * 1.0
    limit = (STEP[tensor.scheme.format.name] / 2 * 1.1 + 2**-8) * span
    ends = tensor.codes[rows].view(-1, K) == 15
    error = ((w - q).abs() * kept / (1 + (ends & method.signed).float())).view(len(w), groups, -1).amax(-1)
    assert bool((error <= limit).all()), f"off by {float((error / limit).max()):.2f} of half a step"


def exactly_zero(result: Result, rows: slice | int = 7) -> None:
    _, tensor, facts, method = result
    assert bool((tensor.dequantize()[rows] == 0).all())
    assert bool((tensor.scales[rows] == (0 if method.published else 1)).all()), tensor.scales[rows]
    zero = tensor.scheme.format.zero_code if tensor.zeros is None else tensor.zeros[rows].flatten()[0]
    sign = 1 << (tensor.scheme.format.bits - 1) if tensor.scheme.format.is_float else 0
    assert bool(((tensor.codes[rows] == zero) | (tensor.codes[rows] == zero + sign)).all())
    assert facts["zero_scales"] == int((tensor.scales == 0).sum())


def lowest_two(result: Result) -> None:
    half_a_step(result)
    tensor = result.tensor
    if tensor.scheme.sparsity:
        kept = (tensor.codes[7] != tensor.scheme.format.zero_code).view(-1, 4)
        assert bool((kept == torch.tensor([True, True, False, False])).all()), "a tie went to a higher index"


def counted(result: Result) -> None:
    """Ask that the report counts small scales, and that none is silently zero."""
    _, tensor, facts, method = result
    scales = tensor.scales.float().abs()
    assert facts["subnormal_scales"] == int((scales < SMALLEST_NORMAL).sum()) > 0
    assert facts["zero_scales"] == int((scales == 0).sum())
    assert method.published or float(scales.min()) >= SMALLEST_SCALE
    assert facts["floored_scales"] == int((scales == SMALLEST_SCALE).sum())


def floored(result: Result) -> None:
    counted(result)
    weight, tensor, facts, method = result
    assert facts["zero_scales" if method.published else "floored_scales"] >= tensor.scales.shape[1]
    finest = min(value for value in tensor.scheme.format.values if value > 0)
    limit = 0.0 if method.published else finest * SMALLEST_SCALE / 2
    q = tensor.dequantize()[7]
    kept = q != 0
    assert bool(((weight[7].float() - q).abs() <= limit)[kept].all())
    assert tensor.scheme.sparsity or bool((weight[7].abs() <= finest * SMALLEST_SCALE)[~kept].all())


def not_flushed(result: Result) -> None:
    counted(result)
    tensor, w, q = result.tensor, result.weight[7].float(), result.tensor.dequantize()[7]
    kept = tensor.codes[7] != tensor.scheme.format.zero_code if tensor.scheme.sparsity else w != 0
    assert bool(kept.any()) and float((q - w)[kept].norm() / w[kept].norm()) < 0.3


def ranged(result: Result, column: int = 5) -> None:
    weight, tensor, facts, _ = result
    q = tensor.dequantize()[7]
    assert abs(float(q[column]) / float(weight[7, column]) - 1) < 0.1
    small = [i for i in range(K // tensor.scales.shape[1]) if i != column]
    assert bool((q[small] == 0).all()) and facts["zeroed"] >= len(small) - 1
    assert bool(torch.isfinite(q).all())


def no_worse(result: Result) -> None:
    """Ask for the row guard's law."""
    assert not result.method.solved or result.facts["loss"] <= result.facts["rtn_loss"] * (1 + 1e-9)


def finite(result: Result) -> None:
    assert bool(torch.isfinite(result.tensor.dequantize(torch.float16)).all())
    no_worse(result)


def weights() -> Iterator[tuple[str, Tensor, Tensor | None, Check]]:
    """Yield odd weights that have a result: name, weight, tokens that calibrate, and the check."""
    usual = 0.04 * gauss(N, K)

    def changed(row: int, values: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
        weight = usual.clone()
        weight[row] = values
        return weight.to(dtype)

    alone = torch.zeros(K)
    alone[77] = -0.37
    signs = torch.where(gauss(K, seed=9) > 0, 0.37, -0.37)
    zeros = torch.where(torch.arange(K) % 2 == 0, 0.0, -0.0)
    wide = 1e-9 * gauss(K, seed=3).clamp(-2, 2)
    wide[5] = 0.4
    every = partial(exactly_zero, rows=slice(None))
    yield "a row of zeros", changed(7, 0.0), None, exactly_zero
    yield "a row of both zeros", changed(7, zeros), None, exactly_zero
    yield "all rows zero", torch.zeros(N, K), None, every
    yield "one value in a row", changed(7, alone), unrelated(K), half_a_step
    some = partial(half_a_step, rows=list(range(0, N, 51)))
    yield "one value in each row", alone.expand(N, K).contiguous(), unrelated(K), some
    yield "all equal", changed(7, 0.37), unrelated(K), lowest_two
    yield "all equal and negative", changed(7, -0.37), unrelated(K), lowest_two
    yield "equal magnitudes of both signs", changed(7, signs), unrelated(K), lowest_two
    yield "subnormal float16", changed(7, 2**-16 * signs.sign(), torch.float16), unrelated(K), not_flushed
    yield "subnormal bfloat16", changed(7, 1e-40 * signs.sign(), torch.bfloat16), unrelated(K), floored
    yield "a scale below the normal halves", changed(7, 1e-4 * gauss(K, seed=4).clamp(-3, 3)), unrelated(K), counted
    yield "a scale below the floor", changed(7, 2**-24 * signs.sign()), unrelated(K), floored
    yield "a range of 1e8", changed(7, wide), unrelated(K), ranged
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield f"weights in {str(dtype)[6:]}", changed(7, 59000 * signs.sign(), dtype), None, finite


def largest_half() -> Tensor:
    """Return a weight with the largest number of float16, of which only a signed scale is small enough."""
    weight = (0.04 * gauss(N, K)).half()
    weight[5, 3], weight[5, 4], weight[200, 0] = LARGEST_HALF, -LARGEST_HALF, LARGEST_HALF
    return weight


def refused_weights(method: Method) -> Iterator[tuple[str, Tensor, str]]:
    """Yield weights that a method refuses, and words of the refusal."""
    for name, value in (("NaN", torch.nan), ("infinity", torch.inf), ("minus infinity", -torch.inf)):
        weight = 0.04 * gauss(N, K)
        weight[3, 5] = value
        yield f"{name} in a weight", weight, f"1 of {N * K} weights are NaN or infinite, the first [3, 5] = {value}"
    too_large = "row 5, 200 has weights too large"
    if not method.signed:
        yield "65504 in float16", largest_half(), too_large
    for value, dtype in ((3e38, torch.bfloat16), (3e38, torch.float32), (1e300, torch.float64)):
        weight = (0.04 * gauss(N, K)).to(dtype)
        weight[5, 3], weight[5, 4], weight[200, 0] = value, -value, value
        yield f"{value:g} in {str(dtype)[6:]}", weight, too_large


def hessians(found: Run) -> None:
    """Odd inputs: dead, too few, duplicated, massive and impossible ones."""
    weight = 0.04 * gauss(N, K)
    x = ordinary(K)
    dead, twins = x.clone(), x.clone()
    dead[:, 17] = 0
    twins[:, 1::2] = twins[:, ::2]
    inputs = {
        "a dead channel": dead,
        "duplicated channels": twins,
        "fewer tokens than channels": x[: K // 8],
        "one token": x[:1],
    }
    for size in (1e3, 1e4, 1e5):
        inputs[f"a correlated channel x {size:g}"] = x * torch.where(torch.arange(K) == 100, size, 1.0)
        inputs[f"a channel x {size:g}"] = x.index_copy(1, torch.tensor([100]), size * uncorrelated(x))
    for method in METHODS:
        if not method.solved:
            continue
        for name, tokens in inputs.items():

            def calibrated(method: Method = method, name: str = name, tokens: Tensor = tokens) -> QuantizedTensor:
                tensor, facts = method.quantize(weight, tokens)
                no_worse(Result(weight, tensor, facts, method))
                assert facts["tokens"] == len(tokens) and facts["dead_columns"] == (name == "a dead channel")
                if name == "a dead channel":
                    assert_nearest(weight, tensor, 17)
                if "channel x" in name:
                    rounded, _ = replace(method, method="rtn").quantize(weight)
                    gains(weight, tensor, rounded, tokens, alone="correlated" not in name)
                return tensor

            recorded(found, f"{name}, {method.name}", calibrated)
        for name, tokens, words in (
            ("all channels dead", torch.zeros(300, K), "no input channel ever moved"),
            ("activations that overflow the Hessian", torch.full((300, K), 1e25), "NaN or infinite"),
            ("no token", torch.zeros(0, K), "no calibration token came here"),
            ("a NaN among activations", x.index_fill(0, torch.tensor([4]), torch.nan), "first in token 4, channel 0"),
            ("infinite activations", x.index_fill(1, torch.tensor([9]), torch.inf), "first in token 0, channel 9"),
        ):
            with found.case(f"{name}, {method.name}"):
                refuses(words, lambda method=method, tokens=tokens: method.quantize(weight, tokens))
        for name, h, words in impossible():
            with found.case(f"{name}, {method.name}"):
                refuses(words, lambda method=method, h=h: gptq.quantize(weight, method.scheme, h, Options()))
        for name, tokens in (("all channels dead", torch.zeros(300, K)), ("no token", torch.zeros(0, K))):
            recorded(
                found, f"{name} where rounding is allowed, {method.name}", partial(allowed, method, weight, tokens)
            )


def uncorrelated(x: Tensor) -> Tensor:
    """Return a channel `[t, 1]` whose products with the channels of `x` `[t, k]` sum to zero."""
    basis = torch.linalg.qr(x.double()).Q
    channel = gauss(len(x), 1, seed=8).double()
    return (channel - basis @ (basis.T @ channel)).float()


def gains(weight: Tensor, tensor: QuantizedTensor, rounded: QuantizedTensor, tokens: Tensor, *, alone: bool) -> None:
    """Ask for 0.9 of rounding's loss in spite of channel 100, which is massive at every token.

    If it stands `alone`, the loss on the other channels counts. Otherwise they make up for its error at every token,
    and the whole loss counts.
    """
    tokens = tokens.index_fill(1, torch.tensor([100]), 0.0) if alone else tokens
    h = tokens.double().T @ tokens.double()
    loss, rounding = (float(row_losses(weight, each, h).sum()) for each in (tensor, rounded))
    assert loss <= 0.9 * rounding, f"{loss / rounding:.3f} of rounding"


def allowed(method: Method, weight: Tensor, tokens: Tensor) -> QuantizedTensor:
    """Quantize with `on_unsolvable: rtn`; the report must say that it was rounded, and why."""
    recipe = replace(method.recipe, gptq=replace(method.recipe.gptq, on_unsolvable="rtn"))
    hessian = Hessian(K, "cpu")
    hessian.add(tokens)
    (item,) = solve({"w": weight}, {"w": method.scheme}, hessian, recipe, Progress(quiet=True))
    assert isinstance(item.value, QuantizedTensor) and item.facts is not None
    assert item.facts["method"] == "rtn" and item.facts["reason"], item.facts
    return item.value


def assert_nearest(weight: Tensor, tensor: QuantizedTensor, column: int) -> None:
    """Ask that the weights of a dead channel are rounded to nearest, not set to zero; a 2:4 mask may remove them."""
    scale = tensor.scales[:, column * tensor.scales.shape[1] // K].float()
    fmt = tensor.scheme.format
    values = torch.tensor(fmt.values)
    zero: Tensor | float = 0.0
    if tensor.zeros is not None:
        zero = fmt.decode(tensor.zeros[:, column * tensor.scales.shape[1] // K]).unsqueeze(1)
    nearest = (weight[:, column, None] - (values - zero) * scale[:, None]).abs().amin(1)
    error = (weight[:, column] - tensor.dequantize()[:, column]).abs()
    kept = torch.ones(N, dtype=torch.bool)
    if tensor.scheme.sparsity:
        kept = tensor.codes[:, column] != fmt.zero_code
    assert bool((error <= nearest + 1e-6)[kept].all()), "a dead channel is not rounded to nearest"
    assert tensor.scheme.sparsity or int((tensor.dequantize()[:, column] != 0).sum()) > N // 4, "zeroed"


def impossible() -> Iterator[tuple[str, Tensor, str]]:
    """Yield matrices that no inputs have."""
    h = ordinary(K).T @ ordinary(K)
    star = torch.eye(K)
    star[0, 1:] = star[1:, 0] = 0.9
    large = h.clone()
    large[3, 5] = large[5, 3] = 2 * (large[3, 3] * large[5, 5]).sqrt()
    yield "an indefinite matrix", star, "indefinite"
    yield "a negative diagonal", -torch.eye(K), "not a covariance"
    yield "an entry beyond its diagonal", large, "no covariance"
    yield "a Hessian with NaN", h.index_fill(0, torch.tensor([3]), torch.nan), "NaN or infinite"


def recorded(found: Run, name: str, work: Callable[[], QuantizedTensor]) -> QuantizedTensor | None:
    """Count a case that makes a record, and one for each layout that holds it; on each change for one layout."""
    tensor = None
    with found.case(name):
        tensor = work()
    if tensor is not None:
        layouts = holding(tensor.scheme, *tensor.shape)
        for layout in layouts if found.column != "pr" else found.random(name).sample(layouts, min(1, len(layouts))):
            with found.case(f"{name}, {layout}"):
                survives(layout, tensor)
    return tensor


def odd_shapes(found: Run) -> None:
    """Every shape is refused by name, or has every weight in its result."""
    for method in METHODS:
        for n in (1, 128):
            for k in (1, 2, 64, 127, 128, 129, 192, 200):
                for group in sorted({None, method.scheme.group_size, 32}, key=str):
                    scheme = replace(method.scheme, group_size=group)
                    odd = replace(method, label=scheme.label)
                    name, weight = f"{n} x {k}, {scheme.label}, {method.name}", 0.04 * gauss(n, k)
                    if (group is not None and k % group) or (scheme.sparsity and k % 4):
                        words = "multiple of 4" if scheme.sparsity and k % 4 else "does not divide"
                        with found.case(name):
                            refuses(words, partial(odd.quantize, weight))
                        continue

                    def shaped(odd: Method = odd, weight: Tensor = weight) -> QuantizedTensor:
                        tensor, facts = odd.quantize(weight)
                        assert tensor.shape == weight.shape
                        no_worse(Result(weight, tensor, facts, odd))
                        assert odd.scheme.sparsity or facts["relative_error"] < 0.6, facts["relative_error"]
                        return tensor

                    if (made := recorded(found, name, shaped)) is not None:
                        for layout in set(LAYOUTS) - set(holding(scheme, n, k)):
                            with found.case(f"{name}, not in {layout}"):
                                refuses("", partial(LAYOUTS[layout].pack, made))


def ties(found: Run) -> None:
    """Two of each quad stay, whatever the scores."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1e-45, 3e38])
    scores = torch.cartesian_prod(*[values] * 4)
    for name, rows in (("scores of every kind", scores), ("their magnitudes", scores.abs())):
        with found.case(f"2:4 with {name}"):
            kept = sparsity.mask(rows).sum(-1)
            assert bool((kept == 2).all()), f"{int((kept != 2).sum())} of {len(kept)} quads do not keep two"
    with found.case("2:4 with ties"):
        kept = sparsity.mask(torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 2, 1, 1], [1, 1, 2, 2], [-0.0, 0, 0, 1]]))
        assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1], [0, 1], [0, 1], [2, 3], [0, 3]]


def numeric(found: Run) -> None:
    """N1: the numeric cases through every method and layout, and through the command line."""
    torch.set_num_threads(1)
    for method in METHODS:
        for name, weight, tokens, check in weights():

            def checked(
                method: Method = method, weight: Tensor = weight, tokens: Tensor | None = tokens, check: Check = check
            ) -> QuantizedTensor:
                tensor, facts = method.quantize(weight, tokens)
                check(Result(weight, tensor, facts, method))
                return tensor

            recorded(found, f"{name}, {method.name}", checked)
        if method.signed:
            with found.case(f"65504 in float16 is held, {method.name}"):
                tensor, _ = method.quantize(largest_half(), unrelated(K))
                assert bool(torch.isfinite(tensor.dequantize(torch.float16)).all())
                half_a_step(Result(largest_half(), tensor, {}, method), 200)
        for name, weight, words in refused_weights(method):
            with found.case(f"{name}, {method.name}"):
                refuses(words, lambda method=method, weight=weight: method.quantize(weight))
        with found.case(f"no float, {method.name}"):
            codes = torch.zeros(N, K, dtype=torch.int8)
            refuses("convert it", lambda method=method, codes=codes: method.quantize(codes))
    hessians(found)
    odd_shapes(found)
    ties(found)
    found.facts["through functions"] = found.cases
    before = found.cases
    folders(found)
    found.facts["through the command line"] = found.cases - before


def edited(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: object) -> Path:
    """Write a model of one block whose tensors are what `change` makes of them."""
    source = model(folder, 1, **config)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    held = change({name: tensor for file in files for name, tensor in load_file(source / file).items()})
    for file in files:
        (source / file).unlink()
    (source / "model.safetensors.index.json").unlink()
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    return source


LINEAR = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def with_values(
    name: str, dtype: torch.dtype, rows: slice | int, value: float
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a change: all tensors in `dtype`, and some entries of one set."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        made[name][rows] = value
        return made

    return change


def odd_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a linear rows of zeros, of one value, of small and of large values, and a wide range."""
    weight = tensors[LINEAR]
    weight[0] = 0.0
    weight[1] = -0.0
    weight[2], weight[2, 9] = 0.0, 0.5
    weight[3] = 0.25
    weight[4] = 2**-24
    weight[5] = 2**-15
    weight[6], weight[6, 3] = 2**-24, 1000.0
    weight[7] = 50000.0
    return tensors


#: Folders that are refused: a tensor, its dtype, the value that its row 3 or all of it gets, and words of the refusal.
REFUSED: dict[str, tuple[str, torch.dtype, float, str]] = {
    "NaN": (LINEAR, torch.float16, torch.nan, "the first [3, 0] = nan"),
    "infinity": (LINEAR, torch.bfloat16, torch.inf, "the first [3, 0] = inf"),
    "65504": (LINEAR, torch.float16, 65504.0, "row 3 has weights too large"),
    "3e38": (LINEAR, torch.bfloat16, 3e38, "row 3 has weights too large"),
    "3e38 in float32": (LINEAR, torch.float32, 3e38, "row 3 has weights too large"),
    "infinite activations": (NORM, torch.float32, 3e38, "calibration document 0: "),
    "a Hessian that overflows": (NORM, torch.float32, 1e25, "NaN or infinite"),
}


def folders(found: Run) -> None:
    """Run the command line on folders with odd values and dtypes; on each change by two methods drawn for a folder."""
    folder, words = found.folder, text(found.folder / "text.txt")

    def each(name: str, *without: str) -> list[tuple[str, tuple[object, ...]]]:
        methods = [item for item in COMMANDS.items() if item[0] not in without]
        return methods if found.column != "pr" else found.random(name).sample(methods, min(2, len(methods)))

    def refused(name: str, method: str, source: Path, options: tuple[object, ...], *said: str) -> None:
        with found.case(f"quantize {name}, {method}"):
            ended = quantkit(folder, *calibrated(source, words, folder / "out", *options), code=1)
            one_line(ended)
            assert all(words in ended.stderr for words in said), ended.stderr
            assert not (folder / "out").exists(), "an output is left"

    def verified(name: str, method: str, source: Path, *options: object) -> None:
        with found.case(f"{name}, {method}, quantized and verified"):
            quantkit(folder, *calibrated(source, words, folder / "out", *options))
            quantkit(folder, "verify", folder / "out", "-q")
        shutil.rmtree(folder / "out", ignore_errors=True)

    for name, (tensor, dtype, value, said) in REFUSED.items():
        rows = 3 if tensor == LINEAR else slice(None)
        source = edited(folder / name, with_values(tensor, dtype, rows, value), torch_dtype=str(dtype)[6:])
        # Signed scales hold 65504. Rounding reads no activations.
        without = ("int4 gptq",) if name == "65504" else ROUNDING if tensor == NORM else ()
        named = LINEAR.removesuffix(".weight") if tensor == LINEAR else "model.layers.0.self_attn.q_proj"
        for method, options in each(name, *without):
            refused(name, method, source, options, said, named)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):  # float16 has every other folder
        name = str(dtype)[6:]
        source = edited(folder / name, lambda t, d=dtype: {key: x.to(d) for key, x in t.items()}, torch_dtype=name)
        for method, options in each(name):
            verified(f"source in {name}", method, source, *options)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        name = str(dtype)[6:]

        def change(tensors: dict[str, Tensor], dtype: torch.dtype = dtype) -> dict[str, Tensor]:
            return tensors | {LINEAR: (tensors[LINEAR].clamp(-1, 1) * 100).to(dtype)}

        source = edited(folder / name, change)
        for method, options in each(name):
            refused(f"source in {name}", method, source, options, LINEAR.removesuffix(".weight"))
    source = edited(folder / "odd", odd_values)
    for method, options in each("odd"):
        layouts = holding(next(m for m in METHODS if m.name == method).scheme)
        # int4 rtn has the scheme of int4 gptq.
        for layout in layouts[:1] if method == "int4 gptq" or found.column == "pr" else layouts:
            given = (*options, "--layout", layout, "--set", "clip=search")
            verified(f"odd values in {layout}", method, source, *given)


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
            damp_kind=dice.choice(("own", "own", "mean")),
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
            loss, rounding = quadratic(weight, solution.tensor, exact), solution.rtn_loss
            if options.clip == "none" and not scheme.sparsity:  # rounding as anybody can do it
                alone = quadratic(weight, rtn.quantize(weight, scheme)[0], exact)
                assert torch.allclose(alone, rounding, rtol=1e-9, atol=float(noise(weight, exact).max()))
            limit = rounding * (1 + 1e-9) + noise(weight, exact)
            assert bool((loss <= limit).all()), f"{int((loss > limit).sum())} rows worse than rounding"
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


def quadratic(weight: Tensor, tensor: QuantizedTensor, h: Tensor) -> Tensor:
    d = weight.double() - tensor.dequantize(torch.float64)
    return ((d @ h) * d).sum(1)


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
    assert counts["subnormal_scales"] == int((scales < SMALLEST_NORMAL).sum())
    assert counts["zero_scales"] == int((scales == 0).sum())
    assert counts["floored_scales"] == int((scales == SMALLEST_SCALE).sum())
    if method.published:  # codes come from the unrounded scale, so they never change
        amax = weight.float().abs().amax(1, keepdim=True)
        exact = (amax >= 1e-12).expand_as(tensor.codes)
        assert torch.equal(tensor.codes[exact], one.codes[exact])
        half = half_precision((amax.clamp_min(1e-12) / one.scheme.format.largest), weight.dtype)
        assert torch.equal(tensor.scales.float(), half), "a stored scale is not the rounded one"
    else:
        assert float(scales.min()) >= SMALLEST_SCALE
        finest = min(value for value in tensor.scheme.format.values if value > 0)
        if float(weight.abs().max()) < SMALLEST_SCALE * finest / 2:
            assert counts["floored_scales"] == scales.numel()
            # GPTQ may gather the errors of many weights in one.
            assert method.solved or bool((tensor.dequantize() == 0).all())
            return "all at the floor"
    return "subnormal scales, counted"


FAMILIES: list[Family] = [
    Family("N1", "odd values have the result that is written down, or are refused", (1500, 1500, 1500), numeric),
    Family("N2", "no row is worse than rounding, whatever the Hessian", (100, 6000, 6000), random_hessians),
    Family("N3", "weights keep their codes at every scale that float16 holds", (81, 81, 81), scale_range),
]
