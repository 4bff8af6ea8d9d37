"""A checkpoint's model as transformers builds it, without weights: its parameters are on the meta
device.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from quantkit.core.threads import building
from quantkit.errors import CheckpointError, is_out_of_memory, reason
from quantkit.io.json_files import decode_floats
from quantkit.models.experts import find_routers
from quantkit.models.families import AUTO_CLASSES, COMPUTES, family_of
from quantkit.models.linears import is_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.configuration_utils import PretrainedConfig

#: Whether a thread builds a model whose parameters are on the meta device.
_THREAD = threading.local()


class Configured(Protocol):
    """Describe a model to build: a checkpoint, or only a config.json; `path` is for messages."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...


def config_of(src: Configured, trust_remote_code: bool) -> PretrainedConfig:
    """Return the configuration in config.json, without its quantization.

    CheckpointError for a model type that transformers does not know, or a config that it cannot
    read.
    """
    with building():  # threads that import a name of transformers at once may not find it
        from transformers import CONFIG_MAPPING, AutoConfig

    family = str(src.config.get("model_type"))
    remote = trust_remote_code and "auto_map" in src.config
    if not remote and family not in CONFIG_MAPPING:
        raise CheckpointError(
            f"model type {family!r} is unknown to transformers",
            "upgrade it",
            "check config.json",
            subject=src.path,
        )
    config: PretrainedConfig
    try:
        if remote:
            config = AutoConfig.from_pretrained(src.path, trust_remote_code=True)
        else:
            known = {
                key: value
                for key, value in src.config.items()
                if key not in ("quantization_config", "auto_map")
            }
            config = CONFIG_MAPPING[family].from_dict(decode_floats(known))
    except Exception as error:  # a wrong config can raise anything
        raise unbuildable(src, error) from error
    if family_of(family).diffuses:
        raise CheckpointError(
            f"{family} writes blocks of text by diffusion, and quantkit does not quantize such "
            "models",
            "use one that writes token by token",
            subject=src.path,
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def auto_class(src: Configured, config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """Return the auto class of transformers that builds the model.

    It is one for causal LMs or encoder-decoders, by the config, or for models of text and images.
    config.json names the model's class; CheckpointError if no auto class knows the model type.
    """
    import transformers

    kinds = AUTO_CLASSES[bool(config.is_encoder_decoder)]
    autos = [getattr(transformers, name) for name in kinds]
    if trust_remote_code and "auto_map" in src.config:
        return autos[0]
    named = src.config.get("architectures")
    able = [
        auto
        for auto in autos
        if type(config) in auto._model_mapping and not family_of(config.model_type).classifies
    ]
    for auto in able:
        built: Any = auto._model_mapping[type(config)]
        if isinstance(named, list) and getattr(built, "__name__", None) in named:
            return auto
    if not able:
        raise CheckpointError(
            f"model type {config.model_type!r} is no model that writes text, as transformers "
            "builds it",
            "use a causal or an image-text model",
            subject=src.path,
        )
    return able[0]


def require_decoder_only(
    src: Configured, config: PretrainedConfig, what: str, *ways_out: str
) -> None:
    """Raise CheckpointError for an encoder-decoder; `what` says why the caller does not
    take one.
    """
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{config.model_type} is an encoder-decoder, {what}", *ways_out, subject=src.path
        )


def require_text(src: Configured, config: PretrainedConfig, trust_remote_code: bool) -> None:
    """Raise CheckpointError for an encoder-decoder whose encoder takes sound or images, and no
    text.
    """
    known: Any = auto_class(src, config, trust_remote_code)._model_mapping
    takes = (
        getattr(known[type(config)], "main_input_name", "input_ids")
        if type(config) in known
        else "input_ids"
    )
    if config.is_encoder_decoder and takes != "input_ids":
        raise CheckpointError(
            f"{config.model_type} reads {takes}, and no text",
            "load it with quantkit.load",
            subject=src.path,
        )


def positions_of(config: PretrainedConfig) -> tuple[int | None, int | None]:
    """Return the most tokens that a model reads, and that its decoder writes; None without a limit.

    They are the same number, except in LED. In a decoder alone, what it reads and writes takes one
    range of positions.
    """
    both = getattr(config.get_text_config(), "max_position_embeddings", None)
    encoder, decoder = (
        getattr(config, f"max_{side}_position_embeddings", both) for side in ("encoder", "decoder")
    )
    return encoder, decoder


def skeleton(src: Configured, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model with meta parameters and real buffers (rotary tables are computed, not
    stored).

    transformers chooses the attention implementation: sdpa, except for models that need another.
    CheckpointError if it cannot build the model.
    """
    config = config_of(src, trust_remote_code)
    for each in (config, config.get_text_config()):
        each.use_cache = False
    auto = auto_class(src, config, trust_remote_code)
    remote = trust_remote_code and "auto_map" in src.config
    _hook()
    _THREAD.builds = True
    try:
        with building():
            module: PreTrainedModel = auto.from_config(
                config, dtype=dtype, trust_remote_code=remote
            )
    except Exception as error:  # as above
        raise unbuildable(src, error) from error
    finally:
        _THREAD.builds = False
    module.eval()
    return module


@cache
def _hook() -> None:
    """Register `_on_meta` for the process, once: a thread that makes a module must not see the
    hooks change.
    """
    register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]  # it may return another


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Give a module a meta parameter for which transformers draws no first values; None in threads
    of others.
    """
    if not getattr(_THREAD, "builds", False):
        return None
    made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


def float32_states(module: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return a pattern of the states that the model's code needs in float32 in a model of a dtype;
    None if none is.
    """
    from transformers.core_model_loading import build_glob_alternation

    names = list(module._get_dtype_plan(dtype))
    return build_glob_alternation([*names])[0] if names else None


def unbuildable(src: Configured, error: Exception) -> CheckpointError:
    """Return the error for a model that transformers cannot build; an error about memory is raised
    unchanged.
    """
    if is_out_of_memory(error):
        raise error
    return CheckpointError(
        f"transformers cannot build the model of config.json ({reason(error)})",
        "mend it",
        "upgrade transformers",
        subject=src.path,
    )


def language_model(module: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the path and the module of the decoder that reads tokens, without the towers of other
    inputs.
    """
    decoder = module.get_decoder()
    path = next((path for path, found in module.named_modules() if found is decoder), "")
    return (path, decoder) if path and find_blocks(decoder) else ("", module)


def text_encoder(module: PreTrainedModel) -> str:
    """Return the path of an encoder-decoder's encoder, if it reads tokens; "" without one."""
    encoder = module.get_encoder() if module.config.is_encoder_decoder else None
    path = next((path for path, found in module.named_modules() if found is encoder), "")
    return "" if path in find_towers(module) else path


def find_towers(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the models inside a model that take other inputs than text: encoders of
    images or sound.
    """
    from transformers import PreTrainedModel

    return tuple(
        path
        for path, found in module.named_modules()
        if path
        and isinstance(found, PreTrainedModel)
        and not {"input_ids", "decoder_input_ids", "inputs_embeds", "args"} & _inputs(found).keys()
    )


def text_model(module: PreTrainedModel, blocks: Sequence[str]) -> str:
    """Return the path of the outermost model around the blocks that needs only tokens; "" for the
    whole.

    It embeds tokens as the whole model does. It is also "" if there is no such model, and for an
    encoder-decoder.
    """
    from transformers import PreTrainedModel

    if module.config.is_encoder_decoder:
        return ""
    asking = family_of(module.config.model_type).asks_for_images
    path: str
    for path, found in module.named_modules():
        around = all(block.startswith(f"{path}." if path else "") for block in blocks)
        if not around or not isinstance(found, PreTrainedModel) or (asking and not path):
            continue
        inputs = _inputs(found)
        runs = "input_ids" in inputs and all(
            may for name, may in inputs.items() if name != "input_ids"
        )
        if runs and found.get_input_embeddings() is module.get_input_embeddings():
            return path
    return ""


def _inputs(module: nn.Module) -> dict[str, bool]:
    """Return the arguments of a model's forward, and whether each may be absent."""
    found = inspect.signature(module.forward).parameters.values()
    return {
        each.name: each.default is not each.empty or each.kind is each.VAR_POSITIONAL
        for each in found
        if each.kind is not each.VAR_KEYWORD
    }


def find_blocks(module: nn.Module) -> list[str]:
    """Return the paths of the transformer blocks: the largest list of modules that hold linears.

    Blocks may be of several classes, as in models that mix attention and state spaces.
    """
    best, largest = [], 0
    towers = tuple(f"{path}." for path in find_towers(module))
    for path, found in module.named_modules():
        if not isinstance(found, nn.ModuleList) or path.startswith(towers):
            continue
        size = sum(p.numel() for p in found.parameters())
        if size > largest and any(is_linear(m) for m in found.modules()):
            best, largest = [f"{path}.{i}" for i in range(len(found))], size
    return best


def lists_beside(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the module lists that run parallel to the blocks, with linears, if both hold parts of
    layers.

    XLM keeps attention and feed-forward of its layers in two lists, and adds and normalizes between
    them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    own = blocks[0].rpartition(".")[0]
    owner = own.rpartition(".")[0]
    return [
        f"{owner}.{name}" if owner else name
        for name, found in module.get_submodule(owner).named_children()
        if isinstance(found, nn.ModuleList)
        and len(found) == len(blocks)
        and name != own.rpartition(".")[2]
        if any(is_linear(inner) for inner in found.modules())
        if not any(isinstance(part, GradientCheckpointingLayer) for part in found)  # a whole layer
    ]


def find_linears(
    module: PreTrainedModel, stored: dict[str, str]
) -> tuple[dict[str, str], set[str], list[str]]:
    """Return stored name -> module path of every linear, the tied ones, and notices of matrices
    that stay dense.

    `stored` maps each state to its name in the checkpoint.
    """
    paths: dict[str, str] = {}
    tied: set[str] = set()
    others: dict[str, list[str]] = {}
    for path, found in module.named_modules():
        weight = f"{path}.weight"
        if is_linear(found) and weight in module.all_tied_weights_keys:
            paths[path] = path
            tied.add(path)
        elif is_linear(found) and weight in stored:
            paths[stored[weight].removesuffix(".weight")] = path
        elif is_linear(found):
            others.setdefault(
                "linear that transformers makes from other stored tensors,", []
            ).append(path)
    return paths, tied, _notices(others) + dense_matrices(module)


def dense_matrices(module: PreTrainedModel) -> list[str]:
    """Return notices of matrices outside linears, such as experts in one parameter, which stay
    dense.
    """
    others: dict[str, list[str]] = {}
    routers = find_routers(module)
    for path, found in module.named_modules():
        if not is_linear(found) and not isinstance(found, nn.Embedding) and path not in routers:
            wide = [
                f"{path}.{name}" for name, p in found.named_parameters(recurse=False) if p.ndim > 1
            ]
            if wide:
                others.setdefault(
                    f"parameter of {type(found).__name__}, which is no nn.Linear,", []
                ).extend(wide)
    return _notices(others)


def _notices(others: dict[str, list[str]]) -> list[str]:
    return [
        f"{names[0]}: {what} left dense ({len(names)} in all)" for what, names in others.items()
    ]


def computed(module: nn.Module, state: str) -> Tensor | None:
    """Compute a state that a checkpoint may lack, such as sinusoidal positions; None if its module
    cannot.
    """
    compute = getattr(module.get_submodule(state.rpartition(".")[0]), COMPUTES, None)
    return compute().detach() if compute is not None else None


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer called `name`."""
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), leaf)
    return found


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer called `name`; CheckpointError if its shape differs."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    expected = getattr(owner, leaf).shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"is {list(tensor.shape)} in the checkpoint, config.json asks for {list(expected)}",
            subject=name,
        )
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
