"""An unfused view of a mixture of experts: one linear for each projection of each expert.

`unfuse_experts` gives the model the names of the checkpoint, in which each projection of an expert
has its own matrix. A checkpoint that stores three-dimensional tensors, as transformers does,
presents their slices instead. `UnfusedExperts` computes one expert after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set as AbstractSet
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import Derived, Read
from quantkit.errors import CheckpointError
from quantkit.models.families import EXPERT_CLASSES, LEAVES, ROLES, ROUTERS, ExpertClass
from quantkit.models.modules import add_module, is_free, wrong_shape
from quantkit.models.state_names import Rows, StateNames, rows_of, select

#: Why a matrix that chooses experts stays dense.
ROUTER = "a router"
#: The end of the name of a fused parameter that holds biases.
BIAS = "_bias"
#: A linear of an expert as the checkpoint stores it: path of the experts, number, leaf, `weight` or
#: `bias`.
_PER_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.(weight|bias)")


class Expert(NamedTuple):
    """Name an expert, and the role of a linear in it: path of the unfused experts, number, a value
    of ROLES.
    """

    owner: str
    number: int
    role: str


class Fused(NamedTuple):
    """Describe fused experts: their number, `(n, k)` of each role, and the roles that each
    parameter holds.

    `transposed` has the parameters with transposed matrices, `[k, n]`. With `interleaved`, rows of
    gate and up alternate. `call` is a key of CALLS.
    """

    experts: int
    sizes: dict[str, tuple[int, int]]
    parameters: dict[str, tuple[str, ...]]
    transposed: frozenset[str]
    interleaved: bool
    call: str = "routed"

    def rows(self, parameter: str) -> dict[str, slice]:
        """Return role -> the rows of an expert's matrix, or of its bias, in a parameter."""
        roles = self.parameters[parameter.removesuffix(BIAS)]
        n = self.sizes[roles[0]][0]
        if self.interleaved:
            return {role: slice(at, n * len(roles), len(roles)) for at, role in enumerate(roles)}
        return {role: slice(at * n, (at + 1) * n, 1) for at, role in enumerate(roles)}


class UnfusedExperts(nn.Module):
    """Experts that compute the fused module's output, expert by expert.

    Each of `singles` holds an expert's linears under their `leaves` (role -> name). The caller adds
    them to the model at `home` (path, number of the first), which may be another module's place.
    Everything else of the fused module stays: its activation, limits, norms. Experts in
    `on_all_tokens` also run on tokens that are routed elsewhere, so that calibration sees them.
    Those results are dropped. It is called with the arguments of transformers'
    `use_experts_implementation`.
    """

    _act: Callable[[Tensor], Tensor]

    def __init__(
        self, module: nn.Module, fused: Fused, leaves: dict[str, str], home: tuple[str, int]
    ) -> None:
        super().__init__()
        held = {parameter.partition(".")[0] for parameter in fused.parameters}
        for key, value in vars(module).items():
            if key in ("_modules", "_buffers", "_parameters"):
                vars(self)[key].update(
                    {k: each for k, each in value.items() if k.removesuffix(BIAS) not in held}
                )
            elif key not in vars(self):
                vars(self)[key] = value
        self.count, self.leaves, self.home = fused.experts, leaves, home
        self.on_all_tokens: frozenset[int] = frozenset()
        self._interleaved = fused.interleaved
        self._gate_of: Callable[[Any, Tensor], Tensor] | None = getattr(
            type(module), "_apply_gate", None
        )
        inner = module.get_submodule("mlp") if "mlp" in held else module
        # Past nn.Module, which would register it a second time.
        vars(self)["_act"] = getattr(inner, "act_fn", None) or getattr(inner, "activation_fn", None)
        bias = any(parameter.endswith(BIAS) for parameter in module._parameters)
        dtype = next(module.parameters()).dtype
        singles = [nn.Module() for _ in range(fused.experts)]
        for expert in singles:
            for role, leaf in leaves.items():
                n, k = fused.sizes[role]
                expert.add_module(leaf, nn.Linear(k, n, bias, device="meta", dtype=dtype))
        # torch registers no submodules from a tuple: they have one place.
        self.singles = tuple(singles)

    def paths(self) -> list[str]:
        """Return the path of each expert in the model."""
        path, first = self.home
        return [f"{path}.{first + number}" for number in range(self.count)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, for each token.

        hidden_states `[..., h]`; top_k_index int64 and top_k_weights `[tokens, top_k]`. An index
        past the last expert adds nothing, or the token itself in a model with identity experts.
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
                # Autocast may narrow it.
                slots[slot] = self._expert(number, flat[token]).to(slots.dtype)
        return (out * top_k_weights[..., None]).sum(1).to(flat.dtype).view(hidden_states.shape)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        linear = self._linears(number)
        out: Tensor = linear["down"](self._inner(linear, x))
        if getattr(self, "has_post_expert_norm", False):
            out = self.get_submodule("post_expert_norm")(out)
        return out.to(x.dtype)  # autocast computes products in another dtype

    def _linears(self, number: int) -> dict[str, nn.Module]:
        return {
            role: self.singles[number].get_submodule(leaf) for role, leaf in self.leaves.items()
        }

    def _inner(self, linear: dict[str, nn.Module], x: Tensor) -> Tensor:
        if "gate" not in linear:
            return self._act(linear["up"](x))
        gate: Tensor = linear["gate"](x)
        up: Tensor = linear["up"](x)
        if self._gate_of is None:
            return self._act(gate) * up
        both = (
            torch.stack((gate, up), -1).flatten(-2)
            if self._interleaved
            else torch.cat((gate, up), -1)
        )
        return self._gate_of(self, both)


class SortedExperts(UnfusedExperts):
    """Experts with an input sorted by expert, as in Llama 4: each takes an equal share of the rows.

    Rows of tokens that are routed elsewhere are zero, and stay so.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the output of each row by its expert; hidden_states `[experts * tokens, h]`."""
        parts = hidden_states.view(self.count, -1, hidden_states.shape[-1])
        out = torch.zeros_like(parts)
        for number, part in enumerate(parts):
            routed = part.any(-1)
            if routed.any():
                out[number, routed] = self._expert(number, part[routed]).to(out.dtype)
        return out.view(hidden_states.shape)


class SharedExperts(UnfusedExperts):
    """Experts that take every token, as in Inkling; their gates come with the call."""

    def forward(self, hidden_states: Tensor, gammas: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum of the experts' outputs; hidden_states `[..., h]`, one gamma a token and
        expert.
        """
        flat, parts = hidden_states.reshape(-1, hidden_states.shape[-1]), []
        for number, gamma in enumerate(gammas.reshape(-1, self.count, 1).unbind(1)):
            linear = self._linears(number)
            parts.append(linear["down"](self._inner(linear, flat) * gamma))
        return torch.stack(parts).float().sum(0).to(hidden_states.dtype).view(hidden_states.shape)


class ParallelExperts(UnfusedExperts):
    """One projection of all experts, with an input sorted by expert, as in JetMoE."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:  # type: ignore[override]
        """Return the product of each row by its expert: inputs `[rows, k]`, expert_size rows of
        each.
        """
        parts = []
        for number, part in enumerate(inputs.split(expert_size)):
            linear, end = self._linears(number)["linear"], sum(expert_size[: number + 1])
            all_rows = number in self.on_all_tokens
            parts.append(linear(inputs)[end - len(part) : end] if all_rows else linear(part))
        return torch.cat(parts)


#: How a class of experts is called (`families.ExpertClass`) -> its unfused form.
CALLS: dict[str, type[UnfusedExperts]] = {
    "routed": UnfusedExperts,
    "sorted": SortedExperts,
    "shared": SharedExperts,
    "parallel": ParallelExperts,
}


def unfuse_experts(names: StateNames, src: Checkpoint, *, slices: bool = True) -> list[str]:
    """Replace the experts of a model on the meta device by unfused experts.

    Tensors of `src` that hold all experts are replaced by one tensor an expert
    (`Checkpoint.derive`), unless `slices` is false; their names are returned. CheckpointError if an
    expert or a projection is missing.
    """
    model = names.module
    fused = {
        path: found
        for path, module in model.named_modules()
        if (found := _fused(module)) is not None
    }
    sliced: list[str] = []
    if not fused:
        return sliced
    single, whole = _stored(src, names, fused)
    homes = _homes(names, fused, single, whole)
    converted: dict[str, dict[str, tuple[Rows, ...]]] | None = None
    for path, found in fused.items():
        module = model.get_submodule(path)
        if path in homes:
            home = homes[path]
            leaves = _leaves(src, home, single[home[0]], found)
        elif slices:
            parts = whole.get(path, {})
            if not found.parameters.keys() <= parts.keys():
                converted = _converted(names, src, fused) if converted is None else converted
                parts = {**converted.get(path, {}), **parts}
            prefixes = {
                _prefix(each.name, parameter, path)
                for parameter, rows in parts.items()
                for each in rows
            }
            if not found.parameters.keys() <= parts.keys() or len(prefixes) > 1:
                continue
            (prefix,), leaves = prefixes, {role: LEAVES[role] for role in found.sizes}
            ending = f".0.{next(iter(leaves.values()))}.weight"
            spelled = [state.removesuffix(ending) for state in names.spellings(f"{prefix}{ending}")]
            home = (path if path in spelled else spelled[0], 0)
            if home[0] != path and not is_free(model, home[0]):
                continue
            _slice(src, module, parts, found, prefix, parts.keys() - whole.get(path, {}))
            sliced += dict.fromkeys(each.name for rows in parts.values() for each in rows)
        else:
            continue
        unfused = CALLS[found.call](module, found, leaves, home)
        model.set_submodule(path, unfused)
        for place, expert in zip(unfused.paths(), unfused.singles, strict=True):
            add_module(model, place, expert)
        # transformers would fill the fused parameters.
        holder = model.get_submodule(path.rpartition(".")[0])
        holder._is_hf_initialized = True  # type: ignore[assignment]
    return sliced


def _stored(
    src: Checkpoint, names: StateNames, fused: dict[str, Fused]
) -> tuple[dict[str, dict[tuple[int, str], str]], dict[str, dict[str, tuple[Rows, ...]]]]:
    """Return the stored names of single experts' linears by their path, and the rows of fused
    parameters by theirs.
    """
    single: dict[str, dict[tuple[int, str], str]] = {}
    whole: dict[str, dict[str, tuple[Rows, ...]]] = {}
    for name in src.logical():
        for number, state in enumerate(names.spellings(name)):
            matched = _PER_EXPERT.fullmatch(state)
            if matched and matched[3] in ROLES and (matched[1] in fused or number == 0):
                single.setdefault(matched[1], {})[int(matched[2]), f"{matched[3]}.{matched[4]}"] = (
                    name
                )
            for path in {
                state.rpartition(".")[0],
                state.rpartition(".")[0].rpartition(".")[0],
            } & fused.keys():
                parameter = state.removeprefix(f"{path}.")
                if parameter.removesuffix(BIAS) in fused[path].parameters:
                    last = max(rows.stop for rows in fused[path].rows(parameter).values())
                    whole.setdefault(path, {})[parameter] = (Rows(name, slice(0, last, 1)),)
    return single, whole


def _homes(
    names: StateNames,
    fused: dict[str, Fused],
    single: dict[str, dict[tuple[int, str], str]],
    whole: dict[str, dict[str, tuple[Rows, ...]]],
) -> dict[str, tuple[str, int]]:
    """Return path of fused experts -> path and first number of the experts that are stored one by
    one.

    They may have a path of their own, as in Step 3.7, which may serve two lists of experts, as in
    Ernie 4.5 VL.
    """
    homes = {path: (path, 0) for path in fused if path in single}
    others = {
        home: list(found)
        for home, found in single.items()
        if home not in fused and is_free(names.module, home)
    }
    for home, found in others.items():
        states, pattern = names.place(single[home][found[0]])
        served = [
            path
            for path in (state.rpartition(".")[0] for state in states)
            if pattern is not None and path in fused
        ]
        block = re.match(r".+?\.\d+\.", home)
        if not served and block:
            served = [path for path in fused if path.startswith(block[0]) and path not in whole]
        served = [path for path in served if path not in homes]
        if len({number for number, _ in found}) == sum(fused[path].experts for path in served):
            first = 0
            for path in served:
                homes[path] = (home, first)
                first += fused[path].experts
    return homes


def _converted(
    names: StateNames, src: Checkpoint, fused: dict[str, Fused]
) -> dict[str, dict[str, tuple[Rows, ...]]]:
    """Return path -> parameter -> stored rows, of fused parameters that are rows of
    stored tensors.
    """
    parameters = {
        f"{path}.{name}": (path, name) for path, found in fused.items() for name in found.parameters
    }
    converted: dict[str, dict[str, tuple[Rows, ...]]] = {}
    for merged in names.match(src).merged:
        if not parameters.keys().isdisjoint(merged.states):
            for state, rows in (rows_of(merged, src.true_shape) or {}).items():
                path, parameter = parameters.get(state, ("", ""))
                if not path or parameter in fused[path].transposed:
                    continue
                if None not in [
                    select(rows, asked) for asked in fused[path].rows(parameter).values()
                ]:
                    converted.setdefault(path, {})[parameter] = rows
    return converted


def find_experts(model: nn.Module) -> dict[str, Expert]:
    """Return the path of every linear in unfused experts -> its expert and role."""
    return {
        f"{place}.{leaf}": Expert(path, number, role)
        for path, module in model.named_modules()
        if isinstance(module, UnfusedExperts)
        for number, place in enumerate(module.paths())
        for role, leaf in module.leaves.items()
    }


def find_routers(model: nn.Module) -> set[str]:
    """Return the paths of the routers, the modules with a matrix that choose experts."""
    listed = (nn.ModuleList, nn.ModuleDict)
    owners = {
        path.rpartition(".")[0]
        for path, module in model.named_modules()
        if isinstance(module, UnfusedExperts)
        or (isinstance(module, listed) and path.rpartition(".")[2] == "experts")
        or _fused(module) is not None
    }
    return {
        path
        for owner in owners
        for path, module in model.get_submodule(owner).named_modules(prefix=owner)
        if ROUTERS.search(path.removeprefix(owner))
        and getattr(module._parameters.get("weight"), "ndim", 0) == 2
    }


def _fused(module: nn.Module) -> Fused | None:
    """Describe fused experts that can be computed one by one; None for any other module.

    They follow `use_experts_implementation`, or their class is in `families`.
    """
    form = EXPERT_CLASSES.get(type(module).__name__)
    if form is None and not (hasattr(module, "has_gate") or hasattr(module, "identity_expert")):
        return None
    form = form or ExpertClass()
    ungated = {"up_proj": ("up",), "down_proj": ("down",)}
    parameters = dict(form.parameters if getattr(module, "has_gate", True) else ungated)
    transposed = frozenset(form.transposed)
    if hasattr(module, "is_transposed"):
        transposed = frozenset(parameters if module.is_transposed else ())
    shapes = {name: tuple(found.shape) for name, found in module.named_parameters()}
    experts, sizes = 0, dict[str, tuple[int, int]]()
    for name, roles in parameters.items():
        shape = shapes.get(name, ())
        if form.count is not None and len(shape) == 2:
            count: int = attrgetter(form.count)(module)
            shape = (count, shape[0] // count, shape[1])
        if len(shape) != 3:
            return None
        experts, n, k = (shape[0], shape[2], shape[1]) if name in transposed else shape
        sizes |= dict.fromkeys(roles, (n // len(roles), k))
    return Fused(
        experts,
        sizes,
        parameters,
        transposed,
        not getattr(module, "is_concatenated", True),
        form.call,
    )


def _leaves(
    src: Checkpoint, home: tuple[str, int], found: dict[tuple[int, str], str], fused: Fused
) -> dict[str, str]:
    """Return role -> leaf of experts that are stored one by one; CheckpointError if one
    is missing.
    """
    leaves = {ROLES[leaf.partition(".")[0]]: leaf.partition(".")[0] for _, leaf in found}
    path, first = home
    for role in fused.sizes:
        for number in range(first, first + fused.experts):
            if role not in leaves or (number, f"{leaves[role]}.weight") not in found:
                wanted = f"{path}.{number}.{leaves.get(role, LEAVES[role])}.weight"
                raise CheckpointError(
                    f"{wanted} is not in the checkpoint, which has {len(found)} tensors of these "
                    f"{fused.experts} experts",
                    "download the folder again",
                    subject=src.path,
                )
    return {role: leaves[role] for role in fused.sizes}


def _slice(
    src: Checkpoint,
    module: nn.Module,
    stored: dict[str, tuple[Rows, ...]],
    fused: Fused,
    prefix: str,
    converted: AbstractSet[str],
) -> None:
    """Present parts of tensors of all experts as the weights and biases of single experts below
    `prefix`.

    Parameters in `converted` are rows of the stored tensors; other parameters are whole tensors.
    """
    derived: dict[str, Derived] = {}
    for parameter, parts in stored.items():
        expected, transposed = tuple(module.get_parameter(parameter).shape), set[str]()
        weight, used = (
            parameter.removesuffix(BIAS),
            sum(len(range(r.start, r.stop, r.step)) for _, r in parts),
        )
        for name in dict.fromkeys(each.name for each in parts):
            shape = src.shape(name)
            need = expected
            if parameter in converted and len(shape) == 3:
                need = (expected[0], shape[1] * expected[1] // used, *expected[2:])
            swapped = len(shape) == 3 and shape != need and (shape[0], shape[2], shape[1]) == need
            if shape != need and not swapped:
                raise wrong_shape(src.path, name, shape, need)
            if weight == parameter and (weight in fused.transposed) != swapped:
                transposed.add(name)
        chosen = {role: select(parts, rows) for role, rows in fused.rows(parameter).items()}
        for number in range(fused.experts):
            for role, rows in chosen.items():
                assert rows is not None
                n, k = fused.sizes[role]
                each = (
                    src.shape(rows.name)[0] // fused.experts
                )  # rows of an expert where they follow each other in rows
                whole = number if each == 1 else slice(number * each, (number + 1) * each)
                kind, size = ("weight", (n, k)) if weight == parameter else ("bias", (n,))
                derived[f"{prefix}.{number}.{LEAVES[role]}.{kind}"] = Derived(
                    size,
                    src.dtype(rows.name),
                    (rows.name,),
                    partial(_read_part, rows.name, whole, rows.rows, rows.name in transposed),
                )
    src.derive(derived)


def _prefix(name: str, parameter: str, path: str) -> str:
    """Return the stored name of the experts, given the stored name of one of their parameters."""
    if name.endswith(f".{parameter}"):
        return name.removesuffix(f".{parameter}")
    prefix, leaf = name.removesuffix(".weight").rpartition(".")[0], path.rpartition(".")[2]
    return prefix if prefix.endswith(f".{leaf}") else f"{prefix}.{leaf}"


def _read_part(
    name: str,
    whole: int | slice,
    rows: slice,
    transposed: bool,
    read: Read,
    index: int | slice | None,
) -> Tensor:
    """Read some rows of an expert's matrix or bias, which is the part `whole` of a tensor."""
    expert = read(name, whole)
    found = (expert.T if transposed else expert)[rows].contiguous()
    return found if index is None else found[index]
