"""A small model whose experts are `nn.Linear`s; each token goes to one, so that some get none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TinyMoeConfig(PreTrainedConfig):
    model_type = "quantkit-tiny-moe"

    def __init__(self, hidden_size: int = 128, vocab_size: int = 257, experts: int = 4, depth: int = 2, **kwargs: Any):
        self.hidden_size, self.vocab_size, self.experts, self.depth = hidden_size, vocab_size, experts, depth
        super().__init__(**kwargs)


class Experts(nn.Module):
    def __init__(self, config: TinyMoeConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.router = nn.Linear(h, config.experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(h, 2 * h) for _ in range(config.experts))
        self.down = nn.ModuleList(nn.Linear(2 * h, h) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            y[chosen == expert] = down(up(x[chosen == expert]).relu())
        return x + y


class TinyMoe(PreTrainedModel):
    config_class = TinyMoeConfig
    base_model_prefix = "model"

    def __init__(self, config: TinyMoeConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Experts(config) for _ in range(config.depth))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(x))


AutoConfig.register(TinyMoeConfig.model_type, TinyMoeConfig)
AutoModelForCausalLM.register(TinyMoeConfig, TinyMoe)
