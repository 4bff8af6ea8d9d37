"""Open stored tensors with transformers' own quantizer, from their dtypes and shapes, on the meta
device.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.threads import building
from quantkit.errors import CheckpointError, Setting, Words, reason
from quantkit.inference.load import silent_transformers
from quantkit.layouts.compressed_tensors import METHOD
from quantkit.models.meta_model import config_of
from quantkit.models.modules import computed
from quantkit.models.outline import Outline
from quantkit.models.outside import undeclared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    trust_remote_code: bool,
) -> str | None:
    """Open tensors with transformers' own quantizer; return the reason why it refuses, None if it
    opens them.

    `stated` is the `quantization_config`, None for a dense folder. CheckpointError if transformers
    would initialise missing weights, NotTried if its quantizer cannot run here.
    """
    from transformers import __version__
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    config: Any = config_of(src, trust_remote_code)
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
    found = _opened(
        _Question(
            type(outline.module),
            repr((src.config, stated, tensors)),
            src.dtype_of_model,
            config,
            forms,
        )
    )
    if isinstance(found, str):
        return found
    lacking = [name for name in found["missing_keys"] if computed(outline.module, name) is None]
    for key, what in WRONG.items():
        names = lacking if key == "missing_keys" else found[key]
        if key == "unexpected_keys":
            names = undeclared(outline.names, src, names)
        for name in sorted(names):
            raise CheckpointError(
                f"transformers {__version__} would open the output and {what} {name} ({len(names)} "
                "in all), "
                "without an error",
                Words("use", Setting("layout", "humming"), "or another"),
                subject=src.path,
            )
    return None


@dataclass(frozen=True)
class _Question:
    """A model's class and dtype, its config and the tensors to open, with a text that tells both
    from others.
    """

    cls: type[PreTrainedModel]
    asked: str
    dtype: torch.dtype
    config: Any = field(compare=False)
    forms: Forms = field(compare=False)


@lru_cache(maxsize=1)  # a run asks twice: of its plan, and of the files that it wrote
def _opened(question: _Question) -> dict[str, list[str]] | str:
    """Return the names that `from_pretrained` reports, or the reason why it refuses."""
    states = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in question.forms.items()
    }
    options: Any = {
        "dtype": question.dtype,
        "device_map": {"": "meta"},
        "output_loading_info": True,
    }
    cls: Any = question.cls
    try:
        # compressed-tensors has bars of its own.
        with building(), silent_transformers(), redirect_stderr(io.StringIO()), _in_this_process():
            _, found = cls.from_pretrained(
                None, config=question.config, state_dict=states, **options
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

    alone: AbstractContextManager[None] = as_single_threaded()
    return alone
