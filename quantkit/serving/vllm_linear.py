"""A packed linear inside vLLM: its loading parameters, a rank's share packed for a kernel, and the product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_world_group
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear
from vllm.model_executor.parameter import BasevLLMParameter

from quantkit import kernels
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError, LayoutError, QuantkitError, Setting, Words
from quantkit.inference.engine_linear import prepare
from quantkit.serving.shards import JoinedWeight, Part

#: vLLM's names of the parts of joined queries, keys and values.
QKV = {"q": 0, "k": 1, "v": 2}


class QuantkitParameter(BasevLLMParameter):  # type: ignore[misc]
    """One suffix of a packed linear while it is loaded. It is empty: `weight_loader` hands each tensor on."""

    def __new__(cls, name: str, dtype: torch.dtype, weight_loader: Callable[..., None]) -> Any:
        return super().__new__(cls, torch.empty(0, dtype=dtype))

    def __init__(self, name: str, dtype: torch.dtype, weight_loader: Callable[..., None]) -> None:
        super().__init__(self.data, weight_loader)
        self.quantkit_name = name

    @property
    def output_dim(self) -> int:
        """Refuse the question that some of vLLM's classes ask to reorder rows: packed words have no such dimension."""
        raise reordered(self.quantkit_name)


class QuantkitLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Loads one linear of vLLM, whose parts have `names` and one scheme, and multiplies with it."""

    def __init__(self, config: Any, scheme: Scheme, names: Sequence[str]) -> None:
        self.config, self.scheme, self.names = config, scheme, names

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for each suffix of the layout.

        LayoutError if the linear cannot be split over the ranks, or no kernel takes it; KernelError if none runs here.
        """
        name, totals = layer.prefix, _totals(layer, output_partition_sizes, output_size)
        names = self.names if len(self.names) == len(totals) else [name] * len(totals)
        parts = [Part(*each) for each in zip(names, totals, output_partition_sizes, strict=True)]
        columns = input_size, input_size_per_partition
        weight = JoinedWeight(
            name,
            self.config.layout,
            self.scheme,
            parts,
            columns,
            layer.tp_rank,
            layer.tp_size,
        )
        weight.check()
        device = torch.empty(0).device
        require_kernels(device)
        engine = get_current_vllm_config()
        model, cache = engine.model_config, engine.load_config.download_dir
        is_first = get_world_group().local_rank == 0  # one process of each machine hashes the files
        self.config.damage.expect(model.model, model.revision, cache, is_first)
        layer.quantkit_weight = weight
        for suffix, dtype in weight.stored.items():
            loader = partial(self._load, weight, suffix, device)
            layer.register_parameter(suffix, QuantkitParameter(name, dtype, loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters by the packed share; CheckpointError if the folder is damaged."""
        self.config.damage.require()
        weight = layer.__dict__.pop("quantkit_weight", None)
        if weight is None:
            return
        found = weight.packed()
        for suffix in weight.stored:
            delattr(layer, suffix)
        names = {suffix: f"quantkit_{suffix}" for suffix in found.tensors}  # vLLM takes a `weight` for a dense one
        for suffix, name in names.items():
            layer.register_parameter(name, nn.Parameter(found.tensors[suffix], requires_grad=False))
        (n, k), label = found.shape, found.scheme.label
        layer.quantkit_layout, layer.quantkit_label, layer.quantkit_names = found.layout, label, tuple(names.values())
        layer.quantkit_out = weight.out
        layer.quantkit_handle = prepare(found.layout, label, n, k, weight.out, found.tensors, layer.params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `x [..., k] @ weight.T + bias` by the layer's kernel, `[..., out]`."""
        tensors = [getattr(layer, name) for name in layer.quantkit_names]
        product: Tensor = torch.ops.quantkit.engine_linear(x, tensors, bias, layer.quantkit_handle, layer.quantkit_out)
        return product

    def _load(
        self, weight: JoinedWeight, suffix: str, device: torch.device, _: Any, tensor: Tensor, shard: Any = None
    ) -> None:
        """Take one tensor of the folder; `shard` is vLLM's name for the part, or parts, that it has."""
        self.config.damage.begin()
        every = range(len(weight.parts))
        which = every if shard is None else shard if isinstance(shard, tuple) else (QKV.get(shard, shard),)
        name = weight.named(which)
        if not self.config.damage.is_stored((f"{each}.{suffix}" for each in self.config.in_folder(name)), tensor):
            raise reordered(name)
        try:
            # vLLM's loaders may use the memory of a tensor again.
            weight.add(which, suffix, tensor.to(device, copy=True))
        except QuantkitError:
            self.config.damage.require()  # the better reason
            raise


def reordered(name: str) -> LayoutError:
    """Say that vLLM changes a weight before it hands it on, which would silently give a wrong one."""
    return LayoutError(
        "vLLM's class of this model reorders it while loading, which packed words do not survive",
        Words("leave it dense with", Setting("skip", f".*{name.rpartition('.')[2]}")),
        subject=name,
    )


@functools.cache
def require_kernels(device: torch.device) -> None:
    """Raise KernelError if a GPU cannot run quantkit's kernels, or CuPy is missing."""
    if device.type == "cuda" and (problem := kernels.unusable(device)) is not None:
        raise KernelError("quantkit's kernels cannot run inside vLLM here", problem)


def _totals(layer: Any, sizes: Sequence[int], output_size: int) -> list[int]:
    """Give the rows of each part in the folder; `sizes` are those of a rank."""
    if isinstance(layer, QKVParallelLinear):
        if len(sizes) != len(QKV):
            raise ValueError(f"{layer.prefix}: quantkit's plug-in does not know the parts of a {type(layer).__name__}")
        heads, values = layer.total_num_kv_heads, getattr(layer, "v_head_size", layer.head_size)
        return [layer.total_num_heads * layer.head_size, heads * layer.head_size, heads * values]
    if len(sizes) == 1:
        return [output_size]
    return list(layer.output_sizes)
