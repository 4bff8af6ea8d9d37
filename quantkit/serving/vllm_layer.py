"""A packed linear inside vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_world_group
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear
from vllm.model_executor.parameter import BasevLLMParameter

from quantkit.serving.engine_config import EngineConfig, reordered
from quantkit.serving.engine_method import PackedLinearMethod


class QuantkitParameter(BasevLLMParameter):  # type: ignore[misc]
    """One suffix of a packed linear while it is loaded. It is empty: `weight_loader` hands each
    tensor on.
    """

    def __new__(cls, name: str, dtype: torch.dtype, weight_loader: Callable[..., None]) -> Any:
        return super().__new__(cls, torch.empty(0, dtype=dtype))

    def __init__(self, name: str, dtype: torch.dtype, weight_loader: Callable[..., None]) -> None:
        super().__init__(self.data, weight_loader)
        self.quantkit_name = name

    @property
    def output_dim(self) -> int:
        """Refuse the question that some of vLLM's classes ask to reorder rows: packed words have no
        such dimension.
        """
        raise reordered(self.quantkit_name, "vLLM")


def expect_folder(config: EngineConfig) -> None:
    """Name the folder that is compared while vLLM reads it."""
    engine = get_current_vllm_config()
    model, cache = engine.model_config, engine.load_config.download_dir
    is_first = get_world_group().local_rank == 0  # one process of each machine hashes the files
    config.damage.expect(model.model, model.revision, cache, is_first)


class QuantkitLinearMethod(PackedLinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Loads one linear of vLLM and multiplies with it."""

    QKV_CLASS = QKVParallelLinear

    def place(self, layer: Any) -> tuple[int, int]:
        return layer.tp_rank, layer.tp_size

    def parameter(self, dtype: torch.dtype, weight_loader: Callable[..., None]) -> Any:
        return QuantkitParameter(self.prefix, dtype, weight_loader)

    def expect(self) -> None:
        expect_folder(self.config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters, as the base does; `weight` answers vLLM's questions for
        dtype and device.

        Without it, attention with latent heads fails. It is empty, so that nothing takes it for a
        dense weight.
        """
        super().process_weights_after_loading(layer)
        device = layer.get_parameter(layer.quantkit_names[0]).device
        layer.weight = torch.empty(0, dtype=layer.params_dtype, device=device)
