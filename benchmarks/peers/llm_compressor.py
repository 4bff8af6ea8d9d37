"""Quantize with llm-compressor: INT4, groups of 128, symmetric, `lm_head` dense, all else as its package has it."""

from __future__ import annotations

from pathlib import Path

import torch
from common import Tokens, run
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier

if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = lambda self: self  # AWQ pins activations, which needs an accelerator
SCHEME = {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}
RECIPES = {
    "gptq": lambda: [GPTQModifier(**SCHEME)],
    "awq": lambda: [AWQModifier(), QuantizationModifier(**SCHEME)],
}


def quantize(model: Path, tokens: Tokens, out: Path, method: str) -> None:
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]})
    oneshot(
        model=str(model),
        dataset=data,
        recipe=RECIPES[method](),
        max_seq_length=len(tokens[0]),
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
        output_dir=str(out),
    )


if __name__ == "__main__":
    run("llmcompressor", __doc__, tuple(RECIPES), quantize)
