"""Modules that compute a mixture of experts one expert after the other, each projection of an
expert a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BIAS = "_bias"


class Fused(NamedTuple):
    """Describe fused experts: their number, `(n, k)` of each role, and the roles that each
    parameter holds.

    `turned` has the parameters with transposed matrices, `[k, n]`. With `interleaved`, rows of gate
    and up alternate. `call` is a key of CALLS.
    """

    experts: int
    sizes: dict[str, tuple[int, int]]
    parameters: dict[str, tuple[str, ...]]
    turned: frozenset[str]
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

    def __init__(
        self, module: nn.Module, fused: Fused, leaves: dict[str, str], home: tuple[str, int]
    ) -> None:
        super().__init__()
        for key, value in vars(module).items():
            if key not in vars(self):
                self.__dict__[key] = value
        held = {parameter.partition(".")[0] for parameter in fused.parameters}
        self._modules.update(
            {key: child for key, child in module._modules.items() if key not in held}
        )
        self._buffers.update(module._buffers)
        self._parameters.update(
            {k: v for k, v in module._parameters.items() if k.removesuffix(BIAS) not in held}
        )
        self.count, self.leaves, self.home = fused.experts, leaves, home
        self.on_all_tokens: frozenset[int] = frozenset()
        self._interleaved = fused.interleaved
        self._gate_of: Callable[[Any, Tensor], Tensor] | None = getattr(
            type(module), "_apply_gate", None
        )
        inner = module.get_submodule("mlp") if "mlp" in held else module
        self._act: Callable[[Tensor], Tensor]
        # Past nn.Module, which would register an activation a second time.
        self.__dict__["_act"] = getattr(inner, "act_fn", None) or getattr(
            inner, "activation_fn", None
        )
        bias = any(parameter.endswith(BIAS) for parameter in module._parameters)
        dtype = next(module.parameters()).dtype
        singles = [nn.Module() for _ in range(fused.experts)]
        for expert in singles:
            for role, leaf in leaves.items():
                n, k = fused.sizes[role]
                expert.add_module(leaf, nn.Linear(k, n, bias, device="meta", dtype=dtype))
        self.singles = tuple(
            singles
        )  # torch registers no submodules from a tuple: they have one place

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
                slots[slot] = self._expert(number, flat[token]).to(
                    slots.dtype
                )  # autocast may narrow it
        return (out * top_k_weights[..., None]).sum(1).to(flat.dtype).view(hidden_states.shape)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        linear = {
            role: self.singles[number].get_submodule(leaf) for role, leaf in self.leaves.items()
        }
        if "gate" in linear:
            inner = self._activated(linear["gate"](x), linear["up"](x))
        else:
            inner = self._act(linear["up"](x))
        out: Tensor = linear["down"](inner)
        out = (
            self.get_submodule("post_expert_norm")(out)
            if getattr(self, "has_post_expert_norm", False)
            else out
        )
        return out.to(x.dtype)  # autocast computes products in another dtype

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
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
        for expert, gamma in zip(
            self.singles, gammas.reshape(-1, self.count).unbind(-1), strict=True
        ):
            linear = {role: expert.get_submodule(leaf) for role, leaf in self.leaves.items()}
            gated = self._activated(linear["gate"](flat), linear["up"](flat))
            parts.append(linear["down"](gated * gamma[:, None]))
        return torch.stack(parts).float().sum(0).to(hidden_states.dtype).view(hidden_states.shape)


class ParallelExperts(UnfusedExperts):
    """One projection of all experts, with an input sorted by expert, as in JetMoE."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:  # type: ignore[override]
        """Return the product of each row by its expert: inputs `[rows, k]`, expert_size rows of
        each.
        """
        parts = []
        for number, part in enumerate(inputs.split(expert_size)):
            linear, end = (
                self.singles[number].get_submodule(self.leaves["linear"]),
                sum(expert_size[: number + 1]),
            )
            all_rows = number in self.on_all_tokens
            parts.append(linear(inputs)[end - len(part) : end] if all_rows else linear(part))
        return torch.cat(parts)


#: How a class of experts is called (`families.ExpertClass`) -> its unfused form.
CALLS: dict[str, type[UnfusedExperts]] = {
    **{"routed": UnfusedExperts, "sorted": SortedExperts},
    **{"shared": SharedExperts, "parallel": ParallelExperts},
}
