"""The config of quantkit's method inside SGLang, which chooses each layer's method, and
the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import nn

from quantkit.layouts import read_config
from quantkit.serving.engine_config import EngineConfig
from quantkit.serving.methods import PackedLinearMethod


class QuantkitConfig(EngineConfig, QuantizationConfig):  # type: ignore[misc]
    """The layout and the schemes of a folder."""

    ENGINE = "SGLang"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantkitConfig:
        """Read a `quantization_config`, to which SGLang adds the model's config and the names that
        it joins.
        """
        added = ("packed_modules_mapping", "hf_config")
        found = cls(
            *read_config(
                {key: value for key, value in config.items() if key not in added}, "config.json"
            )
        )
        found.packed_modules_mapping = dict(config.get("packed_modules_mapping", {}))
        hf_config = config.get("hf_config")
        found.learn_head(hf_config)
        for name in found.tables:
            raise _unserved(name or "the embeddings")
        if path := getattr(hf_config, "_name_or_path", ""):
            found.damage.expect(path, None, None, hashes=True)
        return found

    def get_scaled_act_names(self) -> list[str]:
        return []

    def update_packed_modules_mapping(self, mapping: Mapping[str, list[str]]) -> None:
        self.packed_modules_mapping = {**self.packed_modules_mapping, **mapping}

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self.learn_names(hf_to_sglang_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Make the method of a layer; None leaves it to SGLang. ValueError for packed experts and
        heads, and as `scheme_of_linear`.
        """
        if isinstance(layer, FusedMoE):
            inside = tuple(f"{name}." for name in self.in_folder(prefix))
            if not self.is_dense(prefix) and not any(
                entry.startswith(inside) for entry in self.schemes.ignore
            ):
                raise ValueError(
                    f"{prefix} are packed experts, which quantkit's plug-in does not serve in "
                    "SGLang: use the layout compressed-tensors without --quantization quantkit"
                )
            return None
        if isinstance(layer, ParallelLMHead) and self.head(prefix) is not None:
            raise _unserved(prefix or "the output head")
        if not isinstance(layer, LinearBase):
            return None
        scheme = self.scheme_of_linear(prefix)
        if scheme is None:
            return UnquantizedLinearMethod()
        return QuantkitLinearMethod(self, scheme, prefix)


def _unserved(name: str) -> ValueError:
    return ValueError(
        f"{name} is packed, which SGLang does not serve with quantkit: quantize without it"
    )


class QuantkitLinearMethod(PackedLinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Loads one linear of SGLang and multiplies with it."""

    QKV_CLASS = QKVParallelLinear

    def place(self, layer: Any) -> tuple[int, int]:
        rank, size = get_group_rank_size(layer.tp_group)
        if get_group_rank_size(getattr(layer, "kv_tp_group", layer.tp_group)) != (rank, size):
            raise ValueError(
                f"{self.prefix}: quantkit's plug-in splits keys and values as queries, not over "
                "other GPUs"
            )
        return rank, size

    def parameter(self, dtype: torch.dtype, weight_loader: Callable[..., Any]) -> Any:
        made = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        made.weight_loader = weight_loader  # type: ignore[attr-defined]
        return made

    def expect(self) -> None:
        """Do nothing: `from_config` has named the folder."""
