"""Which stored tensor goes where in a model that transformers builds.

transformers knows under which names a class was published, for example `embed_out` for `lm_head`, or names without the
base model's prefix, and which stored tensors it merges or splits. Its own rules are used, as its loader uses them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Stored name -> the states that transformers makes of it, and whether it merges or splits tensors to do so.
Places = Callable[[str], tuple[tuple[str, ...], bool]]


class Merged(NamedTuple):
    """Hold states that transformers computes from stored tensors, such as one convolution from three.

    `convert` takes the tensors of `names`, in their order, and returns them by state.
    """

    states: tuple[str, ...]
    names: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], dict[str, Tensor]]


class Match(NamedTuple):
    """Hold where each state of a model comes from.

    `stored`: state -> stored name. `missing` states have no source. `unexpected` stored names have no state.
    """

    stored: dict[str, str]
    merged: list[Merged]
    missing: list[str]
    unexpected: list[str]


class _Rules:
    """Hold transformers' rules for the names of a model."""

    def __init__(self, module: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(module)
        self.module = module
        self.states = module.state_dict()
        self.renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self.converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.of_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}

    def state_of(self, name: str, converters: Sequence[Any]) -> tuple[str, str | None]:
        """Return the state of a stored name, and the pattern of the converter that makes it."""
        from transformers.core_model_loading import rename_source_key

        state, pattern = rename_source_key(
            name, self.renamings, list(converters), self.module.base_model_prefix, self.states
        )
        if pattern is not None and state not in self.states:  # experts that are unfused here
            return self.state_of(name, [])
        return (state if state in self.states or name not in self.states else name), pattern


def places(module: PreTrainedModel) -> Places:
    """Return a function from a stored name to its states in `module`; the module need not have these states."""
    rules = _Rules(module)

    def place(name: str) -> tuple[tuple[str, ...], bool]:
        state, pattern = rules.state_of(name, rules.converters)
        if pattern is None:
            return (state,), False
        first, *others = rules.of_pattern[pattern].target_patterns
        return (state, *(state.replace(first, other) for other in others)), True

    return place


def spellings(module: PreTrainedModel) -> Callable[[str], Iterator[str]]:
    """Return a function from a stored name to the states that it may have in `module`, before any merging."""
    rules, prefix = _Rules(module), module.base_model_prefix

    def of(name: str) -> Iterator[str]:
        state, _ = rules.state_of(name, [])
        yield state
        if prefix:
            yield f"{prefix}.{state}"
            yield state.removeprefix(f"{prefix}.")

    return of


def match(module: PreTrainedModel, src: Checkpoint) -> Match:
    """Match the states of a model with the tensors of a checkpoint."""
    rules, is_ignored = _Rules(module), ignored(module)
    states = rules.states
    stored: dict[str, str] = {}
    unexpected: list[str] = []
    sources: dict[str, dict[str, list[str]]] = {}
    for name in src.logical():
        state, pattern = rules.state_of(name, rules.converters)
        if pattern is not None:
            sources.setdefault(state, {}).setdefault(pattern, []).append(name)
        elif state in states and state not in stored:
            stored[state] = name
        elif not is_ignored(name):
            unexpected.append(name)
    merged = [_merged(rules, state, names) for state, names in sources.items()]
    for a, b in module.all_tied_weights_keys.items():  # a tied weight may be stored once, under either name
        if (a in stored) != (b in stored):
            stored[a] = stored[b] = stored.get(a) or stored[b]
    found = {*stored, *(state for each in merged for state in each.states)}
    return Match(stored, merged, [state for state in states if state not in found], unexpected)


def _merged(rules: _Rules, state: str, by_pattern: dict[str, list[str]]) -> Merged:
    from transformers.core_model_loading import dot_natural_key

    converter = rules.of_pattern[next(iter(by_pattern))]
    names = [(pattern, name) for pattern, found in by_pattern.items() for name in sorted(found, key=dot_natural_key)]
    first, *others = converter.target_patterns

    def convert(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        fresh = copy.deepcopy(converter)
        for (pattern, name), tensor in zip(names, tensors, strict=True):
            loaded: Any = tensor  # its annotation knows only tensors that are still being loaded
            fresh.add_tensor(state, name, pattern, loaded)
        made = fresh.convert(state, model=rules.module, config=rules.module.config)
        return {each: value[0] if isinstance(value, list) else value for each, value in made.items()}

    targets = (state, *(state.replace(first, other) for other in others))
    return Merged(targets, tuple(name for _, name in names), convert)


def require_complete(
    module: PreTrainedModel, src: Checkpoint, missing: Sequence[str], unexpected: Sequence[str]
) -> None:
    """Raise CheckpointError, naming the first, for states without a stored tensor or stored tensors without a state."""
    for names, rule in ((missing, "is missing from the checkpoint"), (unexpected, "is not part of the model")):
        if names:
            raise CheckpointError(
                f"{src.path}: {names[0]} {rule} ({len(names)} in all): the folder is not a complete "
                f"{type(module).__name__}, download or quantize it again"
            )


def ignored(module: PreTrainedModel) -> Callable[[str], bool]:
    """Return a test for stored names that the model's class ignores, such as tables that are now computed."""
    patterns = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)
