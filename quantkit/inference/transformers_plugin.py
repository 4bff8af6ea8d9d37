"""quantkit as a quantizer of transformers: `from_pretrained` then gives models whose linears stay packed.

Importing this module registers it; `import quantkit` sees to that as soon as transformers' own table of quantizers is
there. Ours are all folders whose quantization says so in its `quantkit` key, and those in layouts that nothing else in
transformers reads: the kernel layouts and `humming`. Several methods have an owner in transformers already (gptq, awq,
compressed-tensors): what is not ours goes to the owner as before, and `quantkit.load` takes foreign folders as well.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.accelerate import expand_device_map
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit import kernels
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.inference import fused_linear, swap_linears
from quantkit.layouts import read_config

#: What transformers calls our quantizer, and a config that came through `quantkit.load`.
METHOD = "quantkit"
#: What `quant_method` is in the folders of our layouts.
METHODS = (METHOD, "gptq", "awq", "compressed-tensors", "marlin", "humming", "tcfpx")
#: Layouts without a kernel that transformers does not read either.
UNREAD = ("humming",)


class QuantkitConfig(QuantizationConfigMixin):
    """The `quantization_config` of a folder, `stated`; with `slow` a GPU without kernels decodes, else is refused."""

    def __init__(self, stated: Mapping[str, Any], slow: bool = False) -> None:
        self.quant_method: Any = METHOD
        self.stated = dict(stated)
        self.slow = slow

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config of a folder's own dictionary, or of one that `wrapped` made."""
        own = config_dict.get("quant_method") == METHOD
        config = cls(config_dict["stated"], config_dict["slow"]) if own else cls(config_dict)
        read_config(config.stated, "config.json")
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return what is written into config.json: what the folder had there."""
        return copy.deepcopy(self.stated)


def wrapped(stated: Mapping[str, Any], slow: bool) -> dict[str, Any]:
    """Return a `quantization_config` that is ours whatever its method."""
    return {"quant_method": METHOD, "stated": dict(stated), "slow": slow}


class QuantkitQuantizer(HfQuantizer):
    """Puts `PackedLinear`s into a model before its weights are read, and gives them their kernels after.

    `notices` say which weights are decoded at each call, and why; they are warnings too.
    """

    requires_calibration = True  # of transformers' quantizers that is said which only load what is quantized already
    quantization_config: QuantkitConfig

    def __init__(self, quantization_config: QuantkitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.notices: list[str] = []
        self.linears: swap_linears.Linears = {}

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise CheckpointError("packed weights are read from a folder's safetensors: give from_pretrained a folder")
        with torch.device("cpu"):  # transformers makes tensors without data here
            src = Checkpoint(Path(checkpoint_files[0]).parent, trust_remote_code=True)  # the model's code has been run
            self.linears = swap_linears.swap(model, src)
        self._src, self._before = src, self._forms()
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        gpus: list[torch.device] = []
        if isinstance(device_map, dict):
            needs = swap_linears.needs(model, expand_device_map(device_map, list(model.state_dict())))
            swap_linears.require_room(needs, swap_linears.free, src.path)
            gpus = list(needs)
        elif device_map is not None:
            gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        for device in () if self.quantization_config.slow else gpus:
            swap_linears.require_kernels(device)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            # transformers 5.17 leaves a tensor that it renames in the dtype of the file.
            if parameter.dtype not in (self._dtypes[name], torch.float32):
                parameter.data = parameter.data.to(self._dtypes[name])
        self.notices = swap_linears.settle(self.linears)
        fused_linear.join(model)
        for line in self.notices:
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def is_serializable(self) -> bool:
        """Return True, for a config that says what the packed tensors are now; CheckpointError for several layouts."""
        if self._forms() != self._before:
            self.quantization_config.stated = swap_linears.stated_now(self.linears, self._src)
            self._before = self._forms()
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _forms(self) -> list[tuple[Any, ...]]:
        return [(linear.layout, linear.scheme, linear.n, linear.k) for linear in self.linears.values()]


def is_ours(stated: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` is one that no other quantizer of transformers reads, or one of ours."""
    if "quantkit" in stated or stated.get("quant_method") == METHOD:
        return True
    try:
        layout, _ = read_config(stated, "config.json")
    except QuantkitError:  # its owner will say what is wrong with it
        return False
    return layout.NAME in kernels.MATMULS or layout.NAME in UNREAD


def _shared(owner: Any) -> Any:
    """Return the config class of a method that belongs to another quantizer, which leaves ours to us."""

    class Shared(owner):
        @classmethod
        def from_dict(cls, config_dict: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = QuantkitConfig if is_ours(config_dict) else owner
            return chosen.from_dict(config_dict, *args, **kwargs)

    Shared.__name__ = Shared.__qualname__ = owner.__name__
    return Shared


def _register() -> None:
    auto.register_quantizer(METHOD)(QuantkitQuantizer)
    for method in METHODS:
        owner = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(method, None)
        auto.register_quantization_config(method)(QuantkitConfig if owner is None else _shared(owner))


_register()
