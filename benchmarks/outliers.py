"""Measure GPTQ on layers where one input channel fires up to 1e5 times as strongly at the first token of a document.

The loss on held-out ordinary tokens is compared with that of rounding. Layers are synthetic, with documents of 64
tokens. The first token is the same in all documents or varies. The outlier channel correlates with the others at
ordinary tokens, or stands alone. In a third kind of layer all channels are independent and alike, so that no method can
gain anything: it shows how much GPTQ loses there by fitting the noise of its calibration tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms import gptq, rtn, sparsegpt
from quantkit.algorithms.hessian import Hessian
from quantkit.algorithms.masks import fixed_mask
from quantkit.algorithms.options import Options
from quantkit.core.scheme import Scheme

SCHEMES = ("int4:g128", "int4:g128:asym", "fp6:channel", "fp5:channel", "int4:g128:24", "2:4")
FIRST = ("same", "varying")
CHANNELS = ("correlated", "alone", "independent")
DOCUMENT = 64
HELD_OUT = 4096


class Layer(NamedTuple):
    """A weight `[n, k]`, the tokens that calibrate it, and held-out tokens, all ordinary."""

    weight: Tensor
    tokens: Tensor
    held_out: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="64x256", help="rows x columns of the weight [64x256]")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--channel", nargs="*", default=CHANNELS, choices=CHANNELS)
    parser.add_argument("--plain", action="store_true", help="measure the plain sum as well")
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/cpu/outliers.json"))
    args = parser.parse_args()
    n, k = map(int, args.shape.split("x"))
    rows = []
    for channel, first, seed in product(args.channel, FIRST, range(args.seeds)):
        for row in cases(n, k, args.tokens, seed, first, channel, plain=args.plain):
            rows.append(row)
            print(*row.values(), flush=True)
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    found[f"{args.shape}, {args.tokens} tokens"] = {"torch": torch.__version__, "worst": worst(rows), "rows": rows}
    args.out.write_text(compact(found), encoding="utf-8")


def cases(n: int, k: int, tokens: int, seed: int, first: str, channel: str, *, plain: bool) -> Iterator[dict[str, Any]]:
    """Yield the loss of each scheme relative to rounding, for each size of the outlier.

    Size 1 is a layer without outlier. The second size is just too small for the cap.
    """
    for size in (1.0, round(9 * k**0.5), 1e3, 1e4, 1e5):
        layer = draw(n, k, tokens, seed, size, first, channel)
        for cap_tokens in (True, False) if plain else (True,):
            hessian = Hessian(k, "cpu", cap_tokens=cap_tokens)
            hessian.add(layer.tokens)
            h, capped = hessian.limited([layer.weight])
            for scheme in SCHEMES:
                row = {"scheme": scheme, "channel": channel, "first": first, "size": size, "seed": seed}
                yield {**row, "cap_tokens": cap_tokens, "capped": capped, **ratios(layer, scheme, h)}


def draw(n: int, k: int, tokens: int, seed: int, size: float, first: str, channel: str) -> Layer:
    """Draw a layer whose channel `k // 3` has magnitude `size` at the first token of each document."""
    generator = torch.Generator().manual_seed(seed)

    def gauss(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    massive = k // 3
    mix, sizes = torch.eye(k), torch.ones(k)
    if channel != "independent":
        mix = (gauss(k, k) * torch.arange(1, k + 1) ** -0.4) @ gauss(k, k) / k + 0.05 * mix
        sizes = torch.exp(0.7 * gauss(k))
    if channel == "alone":
        mix[massive], mix[:, massive] = 0.0, 0.0
        mix[massive, massive] = 1.0
    sizes = sizes / mix.norm(dim=1)

    def ordinary(tokens: int) -> Tensor:
        return (gauss(tokens, k) @ mix.T) * torch.exp(0.3 * gauss(tokens, 1)) * sizes

    documents = tokens // DOCUMENT
    x = ordinary(DOCUMENT * documents).view(documents, DOCUMENT, k)
    x[:, 0] = ordinary(documents) if first == "varying" else ordinary(1) + 0.1 * ordinary(documents)
    if size > 1:
        x[:, 0, massive] = size * (1 + 0.05 * gauss(documents))
    weight = gauss(n, k) * 0.02 * (1 + 0.3 * gauss(n, 1).abs())
    return Layer(weight, x.view(-1, k), ordinary(HELD_OUT))


def ratios(layer: Layer, scheme: str, h: Tensor) -> dict[str, float]:
    """Return GPTQ's loss on held-out tokens relative to rounding's, with plain scales and with searched ones."""
    weight = layer.weight
    if scheme == "2:4":  # dense values
        solved = sparsegpt.prune(weight, h, Options())
        rounded = {"of_rounding": weight.masked_fill(~fixed_mask(weight, "magnitude", None), 0)}
    else:
        parsed = Scheme.parse(scheme)
        solved = gptq.quantize(weight, parsed, h, Options()).tensor.dequantize()
        rounded = {
            "of_rounding": rtn.quantize(weight, parsed)[0].dequantize(),
            "of_searched_rounding": rtn.quantize(weight, parsed, clip="search")[0].dequantize(),
        }
    loss = held_out_loss(layer, solved)
    return {name: round(loss / held_out_loss(layer, value), 4) for name, value in rounded.items()}


def held_out_loss(layer: Layer, value: Tensor) -> float:
    """Return the squared error of the outputs on held-out tokens."""
    return float(((layer.weight - value) @ layer.held_out.T).square().sum(dtype=torch.float64))


def worst(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the largest ratio to either rounding: of each kind of layer and size, for each scheme."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        kind = f"{row['channel']}, {row['size']:g}{'' if row['cap_tokens'] else ', plain sum'}"
        largest = max(row["of_rounding"], row.get("of_searched_rounding", 0.0))
        ratios = found.setdefault(kind, {})
        ratios[row["scheme"]] = max(ratios.get(row["scheme"], 0.0), largest)
    return found


def compact(found: dict[str, Any]) -> str:
    """Write JSON with one line for each row."""
    shapes = []
    for shape, result in found.items():
        rows = ",\n".join(f"   {json.dumps(row)}" for row in result["rows"])
        lines = [f"   {json.dumps(kind)}: {json.dumps(ratios)}" for kind, ratios in result["worst"].items()]
        head = f'  "torch": {json.dumps(result["torch"])},\n  "worst": {{\n' + ",\n".join(lines) + "\n  },\n"
        shapes.append(f' {json.dumps(shape)}: {{\n{head}  "rows": [\n{rows}\n  ]\n }}')
    return "{\n" + ",\n".join(shapes) + "\n}\n"


if __name__ == "__main__":
    main()
