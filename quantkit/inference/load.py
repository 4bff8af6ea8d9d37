"""A checkpoint as a transformers model whose linears stay packed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from quantkit.checkpoint.origin import checked, resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.threads import building
from quantkit.errors import CheckpointError, Command, QuantkitError, Setting, Words, reason
from quantkit.inference.swap_linears import require_kernels, require_memory
from quantkit.keys import built
from quantkit.layouts.compressed_tensors import METHOD
from quantkit.models.meta_model import (
    RESTRICTIONS,
    SPECIAL,
    auto_class,
    config_of,
    generation_config_of,
    runs_code,
    skeleton,
    unbuildable,
)
from quantkit.models.modules import computed
from quantkit.models.outline import Outline
from quantkit.models.outside import undeclared
from quantkit.models.weights import compute_dtype, device_of, free_bytes, load_dense_model
from quantkit.progress import QUIET, Progress
from quantkit.recipes.options import LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    checkpoint: str | Path,
    *,
    device: str = "auto",
    device_map: Any = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
) -> PreTrainedModel:
    """Load a folder or hub id as a transformers model whose packed linears are `PackedLinear`s.

    It reads every layout, whoever wrote the folder; a dense folder loads as transformers loads it.
    On a GPU, a weight without a kernel is repacked losslessly for one that has a kernel. If its
    values forbid that, it is decoded at each call, and a warning says so. On a CPU, weights are
    decoded once, beside their packed tensors, and a note says so. So is an output head without a
    kernel on a GPU, as INT8. Weights that the free memory does not hold are decoded at each call,
    with a warning.

    `device` "auto" takes a GPU even if it cannot run kernels; "cuda" refuses such a GPU.
    `device_map` is the option of transformers and overrides `device`. `dtype` defaults to float32
    on a CPU and to the model's own on a GPU. On a CPU, float16 writes new tokens faster, reads
    prompts slower, and overflows in models with large hidden states. The call runs
    `quantkit.register()`.

    With `check`, loading compares every file with its recorded hash, or a weight file of quantkit
    without a hash with its own digests.

    CheckpointError for a file that was changed. Before any weight is read, a QuantkitError is
    raised for an unknown layout or version, FP8 and MXFP4 sources, missing or unexpected tensors,
    a GPU that is too old, or a device that is too small.

    Example:

    ```python
    import quantkit
    import torch
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained("model-int4")
    packed, dense = quantkit.load("model-int4", device="cpu"), quantkit.load("model", device="cpu")
    prompt = words("Return the", return_tensors="pt")
    print(words.decode(packed.generate(**prompt, max_new_tokens=8, do_sample=False)[0]))

    with torch.inference_mode():
        difference = packed(**prompt).logits - dense(**prompt).logits

    print("largest difference of a logit:", difference.abs().max().item())
    print(packed.model.layers[1].self_attn.q_proj)  # a PackedLinear with the stored tensors
    ```
    """
    src = Checkpoint(resolve(str(checkpoint), revision, trust_remote_code), trust_remote_code)
    with checked(src, check):
        model = _load(src, device, device_map, dtype)
    if notice := getattr(getattr(model, "hf_quantizer", None), "decoded_once", None):
        Progress().note(notice)
    return model


def _load(
    src: Checkpoint,
    device: str,
    device_map: Any,
    dtype: torch.dtype | None,
) -> PreTrainedModel:
    if src.low_bit is not None or src.wrapped is not None:
        held = f"{src.low_bit} weights" if src.low_bit else f"{src.wrapped} of a wrapped model"
        raise CheckpointError(
            f"holds {held}, a source",
            Words("use", Command("quantize")),
            "load it by transformers"
            if src.low_bit
            else "save the inner model, without its wrapper",
            subject=src.path,
        )
    place = device_of(device)
    if device != "auto" and device_map is None and src.layout is not None:
        require_kernels(place)
    if dtype is None:
        gpu = torch.cuda.is_available() and (device_map is not None or place.type == "cuda")
        dtype = compute_dtype(src.dtype_of_model, torch.device("cuda" if gpu else "cpu"))
    if src.layout is None and device_map is None:
        _require_memory(src, place, dtype)
    if src.layout is None:  # transformers drops what the model lacks, and takes codes for values
        Outline(src, skeleton(src, dtype), as_matrices=False).require_complete()
    return _from_pretrained(src, device_map or {"": place}, dtype, device == "auto")


def load_for_evaluation(
    src: Checkpoint, *, progress: Progress | None = None, **options: Any
) -> PreTrainedModel:
    """Load a packed model, or a dense one in float32; warnings about slow weights become notes of
    `progress`.

    Its generation config keeps only what concerns the texts themselves, so that callers alone
    choose how to search them. The `options` are the fields of `LoadOptions`; `src` was opened with
    some of them.
    """
    (asked,), _ = built(options, LoadOptions)
    src = _with_its_scales(src)
    with checked(src, asked.check):
        if src.layout is None:
            (progress or QUIET).note(*src.notices)
            _require_memory(src, device_of(asked.device), torch.float32)
            model = load_dense_model(src, device=asked.device)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                model = _load(src, asked.device, None, None)
            quantizer: Any = model.hf_quantizer
            (progress or QUIET).note(*quantizer.notices)
            if quantizer.decoded_once is not None:
                (progress or QUIET).detail(quantizer.decoded_once)
    texts, names = model.generation_config, (*SPECIAL, *RESTRICTIONS)
    model.generation_config = type(texts)(**{name: getattr(texts, name, None) for name in names})
    return model


def _require_memory(src: Checkpoint, place: torch.device, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a device has too little free memory for a dense model in a dtype."""
    needed = sum(prod(src.shape(name)) for name in src.names()) * dtype.itemsize
    require_memory({place: needed}, free_bytes, src.path)


def _with_its_scales(src: Checkpoint) -> Checkpoint:
    """Open another tool's packed folder as a dense model, because float16 cannot hold
    its scales.
    """
    for name in (src.parts(module).get("weight_scale") for module in src.modules()):
        if name is not None and src.dtype(name) != torch.float16:
            scales = src.get(name)
            if bool((scales.half().float() != scales.float()).any()):
                return Checkpoint(src.path, src.trusted, dequantize=True)
    return src


def _from_pretrained(
    src: Checkpoint,
    device_map: Any,
    dtype: torch.dtype,
    decodes_without_kernels: bool,
) -> PreTrainedModel:
    config = config_of(src)
    texts = generation_config_of(src)
    if src.stated is not None:
        from quantkit.inference import transformers_plugin

        transformers_plugin.register()
        config.quantization_config = transformers_plugin.as_ours(
            src.stated, decodes_without_kernels, src.config
        )
    names = [path.name for path in src.files()]
    if len(names) == 1:
        config.transformers_weights = names[0]  # whatever its name is
    try:
        with building(), silent_transformers():
            model, loading = auto_class(src, config).from_pretrained(
                src.path,
                config=config,
                output_loading_info=True,
                device_map=device_map,
                dtype=dtype,
                trust_remote_code=runs_code(src),
            )
    except (QuantkitError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # a config is free to be wrong in any way
        raise unbuildable(src, error) from error
    model.generation_config = texts
    if hasattr(model.config, "transformers_weights"):
        del model.config.transformers_weights
    missing = sorted(s for s in map(str, loading["missing_keys"]) if computed(model, s) is None)
    if missing:  # of an index, or of a packed linear
        raise CheckpointError(
            f"{missing[0]} is not there as config.json asks for it",
            "fetch it again",
            subject=src.path,
        )
    return cast("PreTrainedModel", model)


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Run without transformers' progress bars and reports. Our own checks report errors."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


#: Names of the lists of tensors that `from_pretrained` reports -> how it treats such tensors,
#: without an error.
WRONG = {
    "missing_keys": "fill with random values",
    "mismatched_keys": "fill with random values",
    "unexpected_keys": "leave out",
}


#: Name -> dtype and shape of stored tensors.
Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class NotTried(Exception):
    """Say why transformers' own quantizer cannot be tried here."""


def refusal_by_transformers(
    outline: Outline,
    src: Checkpoint,
    stated: dict[str, Any] | None,
    forms: Forms,
) -> str | None:
    """Open tensors with transformers' own quantizer; return the reason why it refuses, None if it
    opens them.

    `stated` is the `quantization_config`, None for a dense folder. CheckpointError if transformers
    would initialise missing weights, NotTried if its quantizer cannot run here.
    """
    from transformers import __version__
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    config: Any = config_of(src)
    if stated is not None:
        method = stated["quant_method"]
        if method not in AUTO_QUANTIZER_MAPPING:
            raise NotTried(
                f"it has no quantizer for {method!r} until quantkit.register() is called"
            )
        if method != METHOD:
            raise NotTried(f"its quantizer for {method!r} needs compiled packages")
        config.quantization_config = stated
    tensors = sorted(forms.items())
    asked = type(outline.module), repr((src.config, stated, src.dtype_of_model, tensors))
    if (found := _ANSWERS.get(asked)) is None:
        found = _opened(type(outline.module), config, src.dtype_of_model, forms)
        _ANSWERS.clear()
        _ANSWERS[asked] = found
    if isinstance(found, str):
        return found
    lacking = [name for name in found["missing_keys"] if computed(outline.module, name) is None]
    left_out = undeclared(outline.names, src, found["unexpected_keys"])
    wrong = {**found, "missing_keys": lacking, "unexpected_keys": left_out}
    for key, what in WRONG.items():
        for name in sorted(wrong[key]):
            raise CheckpointError(
                f"transformers {__version__} would open the output and {what} {name} "
                f"({len(wrong[key])} in all), without an error",
                Words("use", Setting("layout", "humming"), "or another"),
                subject=src.path,
            )
    return None


#: The last question to transformers, with its answer: a run asks twice, of its plan, and of the
#: files that it wrote.
_ANSWERS: dict[tuple[type, str], dict[str, list[str]] | str] = {}


def _opened(cls: Any, config: Any, dtype: torch.dtype, forms: Forms) -> dict[str, list[str]] | str:
    """Return the names that `from_pretrained` reports, or the reason why it refuses."""
    states = {
        name: torch.empty(shape, dtype=stored, device="meta")
        for name, (stored, shape) in forms.items()
    }
    try:
        # compressed-tensors has bars of its own.
        with building(), silent_transformers(), redirect_stderr(io.StringIO()), _in_this_process():
            _, found = cls.from_pretrained(
                None,
                config=config,
                state_dict=states,
                dtype=dtype,
                device_map={"": "meta"},
                output_loading_info=True,
            )
    except ImportError as error:
        raise NotTried(reason(error)) from error
    except Exception as error:  # each quantizer has its own
        return reason(error)
    return {key: [str(name) for name in found[key]] for key in WRONG}


def _in_this_process() -> AbstractContextManager[None]:
    """Keep compressed-tensors from waiting for other processes of a process group: they do not call
    it.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return nullcontext()
    from compressed_tensors.offload import as_single_threaded

    return cast("AbstractContextManager[None]", as_single_threaded())
