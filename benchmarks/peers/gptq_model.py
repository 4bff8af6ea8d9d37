"""Quantize with GPTQModel: INT4, groups of 128, symmetric, `lm_head` dense, all else as its package has it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from common import Tokens, run

CORES = os.cpu_count() or 1
os.cpu_count = lambda: max(4, CORES)  # on two cores its pool of loaders refuses to start

from gptqmodel import GPTQModel, QuantizeConfig  # noqa: E402, after the patch


def quantize(model: Path, tokens: Tokens, out: Path, method: str, group_size: int) -> None:
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens]
    config = QuantizeConfig(bits=4, group_size=group_size, sym=True)
    job = GPTQModel.load(str(model), config, device="cuda:0" if torch.cuda.is_available() else "cpu")
    job.quantize(data, batch_size=1)
    job.save(str(out))


if __name__ == "__main__":
    run("gptqmodel", __doc__, ("gptq",), quantize)
