"""The config of quantkit's method inside vLLM. vLLM makes one in its front end and sends copies to
its workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from quantkit.core.quantized_tensor import Scheme
from quantkit.inference.products import places
from quantkit.layouts import read_config
from quantkit.layouts.compressed_tensors import METHOD as COMPRESSED_TENSORS
from quantkit.serving.engine_config import EngineConfig

#: The classes of layers of experts: before vLLM 0.26, and since then.
EXPERTS = {"FusedMoE", "RoutedExperts"}


class QuantkitConfig(EngineConfig, QuantizationConfig):  # type: ignore[misc]
    """The layout and the schemes of a folder, and by them the method of each layer."""

    ENGINE = "vLLM"
    #: The `quantization_config` of the folder.
    stated: dict[str, Any] | None = None

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
        found = cls(*read_config(config, "config.json"))
        found.stated = dict(config)
        return found

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
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        from quantkit.serving.vllm_layers import (
            QuantkitLinearMethod,
            QuantkitVocabularyMethod,
            method_of,
        )

        if EXPERTS.intersection(kind.__name__ for kind in type(layer).__mro__):
            return method_of(self, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            is_head = isinstance(layer, ParallelLMHead)
            found = self.head(prefix) if is_head else self.table(prefix)
            if found is None:
                return None
            theirs = self._of_vllm(layer, prefix, found[1]) if is_head else None
            return theirs or QuantkitVocabularyMethod(self, *found, is_head)
        if not isinstance(layer, LinearBase):
            return None
        scheme = self.scheme_of_linear(prefix)
        if scheme is None:
            return UnquantizedLinearMethod()
        return QuantkitLinearMethod(self, scheme, prefix)

    def _of_vllm(self, layer: Any, prefix: str, scheme: Scheme) -> Any:
        """Make vLLM's own method of a head in compressed-tensors that no kernel of quantkit
        multiplies, as INT8; None for others.
        """
        from vllm.model_executor.layers.quantization import get_quantization_config

        size = layer.org_vocab_size, scheme.padded_k(layer.embedding_dim)
        is_theirs = self.stated is not None and self.stated["quant_method"] == COMPRESSED_TENSORS
        has_kernel = any(True for _ in places(self.layout.NAME, scheme, *size))
        if self.is_head_tied or has_kernel or not is_theirs:
            return None
        config = get_quantization_config(COMPRESSED_TENSORS).from_config(self.stated)
        return config.get_quant_method(layer, prefix)
