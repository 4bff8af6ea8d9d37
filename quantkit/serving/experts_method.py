"""The packed experts of a layer inside an engine: loading parameters, a rank's experts or their
shares, the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.core.scheme import Scheme
from quantkit.inference.engine_experts import prepare_experts
from quantkit.serving.engine_config import EngineConfig
from quantkit.serving.engine_method import require_kernels
from quantkit.serving.shards import JoinedWeight, Part, StackedWeight

#: Engines' names of an expert's linears but the gate, "w1". Parameters of gate and up begin with
#: the first of PREFIXES.
DOWN, UP = "w2", "w3"
PREFIXES = ("w13_", "w2_")


class ExpertSizes(NamedTuple):
    """The features of a layer of experts: of tokens, between both products, and between them on a
    rank.
    """

    hidden: int
    inner: int
    inner_of_rank: int


class PackedExpertsMethod:
    """Loads the experts that the engine calls `prefix`, and multiplies with them: the first base of
    an engine's method.

    `names` are an expert's linears in the folder: gate and up, or only up, and down.
    """

    def __init__(
        self, config: EngineConfig, scheme: Scheme, prefix: str, names: Sequence[str]
    ) -> None:
        self.config, self.scheme, self.prefix, self.names = config, scheme, prefix, names

    def register(
        self,
        layer: Any,
        numbers: Sequence[int],
        sizes: ExpertSizes,
        place: tuple[int, int],
        parameter: Callable[[torch.dtype, Callable[..., bool]], Any],
    ) -> None:
        """Register a parameter for each suffix of the layout, for the experts of this rank, which
        `numbers` names.

        `place` is the rank, and the number of ranks that share each expert. LayoutError if experts
        cannot be split over them, or no kernel takes them; KernelError if none runs here.
        """
        *firsts, down = self.names
        hidden, inner, of_rank = sizes

        def weight(parts: list[Part], columns: tuple[int, int]) -> JoinedWeight:
            return JoinedWeight(
                parts[0].name,
                self.config.layout,
                self.scheme,
                parts,
                columns,
                *place,
                is_expert=True,
            )

        def each(
            leaves: Sequence[str], size: tuple[int, int], columns: tuple[int, int]
        ) -> StackedWeight:
            named = [
                [Part(f"{self.prefix}.{number}.{leaf}", *size) for leaf in leaves]
                for number in numbers
            ]
            return StackedWeight([weight(parts, columns) for parts in named])

        both = (
            each(firsts, (inner, of_rank), (hidden, hidden)),
            each([down], (hidden, hidden), (inner, of_rank)),
        )
        device = torch.empty(0).device
        require_kernels(device, self.config.ENGINE)
        layer.quantkit_experts = both
        local = {number: index for index, number in enumerate(numbers)}
        for start, stacked in zip(PREFIXES, both, strict=True):
            stacked.experts[0].check()
            for suffix, dtype in stacked.experts[0].stored.items():
                loader = partial(self._load, both, local, suffix, device)
                layer.register_parameter(start + suffix, parameter(dtype, loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters by the stacks of packed experts; CheckpointError if the
        folder is damaged.
        """
        self.config.damage.require()
        both = layer.__dict__.pop("quantkit_experts", None)
        if both is None:
            return
        found = [stacked.packed() for stacked in both]
        layer.quantkit_names = []
        for start, stacked, weight in zip(PREFIXES, both, found, strict=True):
            for suffix in stacked.experts[0].stored:
                delattr(layer, start + suffix)
            names = [f"quantkit_{start}{suffix}" for suffix in weight.tensors]
            for name, tensor in zip(names, weight.tensors.values(), strict=True):
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            layer.quantkit_names.append(tuple(names))
        outs = both[0].experts[0].out, both[1].experts[0].out
        layer.quantkit_layout = "/".join(dict.fromkeys(weight.layout for weight in found))
        layer.quantkit_out = outs[1]
        layer.quantkit_handle = prepare_experts(
            found[0], found[1], outs, self.activation(layer), layer.params_dtype
        )
        device = layer.get_parameter(layer.quantkit_names[0][0]).device
        layer.quantkit_kernel = "grouped" if device.type == "cuda" else "decoded"

    def activation(self, layer: Any) -> str:
        raise NotImplementedError

    def multiply(self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Add the outputs of the experts `ids` of each token, times their weights: `[m, hidden]`;
        -1 is no expert.
        """
        first, second = ([getattr(layer, name) for name in names] for names in layer.quantkit_names)
        product: Tensor = torch.ops.quantkit.engine_experts(
            x, first, second, weights, ids, layer.quantkit_handle, layer.quantkit_out
        )
        return product

    def _load(
        self,
        both: tuple[StackedWeight, StackedWeight],
        local: dict[int, int],
        suffix: str,
        device: torch.device,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        """Take one tensor of the folder, if its expert is this rank's. The arguments have the names
        that vLLM uses.
        """
        self.config.damage.begin()
        expert = local.get(expert_id)
        if expert is None:
            return False
        stacked, part = both[shard_id == DOWN], int(shard_id == UP)
        if expert == 0:  # a class that reorders tensors does so with all experts
            self.config.check_stored(stacked.experts[0].parts[part].name, suffix, loaded_weight)
        with self.config.damage.blamed():
            # An engine's loaders may use the memory of a tensor again.
            stacked.add(expert, part, suffix, loaded_weight.to(device, copy=True))
        return True
