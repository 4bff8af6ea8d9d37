"""A checkpoint's model as transformers builds it, without weights: its parameters are on the meta
device.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from quantkit.checkpoint.reader import CONFIG, Checkpoint
from quantkit.core.memory_limits import uncollected
from quantkit.core.threads import building
from quantkit.errors import CheckpointError, is_out_of_memory, reason
from quantkit.io import hub
from quantkit.io.json_files import decode_floats, entries, load_json, shown
from quantkit.models.families import AUTO_CLASSES, family_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.configuration_utils import PretrainedConfig

#: The tokens that begin, end and fill texts, as configs name them.
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
#: What else a generation config states about a model's texts. All other entries choose a search, a
#: draw or a cache, or a length, which the caller chooses.
RESTRICTIONS = (
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "stop_strings",
)
#: How many experts a layer has, and to how many a token is routed, as configs name them.
EXPERTS = re.compile("(num|n|moe_num)_(local_|routed_)?experts")
ROUTED = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
#: Bytes of a new tensor that is no buffer.
LARGE = 2**30
#: Whether a thread builds a model whose parameters are on the meta device.
_THREAD = threading.local()


class ContradictoryConfigError(CheckpointError):
    """A config that readers of any version refuse or understand differently, although its model
    could be built: no output repeats it.
    """


def runs_code(src: Checkpoint) -> bool:
    """Return True if the user trusts the code of a model, and its config names some."""
    return src.trusted and bool(src.config.get("auto_map"))


@uncollected()
def config_of(src: Checkpoint) -> PretrainedConfig:
    """Return the configuration in config.json, without its quantization.

    CheckpointError for a model type or config that transformers cannot read.
    """
    with building():  # threads that import a name of transformers at once may not find it
        from transformers import CONFIG_MAPPING, AutoConfig

    family = str(src.config.get("model_type"))
    remote = runs_code(src)
    if not remote and family not in CONFIG_MAPPING:
        what: tuple[str, ...] = f"model type {family!r} is unknown to transformers", "upgrade it"
        if src.config.get("model_type") is None:
            what = (f"{CONFIG} states no model_type",)
        raise CheckpointError(*what, "check config.json", subject=src.path)
    left_out = ("quantization_config", "auto_map")
    known = {key: value for key, value in src.config.items() if key not in left_out}
    for key, value in entries({} if remote else known, src.path / CONFIG):
        # "auto" is an argument's value only.
        if key in ("dtype", "torch_dtype") and not (
            value is None or isinstance(getattr(torch, str(value), None), torch.dtype)
        ):
            raise ContradictoryConfigError(
                f"{key} is {shown(value)}, which is no dtype of torch",
                "name that of the weights, such as bfloat16",
                "remove the entry",
                subject=src.path / CONFIG,
            )
    try:
        config: PretrainedConfig = (
            AutoConfig.from_pretrained(src.path, trust_remote_code=True)
            if remote
            else CONFIG_MAPPING[family].from_dict(decode_floats(known))
        )
    except (Exception, SystemExit) as error:  # a wrong config, or trusted code, can raise anything
        raise unbuildable(src, error) from error
    # Where transformers looks for the config of a model's texts, whatever the model type.
    for name in ("text_config", "decoder", "generator", "text_encoder"):
        if (found := getattr(config, name, None)) is not None and not hasattr(found, "to_dict"):
            raise CheckpointError(
                f"{CONFIG} describes a {name}, and a {family} has none",
                "remove it",
                "mend model_type",
                subject=src.path,
            )
    _require_one_value(src.config, config, src.path / CONFIG)
    text = config.get_text_config(decoder=True)
    _require_possible(text, src.path / CONFIG)
    if family_of(family).diffuses:
        raise CheckpointError(
            f"{family} writes blocks of text by diffusion, and quantkit does not quantize such "
            "models",
            "use one that writes token by token",
            subject=src.path,
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for part in (config, text):  # what a caller of the model gets back
        part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    # An implementation may need a package that is not here: transformers chooses one for the model.
    config._attn_implementation = config._experts_implementation = None
    return config


def _require_one_value(stated: Mapping[str, Any], config: Any, path: Path) -> None:
    """Raise CheckpointError for an entry that a configuration states under two names with two
    values: readers differ in which one they take.
    """
    rope = stated.get("rope_parameters")
    if rope and stated.get("rope_scaling") is not None:
        with suppress(Exception):  # as above
            read = [
                type(config).from_dict(decode_floats({**stated, key: None})).rope_parameters
                for key in ("rope_parameters", "rope_scaling")  # of newer and of older readers
            ]
            if {**read[0], "type": None} == {**read[1], "type": None}:
                stated = {**stated, "rope_scaling": None}
    flat = {f"rope_parameters.{key}": each for key, each in (rope or {}).items()}
    twins = {} if config.is_encoder_decoder else {**config.attribute_map}
    twins |= {"torch_dtype": "dtype", "rope_scaling": "rope_parameters"}
    twins |= {key.partition(".")[2]: key for key in flat}
    for one, other in twins.items():
        values = stated.get(one), {**stated, **flat}.get(other)
        if None not in values and values[0] != values[1] and not one.endswith("_token_id"):
            raise ContradictoryConfigError(
                f"{one} is {shown(values[0])} and {other} is {shown(values[1])}, which are the "
                "same entry",
                "remove the wrong one",
                subject=path,
            )
    if isinstance(text := stated.get("text_config"), dict) and hasattr(config, "text_config"):
        _require_one_value(text, config.text_config, path)


def _require_possible(text: Any, path: Path) -> None:
    """Raise CheckpointError if a token goes to more experts, or groups of them, than there are, or
    sees no token.
    """
    values = {key: value for key, value in text.to_dict().items() if type(value) is int}
    experts = max((values[key] for key in values if EXPERTS.fullmatch(key)), default=0)
    routed = dict.fromkeys(ROUTED if experts > 1 else (), experts)  # Jamba routes to no single one
    limits = {**routed, "topk_group": values.get("n_group", 0)}
    wrong = [
        f"{key} is {values[key]}, and there are {most}"
        for key, most in limits.items()
        if most and not 0 < values.get(key, 1) <= most
    ]
    # Some classes write 0 where they use none.
    slides = hasattr(type(text), "sliding_window") and getattr(text, "use_sliding_window", True)
    if slides and values.get("sliding_window", 1) <= 0:
        wrong.append(f"sliding_window is {values['sliding_window']}, and must be null or above 0")
    if wrong:
        raise CheckpointError(wrong[0], "mend the entry", subject=path)


def generation_config_of(src: Checkpoint) -> GenerationConfig:
    """Return how a model begins, ends and restricts its texts, whether it is dense or packed.

    generation_config.json states it, or config.json if there is no such file. Special tokens that
    the file leaves out are those of config.json. CheckpointError for a file that cannot be read.
    """
    from transformers import GenerationConfig

    of_model = GenerationConfig.from_model_config(config_of(src))
    of_model.update(**GenerationConfig.from_model_config({**src.config}).to_diff_dict())
    path = src.path / "generation_config.json"
    if not path.is_file():
        return of_model
    try:
        found = GenerationConfig.from_dict(decode_floats(load_json(path)))
        for name in SPECIAL:
            if getattr(found, name, None) is None:
                setattr(found, name, getattr(of_model, name, None))
            ids = torch.tensor(getattr(found, name) or 0, dtype=torch.int64)
            if ids.ndim > 1:
                raise ValueError(f"{name} is {shown(ids.tolist())}")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot be read ({reason(error)})", "mend it", "remove it", subject=path
        ) from error
    return found


@uncollected()
def auto_class(src: Checkpoint, config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that builds the model.

    The class is for causal LMs or encoder-decoders, by the config, or for models of text and
    images. config.json names the model's class; CheckpointError if no auto class knows the model
    type.
    """
    import transformers

    autos = [getattr(transformers, name) for name in AUTO_CLASSES[bool(config.is_encoder_decoder)]]
    remote, named = runs_code(src), src.config.get("architectures")
    able = [
        auto
        for auto in autos
        if (
            auto.__name__ in src.config["auto_map"]
            if remote
            else type(config) in auto._model_mapping and not family_of(config.model_type).classifies
        )
    ]
    for auto in able if not remote else ():
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
    src: Checkpoint, config: PretrainedConfig, what: str, *ways_out: str
) -> None:
    """Raise CheckpointError for an encoder-decoder; `what` is the caller's reason."""
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{config.model_type} is an encoder-decoder, {what}", *ways_out, subject=src.path
        )


def require_continuing(src: Checkpoint, config: PretrainedConfig) -> None:
    """Raise CheckpointError for a model that fills gaps in a text. It reads in both directions, so
    that each token would be predicted from itself and the next ones.
    """
    from transformers import (
        MODEL_FOR_MASKED_LM_MAPPING as FILLING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as OF_PAIRS,
    )

    kind: Any = type(config)
    if kind in FILLING and kind not in OF_PAIRS and not getattr(config, "is_decoder", True):
        raise CheckpointError(
            f"{config.model_type} reads a text in both directions, and continues none",
            "if it was trained as a decoder, set is_decoder to true in config.json",
            subject=src.path,
        )


def require_text(src: Checkpoint, config: PretrainedConfig) -> None:
    """Raise CheckpointError for an encoder-decoder whose encoder takes sound or images, and no
    text.
    """
    known: Any = auto_class(src, config)._model_mapping
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
    """Return the most tokens of a model's input, and of its decoder's output; None without a limit.

    They are the same number, except in LED. A decoder-only model reads and writes within one range
    of positions.
    """
    both = getattr(config.get_text_config(), "max_position_embeddings", None)
    encoder, decoder = (
        getattr(config, f"max_{side}_position_embeddings", both) for side in ("encoder", "decoder")
    )
    return encoder, decoder


def skeleton(src: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with meta parameters and real buffers (rotary tables are computed, not
    stored).

    transformers chooses the attention implementation: sdpa, except for models that need another.
    CheckpointError if it cannot build the model.
    """
    config = config_of(src)
    auto = auto_class(src, config)  # some others have several texts
    for each in (config, config.get_text_config()):
        each.use_cache = False
    _hook()
    _THREAD.builds = True
    try:
        with building(), _LargeOnMeta():
            module: PreTrainedModel = auto.from_config(
                config, dtype=dtype, trust_remote_code=runs_code(src)
            )
    except (Exception, SystemExit) as error:  # as above
        raise unbuildable(src, error) from error
    finally:
        _THREAD.builds = False
    module.eval()
    for name, table in module.named_non_persistent_buffers():
        if table.is_floating_point() and not table.is_meta and not (table < torch.inf).all():
            raise CheckpointError(
                f"{CONFIG} makes {name} NaN or infinite",
                "mend its entries, such as rope_theta or factor",
                subject=src.path,
            )
    _note_other_class(src, type(module), config)
    return module


class _LargeOnMeta(TorchFunctionMode):
    """Make large tensors without values on the meta device. A layer's experts in float32 may be
    larger than the memory, which refuses them, though no page of them would be touched.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            found: Tensor = func(*args, **{**kwargs, "device": "meta"})
            if found.nbytes >= LARGE:
                return found
        return func(*args, **kwargs)


def _note_other_class(src: Checkpoint, built: type[Any], config: PretrainedConfig) -> None:
    """Note a class in config.json that is not one of the model type's: its code may compute
    something else from the same weights, as BitNet's does that calls itself a Llama.
    """
    import transformers

    named = src.config.get("architectures")
    classes = [getattr(transformers, str(n), 0) for n in named] if isinstance(named, list) else []
    ours = {getattr(built, "config_class", None), type(config)}
    if (
        classes
        and not runs_code(src)
        and ours.isdisjoint(getattr(c, "config_class", 0) for c in classes)
    ):
        src.notices.append(
            f"{CONFIG} names {shown(named)}, and transformers builds {built.__name__} by its "
            "model_type: see that both compute the same"
        )


@cache
def _hook() -> None:
    """Register `_on_meta` once for the process, because hooks must not change while another thread
    makes a module.
    """
    # The hook may return another parameter.
    register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Give a module a meta parameter that transformers does not initialize. Returns None in other
    threads.
    """
    if not getattr(_THREAD, "builds", False):
        return None
    made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


def float32_states(module: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return a pattern of the states that transformers keeps in float32 in a model of a dtype.

    One list of a model's class is for float16 only, the strict list for bfloat16 too.
    """
    from transformers.core_model_loading import build_glob_alternation

    names = [*module._get_dtype_plan(dtype)]
    return build_glob_alternation(names)[0] if names else re.compile("(?!)")


def unbuildable(src: Checkpoint, error: BaseException) -> CheckpointError:
    """Return the error for a model that transformers cannot build; an error about memory is raised
    unchanged.
    """
    if is_out_of_memory(error):
        raise error
    rule, *ways = (
        f"transformers cannot build the model of {CONFIG} ({reason(error)})",
        "mend it",
        "upgrade transformers",
    )
    if runs_code(src) or isinstance(error, ImportError):
        rule, *ways = hub.reasons_of_code(error, src.path / CONFIG, rule)
    return CheckpointError(rule, *ways, subject=src.path)
