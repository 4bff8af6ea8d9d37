"""The config of quantkit's method inside vLLM. vLLM makes one in its front end and sends copies to
its workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from quantkit.layouts import read_config
from quantkit.serving.engine_config import EngineConfig

#: The classes of layers of experts: before vLLM 0.26, and since then.
EXPERTS = {"FusedMoE", "RoutedExperts"}


class QuantkitConfig(EngineConfig, QuantizationConfig):  # type: ignore[misc]
    """The layout and the schemes of a folder, and by them the method of each layer."""

    ENGINE = "vLLM"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantkitConfig:
        """Read a `quantization_config`; CheckpointError if it is malformed, or of a method that
        quantkit reads not.
        """
        from vllm import envs

        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                "VLLM_BATCH_INVARIANT=1: sums of quantkit's kernels depend on the batch: unset it"
            )
        return cls(*read_config(config, "config.json"))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        self.learn_head(hf_config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.learn_names(hf_to_vllm_mapper)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Drop no tensor: newer vLLM drops `g_idx`, without which act-order would not
        be noticed.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Make the method of a layer; None leaves it to vLLM. ValueError for features that are not
        served.
        """
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from quantkit.serving.vllm_layers import QuantkitLinearMethod, method_of

        if EXPERTS.intersection(kind.__name__ for kind in type(layer).__mro__):
            return method_of(self, layer, prefix)
        scheme, is_linear = self.scheme_of_layer(layer, prefix, ParallelLMHead, LinearBase)
        if scheme is None:
            return UnquantizedLinearMethod() if is_linear else None
        return QuantkitLinearMethod(self, scheme, prefix)
