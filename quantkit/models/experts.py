"""An unfused view of a mixture of experts: one linear for each projection of each expert.

transformers keeps the experts of a layer in three-dimensional parameters, so that a few large products compute them.
On the hub, and in every quantized checkpoint that engines read, each projection of an expert has a matrix of its own.
`unfuse_experts` gives the model the names of the checkpoint. A checkpoint that stores three-dimensional tensors
presents their slices instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.checkpoint.derived import Compute, Derived, Read
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The leaf of an expert's linear on the hub -> its role.
ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
#: The names of expert linears whose source is a three-dimensional tensor.
LEAVES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
BIAS = "_bias"

#: Why a matrix that chooses experts stays dense.
ROUTER = "a router"
#: The names of routers, below the module that holds the experts.
_ROUTER = re.compile(r"\.(\w*router\w*|gate|wg)(\.|$)")
#: A linear of an expert as the checkpoint stores it: path of the experts, number, leaf, `weight` or `bias`.
_PER_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.(weight|bias)")


class Expert(NamedTuple):
    """Name an expert, and the role of a linear in it: path of the unfused experts, number, `gate`, `up` or `down`."""

    owner: str
    number: int
    role: str


class _Fused(NamedTuple):
    """Describe fused experts: their number, `(n, k)` of each role, and the roles that each parameter holds.

    `turned` has the parameters whose matrices are `[k, n]`. With `interleaved`, rows of gate and up take turns.
    """

    experts: int
    sizes: dict[str, tuple[int, int]]
    parameters: dict[str, tuple[str, ...]]
    turned: frozenset[str]
    interleaved: bool


class UnfusedExperts(nn.Module):
    """Experts that compute what the fused module computes, one expert after the other.

    Each child `0`, `1`, ... holds an expert's linears under their `leaves` (role -> name). Everything else of the fused
    module stays: its activation, limits, norms. Experts in `on_all_tokens` are also run on tokens that are routed
    elsewhere, whose result is dropped: calibration watches their input. The arguments of the call are those of
    transformers' `use_experts_implementation`.
    """

    def __init__(self, module: nn.Module, fused: _Fused, leaves: dict[str, str]) -> None:
        super().__init__()
        for key, value in vars(module).items():
            if key not in vars(self):
                self.__dict__[key] = value
        held = {parameter.partition(".")[0] for parameter in fused.parameters}
        self._modules.update({key: child for key, child in module._modules.items() if key not in held})
        self._buffers.update(module._buffers)
        self._parameters.update({k: v for k, v in module._parameters.items() if k.removesuffix(BIAS) not in held})
        self.count, self.leaves = fused.experts, leaves
        self.on_all_tokens: frozenset[int] = frozenset()
        self._interleaved = fused.interleaved
        self._gate_of: Callable[[Any, Tensor], Tensor] | None = getattr(type(module), "_apply_gate", None)
        inner = module.get_submodule("mlp") if "mlp" in held else module
        self._act: Callable[[Tensor], Tensor]
        # Past nn.Module, which would register an activation a second time.
        self.__dict__["_act"] = getattr(inner, "act_fn", None) or getattr(inner, "activation_fn", None)
        bias = any(parameter.endswith(BIAS) for parameter in module._parameters)
        dtype = next(module.parameters()).dtype
        for number in range(fused.experts):
            expert = nn.Module()
            for role, leaf in leaves.items():
                n, k = fused.sizes[role]
                expert.add_module(leaf, nn.Linear(k, n, bias, device="meta", dtype=dtype))
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, for each token.

        hidden_states `[..., h]`; top_k_index int64 and top_k_weights `[tokens, top_k]`. An index past the last expert
        adds nothing, or the token itself in a model with identity experts.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = flat.new_zeros(*top_k_index.shape, flat.shape[-1])
        slots = out.view(-1, flat.shape[-1])
        order = top_k_index.flatten().argsort(stable=True)
        chosen = torch.bincount(top_k_index.flatten(), minlength=self.count + 1).tolist()
        start = 0
        for number, tokens in enumerate(chosen):
            slot = order[start : start + tokens]
            token = slot // top_k_index.shape[1]
            start += tokens
            if number >= self.count:
                if tokens and hasattr(self, "identity_expert"):
                    slots[slot] = flat[token]
            elif number in self.on_all_tokens:
                slots[slot] = self._expert(number, flat)[token]
            elif tokens:
                slots[slot] = self._expert(number, flat[token])
        return (out * top_k_weights[..., None]).sum(1).to(flat.dtype).view(hidden_states.shape)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        expert = self.get_submodule(str(number))
        linear = {role: expert.get_submodule(leaf) for role, leaf in self.leaves.items()}
        if "gate" in linear:  # noqa: SIM108 - two calls of linears, in the order of their names
            inner = self._activated(linear["gate"](x), linear["up"](x))
        else:
            inner = self._act(linear["up"](x))
        out: Tensor = linear["down"](inner)
        return self.get_submodule("post_expert_norm")(out) if getattr(self, "has_post_expert_norm", False) else out

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._gate_of is None:
            return self._act(gate) * up
        both = torch.stack((gate, up), -1).flatten(-2) if self._interleaved else torch.cat((gate, up), -1)
        return self._gate_of(self, both)


class _SortedExperts(UnfusedExperts):
    """Experts whose input is sorted by expert, as in Llama 4: each takes an equal share of the rows.

    Rows of tokens that are routed elsewhere are zero, and stay so.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the output of each row by its expert; hidden_states `[experts * tokens, h]`."""
        parts = hidden_states.view(self.count, -1, hidden_states.shape[-1])
        out = torch.zeros_like(parts)
        for number, part in enumerate(parts):
            routed = part.any(-1)
            if routed.any():
                out[number, routed] = self._expert(number, part[routed])
        return out.view(hidden_states.shape)


def unfuse_experts(
    model: PreTrainedModel, src: Checkpoint, spell: Callable[[str], Iterator[str]], *, slices: bool = True
) -> list[str]:
    """Replace the experts of a model on the meta device by unfused ones.

    `spell` gives the states that a stored name may have in the model. Tensors of `src` that hold all experts are
    replaced by one tensor an expert (`Checkpoint.derive`), unless `slices` is false; their names are returned.
    CheckpointError if an expert or a projection is missing.
    """
    fused = {path: found for path, module in model.named_modules() if (found := _fused(module)) is not None}
    sliced: list[str] = []
    if not fused:
        return sliced
    single: dict[str, dict[tuple[int, str], str]] = {}
    whole: dict[str, dict[str, str]] = {}
    for name in src.logical():
        for state in spell(name):
            matched = _PER_EXPERT.fullmatch(state)
            if matched and matched[1] in fused and matched[3] in ROLES:
                single.setdefault(matched[1], {})[int(matched[2]), f"{matched[3]}.{matched[4]}"] = name
            for path in {state.rpartition(".")[0], state.rpartition(".")[0].rpartition(".")[0]} & fused.keys():
                parameter = state.removeprefix(f"{path}.")
                if parameter.removesuffix(BIAS) in fused[path].parameters:
                    whole.setdefault(path, {})[parameter] = name
    for path, found in fused.items():
        module = model.get_submodule(path)
        if path in single:
            leaves = _leaves(src, path, single[path], found)
        elif slices and found.parameters.keys() <= whole.get(path, {}).keys():
            leaves = {role: LEAVES[role] for role in found.sizes}
            _slice(src, module, whole[path], found, path)
            sliced += whole[path].values()
        else:
            continue
        owner, _, leaf = path.rpartition(".")
        kind = _SortedExperts if _is_sorted(module) else UnfusedExperts
        holder = model.get_submodule(owner)
        setattr(holder, leaf, kind(module, found, leaves))
        holder._is_hf_initialized = True  # type: ignore[assignment] # transformers would fill the fused parameters
    return sliced


def find_experts(model: nn.Module) -> dict[str, Expert]:
    """Return the path of every linear in unfused experts -> its expert and role."""
    return {
        f"{path}.{number}.{leaf}": Expert(path, number, role)
        for path, module in model.named_modules()
        if isinstance(module, UnfusedExperts)
        for number in range(module.count)
        for role, leaf in module.leaves.items()
    }


def find_routers(model: nn.Module) -> set[str]:
    """Return the paths of the modules with a matrix that choose experts, beside the experts."""
    found: set[str] = set()
    for path, module in model.named_modules():
        listed = isinstance(module, nn.ModuleList) and path.rpartition(".")[2] == "experts"
        if isinstance(module, UnfusedExperts) or listed or _fused(module) is not None:
            owner = path.rpartition(".")[0]
            for inner, other in model.get_submodule(owner).named_modules(prefix=owner):
                weight = other._parameters.get("weight")
                if weight is not None and weight.ndim == 2 and _ROUTER.search(inner.removeprefix(owner)):
                    found.add(inner)
    return found


def _fused(module: nn.Module) -> _Fused | None:
    """Describe fused experts that can be computed one by one; None for any other module.

    They follow `use_experts_implementation`, or are those of LongCat, Llama 4 or DBRX, which have parameters alike.
    """
    if type(module).__name__ == "DbrxExperts":
        inner: Any = module.get_submodule("mlp")
        count, i, h = inner.moe_num_experts, inner.ffn_hidden_size, inner.hidden_size
        sizes = {"gate": (i, h), "up": (i, h), "down": (h, i)}
        parameters: dict[str, tuple[str, ...]] = {"mlp.w1": ("gate",), "mlp.v1": ("up",), "mlp.w2": ("down",)}
        return _Fused(count, sizes, parameters, frozenset({"mlp.w2"}), False)
    gated = bool(getattr(module, "has_gate", True))
    known = hasattr(module, "has_gate") or hasattr(module, "identity_expert") or _is_sorted(module)
    first = "gate_up_proj" if gated else "up_proj"
    up, down = module._parameters.get(first), module._parameters.get("down_proj")
    if not known or down is None or up is None or down.ndim != 3 or up.ndim != 3:
        return None
    roles: tuple[str, ...] = ("gate", "up") if gated else ("up",)
    parameters = {first: roles, "down_proj": ("down",)}
    turned = bool(getattr(module, "is_transposed", _is_sorted(module)))
    count, h, i = down.transpose(1, 2).shape if turned else down.shape
    sizes = {**{role: (i, h) for role in roles}, "down": (h, i)}
    interleaved = not getattr(module, "is_concatenated", True)
    return _Fused(count, sizes, parameters, frozenset(parameters if turned else ()), interleaved)


def _is_sorted(module: nn.Module) -> bool:
    return type(module).__name__ == "Llama4TextExperts"


def _leaves(src: Checkpoint, path: str, found: dict[tuple[int, str], str], fused: _Fused) -> dict[str, str]:
    """Return role -> leaf of experts that are stored one by one; CheckpointError if one is missing."""
    leaves = {ROLES[leaf.partition(".")[0]]: leaf.partition(".")[0] for _, leaf in found}
    for role in fused.sizes:
        for number in range(fused.experts):
            if role not in leaves or (number, f"{leaves[role]}.weight") not in found:
                wanted = f"{path}.{number}.{leaves.get(role, LEAVES[role])}.weight"
                raise CheckpointError(
                    f"{src.path}: {wanted} is not in the checkpoint, which has {len(found)} tensors of these "
                    f"{fused.experts} experts: download the folder again"
                )
    return {role: leaves[role] for role in fused.sizes}


def _slice(src: Checkpoint, module: nn.Module, stored: dict[str, str], fused: _Fused, path: str) -> None:
    """Present parts of tensors of all experts as the weights and biases of single experts."""
    derived: dict[str, Derived] = {}
    for parameter, name in stored.items():
        shape, expected = src.shape(name), tuple(module.get_parameter(parameter).shape)
        swapped = len(shape) == 3 and shape != expected and (shape[0], shape[2], shape[1]) == expected
        if shape != expected and not swapped:
            raise CheckpointError(f"{name}: is {list(shape)} in the checkpoint, config.json asks for {list(expected)}")
        weight = parameter.removesuffix(BIAS)
        turned = weight == parameter and (weight in fused.turned) != swapped
        each = shape[0] // fused.experts  # rows of an expert where the first dimension is not the expert's
        roles = fused.parameters[weight]
        for number in range(fused.experts):
            whole = number if each == 1 else slice(number * each, (number + 1) * each)
            for at, role in enumerate(roles):
                n, k = fused.sizes[role]
                rows = slice(at, None, len(roles)) if fused.interleaved else slice(at * n, (at + 1) * n)
                single = f"{_prefix(name, parameter, path)}.{number}.{LEAVES[role]}"
                if weight == parameter:
                    found = Derived((n, k), src.dtype(name), (name,), _part(name, whole, rows, turned))
                    derived[f"{single}.weight"] = found
                else:
                    derived[f"{single}.bias"] = Derived((n,), src.dtype(name), (name,), _part(name, whole, rows, False))
    src.derive(derived)


def _prefix(name: str, parameter: str, path: str) -> str:
    """Return the stored name of the experts, given the stored name of one of their parameters."""
    if name.endswith(f".{parameter}"):
        return name.removesuffix(f".{parameter}")
    prefix, leaf = name.removesuffix(".weight").rpartition(".")[0], path.rpartition(".")[2]
    return prefix if prefix.endswith(f".{leaf}") else f"{prefix}.{leaf}"


def _part(name: str, whole: int | slice, rows: slice, turned: bool) -> Compute:
    """Return a function that reads some rows of an expert's matrix or bias, which is the part `whole` of a tensor."""

    def compute(read: Read, index: int | slice | None) -> Tensor:
        expert = read(name, whole)
        found = (expert.T if turned else expert)[rows].contiguous()
        return found if index is None else found[index]

    return compute
