"""Packed weights inside an engine: their loading parameters, a rank's share packed for a kernel,
and the product; of linears and of the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import kernels
from quantkit.core.quantized_tensor import QuantizedTensor, Scheme
from quantkit.errors import KernelError, LayoutError
from quantkit.inference.products import KernelWeight, pack_for_kernel, prepare, prepare_experts
from quantkit.serving.engine_config import EngineConfig
from quantkit.serving.shards import JoinedWeight, Part, StackedWeight

#: Engines' names of the parts of joined queries, keys and values.
QKV = {"q": 0, "k": 1, "v": 2}
#: Engines' names of an expert's linears but the gate, "w1". Parameters of gate and up begin with
#: the first of PREFIXES.
DOWN, UP = "w2", "w3"
PREFIXES = ("w13_", "w2_")


class PackedMethod:
    """Loads the packed weights that the engine calls `prefix`: the base of the methods below.

    The engine's class has `parameter`, which makes a loading parameter, and `expect`, which tells
    `config.damage` the folder.
    """

    parameter: Callable[[torch.dtype, Callable[..., Any]], Any]
    expect: Callable[[], None]

    def __init__(
        self, config: EngineConfig, scheme: Scheme, prefix: str, names: Sequence[str]
    ) -> None:
        self.config, self.scheme, self.prefix, self.names = config, scheme, prefix, names

    def _register(
        self,
        layer: Any,
        stored: dict[str, torch.dtype],
        load: Callable[..., Any],
        device: torch.device,
        start: str = "",
    ) -> None:
        """Register a loading parameter for each suffix of the layout. `load` gets suffix, device
        and the engine's arguments.
        """
        for suffix, dtype in stored.items():
            layer.register_parameter(
                start + suffix, self.parameter(dtype, partial(load, suffix, device))
            )

    def _take(
        self,
        weight: JoinedWeight | StackedWeight,
        which: Sequence[int],
        suffix: str,
        tensor: Tensor,
        device: torch.device,
    ) -> None:
        """Give one tensor of the folder to a weight; errors as `add` there, or of a file that was
        damaged.
        """
        with self.config.damage.blamed():
            # An engine's loaders may use the memory of a tensor again.
            weight.add(which, suffix, tensor.to(device, copy=True))

    def _replace(
        self, layer: Any, stored: Iterable[str], found: KernelWeight, start: str = ""
    ) -> tuple[str, ...]:
        """Replace the loading parameters by packed tensors, and return their names."""
        for suffix in stored:
            delattr(layer, start + suffix)
        # vLLM takes a `weight` for a dense one.
        named = {f"quantkit_{start}{suffix}": tensor for suffix, tensor in found.tensors.items()}
        for name, tensor in named.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return tuple(named)


class PackedLinearMethod(PackedMethod):
    """Loads one linear and multiplies with it: the first base of an engine's method.

    That has `place`, the rank and the number of ranks of a layer, too. `QKV_CLASS` is the class of
    joined queries, keys and values.
    """

    QKV_CLASS: Any = ()
    place: Callable[[Any], tuple[int, int]]

    def __init__(self, config: EngineConfig, scheme: Scheme, prefix: str) -> None:
        super().__init__(config, scheme, prefix, config.members(prefix))

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
        totals = self._totals(layer, output_partition_sizes, output_size)
        names = self.names if len(self.names) == len(totals) else [self.prefix] * len(totals)
        parts = [Part(*each) for each in zip(names, totals, output_partition_sizes, strict=True)]
        columns, place = (input_size, input_size_per_partition), self.place(layer)
        weight = JoinedWeight(self.prefix, self.config.layout, self.scheme, parts, columns, *place)
        weight.check()
        self._await(layer, weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters by the packed share; CheckpointError if the folder is
        damaged.
        """
        self.config.damage.require()
        weight = layer.__dict__.pop("quantkit_weight", None)
        if weight is not None:
            found = weight.packed()
            for suffix in weight.stored:
                delattr(layer, suffix)
            self._keep(layer, found, weight.out)

    def _await(self, layer: Any, weight: JoinedWeight) -> None:
        """Register a parameter for each suffix of a weight; KernelError if no kernel runs here."""
        device = torch.empty(0).device
        require_kernels(device, self.config.ENGINE)
        self.expect()
        layer.quantkit_weight = weight
        self._register(layer, weight.stored, partial(self._load, weight), device)

    def _keep(self, layer: Any, found: Any, out: int) -> None:
        """Let a layer multiply by a packed weight."""
        layer.quantkit_layout, layer.quantkit_label = found.layout, found.scheme.label
        layer.quantkit_names, layer.quantkit_out = self._replace(layer, (), found), out
        layer.quantkit_handle = prepare(found, out, layer.params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `x [..., k] @ weight.T + bias` by the layer's kernel, `[..., out]`."""
        tensors = [getattr(layer, name) for name in layer.quantkit_names]
        product: Tensor = torch.ops.quantkit.multiply(
            x,
            tensors,
            [] if bias is None else [bias],
            layer.quantkit_handle,
            layer.quantkit_out,
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
        which: Sequence[int] = shard if isinstance(shard, tuple) else (QKV.get(shard, shard),)
        if shard is None:
            which = range(len(weight.parts))
        self.config.damage.begin()
        self.config.check_stored(weight.named(which), suffix, tensor)
        self._take(weight, which, suffix, tensor, device)

    def _totals(self, layer: Any, sizes: Sequence[int], output_size: int) -> list[int]:
        """Return the rows of each part in the folder; `sizes` are a rank's rows."""
        if isinstance(layer, self.QKV_CLASS):
            if len(sizes) != len(QKV):
                raise ValueError(
                    f"{self.prefix}: quantkit's plug-in does not know the parts of a "
                    f"{type(layer).__name__}"
                )
            keys, size = layer.total_num_kv_heads, layer.head_size
            values = keys * getattr(layer, "v_head_size", size)
            return [layer.total_num_heads * size, keys * size, values]
        return [output_size] if len(sizes) == 1 else list(layer.output_sizes)


class PackedVocabularyMethod(PackedLinearMethod):
    """Loads token embeddings, an output head, or embeddings to which a head is tied: the first base
    of an engine's method.

    A rank has the rows of its tokens, and rows of zeros up to the engine's number. Embeddings stay
    in the layout of the folder, heads are packed for a kernel, and tied ones are held as both. If
    no kernel multiplies a head, `use_decoded` gets its decoded weight.
    """

    use_decoded: Callable[[Any, Tensor], None]

    def __init__(self, config: EngineConfig, name: str, scheme: Scheme, is_head: bool) -> None:
        super().__init__(config, scheme, name)
        self.is_head, self.multiplies = is_head, is_head or config.is_head_tied

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
        """Register a parameter for each suffix of the layout; none for a head that is tied.

        KernelError if no kernel runs here.
        """
        if self.is_head and self.config.is_head_tied:
            return
        tokens = layer.shard_indices
        own = range(tokens.org_vocab_start_index, tokens.org_vocab_end_index)
        part = Part(self.prefix, layer.org_vocab_size, sum(output_partition_sizes), own)
        self._await(
            layer,
            JoinedWeight(
                self.prefix,
                self.config.layout,
                self.scheme,
                [part],
                columns=(input_size, input_size),
                is_table=True,
            ),
        )

    def _keep(self, layer: Any, found: QuantizedTensor, out: int) -> None:
        """Let a layer gather the rows of a weight, or multiply by it, or both."""
        layout = self.config.layout
        if self.multiplies:
            try:
                super()._keep(layer, pack_for_kernel(found, layout.NAME), out)
            except LayoutError:
                return self.use_decoded(
                    layer, found.dequantize(layer.params_dtype)[:, : layer.embedding_dim]
                )
        if self.is_head:
            return
        rows = KernelWeight(layout.NAME, found.scheme, found.shape, layout.pack(found))
        layer.quantkit_rows = self._replace(layer, (), rows, "rows_")
        layer.quantkit_table = [*rows.tensors], rows.layout, rows.scheme.label, rows.shape[1]
        layer.quantkit_kernel = "gathered"
        layer.quantkit_layout = getattr(layer, "quantkit_layout", rows.layout)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Look up the rows of token numbers `[...]` among those of the rank: `[..., k]`."""
        tensors = [getattr(layer, name) for name in layer.quantkit_rows]
        found: Tensor = torch.ops.quantkit.gather(
            input_, tensors, *layer.quantkit_table, layer.params_dtype
        )
        return found[..., : layer.embedding_dim]


class PackedExpertsMethod(PackedMethod):
    """Loads the experts of a layer and multiplies with them: the first base of an engine's method.

    `names` are an expert's linears in the folder: gate and up, or only up, and down.
    """

    activation: Callable[[Any], str]

    def register_experts(
        self,
        layer: Any,
        numbers: Sequence[int],
        hidden: int,
        inner: tuple[int, int],
        place: tuple[int, int],
    ) -> None:
        """Register a parameter for each suffix of the layout, for the experts of this rank, which
        `numbers` names.

        `hidden` are the features of a token, `inner` those between both products: all, and those of
        a rank. `place` is the rank, and the number of ranks that share each expert. LayoutError if
        experts cannot be split over them, or no kernel takes them; KernelError if none runs here.
        """
        *firsts, down = self.names
        both = []
        for leaves, size, columns in (
            (firsts, inner, (hidden, hidden)),
            ([down], (hidden, hidden), inner),
        ):
            experts = [
                [Part(f"{self.prefix}.{number}.{leaf}", *size) for leaf in leaves]
                for number in numbers
            ]
            layout, scheme = self.config.layout, self.scheme
            both.append(
                StackedWeight(
                    [
                        JoinedWeight(parts[0].name, layout, scheme, parts, columns, *place, True)
                        for parts in experts
                    ]
                )
            )
        device = torch.empty(0).device
        require_kernels(device, self.config.ENGINE)
        self.expect()
        layer.quantkit_experts = both
        load = partial(self._load, both, {number: index for index, number in enumerate(numbers)})
        for start, stacked in zip(PREFIXES, both, strict=True):
            stacked.experts[0].check()
            self._register(layer, stacked.experts[0].stored, load, device, start)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loading parameters by the stacks of packed experts; CheckpointError if the
        folder is damaged.
        """
        self.config.damage.require()
        both = layer.__dict__.pop("quantkit_experts", None)
        if both is None:
            return
        found = [stacked.packed() for stacked in both]
        layer.quantkit_names = [
            self._replace(layer, stacked.experts[0].stored, weight, start)
            for start, stacked, weight in zip(PREFIXES, both, found, strict=True)
        ]
        outs = both[0].experts[0].out, both[1].experts[0].out
        layer.quantkit_layout = "/".join(dict.fromkeys(weight.layout for weight in found))
        layer.quantkit_out = outs[1]
        layer.quantkit_handle = prepare_experts(
            found[0], found[1], outs, self.activation(layer), layer.params_dtype
        )
        device = layer.get_parameter(layer.quantkit_names[0][0]).device
        layer.quantkit_kernel = "grouped" if device.type == "cuda" else "decoded"

    def multiply(self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Add the outputs of the experts `ids` of each token, times their weights: `[m, hidden]`;
        -1 is no expert.
        """
        tensors = [getattr(layer, name) for names in layer.quantkit_names for name in names]
        product: Tensor = torch.ops.quantkit.multiply(
            x, tensors, [weights, ids], layer.quantkit_handle, layer.quantkit_out
        )
        return product

    def _load(
        self,
        both: Sequence[StackedWeight],
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
        stacked, which = both[shard_id == DOWN], (expert, int(shard_id == UP))
        if expert == 0:  # a class that reorders tensors does so with all experts
            self.config.check_stored(stacked.named(which), suffix, loaded_weight)
        self._take(stacked, which, suffix, loaded_weight, device)
        return True


@cache
def require_kernels(device: torch.device, engine: str) -> None:
    """Raise KernelError if a GPU cannot run quantkit's kernels, or CuPy is missing."""
    if device.type == "cuda" and (problem := kernels.unusable(device)) is not None:
        raise KernelError(f"quantkit's kernels cannot run inside {engine} here", problem)
