"""Packed linears and experts inside vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_world_group
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import BasevLLMParameter

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import QuantkitError, Setting, Words
from quantkit.inference.products import FUNCTIONS, UNGATED
from quantkit.serving.engine_config import EngineConfig, reordered
from quantkit.serving.methods import (
    PackedExpertsMethod,
    PackedLinearMethod,
    PackedMethod,
    PackedVocabularyMethod,
)

#: The only way of vLLM to exchange tokens between data-parallel ranks that asks nothing of a
#: method.
EXCHANGE = "allgather_reducescatter"


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


class VllmMethod(PackedMethod):
    """The loading parameters of vLLM, and the folder that is compared while vLLM reads it."""

    def parameter(self, dtype: torch.dtype, weight_loader: Callable[..., Any]) -> Any:
        return QuantkitParameter(self.prefix, dtype, weight_loader)

    def expect(self) -> None:
        engine = get_current_vllm_config()
        model, cache = engine.model_config, engine.load_config.download_dir
        self.config.damage.expect(
            model.model,
            model.revision,
            cache,
            hashes=get_world_group().local_rank == 0,  # one process of each machine
        )


class QuantkitLinearMethod(VllmMethod, PackedLinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Loads one linear of vLLM and multiplies with it."""

    QKV_CLASS = QKVParallelLinear

    def place(self, layer: Any) -> tuple[int, int]:
        return layer.tp_rank, layer.tp_size

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters, as the base does; `weight` answers vLLM's questions for
        dtype and device.

        Without it, attention with latent heads fails, and LoRA beside packed embeddings. It is
        empty, so that nothing takes it for a dense weight.
        """
        super().process_weights_after_loading(layer)
        named = [*getattr(layer, "quantkit_names", ()), *getattr(layer, "quantkit_rows", ())]
        if named:
            device = layer.get_parameter(named[0]).device
            layer.weight = torch.empty(0, dtype=layer.params_dtype, device=device)


class QuantkitVocabularyMethod(QuantkitLinearMethod, PackedVocabularyMethod):
    """Loads token embeddings or an output head of vLLM; gathers rows and multiplies."""

    def place(self, layer: Any) -> tuple[int, int]:
        return 0, 1  # the part names the rows of the rank

    def create_weights(self, layer: Any, *args: Any, **options: Any) -> None:
        """Register parameters, as the base does. Some classes tie a head by the `weight` of the
        embeddings, which leads to them here.
        """
        super().create_weights(layer, *args, **options)
        if self.config.is_head_tied and not self.is_head:
            layer.weight = lambda: layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters, as the base does. A head that is tied by `weight` shares
        those of the embeddings.

        QuantkitError if vLLM's class has a head of its own.
        """
        super().process_weights_after_loading(layer)
        if not (self.config.is_head_tied and self.is_head):
            return
        if not hasattr(layer, "weight"):
            raise QuantkitError(
                "vLLM's class of this model does not share packed embeddings with the head",
                Words("leave them dense: drop", Setting("embeddings")),
                subject=self.prefix,
            )
        table = layer.__dict__.pop("weight")()
        table.quant_method.process_weights_after_loading(table)
        layer._parameters |= table._parameters
        own = {"quant_method", "weight"}
        shared = {name for name in vars(table) if name.startswith("quantkit_") or name in own}
        layer.__dict__ |= {name: vars(table)[name] for name in shared}

    def use_decoded(self, layer: Any, weight: Tensor) -> None:
        """Leave a head that no kernel multiplies, and embeddings tied to it, to vLLM's own
        method.
        """
        layer.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
        layer.quant_method = UnquantizedEmbeddingMethod()

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Put the embeddings in the place of a head that is tied to them."""
        return embed_tokens


def method_of(config: EngineConfig, layer: Any, prefix: str) -> QuantkitExpertsMethod | None:
    """Make the method of a layer of experts, None if they are dense. ValueError for features that
    are not served.
    """
    if not hasattr(layer, "expert_map_manager"):
        raise ValueError(
            f"{prefix}: quantkit's plug-in knows no experts of a vLLM before 0.26: update vLLM"
        )
    gate, down, up = layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name
    names = (gate, up, down) if layer.moe_config.is_act_and_mul else (up or gate, down)
    every = (
        f"{prefix}.{number}.{name}" for number in range(layer.global_num_experts) for name in names
    )
    scheme = config.scheme_of_experts(prefix, every)
    if scheme is None:
        return None
    if (why := _unserved(layer)) is not None:
        raise ValueError(f"{prefix}: quantkit's plug-in does not serve experts with {why}")
    return QuantkitExpertsMethod(config, scheme, prefix, names, layer.moe_config)


def _unserved(layer: Any) -> str | None:
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    if moe.has_bias:
        return "biases"
    if moe.is_lora_enabled:
        return "LoRA"
    if moe.activation.value.removesuffix(UNGATED) not in FUNCTIONS or moe.swiglu_limit is not None:
        limit = "" if moe.swiglu_limit is None else f" and swiglu_limit {moe.swiglu_limit}"
        return f"the activation {moe.activation.value}{limit}"
    if parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels:
        return f"--all2all-backend {parallel.all2all_backend}: use {EXCHANGE}"
    return None


class QuantkitExpertsMethod(
    VllmMethod,
    PackedExpertsMethod,
    FusedMoEMethodBase,  # type: ignore[misc]
):
    """Loads the experts of one layer of vLLM and multiplies with them; vLLM routes the tokens."""

    def __init__(
        self,
        config: EngineConfig,
        scheme: Scheme,
        prefix: str,
        names: tuple[str, ...],
        moe_config: Any,
    ) -> None:
        PackedExpertsMethod.__init__(self, config, scheme, prefix, names)
        FusedMoEMethodBase.__init__(self, moe_config)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for each suffix of the layout; errors as `register_experts`."""
        mapped = (
            layer.expert_map
        )  # all experts -> those of this rank, -1 for others; None if all are
        found = range(num_experts) if mapped is None else (mapped >= 0).nonzero().flatten().tolist()
        numbers = sorted(
            found, key=lambda number: number if mapped is None else int(mapped[number])
        )
        parallel = self.moe.moe_parallel_config
        inner = (self.moe.intermediate_size, intermediate_size_per_partition)
        place = (parallel.tp_rank, parallel.tp_size)
        self.register_experts(layer, numbers, hidden_size, inner, place)

    def activation(self, layer: Any) -> str:
        return str(layer.activation.value)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Tell vLLM's own kernels of experts nothing, because none of them multiplies."""

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Leave the exchange of tokens between ranks to vLLM's runner."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Add the outputs of each token's experts of this rank, `[m, hidden]`; vLLM computes the
        shared experts.
        """
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]
        if layer.apply_router_weight_on_input:  # of one expert for each token
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return self.multiply(layer, x, topk_weights, topk_ids)
