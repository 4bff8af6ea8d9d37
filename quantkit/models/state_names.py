"""Which stored tensor goes where in a model that transformers builds.

transformers has the published names of a class, such as `embed_out` for `lm_head`, and the stored
tensors that it merges or splits. Its own rules are used, as its loader uses them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.modules import path_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Merged(NamedTuple):
    """Hold states that transformers computes from stored tensors, such as one convolution from
    three.

    `convert` takes the tensors of `names`, in their order, and returns them by state. `patterns`
    identify transformers' rule.
    """

    states: tuple[str, ...]
    names: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], dict[str, Tensor]]
    patterns: tuple[str, ...]


class Rows(NamedTuple):
    """Name some rows of a stored tensor; of a tensor of all experts, the same rows of each."""

    name: str
    rows: slice


class Match(NamedTuple):
    """Hold where each state of a model comes from.

    `stored`: state -> stored name. `outside`: stored names that no state comes from; `strays`:
    names among them whose state the model lacks.
    """

    stored: dict[str, str]
    merged: list[Merged]
    outside: list[str]
    strays: list[str]

    def missing(self, module: nn.Module) -> list[str]:
        """List the states of the model that no stored tensor is the source of."""
        found = {*self.stored, *(state for each in self.merged for state in each.states)}
        return [state for state in module.state_dict() if state not in found]


class StateNames:
    """Tell the states that stored tensors become, by transformers' rules for a model.

    The rules are collected once. After modules were replaced, `refresh` reads the states again.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(module)
        self.module = module
        self.refresh()
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._of_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}

    def refresh(self) -> None:
        """Read the names of the model's states again."""
        self.states = dict.fromkeys(self.module.state_dict(), True)

    def state_of(self, name: str) -> str:
        """Return the state of a stored name if nothing is merged or split."""
        return self._renamed(name, [])[0]

    def place(self, name: str) -> tuple[tuple[str, ...], str | None]:
        """Return the states that come from a stored tensor, and the pattern of the rule that merges
        or splits it; None without a rule. The model need not have these states.
        """
        state, pattern = self._renamed(name, self._converters)
        if pattern is None:
            return (state,), None
        first, *others = self._of_pattern[pattern].target_patterns
        return (state, *(state.replace(first, other) for other in others)), pattern

    def spellings(self, name: str) -> Iterator[str]:
        """Yield the states that a stored name may have, before any merging."""
        state, prefix = self.state_of(name), self.module.base_model_prefix
        yield state
        if prefix:
            yield f"{prefix}.{state}"
            yield state.removeprefix(f"{prefix}.")

    def match(self, src: Checkpoint) -> Match:
        """Match the states that the model has now with the tensors of a checkpoint."""
        self.refresh()
        found = Match({}, [], [], [])
        sources: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for name in src.logical():
            states, pattern = self.place(name)
            if not all(state in self.states for state in states):
                found.outside.append(name)
                found.strays.append(name)
            elif pattern is not None:
                sources.setdefault(states, {}).setdefault(pattern, []).append(name)
            elif states[0] in found.stored:
                found.outside.append(name)
            else:
                found.stored[states[0]] = name
        found.merged.extend(self._merged(states, names) for states, names in sources.items())
        # A tied weight may be stored once, under either name.
        for a, b in self.module.all_tied_weights_keys.items():
            if (a in found.stored) != (b in found.stored):
                found.stored[a] = found.stored[b] = found.stored.get(a) or found.stored[b]
        return found

    def _renamed(self, name: str, converters: Sequence[Any]) -> tuple[str, str | None]:
        """Return the state of a stored name, and the pattern of the converter that makes it."""
        from transformers.core_model_loading import rename_source_key

        state, pattern = rename_source_key(
            name, self._renamings, list(converters), self.module.base_model_prefix, self.states
        )
        if pattern is not None and state not in self.states:  # experts that are unfused here
            return self._renamed(name, [])
        return (state if state in self.states or name not in self.states else name), pattern

    def _merged(self, states: tuple[str, ...], by_pattern: dict[str, list[str]]) -> Merged:
        from transformers.core_model_loading import dot_natural_key

        converter = self._of_pattern[next(iter(by_pattern))]
        names = [
            (pattern, name)
            for pattern, found in by_pattern.items()
            for name in sorted(found, key=dot_natural_key)
        ]

        def convert(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            fresh = copy.deepcopy(converter)
            for (pattern, name), tensor in zip(names, tensors, strict=True):
                loaded: Any = tensor  # its annotation knows only tensors that are being loaded
                fresh.add_tensor(states[0], name, pattern, loaded)
            made = fresh.convert(states[0], model=self.module, config=self.module.config)
            return {
                state: value[0] if isinstance(value, list) else value
                for state, value in made.items()
            }

        return Merged(
            states,
            tuple(name for _, name in names),
            convert,
            patterns=tuple(converter.source_patterns),
        )


def rows_of(
    merged: Merged, shape: Callable[[str], tuple[int, ...]]
) -> dict[str, tuple[Rows, ...]] | None:
    """Return the stored rows that make up each state, in order; None if states are not slices of
    rows.

    It is seen on an example: tensors of two columns that hold their own positions. `shape` gives
    stored shapes: `[n]`, `[n, k]` or `[experts, n, k]`. Every stored row is in one state, once.
    """
    shapes = [shape(name) for name in merged.names]
    axes, experts = len(shapes[0]), shapes[0][0] if len(shapes[0]) == 3 else 1
    if len({(len(each), *each[:-2]) for each in shapes}) > 1 or not 1 <= axes <= 3:
        return None
    heights = [each[1] if axes == 3 else each[0] for each in shapes]
    positions = torch.arange(experts * sum(heights) * 2).view(experts, sum(heights), 2)
    try:
        made = merged.convert([_form(part, axes) for part in positions.split(heights, 1)])
    except Exception:  # it needs more than the example has
        return None
    found: dict[str, tuple[Rows, ...]] = {}
    seen: list[Tensor] = []
    for state in merged.states:
        position = made.get(state)
        if (
            not isinstance(position, Tensor)
            or not position.numel()
            or (position.dtype, position.ndim) != (positions.dtype, axes)
        ):
            return None  # the rule computes with the weights
        first = (
            position if axes == 1 else position.reshape(-1, *position.shape[-2:])[0, :, 0]
        ) // 2
        inside = 0 <= int(first.min()) <= int(first.max()) < sum(heights)
        slices = _slices(first, merged.names, heights) if inside else None
        if slices is None or not torch.equal(position, _form(positions[:, first], axes)):
            return None
        found[state] = slices
        seen.append(first)
    return found if torch.equal(torch.cat(seen).sort().values, torch.arange(sum(heights))) else None


def _form(positions: Tensor, axes: int) -> Tensor:
    """Return positions `[experts, n, 2]` as a vector, a matrix or unchanged."""
    return (positions[0, :, 0], positions[0], positions)[axes - 1]


def _slices(rows: Tensor, names: Sequence[str], heights: Sequence[int]) -> tuple[Rows, ...] | None:
    """Return row numbers, int64 `[n]`, of tensors as slices that follow each other; None if a slice
    runs backwards.
    """
    ends = torch.tensor(heights).cumsum(0)
    sources, counts = torch.bucketize(rows, ends, right=True).unique_consecutive(return_counts=True)
    found = []
    for source, part in zip(sources.tolist(), rows.split(counts.tolist()), strict=True):
        numbers = part - (ends[source] - heights[source])
        while len(numbers):
            step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
            line = numbers[0] + step * torch.arange(len(numbers))
            length = int((numbers == line).long().cumprod(0).sum())
            if step < 1:
                return None
            start = int(numbers[0])
            found.append(Rows(names[source], slice(start, start + step * length, step)))
            numbers = numbers[length:]
    return tuple(found)


def select(parts: Sequence[Rows], rows: slice) -> Rows | None:
    """Return some rows of consecutive parts; None if they are no slice of one tensor."""
    numbers = [
        (name, number) for name, part in parts for number in range(part.start, part.stop, part.step)
    ][rows]
    (name, start), step = numbers[0], numbers[1][1] - numbers[0][1] if len(numbers) > 1 else 1
    stop = start + step * len(numbers)
    whole = step > 0 and numbers == [(name, number) for number in range(start, stop, step)]
    return Rows(name, slice(start, stop, step)) if whole else None


def head_state(module: PreTrainedModel) -> str | None:
    """Return the state that is the weight of the output head, None if the model has no head."""
    path = path_of(module, module.get_output_embeddings())
    return f"{path}.weight" if path else None
