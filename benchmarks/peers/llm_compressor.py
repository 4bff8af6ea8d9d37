"""Quantize with llm-compressor: INT4, groups of 128, symmetric, or NVFP4A16; `lm_head` dense, all else as it has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import Tokens, run
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier

if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = lambda self: self  # AWQ pins activations, which needs an accelerator
NVFP4 = {"targets": "Linear", "scheme": "NVFP4A16", "ignore": ["lm_head"]}
RECIPES = {
    "gptq": lambda scheme: [GPTQModifier(**scheme)],
    "awq": lambda scheme: [AWQModifier(), QuantizationModifier(**scheme)],
    "nvfp4a16": lambda _: [QuantizationModifier(**NVFP4)],
    "nvfp4a16 gptq": lambda _: [GPTQModifier(**NVFP4)],
}


def scheme(group_size: int) -> dict[str, Any]:
    """Return the arguments of a modifier."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    return {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def quantize(model: Path, tokens: Tokens, out: Path, method: str, group_size: int) -> None:
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]})
    oneshot(
        model=str(model),
        dataset=data,
        recipe=RECIPES[method](scheme(group_size)),
        max_seq_length=len(tokens[0]),
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
        output_dir=str(out),
    )


if __name__ == "__main__":
    run("llmcompressor", __doc__, tuple(RECIPES), quantize)
