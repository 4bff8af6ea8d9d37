"""quantkit as a quantizer of transformers: its models keep their linears packed.

Importing this module registers nothing; `register` does.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter
from transformers.integrations.accelerate import expand_device_map
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.memory_limits import unused_memory
from quantkit.errors import CheckpointError
from quantkit.inference import swap_linears
from quantkit.inference.packed_linear import fuse_linears
from quantkit.layouts import LAYOUTS, read_config
from quantkit.models.outline import Outline
from quantkit.models.weights import free_bytes
from quantkit.names import Json, JsonView

#: The name of our quantizer in transformers, and the `quant_method` of a config that
#: `quantkit.load` made.
METHOD = "quantkit"
#: Entries of such a config besides the method.
ENTRIES = ("stated", "decodes_without_kernels", "config")


class QuantkitConfig(QuantizationConfigMixin):
    """The `quantization_config` that a folder states.

    If a GPU lacks kernels, `decodes_without_kernels` lets it decode each weight; otherwise the
    model is refused. `config` takes the place of the folder's config.json.
    """

    def __init__(
        self,
        stated: JsonView,
        decodes_without_kernels: bool = False,
        config: JsonView | None = None,
    ) -> None:
        self.quant_method: Any = METHOD
        self.stated = dict(stated)
        self.decodes_without_kernels = decodes_without_kernels
        self.config = None if config is None else dict(config)

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read the dictionary of a folder or of `as_ours`. CheckpointError for an
        unknown layout.
        """
        ours = config_dict.get("quant_method") == METHOD
        config = cls(**{key: config_dict[key] for key in ENTRIES}) if ours else cls(config_dict)
        read_config(config.stated, "config.json")
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> Json:
        """Copy the entry that belongs into config.json."""
        return copy.deepcopy(self.stated)


def as_ours(stated: JsonView, decodes_without_kernels: bool, config: JsonView) -> Json:
    """Wrap a `quantization_config` of any method so that transformers gives it to our quantizer."""
    values = dict(stated), decodes_without_kernels, dict(config)
    return {"quant_method": METHOD, **dict(zip(ENTRIES, values, strict=True))}


class QuantkitQuantizer(HfQuantizer):
    """Puts `PackedLinear`s into a model before transformers reads the weights, and repacks them for
    kernels after.

    `notices` name the weights that are decoded at each call, and why. They are warnings too.
    `decoded_once` describes the weights that are decoded and kept: on a CPU all that its memory
    holds, on a GPU an output head without a kernel.
    """

    requires_calibration = (
        True  # transformers sets this for quantizers that only load pre-quantized checkpoints
    )
    quantization_config: QuantkitConfig
    notices: list[str]
    decoded_once: str | None
    linears: swap_linears.Linears

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise CheckpointError(
                "packed weights are read from a folder's safetensors",
                "give from_pretrained a folder",
            )
        with torch.device("cpu"):  # transformers makes tensors without data here
            # The model's own code has run already, so trusting it adds no risk.
            src = Checkpoint(
                Path(checkpoint_files[0]).parent,
                trust_remote_code=True,
                config=copy.deepcopy(self.quantization_config.config),
            )
            outline = Outline(src, model, as_matrices=False)
            self.linears = swap_linears.swap(outline)
            self._patterns = {p for each in outline.states.merged for p in each.patterns}
        self._src, self._saved_forms = src, self._forms()
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        gpus: list[torch.device] = []
        if isinstance(device_map, dict):
            needs = swap_linears.memory_needs(
                model, expand_device_map(device_map, list(model.state_dict()))
            )
            swap_linears.require_memory(needs, free_bytes, src.path)
            gpus = [device for device in needs if device.type == "cuda"]
        elif device_map is not None:
            gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        self._has_gpu = bool(gpus)
        for device in () if self.quantization_config.decodes_without_kernels else gpus:
            swap_linears.require_kernels(device)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            # transformers 5.17 leaves a tensor that it renames in the dtype of the file.
            if parameter.dtype not in (self._dtypes[name], torch.float32):
                parameter.data = parameter.data.to(self._dtypes[name])
        self.notices, self.decoded_once = swap_linears.repack_for_kernels(self.linears)
        fuse_linears(model)
        swap_linears.show_weights(model)
        if not self._has_gpu:  # weights offloaded from one are multiplied there
            self.decoded_once, slow = swap_linears.keep_decoded(self.linears, unused_memory())
            self.notices += [slow] if slow else []
        for line in self.notices:
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        """Drop transformers' rules that merge or split tensors which this model has in their stored
        form, such as unfused experts.
        """
        theirs: Any = super().update_weight_conversions
        return [
            rule
            for rule in theirs(weight_conversions, *model)
            if not isinstance(rule, WeightConverter)
            or self._patterns.intersection(rule.source_patterns)
        ]

    def is_serializable(self) -> bool:
        """Return True, after the config was updated to the layout in memory; CheckpointError for
        several layouts.
        """
        if self._forms() != self._saved_forms:
            self.quantization_config.stated = swap_linears.config_in_memory(self.linears, self._src)
            self._saved_forms = self._forms()
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _forms(self) -> list[tuple[Any, ...]]:
        return [
            (linear.layout, linear.scheme, linear.n, linear.k) for linear in self.linears.values()
        ]


def register() -> None:
    """Register quantkit's quantizer with transformers for the methods of its layouts that have no
    owner there yet.

    A second call changes nothing.

    `AutoModelForCausalLM.from_pretrained` then opens folders in the layouts `tcfpx` and `humming`,
    and MARLIN folders whose `quant_method` is `marlin` or `gptq_marlin_24`. All other layouts state
    `gptq`, `awq` or `compressed-tensors`, which transformers handles: `from_pretrained` works as
    without quantkit, and `quantkit.load` opens the folder packed.

    Example:

    ```python
    import quantkit
    from transformers import AutoModelForCausalLM

    quantkit.quantize("model", "model-fp6", format="fp6", method="rtn")
    quantkit.register()
    model = AutoModelForCausalLM.from_pretrained("model-fp6")
    print(model.model.layers[0].mlp)
    ```
    """
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(METHOD)(QuantkitQuantizer)
    for method in (
        METHOD,
        *(method for layout in LAYOUTS.values() for method in layout.QUANT_METHODS),
    ):
        if method not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
            auto.register_quantization_config(method)(QuantkitConfig)
