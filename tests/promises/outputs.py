"""Which outputs are frozen: conversions, recipes, formats. Each is made by commands alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from tests.promises.model import TEXT, write_model
from tests.promises.running import ROOT, Work, digests

LAYOUTS = (
    "compressed-tensors",
    "humming",
    "tcfpx",
    "gptq",
    "gptq-v2",
    "awq",
    "quick",
    "marlin",
    "marlin24",
    "marlin24-ct",
)
INT4 = LAYOUTS[:1] + LAYOUTS[3:]
FLOATS = LAYOUTS[:3]
RTN = "--method rtn -q"
#: Name of a source folder -> (the command that makes it, layouts among which every pair is converted, options).
CONVERTED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "int4": (f"quantize pruned -o int4 {RTN}", INT4, ""),  # really 2:4, so every layout of int4 holds it
    "sparse": (f"quantize model -o sparse --prune 2:4 {RTN}", INT4[:1] + INT4[-2:], ""),
    "asym": (f"quantize model -o asym --asym {RTN}", INT4[:5], ""),
    "channel": (f"quantize pruned -o channel --group-size channel {RTN}", INT4[:1] + INT4[3:7], ""),
    "g64": (f"quantize model -o g64 --group-size 64 {RTN}", INT4[:5], ""),
    "g256": (f"quantize model -o g256 --override down_proj=int4:g256 {RTN}", ("compressed-tensors", "marlin"), ""),
    "fp6": ("quantize model -o fp6 --format fp6 --layout compressed-tensors --method rtn -q", FLOATS, ""),
    "fp5": ("quantize model -o fp5 --format fp5 --layout compressed-tensors --method rtn -q", FLOATS, ""),
    "fp5-e2m2": (
        "quantize model -o fp5-e2m2 --format fp5-e2m2 --layout compressed-tensors --method rtn -q",
        ("compressed-tensors", "tcfpx", "humming"),
        "",
    ),
    "fp6-e2m3": (
        "quantize model -o fp6-e2m3 --format fp6-e2m3 --layout tcfpx --method rtn -q",
        ("tcfpx", "compressed-tensors"),
        "",
    ),
    "padded": (f"quantize odd -o padded --group-size channel {RTN}", ("compressed-tensors", "marlin", "awq"), "--pad"),
    "again": (f"quantize model -o again {RTN}", ("compressed-tensors", "marlin24", "tcfpx"), "--requantize"),
}
#: Sources of which only pairs with the first layout are converted: int4 and asym have every pair of the same layouts.
BY_THE_FIRST = ("channel", "g64")
#: Outputs of one command each.
MADE = {
    "prune magnitude": "prune model -o out --method magnitude -q",
    "pack to marlin": "pack int4 --layout marlin -o out -q",
    "pack in shards": "pack int4 --layout gptq -o out --max-shard-size 50K -q",
    "quantize fp6": "quantize model -o out --format fp6 --method rtn -q",
    "quantize fp5 to tcfpx": "quantize model -o out --format fp5 --layout tcfpx --method rtn -q",
    "quantize fp5-e2m2": "quantize model -o out --format fp5-e2m2 --method rtn -q",
    "quantize int4 asym": f"quantize model -o out --format int4 --asym {RTN}",
    "quantize int4 asym to awq": f"quantize model -o out --asym --layout awq {RTN}",
    "quantize int4 asym to quick": f"quantize model -o out --asym --layout quick {RTN}",
    "quantize signed": f"quantize model -o out --set signed=true {RTN}",
    "quantize without search": f"quantize model -o out --set clip=none {RTN}",
    "quantize g32 to gptq": f"quantize model -o out --group-size 32 --layout gptq {RTN}",
    "quantize with overrides": f"quantize model -o out --override v_proj=int4:g32 --skip o_proj {RTN}",
    "quantize padded to marlin": f"quantize odd -o out --set pad=true --group-size channel --layout marlin {RTN}",
    "quantize 2:4 to marlin24": f"quantize model -o out --prune 2:4 --layout marlin24 {RTN}",
}
CALIB = "--calib calib.txt --samples 8 --max-length 64"
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
ROUNDING = ("int4-rtn",)
#: Recipes whose bytes also depend on how a CPU multiplies in bfloat16.
UNFROZEN = ("int3-best", "int4-best", "int4-marlin24", "int4-tuned")
#: Outputs whose bytes depend on how this machine multiplies and factors matrices.
CALIBRATED = {
    **{
        f"recipe {name}": f"quantize model -o out --recipe {name} {CALIB} -q"
        for name in RECIPES
        if name not in (*ROUNDING, *UNFROZEN)
    },
    # Descent needs 16 tokens for each input channel.
    "quantize refined": f"quantize model -o out --set gptq.refit=true {CALIB.replace('8', '72', 1)} -q",
    "prune sparsegpt": f"prune model -o out --method sparsegpt {CALIB} -q",
    "prune wanda": f"prune model -o out --method wanda {CALIB} -q",
    "quantize gptq by blocks of two": f"quantize two -o out {CALIB} -q",
}
ALONE = {**MADE, **{f"recipe {name}": f"quantize model --recipe {name} -o out -q" for name in ROUNDING}}


def prepare(work: Work) -> Work:
    """Write the models and the text that everything here starts from."""
    write_model(work / "model")
    write_model(work / "two", num_hidden_layers=2)
    write_model(work / "odd", intermediate_size=208, hidden_size=96)
    (work / "calib.txt").write_text(TEXT)
    (work / "problems.jsonl").write_text('{"prompt": "def f(x):", "test": "def check(f): f(1)", "entry_point": "f"}')
    (work / "records.jsonl").write_text('{"document": "Rain fell.", "summary": "Rain"}\n' * 2)
    work.done("prune model -o pruned --method magnitude -q")
    return work


def converted(work: Work, name: str) -> dict[str, Any]:
    """Return digests of pairs of layouts that hold the source folder `name`, or the error of those that fail."""
    line, layouts, options = CONVERTED[name]
    work.make(name, line)
    first, folders = layouts[0], {layouts[0]: name}
    found = {f"{name}: {first}": digests(work / name, work / "model")}
    for source in layouts:
        for target in layouts:
            if source == target or source not in folders:
                continue
            if name in BY_THE_FIRST and first not in (source, target):
                continue
            out = f"{name}.{target}" if source == first else "out"
            result = work.run(f"convert {source}-to-{target} {folders[source]} -o {out} {options} -q")
            if result.exit_code == 0:
                found[f"{name}: {source}-to-{target}"] = digests(work / out, work / "model")
                folders.setdefault(target, out)
            else:
                found[f"{name}: {source}-to-{target}"] = {"code": result.exit_code, "error": result.stderr}
            work.gone("out")
    return found


def made(work: Work, line: str) -> dict[str, Any]:
    """Return the digests of the folder `out` that a command writes."""
    work.make("int4", CONVERTED["int4"][0])
    work.done(line)
    try:
        return digests(work / "out", work / "model")
    finally:
        work.gone("out")


def arithmetic() -> dict[str, str]:
    """Return the environment on which the bytes of calibrated outputs depend, with a probe of its matrix products."""
    import transformers

    data = bytearray(hashlib.shake_128(b"probe").digest(64 * 128))
    a = torch.frombuffer(data, dtype=torch.uint8).view(64, 128).float() / 255 - 0.5
    gram = a @ a.T + torch.eye(64)
    probe: Callable[[torch.Tensor], bytes] = lambda t: t.contiguous().numpy().tobytes()  # noqa: E731
    steps = probe(gram) + probe(torch.linalg.cholesky(gram)) + probe(torch.softmax(a, 1)) + probe(a.half() @ a.half().T)
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "probe": hashlib.sha256(steps).hexdigest(),
    }
