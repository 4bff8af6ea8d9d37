"""A whole model in memory, as evaluation needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.devices import device_of
from quantkit.models.meta_model import get_tensor, put_tensor, skeleton
from quantkit.models.state_names import match, require_complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_dense_model(
    src: Checkpoint, *, device: str = "cpu", dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the whole model of a dense or quantized checkpoint, every weight decoded to `dtype`.

    CheckpointError for a tensor that is missing, of another shape, or not part of the model. Tensors that the model's
    class ignores are allowed.
    """
    module = skeleton(src, dtype, trust_remote_code)
    stored, missing, unexpected = match(module, src)
    require_complete(module, src, missing, unexpected)
    target = device_of(device)
    once = {name: state for state, name in reversed(stored.items())}
    for name, state in once.items():
        # Decoded to `dtype` directly, not rounded to the model's dtype first.
        tensor = src.dense(name, dtype if get_tensor(module, state).is_floating_point() else None)
        put_tensor(module, state, tensor.to(target))
    module.tie_weights(missing_keys=set(stored) - set(once.values()), recompute_mapping=False)
    nn.Module.to(module, target)
    return module
