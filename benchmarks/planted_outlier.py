"""Plant outlier channels in a trained model, and measure GPTQ with and without the weight of first tokens.

In two blocks of the 29 M Llama, the row of `up_proj` of one hidden unit is multiplied by 1000 and the column of
`down_proj` divided by it. The outputs stay; one input channel of `down_proj` is now extreme. Of all units these fire
most strongly at the first token of a document: 65 and 69 times as strongly, on average, as at other tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantkit import api

#: Block -> hidden unit.
UNITS = {3: 292, 4: 1164}
SIZE = 1000.0
SAMPLES, WINDOW, TEXT = 64, 512, 40_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the 29 M Llama")
    parser.add_argument("--calib", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--data", type=Path, required=True, help="text to evaluate on; its first 40,000 characters")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/cpu/planted_outlier.json"))
    args = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in measured(args.model, args.calib, args.data, args.seeds, Path(scratch)):
            rows.append(row)
            print(row, flush=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    args.out.write_text(
        f'{{\n "torch": {json.dumps(torch.__version__)},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8"
    )


def measured(model: Path, calib: Path, data: Path, seeds: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield the KL divergence of each way of quantizing the planted model, and of the model as it is."""
    text = scratch / "text.txt"
    text.write_text(data.read_text(encoding="utf-8")[:TEXT], encoding="utf-8")
    planted = plant(model, scratch / "planted")
    evaluated = {"data": str(text), "window": WINDOW, "device": "cpu"}
    same = api.eval_kld(planted, model, **evaluated)
    yield {"model": "planted", "against": "the model as it is", "kld": same.kld, "top1": same.top1}
    ways: list[tuple[str, Path, str, dict[str, Any], int]] = [
        ("planted", planted, scheme, {"method": "rtn", "clip": "search"}, 0) for scheme in ("int4", "fp6")
    ]
    for seed, scheme, share in product(range(seeds), ("int4", "fp6"), (0.1, 0)):
        ways.append(("planted", planted, scheme, {"method": "gptq", "gptq": {"first_token": share}}, seed))
    ways += [("as it is", model, "int4", {"method": "gptq", "gptq": {"first_token": x}}, 0) for x in (0.1, 0)]
    for name, source, scheme, recipe, seed in ways:
        out = scratch / "out"
        calibration = {"calib": str(calib), "samples": SAMPLES, "max_length": WINDOW, "seed": seed}
        api.quantize(
            source,
            out,
            recipe={"scheme": {"format": scheme}, **recipe},
            device="cpu",
            **(calibration if recipe["method"] == "gptq" else {}),
        )
        found = api.eval_kld(out, source, **evaluated)
        row = {"model": name, "scheme": scheme, "seed": seed, **recipe, "kld": found.kld, "top1": found.top1}
        yield {**row, "predictions": found.tokens}
        shutil.rmtree(out)


def strongest_units(model: Path, each: int) -> list[tuple[int, int]]:
    """Return `each` hidden units of every block, as (block, unit), with the largest norms of their rows and columns.

    A unit's measure is the norm of its row of `up_proj` times that of its column of `down_proj`.
    """
    tensors = {name: x.float() for file in model.glob("*.safetensors") for name, x in load_file(file).items()}
    blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    found = []
    for block in range(blocks):
        up, down = (tensors[f"model.layers.{block}.mlp.{name}_proj.weight"] for name in ("up", "down"))
        found += [(block, int(unit)) for unit in (up.norm(dim=1) * down.norm(dim=0)).topk(each).indices]
    return found


def plant(
    model: Path, folder: Path, units: Iterable[tuple[int, int]] = tuple(UNITS.items()), size: float = SIZE
) -> Path:
    """Write the model in float32 with outlier channels of `size` planted at hidden units of blocks, in one file."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {name: x.float() for file in model.glob("*.safetensors") for name, x in load_file(file).items()}
    for block, unit in units:
        tensors[f"model.layers.{block}.mlp.up_proj.weight"][unit] *= size
        tensors[f"model.layers.{block}.mlp.down_proj.weight"][:, unit] /= size
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    return folder


if __name__ == "__main__":
    main()
