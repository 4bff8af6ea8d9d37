"""Quantize with auto-round: INT4, groups of 128, symmetric, `lm_head` dense, all else as its package has it."""

from __future__ import annotations

from pathlib import Path

import torch
from auto_round import AutoRound
from common import Tokens, run
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = {"50 steps": 50, "200 steps": 200}


def quantize(model: Path, tokens: Tokens, out: Path, method: str, group_size: int) -> None:
    job = AutoRound(
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        AutoTokenizer.from_pretrained(model),
        scheme="W4A16",
        group_size=group_size,
        dataset=[{"input_ids": torch.tensor([row])} for row in tokens],
        iters=STEPS[method],
        seqlen=len(tokens[0]),
        nsamples=len(tokens),
        batch_size=8,
        enable_torch_compile=False,  # compiling for a CPU takes longer than tuning a small model
    )
    job.quantize_and_save(str(out), format="auto_gptq")
    (folder,) = out.iterdir()  # named after the scheme
    for file in folder.iterdir():
        file.rename(out / file.name)
    folder.rmdir()


if __name__ == "__main__":
    run("auto-round", __doc__, tuple(STEPS), quantize)
