"""A whole model in memory, as evaluation needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.devices import device_of
from quantkit.models.meta_model import computed, get_tensor, put_tensor, skeleton
from quantkit.models.outline import Outline
from quantkit.models.outside import require_complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_dense_model(
    src: Checkpoint,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the whole model of a dense or quantized checkpoint, every weight decoded to `dtype`.

    CheckpointError for a tensor that is missing, of another shape, or not part of the model.
    Tensors that its class or config.json declares beside it are left out.
    """
    model = Outline(src, skeleton(src, dtype, trust_remote_code), as_matrices=True)
    module, (stored, merged, *_) = model.module, model.states
    missing = model.states.missing(module)
    for state in missing:
        if (table := computed(module, state)) is not None:
            put_tensor(module, state, table.to(dtype))
    lacking = [state for state in missing if get_tensor(module, state).is_meta]
    require_complete(model.names, src, lacking, model.states.outside)
    target = device_of(device)

    def read(name: str, state: str) -> Tensor:
        # Decoded to `dtype` directly, not rounded to the model's dtype first.
        return src.dense(name, dtype if get_tensor(module, state).is_floating_point() else None)

    once = {name: state for state, name in reversed(stored.items())}
    for name, state in once.items():
        put_tensor(module, state, read(name, state).to(target))
    for each in merged:
        for state, tensor in each.convert(
            [read(name, each.states[0]) for name in each.names]
        ).items():
            put_tensor(module, state, tensor.to(target))
    module.tie_weights(missing_keys=set(stored) - set(once.values()), recompute_mapping=False)
    nn.Module.to(module, target)
    return module
