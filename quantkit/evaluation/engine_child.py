"""The separate process of `verify --engine`, in which vLLM opens the folder and computes.

It reads a request as JSON from its standard input, and writes the answer as JSON into a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def main(answer: str) -> None:
    """Open the folder of the request in vLLM, and write the log-probabilities of its prompts and
    their continuations.

    The request has `engine`, the arguments of `vllm.LLM`, token ids as `prompts`, and the number of
    `new` tokens for each. The answer has the tokens of each sequence, log-probabilities in nats of
    all but its first, `layers`, the engine's version and its dtype.
    """
    import vllm

    request = json.load(sys.stdin)
    llm = vllm.LLM(**request["engine"])
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=request["new"], ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    tokens, logprobs = [], []
    for prompt, found in zip(
        request["prompts"], llm.generate(prompts, sampling, use_tqdm=False), strict=True
    ):
        tokens.append([*prompt, *found.outputs[0].token_ids])
        places = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs]
        logprobs.append(
            [place[token].logprob for token, place in zip(tokens[-1][1:], places, strict=True)]
        )
    content = {
        "version": vllm.__version__,
        "dtype": str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        "layers": llm.apply_model(describe)[0],
        "tokens": tokens,
        "logprobs": logprobs,
    }
    Path(answer).write_text(json.dumps(content))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # nothing that the engine leaves behind may keep the process


def describe(model: Any) -> dict[str, dict[str, int]]:
    """Name the method, scheme and kernel of each kind of layer, and count the layers."""
    found: dict[str, Counter[str]] = {}
    for name, module in model.named_modules():
        owners = [getattr(module, "quant_method", None), getattr(module, "scheme", None)]
        if owners[0] is None:
            continue
        names = [getattr(module, name, None) for name in ("quantkit_layout", "quantkit_kernel")]
        for owner in filter(None, owners):
            held = getattr(owner, "__dict__", {}).values()
            kernels = [value for value in held if type(value).__name__.endswith("Kernel")]
            # vLLM's kernel of experts is a frame for any of its implementations.
            kernels = [getattr(kernel, "fused_experts", kernel) for kernel in kernels]
            names += [type(each).__name__ for each in (owner, *kernels)]
        found.setdefault(name.rpartition(".")[2], Counter())[
            " ".join(dict.fromkeys(filter(None, names)))
        ] += 1
    return {kind: dict(counts) for kind, counts in found.items()}
