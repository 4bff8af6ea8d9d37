"""Random records and hand-made checkpoint folders, built without any quantizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.layouts import LAYOUTS, quantkit_key
from quantkit.layouts.schemes import Schemes

#: Layout -> schemes that it holds, and shapes [n, k].
HELD = {
    "compressed-tensors": (
        [
            *("int4:g128", "int4:g32", "int4:channel", "int4:g64:asym", "int4:channel:asym", "int4:g128:24"),
            *("int2:g64", "int2:channel:asym", "int3:g128", "int3:channel", "int3:g32:asym", "int5:channel:asym"),
            *("int5:g64", "int6:channel", "int6:g128:asym", "int8:channel", "int8:g32:asym"),
            *("fp6:channel", "fp5:channel", "fp6-e2m3:channel", "fp5-e2m2:channel", "nvfp4:g16", "mxfp4:g32"),
        ],
        [(8, 256), (40, 384)],
    ),
    "humming": (
        [
            *("fp6:channel", "fp5:channel", "int2:channel", "int3:g32"),
            *("int4:channel", "int5:g32", "int6:channel", "int8:g32"),
        ],
        [(1, 32), (7, 96), (16, 256)],
    ),
    "tcfpx": (["fp6:channel", "fp5:channel", "fp6-e2m3:channel", "fp5-e2m2:channel"], [(64, 64), (128, 192)]),
    "gptq": (["int4:g128", "int4:g32", "int4:channel", "int4:g64:asym", "int4:channel:asym"], [(32, 128), (96, 384)]),
    "gptq-v2": (
        ["int4:g128", "int4:g32", "int4:channel", "int4:g64:asym", "int4:channel:asym"],
        [(32, 128), (96, 384)],
    ),
    "awq": (
        ["int4:g128", "int4:channel", "int4:g32:24", "int4:g64:asym", "int4:channel:asym"],
        [(8, 128), (40, 256)],
    ),
    "quick": (["int4:g128", "int4:g32", "int4:g128:24", "int4:g64:asym"], [(128, 128), (384, 256)]),
    "marlin": (["int4:g128", "int4:channel", "int4:channel:24"], [(64, 128), (192, 256)]),
    "marlin24": (["int4:g128:24", "int4:channel:24"], [(128, 128), (384, 256)]),
    "marlin24-ct": (["int4:g128:24", "int4:channel:24"], [(128, 128), (256, 256)]),
}

CASES = [(layout, label, n, k) for layout, (labels, shapes) in HELD.items() for label in labels for n, k in shapes]


def record(scheme: Scheme, n: int, k: int, seed: int = 0, lowest_zero: int = 0) -> QuantizedTensor:
    """Make a random record with all codes, and scales of both signs: normal, subnormal and zero."""
    random = torch.Generator().manual_seed(seed)
    top, g = 2**scheme.format.bits, scheme.groups(k)
    scales = torch.randint(0, 0x7C00, (n, g), generator=random, dtype=torch.int16)
    scales[torch.rand(n, g, generator=random) < 0.1] &= 0x03FF
    scales[torch.rand(n, g, generator=random) < 0.1] |= -0x8000
    scales = scales.view(torch.float16)
    if scheme.format.is_microscaled:  # bytes: of E4M3 all but the last and NaN, of E8M0 those within float16
        low, high = (0, 0x7E) if scheme.format.name == "nvfp4" else (127 - 20, 127 + 13)
        stored = torch.randint(low, high, (n, g), generator=random, dtype=torch.uint8)
        stored[(scales < 0) & (low == 0)] |= 0x80
        scales = (stored.view(scheme.format.scale_dtype).float() * scheme.format.scale_unit).half()
    zeros = torch.randint(lowest_zero, top, (n, g), generator=random, dtype=torch.uint8)
    codes = torch.randint(0, top, (n, k), generator=random, dtype=torch.uint8)
    if scheme.sparsity is not None:  # some of the kept codes are zero too
        order = torch.rand(n, k // 4, 4, generator=random).argsort(-1).view(n, k)
        codes[order >= 2] = scheme.format.zero_code
    return QuantizedTensor(scheme, codes, scales, None if scheme.symmetric else zeros)


def tame(q: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """Replace the scales by values around 0.01 that `dtype` holds exactly."""
    random = torch.Generator().manual_seed(7)
    scales = 0.01 * (1 + torch.rand(q.scales.shape, generator=random))
    scales = q.scheme.format.nearest_scale(scales) if q.scheme.format.is_microscaled else scales.to(dtype)
    scales = scales.to(torch.float16)
    return QuantizedTensor(q.scheme, q.codes, scales, q.zeros)


def write_folder(
    source: Path, out: Path, layout: str, schemes: Schemes, *, key: bool = True
) -> dict[str, QuantizedTensor]:
    """Copy the dense model folder `source` with random packed linears; return the record of each module."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    dtype = getattr(torch, config["dtype"])
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
    records = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        n, k = tensors.pop(name).shape
        records[module] = tame(record(schemes.of(module), n, k, seed=len(records), lowest_zero=1), dtype)
        tensors |= {f"{module}.{suffix}": t for suffix, t in LAYOUTS[layout].pack(records[module]).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    public = LAYOUTS[layout].write_config(schemes)
    if key:
        public["quantkit"] = quantkit_key(layout, schemes, "0.1.0", "0" * 64)
    config["quantization_config"] = public
    (out / "config.json").write_text(json.dumps(config))
    side = LAYOUTS[layout].SIDE_FILE
    if side:
        (out / side.name).write_text(json.dumps(side.contents(public)))
    return records
