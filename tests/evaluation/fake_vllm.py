"""A stand-in for vLLM: transformers under vLLM's names, right or with a planted fault.

Tests copy this file to `vllm/__init__.py`. The variable FAULT chooses the fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "0.26.0"
FAULT = os.environ.get("FAULT", "")
if FAULT == "dies":  # before the imports, which take seconds
    sys.stderr.write("[rank0]: ValueError: No available memory for the cache blocks\n[rank0]:[W1] Warning: x\n")
    os._exit(1)
if FAULT == "killed":
    os.abort()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from quantkit.checkpoint.reader import Checkpoint  # noqa: E402
from quantkit.models.weights import load_dense_model  # noqa: E402


class MacheteLinearKernel:
    """A kernel by the name that a method holds it under."""


class StandInLinearMethod:
    def __init__(self) -> None:
        self.kernel = MacheteLinearKernel()


class SamplingParams:
    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values


class LLM:
    def __init__(self, model: str, *, max_model_len: int, dtype: str = "auto", **others: Any) -> None:
        print("INFO some line that an engine prints")
        self.model: Any = load_dense_model(Checkpoint(Path(model)), dtype=torch.bfloat16)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                module.quant_method = StandInLinearMethod()  # type: ignore[assignment]
                if FAULT == "8-bit activations" and "lm_head" not in name:
                    module.register_forward_pre_hook(lambda module, given: (in_eight_bits(given[0]),))

    def generate(self, prompts: list[dict[str, Any]], sampling: Any, use_tqdm: bool) -> list[Any]:
        return [self.answer(prompt["prompt_token_ids"], sampling.max_tokens) for prompt in prompts]

    def answer(self, prompt: list[int], new: int) -> Any:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(new):
                logits = self.model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
                tokens.append(int(logits[-1].argmax()))
        values: list[Any] = [
            {token: SimpleNamespace(logprob=float(row[token]))} for token, row in zip(tokens[1:], logits, strict=True)
        ]
        made = SimpleNamespace(token_ids=tokens[len(prompt) :], logprobs=values[len(prompt) - 1 :])
        return SimpleNamespace(prompt_logprobs=[None, *values[: len(prompt) - 1]], outputs=[made])

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.model)]


def in_eight_bits(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127 + 1e-9
    return (x / step).round() * step
