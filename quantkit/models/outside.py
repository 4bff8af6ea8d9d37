"""Stored tensors that the model of transformers does not have, such as draft layers and heads of
other tasks.

Engines read some of them. They are copied if the model's class or config.json declares them, and
refused otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.formats import FLOATS
from quantkit.errors import CheckpointError
from quantkit.layouts.schemes import ORIGINAL
from quantkit.models.experts import UnfusedExperts
from quantkit.models.families import (
    COMPUTED,
    DRAFT_COUNTS,
    DRAFT_PARTS,
    DRAFT_WORDS,
    HEAD_CLASSES,
    HEAD_KEYS,
    HEAD_PARTS,
    LAYER,
    LAYER_START,
)
from quantkit.models.state_names import StateNames, head_state
from quantkit.names import JsonView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: `id2label` of a model without labels of its own, as transformers wrote it until version 5.
DEFAULT_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}
#: Names of PEFT's tensors and of the weights that they change.
_ADAPTER = re.compile(r"\.(base_layer|original_module|modules_to_save|lora_\w+|ia3_l)(\.|$)")
#: The most further names in an error.
SHOWN = 3
UNEXPLAINED = "no quantization_config explains it"
_MERGED = "save what model.merge_and_unload() returns"
_DECLARED = 'declare it in config.json, as "attention_bias": true does for biases of attention'
_WITHOUT = "save the model without them, by transformers' from_pretrained and save_pretrained"


class Outside(NamedTuple):
    """Hold the dense tensors that the model does not have: their names, and the modules of matrices
    among them.

    A tensor of several experts counts as one module.
    """

    names: list[str]
    modules: list[str]

    @classmethod
    def of(cls, src: Checkpoint, names: Iterable[str]) -> Outside:
        """Sort the stored `names` without a place in the model; tables that are computed today do
        not count.
        """
        packed = set(src.modules())
        dense = [
            name
            for name in names
            if name.rpartition(".")[0] not in packed
            and 1 <= len(src.shape(name)) <= 3
            and src.dtype(name) in FLOATS
            and not _is_computed(src, name)
        ]
        axes = ((name, len(src.shape(name))) for name in dense)
        modules = dict.fromkeys(
            name.rpartition(".")[0] if name.endswith(".weight") or count == 3 else name
            for name, count in axes
            if count > 1
        )
        return cls(dense, list(modules))

    def notices(self) -> list[str]:
        """Say that the tensors are copied."""
        names, modules = self
        count = f"{len(names)} in all, {len(modules)} of them matrices, which stay dense"
        return [f"{names[0]}: not part of the model, copied unchanged ({count})"] if names else []

    def counted(self) -> dict[str, int]:
        """Count the modules for the report; empty if there are none."""
        return {"outside": len(self.modules)} if self.modules else {}

    def dense_entries(self, src: Checkpoint) -> list[str]:
        """List what a config must state as dense: the modules and patterns.

        vLLM numbers some draft layers after the last layer, although the checkpoint names them
        differently.
        """
        depth = _stated_depth(src.config)
        deeper = {match[0]: int(match[1]) for match in map(LAYER_START.match, self.names) if match}
        deeper = {start: number for start, number in deeper.items() if number >= depth}
        if not deeper and not any(map(DRAFT_PARTS.search, self.modules)):
            return self.modules
        past = {*deeper.values()} or ({int(depth)} if depth < math.inf else set())
        own = [name for name in src.logical() if not name.startswith(tuple(deeper))]
        patterns = [rf".*\.layers\.{number}\..*" for number in sorted(past)]
        return [
            *self.modules,
            *(f"re:{each}" for each in patterns if not any(re.match(each, name) for name in own)),
        ]


def drafts_by_name(src: Checkpoint) -> list[str]:
    """List the tensors of draft layers in a folder whose model cannot be built: by their names and
    config.json.
    """
    depth = _stated_depth(src.config)
    return [name for name in src.names() if DRAFT_PARTS.search(name) or _layer(name) >= depth]


def undeclared(states: StateNames, src: Checkpoint, names: Iterable[str]) -> list[str]:
    """List the stored names that neither the model's class nor config.json declares."""
    module, stated = states.module, src.config
    known = [*_entries(stated), *_entries(module.config.get_text_config().to_dict())]
    declared = [*map(re.compile, module._keys_to_ignore_on_load_unexpected or ())]
    if any(value for key, value in known if DRAFT_WORDS.search(key)):
        declared.append(DRAFT_PARTS)
    if HEAD_CLASSES.search(str(stated.get("architectures"))) or any(
        HEAD_KEYS.search(key) and value and value != DEFAULT_LABELS
        for key, value in _entries(stated)
    ):
        declared.append(HEAD_PARTS)
    drafts = max((_count(value) for key, value in known if DRAFT_COUNTS.search(key)), default=0)
    depth = _depth(module)
    tables = {path for path, _ in module.named_buffers()}  # those that transformers computes
    # Path -> number of real experts, where a model has identity experts after them.
    identities = {
        path: found.count
        for path, found in module.named_modules()
        if isinstance(found, UnfusedExperts) and hasattr(found, "identity_expert")
    }
    return [
        name
        for name in names
        if not any(pattern.search(name) for pattern in declared)
        and not _is_computed(src, name)
        and states.state_of(name) not in tables
        and not depth <= _layer(name) < depth + drafts
        and not (identities and _is_identity_expert(states.state_of(name), identities))
    ]


def require_complete(
    states: StateNames, src: Checkpoint, missing: Sequence[str], outside: Sequence[str]
) -> None:
    """Raise CheckpointError for `missing` states, and for tensors `outside` of the model that
    nothing declares.
    """
    module = states.module
    kind = type(module).__name__
    if missing:
        asked = [name for name in src.absent if not set(states.place(name)[0]).isdisjoint(missing)]
        if asked:
            rule = _shown(asked, "is in the index, and its file does not hold it")
            raise CheckpointError(rule, "download it again", subject=src.path)
        rule = (
            f"{_shown(missing, 'is missing from the checkpoint')}: the folder is not a complete "
            f"{kind}"
        )
        ways = _for_missing(module, src, missing)
        if inner := next((name for name in outside if name.endswith(f".{missing[0]}")), None):
            rule = f"{inner}, as stored, is {missing[0]} in {kind}"
            ways = ["save the inner model, without its wrapper"]
        lost = {state.rpartition(".")[0] for state in missing if state.endswith(".weight")}
        if code := next(
            (n for n in outside if states.state_of(n).rpartition(".")[0] in lost), None
        ):
            rule = f"{code} is stored in place of a weight, and {UNEXPLAINED}"
            ways = ["restore it in config.json", ORIGINAL]
        if adapter := next(filter(_ADAPTER.search, outside), None):
            rule = f"{adapter} belongs to an adapter of PEFT that is not merged into the weights"
            ways = [_MERGED]
        raise CheckpointError(rule, *ways, subject=src.home)
    if stray := undeclared(states, src, outside):
        rule = (
            f"{_shown(stray, 'is not part of the model')}: neither {kind} nor config.json declares "
            "it"
        )
        raise CheckpointError(rule, *_for_stray(states, stray), subject=src.path)


def unexplained(src: Checkpoint) -> str | None:
    """Name a matrix of codes in a folder whose config.json states no way to decode them; None if
    there is none. Only headers are read.
    """
    if src.layout is not None or src.low_bit:
        return None
    codes = (torch.int8, torch.uint8, torch.int32)
    stored = (name for name in src.names() if src.dtype(name) in codes)
    code = next((name for name in stored if len(src.shape(name)) == 2), None)
    return code and f"{code} is stored in place of a weight, and {UNEXPLAINED}"


def _is_computed(src: Checkpoint, name: str) -> bool:
    """Return True for a table that models compute today, such as rotary positions or the mask of
    GPT-2, a bias of four axes.
    """
    return bool(COMPUTED.search(name)) or (name.endswith(".bias") and len(src.shape(name)) == 4)


def _is_identity_expert(state: str, counts: Mapping[str, int]) -> bool:
    """Return True for a weight of an identity expert, which no model reads."""
    found = re.fullmatch(r"(.+)\.(\d+)\.\w+\.weight", state)
    return found is not None and int(found[2]) >= counts.get(found[1], math.inf)


def class_without_head(module: PreTrainedModel, src: Checkpoint) -> str:
    """Return the class that config.json names if it writes no text, as `module` does; else ""."""
    stated = src.config.get("architectures")
    named = str(stated[0]) if isinstance(stated, list) and stated else ""
    is_base = named == type(module.base_model).__name__ != type(module).__name__
    return named if is_base or HEAD_CLASSES.search(named) else ""


def _for_missing(module: PreTrainedModel, src: Checkpoint, missing: Sequence[str]) -> list[str]:
    if named := class_without_head(module, src):
        return [f"config.json names {named}, use the model that writes text"]
    flag = 'set "tie_word_embeddings": true in config.json if the embeddings are the head'
    mend = flag if list(missing) == [head_state(module)] else "mend config.json"
    again = "save the whole model again where it was made"
    return [again] if src.home != src.path else [mend, again]


def _for_stray(states: StateNames, stray: Sequence[str]) -> list[str]:
    """List the ways out for undeclared tensors, by their names. A block or layer that has one more,
    such as a bias or a norm, computes with it: without it the model would write other text.
    """
    if any(map(_ADAPTER.search, stray)):
        return [_MERGED]
    module = states.module
    layers = {path for path, found in module.named_modules() if found._parameters}
    read = (name for name in stray if not name.endswith("_scale"))  # of the cache of an engine
    owners = (states.state_of(name).rpartition(".")[0] for name in read)
    if any(owner in layers or 0 <= _layer(f"{owner}.") < _depth(module) for owner in owners):
        return [_DECLARED, "use the model that it was before a conversion"]
    depth, deepest = _depth(module), max(map(_layer, stray))
    past, ways = depth <= deepest, []
    if past or any(map(DRAFT_PARTS.search, stray)):
        keys = [
            key
            for key, _ in _entries(module.config.get_text_config().to_dict())
            if DRAFT_COUNTS.search(key)
        ]
        count = deepest - depth + 1 if past else 1
        key = (*keys, "num_nextn_predict_layers")[0]
        ways.append(f'state draft layers in config.json ("{key}": {count:.0f})')
    if past:
        ways.append(f'count them as layers of the model ("num_hidden_layers": {deepest + 1:.0f})')
    if any(map(HEAD_PARTS.search, stray)):
        ways.append('declare the head in config.json ("num_labels": 1)')
    return [*ways, _WITHOUT]


def _depth(module: PreTrainedModel) -> float:
    found = getattr(module.config.get_text_config(), "num_hidden_layers", math.inf)
    return found if isinstance(found, int) else math.inf


def _stated_depth(config: JsonView) -> float:
    found = [
        value
        for key, value in _entries(config.get("text_config") or config)
        if key == "num_hidden_layers"
    ]
    return found[0] if found and type(found[0]) is int else math.inf


def _layer(name: str) -> float:
    """Return the number of the layer in a stored name; -1 if it has none."""
    found = LAYER.search(name)
    return -1 if found is None else int(found[1])


def _entries(stated: JsonView) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a configuration, and of those inside it."""
    for key, value in stated.items():
        yield str(key), value
        if isinstance(value, Mapping):
            yield from _entries(value)


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else value if type(value) is int else 0


def _shown(names: Sequence[str], what: str) -> str:
    """Describe the fault of the first name, and list further names."""
    first, *others = names
    also = f", also {', '.join(others[:SHOWN])}" if others else ""
    return f"{first} {what} ({len(names)} in all{also}{', ...' if others[SHOWN:] else ''})"
