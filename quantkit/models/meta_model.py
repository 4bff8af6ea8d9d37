"""How transformers builds a checkpoint's model, and where each stored tensor goes in it.

The model comes without weights: parameters on the meta device. transformers itself says under which names a class was
published (`embed_out` for `lm_head`, or no base model's), so its own rules are asked, as its loader does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.configuration_utils import PretrainedConfig

#: Stored name -> the states that transformers makes of it, and whether it merges or splits tensors to do so.
Places = Callable[[str], tuple[tuple[str, ...], bool]]


class Configured(Protocol):
    """What a model is built from: a checkpoint, or a config.json alone; `path` is for messages."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...


def config_of(src: Configured, trust_remote_code: bool) -> PretrainedConfig:
    """Return the configuration that config.json states, without its quantization.

    CheckpointError for a model type that transformers does not know, and for a config that it cannot read.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    family = str(src.config.get("model_type"))
    remote = trust_remote_code and "auto_map" in src.config
    if not remote and family not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{src.path}: model type {family!r} is unknown to transformers: upgrade it, or check config.json"
        )
    config: PretrainedConfig
    try:
        if remote:
            config = AutoConfig.from_pretrained(src.path, trust_remote_code=True)
        else:
            known = {key: value for key, value in src.config.items() if key not in ("quantization_config", "auto_map")}
            config = CONFIG_MAPPING[family].from_dict(known)
    except Exception as error:  # a config is free to be wrong in any way
        raise unbuildable(src, error) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def skeleton(src: Configured, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model with meta parameters and real buffers (a rotary table is computed, not stored).

    The attention implementation is transformers' own choice: sdpa but for models that it would compute wrongly.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = config_of(src, trust_remote_code)
    config.use_cache = False
    remote = trust_remote_code and "auto_map" in src.config
    try:
        with init_empty_weights(include_buffers=False):
            module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote)
    except Exception as error:  # as above
        raise unbuildable(src, error) from error
    module.eval()
    return module


def unbuildable(src: Configured, error: Exception) -> CheckpointError:
    """Return how it is said that transformers cannot make the model of a folder."""
    return CheckpointError(
        f"{src.path}: transformers cannot build the model of config.json ({reason(error)}): mend it, or upgrade "
        "transformers"
    )


def places(module: PreTrainedModel) -> Places:
    """Return the function from a stored name to the states of `module` as it is now, which may not have them."""
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
    """Return state name -> stored name, the states that are missing, the stored names that the model does not have.

    What transformers would merge or split while loading, such as experts, has no stored name here: it counts as
    missing.
    """
    states, place, old = module.state_dict(), places(module), ignored(module)
    stored: dict[str, str] = {}
    strangers: list[str] = []
    for name in src.logical():
        (state, *_), merged = place(name)
        if not merged and state in states and state not in stored:
            stored[state] = name
        elif not merged and not old(name):
            strangers.append(name)
    for a, b in module.all_tied_weights_keys.items():  # a tied weight may be stored once, under either name
        if (a in stored) != (b in stored):
            stored[a] = stored[b] = stored.get(a) or stored[b]
    return stored, [state for state in states if state not in stored], strangers


def require_complete(
    module: PreTrainedModel, src: Checkpoint, missing: Sequence[str], strangers: Sequence[str]
) -> None:
    """Raise CheckpointError, naming the first, for states without a stored tensor or stored tensors without a state."""
    for names, rule in ((missing, "is missing from the checkpoint"), (strangers, "is not part of the model")):
        if names:
            raise CheckpointError(
                f"{src.path}: {names[0]} {rule} ({len(names)} in all): the folder is not a complete "
                f"{type(module).__name__}, download or quantize it again"
            )


def ignored(module: PreTrainedModel) -> Callable[[str], bool]:
    """Return what says of a stored name that the model's class does without it, as of tables that are now computed."""
    patterns = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)
