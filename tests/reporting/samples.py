"""A report to print and draw, and a name that tries to break the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.checkpoint.report import REPORT, SEAL, seal
from quantkit.io.json_files import dump_json

HOSTILE = 'evil\n---\nname: `x` <script>alert(1)</script> | "y" é'


def layer(name: str, **facts: Any) -> dict[str, Any]:
    known = {"name": name, "shape": [256, 512], "scheme": "int4:g128", "method": "gptq", "digest": "0" * 64}
    figures = {"relative_error": 0.1, "loss": 0.5, "rtn_loss": 1.0, "norm": 9.0, "rungs": [0.01], "damp": 0.01}
    counts = {"dead_columns": 0, "guard_rows": 0, "floored_scales": 0, "subnormal_scales": 0, "zero_scales": 0}
    return {**known, **figures, **counts, "seconds": 0.1, **facts}


def example() -> dict[str, Any]:
    return {
        "quantkit": "0.1.0",
        "command": "quantize",
        "source": {"name": "some/model", "revision": "abc", "files": {}},
        "base": {"name": "some/model", "revision": "abc", "base_model": "some/model", "relation": "quantized"},
        "recipe": {"method": "gptq"},
        "recipe_sha256": "f" * 64,
        "layout": "marlin",
        "scheme": "int4:g128",
        "calibration": {
            "source": "c4",
            "rule": "one document a row",
            "sequences": 8,
            "tokens": 2048,
            "lengths": "own",
            "max_length": 256,
            "seed": 3,
            "cut": 5,
            "skipped": 2,
        },
        "layers": [layer("a.q_proj"), layer("a.k_proj", relative_error=0.2, loss=0.9)],
        "dense": ["lm_head"],
        "readers": ["quantkit.load"],
        "notices": ["something was left as it is"],
        "phases": {"forward": 1.5, "solve": 2.25},
        "files": {"model-00001-of-00001.safetensors": "0" * 64},
        "totals": {
            "bits_per_weight": 4.125,
            "bytes": 2_700_000,
            "source_bytes": 4_500_000,
            "seconds": 5.0,
            "peak_memory": {"ram": 400_000_000, "vram": 1_000_000_000},
        },
    }


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write a report as one writes it who knows of its seal."""
    (folder / REPORT).write_bytes(dump_json({**report, SEAL: seal(report)}))
