"""A checkpoint as a transformers model whose linears stay packed, and the text that it writes."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint, resolve
from quantkit.errors import CheckpointError, QuantkitError, RecipeError
from quantkit.inference.swap_linears import require_kernels, way
from quantkit.models.block_runner import compute_dtype, dense_model, device_of, tokenizer
from quantkit.models.calibration_data import check_tokens, token_ids
from quantkit.models.meta_model import config_of, unbuildable
from quantkit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Generated:
    """What a model wrote: `text` follows `prompt`, `tokens` new ones in `seconds`, compiling kernels included.

    `weights` says how the model's are multiplied.
    """

    prompt: str
    text: str
    tokens: int
    seconds: float
    weights: str


def load(
    checkpoint: str | Path,
    *,
    device: str = "auto",
    device_map: Any = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return the transformers model of a folder or hub id, on one device, its packed linears as `PackedLinear`.

    Every layout is taken, of any program. On a GPU a weight whose layout has no kernel is repacked, losslessly, into
    one that has; where its data forbid it, it is decoded at each call, and a warning says so. On a CPU weights stay in
    the layout of the file and are decoded one at a time. `device` "auto" takes a GPU even if no kernel can be run on
    it, "cuda" does not; `device_map` is what transformers knows by that name, and goes before `device`. `dtype` is by
    default float32 on a CPU, the model's own on a GPU. A dense folder gives the model as transformers loads it.

    QuantkitError, before any weight is read, for a layout or version that is unknown, tensors that are missing or too
    many, a GPU that is too old or has too little memory.
    """
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code)
    place = device_of(device)
    if device != "auto" and device_map is None and src.layout is not None:
        require_kernels(place)
    if dtype is None:
        gpu = torch.cuda.is_available() and (device_map is not None or place.type == "cuda")
        dtype = compute_dtype(src.dtype_of_model, torch.device("cuda" if gpu else "cpu"))
    return _from_pretrained(src, device_map or {"": place}, dtype, trust_remote_code, device == "auto")


def opened(
    src: Checkpoint, *, device: str, trust_remote_code: bool, progress: Progress | None = None
) -> PreTrainedModel:
    """Return the model of a checkpoint to be measured: packed, or a dense one in float32; warnings become notes."""
    if src.layout is None:
        return dense_model(src, device=device, trust_remote_code=trust_remote_code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        model = load(src.path, device=device, trust_remote_code=trust_remote_code)
    quantizer: Any = model.hf_quantizer
    for line in quantizer.notices:
        (progress or Progress(quiet=True)).note(line)
    return model


def _from_pretrained(
    src: Checkpoint, device_map: Any, dtype: torch.dtype, trust_remote_code: bool, decodes_without_kernels: bool
) -> PreTrainedModel:
    config = config_of(src, trust_remote_code)
    if src.stated is not None:
        from quantkit.inference import transformers_plugin

        transformers_plugin.register()
        config.quantization_config = transformers_plugin.as_ours(src.stated, decodes_without_kernels)
    names = [path.name for path in src.files()]
    if len(names) == 1:
        config.transformers_weights = names[0]  # whatever its name is
    model: PreTrainedModel
    try:
        model, found = _quietly(src.path, config, device_map, dtype, trust_remote_code and "auto_map" in src.config)
    except (QuantkitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config is free to be wrong in any way
        raise unbuildable(src, error) from error
    if hasattr(model.config, "transformers_weights"):
        del model.config.transformers_weights
    wrong = sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]}))
    if wrong:
        raise CheckpointError(f"{src.path}: {wrong[0]} is not there as config.json asks for it: fetch it again")
    return model


def _quietly(path: Path, config: Any, device_map: Any, dtype: torch.dtype, remote: bool) -> Any:
    """Load without transformers' bars and reports: what is wrong with a folder is found and said by us."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    options: Any = {"device_map": device_map, "dtype": dtype, "trust_remote_code": remote, "output_loading_info": True}
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
        return found
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Generated:
    """Return what a checkpoint writes after a prompt, always its likeliest token, at most `max_new_tokens` of them.

    RecipeError for a prompt of no tokens without a BOS token, and for more tokens than the model has positions.
    """
    src = Checkpoint(resolve(str(checkpoint), revision), trust_remote_code)
    words = tokenizer(src.path)
    ids = _prompt(words, prompt)
    model = opened(src, device=device, trust_remote_code=trust_remote_code, progress=progress)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and len(ids) + max_new_tokens > positions:
        raise RecipeError(
            f"{len(ids)} tokens of the prompt and {max_new_tokens} new ones are more than the model's {positions} "
            f"positions: use --max-new-tokens {max(1, positions - len(ids))} or a shorter prompt"
        )
    check_tokens(int(ids.max()), model.get_input_embeddings().get_parameter("weight").shape[0])
    given: Any = ids[None].to(model.device)
    greedy: Any = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "use_cache": True}
    start = time.perf_counter()
    with torch.inference_mode():
        found: Any = model.generate(  # type: ignore[operator]
            given, attention_mask=torch.ones_like(given), max_new_tokens=max_new_tokens, **greedy
        )
    new = found[0, len(ids) :].tolist()
    text = str(words.decode(new, skip_special_tokens=True))
    return Generated(prompt, text, len(new), time.perf_counter() - start, way(model))


def _prompt(words: Any, prompt: str) -> Tensor:
    """Return the tokens of a prompt, int64 `[t]`: at least one, BOS if there is no other."""
    ids = token_ids(words, prompt, special=True) if prompt else torch.tensor([], dtype=torch.int64)
    if len(ids):
        return ids
    if words.bos_token_id is None:
        raise RecipeError("the prompt has no tokens, and the tokenizer no BOS token to begin with: give a prompt")
    return torch.tensor([words.bos_token_id])
