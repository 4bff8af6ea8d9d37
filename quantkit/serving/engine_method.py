"""A packed linear inside an engine: its loading parameters, a rank's share packed for a kernel, and
the product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import kernels
from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError
from quantkit.inference.engine_linear import prepare
from quantkit.serving.engine_config import EngineConfig
from quantkit.serving.shards import JoinedWeight, Part

#: Engines' names of the parts of joined queries, keys and values.
QKV = {"q": 0, "k": 1, "v": 2}


class PackedLinearMethod:
    """Loads one linear, which the engine calls `prefix`, and multiplies with it: the first base of
    an engine's method.

    That has `place`, the rank and the number of ranks of a layer, `parameter`, which makes a
    loading parameter, and `expect`, which tells `config.damage` the folder. `QKV_CLASS` is the
    class of joined queries, keys and values.
    """

    QKV_CLASS: Any = ()

    def __init__(self, config: EngineConfig, scheme: Scheme, prefix: str) -> None:
        self.config, self.scheme, self.prefix, self.names = (
            config,
            scheme,
            prefix,
            config.members(prefix),
        )

    def place(self, layer: Any) -> tuple[int, int]:
        raise NotImplementedError

    def parameter(self, dtype: torch.dtype, weight_loader: Callable[..., None]) -> Any:
        raise NotImplementedError

    def expect(self) -> None:
        raise NotImplementedError

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

        LayoutError if the linear cannot be split over the ranks, or no kernel takes it; KernelError
        if none runs here.
        """
        name, totals = self.prefix, self._totals(layer, output_partition_sizes, output_size)
        names = self.names if len(self.names) == len(totals) else [name] * len(totals)
        parts = [Part(*each) for each in zip(names, totals, output_partition_sizes, strict=True)]
        columns = input_size, input_size_per_partition
        weight = JoinedWeight(
            name, self.config.layout, self.scheme, parts, columns, *self.place(layer)
        )
        weight.check()
        device = torch.empty(0).device
        require_kernels(device, self.config.ENGINE)
        self.expect()
        layer.quantkit_weight = weight
        for suffix, dtype in weight.stored.items():
            loader = partial(self._load, weight, suffix, device)
            layer.register_parameter(suffix, self.parameter(dtype, loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters by the packed share; CheckpointError if the folder is
        damaged.
        """
        self.config.damage.require()
        weight = layer.__dict__.pop("quantkit_weight", None)
        if weight is None:
            return
        found = weight.packed()
        for suffix in weight.stored:
            delattr(layer, suffix)
        names = {
            suffix: f"quantkit_{suffix}" for suffix in found.tensors
        }  # vLLM takes a `weight` for a dense one
        for suffix, name in names.items():
            layer.register_parameter(name, nn.Parameter(found.tensors[suffix], requires_grad=False))
        (n, k), label = found.shape, found.scheme.label
        layer.quantkit_layout, layer.quantkit_label, layer.quantkit_names = (
            found.layout,
            label,
            tuple(names.values()),
        )
        layer.quantkit_out = weight.out
        layer.quantkit_handle = prepare(
            found.layout, label, n, k, weight.out, found.tensors, layer.params_dtype
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `x [..., k] @ weight.T + bias` by the layer's kernel, `[..., out]`."""
        tensors = [getattr(layer, name) for name in layer.quantkit_names]
        product: Tensor = torch.ops.quantkit.engine_linear(
            x, tensors, bias, layer.quantkit_handle, layer.quantkit_out
        )
        return product

    def _load(
        self,
        weight: JoinedWeight,
        suffix: str,
        device: torch.device,
        _: Any,
        tensor: Tensor,
        shard: Any = None,
    ) -> None:
        """Take one tensor of the folder; `shard` is the engine's name for the part, or parts, that
        it has.
        """
        every = range(len(weight.parts))
        which = (
            every
            if shard is None
            else shard
            if isinstance(shard, tuple)
            else (QKV.get(shard, shard),)
        )
        self.config.damage.begin()
        self.config.check_stored(weight.named(which), suffix, tensor)
        with self.config.damage.blamed():
            # An engine's loaders may use the memory of a tensor again.
            weight.add(which, suffix, tensor.to(device, copy=True))

    def _totals(self, layer: Any, sizes: Sequence[int], output_size: int) -> list[int]:
        """Give the rows of each part in the folder; `sizes` are those of a rank."""
        if isinstance(layer, self.QKV_CLASS):
            if len(sizes) != len(QKV):
                raise ValueError(
                    f"{self.prefix}: quantkit's plug-in does not know the parts of a "
                    f"{type(layer).__name__}"
                )
            heads, values = layer.total_num_kv_heads, getattr(layer, "v_head_size", layer.head_size)
            return [
                layer.total_num_heads * layer.head_size,
                heads * layer.head_size,
                heads * values,
            ]
        if len(sizes) == 1:
            return [output_size]
        return list(layer.output_sizes)


@functools.cache
def require_kernels(device: torch.device, engine: str) -> None:
    """Raise KernelError if a GPU cannot run quantkit's kernels, or CuPy is missing."""
    if device.type == "cuda" and (problem := kernels.unusable(device)) is not None:
        raise KernelError(f"quantkit's kernels cannot run inside {engine} here", problem)
