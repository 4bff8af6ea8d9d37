"""Quantize with auto-round: INT4, groups of 128, symmetric, or FP4 weights; `lm_head` dense, all else as it has it.

FP4 folders hold decoded weights: the stored forms that the package writes quantize activations too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from auto_round.schemes import QuantizationScheme
from common import Tokens, run
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Steps, and the format of FP4 if it is not INT4.
METHODS: dict[str, tuple[int, str | None]] = {
    "50 steps": (50, None),
    "200 steps": (200, None),
    "nvfp4": (200, "nv_fp"),
    "mxfp4": (200, "mx_fp"),
}
FP4_GROUPS = {"nv_fp": 16, "mx_fp": 32}


def quantize(model: Path, tokens: Tokens, out: Path, method: str, group_size: int) -> None:
    steps, fp4 = METHODS[method]
    scheme: dict[str, Any] = {"scheme": "W4A16", "group_size": group_size}
    if fp4:
        weights = {"bits": 4, "group_size": FP4_GROUPS[fp4], "data_type": fp4, "act_bits": 16}
        scheme = {"scheme": QuantizationScheme.from_dict(weights)}
    job = AutoRound(
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        AutoTokenizer.from_pretrained(model),
        dataset=[{"input_ids": torch.tensor([row])} for row in tokens],
        iters=steps,
        seqlen=len(tokens[0]),
        nsamples=len(tokens),
        batch_size=8,
        enable_torch_compile=False,  # compiling for a CPU takes longer than tuning a small model
        **scheme,
    )
    job.quantize_and_save(str(out), format="fake" if fp4 else "auto_gptq")
    (folder,) = out.iterdir()  # named after the scheme
    for file in folder.iterdir():
        file.rename(out / file.name)
    folder.rmdir()
    if fp4:
        config = json.loads((out / "config.json").read_text())
        config.pop("quantization_config", None)
        (out / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    run("auto-round", __doc__, tuple(METHODS), quantize)
