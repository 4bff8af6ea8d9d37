"""Which stored tensor goes where in a model that transformers builds.

transformers knows under which names a class was published, for example `embed_out` for `lm_head`, or names without the
base model's prefix. Its own renaming rules are used, as its loader uses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Stored name -> the states that transformers makes of it, and whether it merges or splits tensors to do so.
Places = Callable[[str], tuple[tuple[str, ...], bool]]


def places(module: PreTrainedModel) -> Places:
    """Return a function from a stored name to its states in `module`; the module need not have these states."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(module)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    of_pattern = {pattern: c.target_patterns for c in converters for pattern in c.source_patterns}
    states = module.state_dict()

    def place(name: str) -> tuple[tuple[str, ...], bool]:
        state, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, states)
        if pattern is None:
            return (state if state in states or name not in states else name,), False
        first, *others = of_pattern[pattern]
        return (state, *(state.replace(first, other) for other in others)), True

    return place


def match(module: PreTrainedModel, src: Checkpoint) -> tuple[dict[str, str], list[str], list[str]]:
    """Return state name -> stored name, the missing states, and the stored names unknown to the model.

    Tensors that transformers would merge or split while loading, such as experts, count as missing.
    """
    states, place, is_ignored = module.state_dict(), places(module), ignored(module)
    stored: dict[str, str] = {}
    unexpected: list[str] = []
    for name in src.logical():
        (state, *_), merged = place(name)
        if not merged and state in states and state not in stored:
            stored[state] = name
        elif not merged and not is_ignored(name):
            unexpected.append(name)
    for a, b in module.all_tied_weights_keys.items():  # a tied weight may be stored once, under either name
        if (a in stored) != (b in stored):
            stored[a] = stored[b] = stored.get(a) or stored[b]
    return stored, [state for state in states if state not in stored], unexpected


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
