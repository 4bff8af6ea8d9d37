"""Which folders quantkit serves inside vLLM, and the method of each layer, by vLLM's `QuantizationConfig`.

vLLM calls layers by names of its own: it joins linears, and renames prefixes in wrapper models. It tells the config of
both before it builds layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from quantkit.core.scheme import Scheme
from quantkit.engines.joined import JOINED
from quantkit.errors import CheckpointError
from quantkit.kernels.contract import ACTIVATIONS
from quantkit.layouts import LAYOUTS, read_config
from quantkit.layouts.base import Layout
from quantkit.layouts.expressions import literal, matches
from quantkit.layouts.schemes import Schemes
from quantkit.names import KERNELS
from quantkit.serving.damage import FolderCheck
from quantkit.serving.vllm_plugin import METHOD

#: The classes of layers of experts, in several releases of vLLM.
EXPERTS = {"FusedMoE", "RoutedExperts"}


class QuantkitConfig(QuantizationConfig):  # type: ignore[misc]
    """The layout and the schemes of a folder. vLLM makes one in its front end and sends copies to its workers."""

    def __init__(self, layout: Layout, schemes: Schemes) -> None:
        super().__init__()
        self.layout, self.schemes = layout, schemes
        self.is_head_tied = False
        self.damage = FolderCheck()
        self._patterns = [entry[3:] for entry in schemes.ignore if entry.startswith("re:")]
        self._dense = frozenset(schemes.ignore)
        #: vLLM's name -> the name in the folder, for names that the config states; then pairs of prefixes.
        self._stated: dict[str, str] = {}
        self._prefixes: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"QuantkitConfig({self.layout.NAME}, {self.schemes.default.label})"

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(ACTIVATIONS)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim folders in layouts of quantkit's kernels, and any that it reads if the user asks; None for others."""
        return METHOD if user_quant == METHOD or is_kernel_layout(hf_quant_cfg) else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantkitConfig:
        """Read a `quantization_config`; CheckpointError if it is malformed, or of a method that quantkit reads not."""
        from vllm import envs

        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError("VLLM_BATCH_INVARIANT=1: sums of quantkit's kernels depend on the batch: unset it")
        return cls(*read_config(config, "config.json"))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self.is_head_tied = any(getattr(config, "tie_word_embeddings", False) for config in (hf_config, text))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Remember how vLLM renames the tensors of a model, to find a linear's name in the folder."""
        named = [literal(pattern) for pattern, _ in self.schemes.overrides] + sorted(self._dense)
        for name in [*self._stated, *filter(None, named)]:
            for renamed in hf_to_vllm_mapper.apply_list([f"{name}.weight"]):
                self._stated.setdefault(renamed.removesuffix(".weight"), self._stated.get(name, name))
        prefixes = hf_to_vllm_mapper.orig_to_new_prefix.items()
        self._prefixes |= {new: old for old, new in prefixes if new is not None}

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Drop no tensor: newer vLLM drops `g_idx`, without which act-order would not be noticed."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Make the method of a layer; None leaves it to vLLM.

        ValueError for a packed head, for packed experts, and for linears of several schemes that vLLM joins.
        """
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from quantkit.serving.vllm_linear import QuantkitLinearMethod

        if isinstance(layer, ParallelLMHead):
            if not self.is_head_tied and not self.is_dense(prefix) and not self.is_dense(prefix.rpartition(".")[2]):
                raise ValueError(f"{prefix} is packed, which vLLM does not serve with quantkit: quantize without it")
        elif EXPERTS.intersection(kind.__name__ for kind in type(layer).__mro__):
            if not self.is_dense(prefix):
                raise ValueError(
                    f"{prefix} are packed experts, which quantkit's plug-in does not serve yet: use the layout "
                    "compressed-tensors without --quantization quantkit"
                )
        elif isinstance(layer, LinearBase):
            names = self.members(prefix)
            schemes = self._schemes(prefix, names)
            if len(set(schemes.values())) > 1:
                mixed = ", ".join(f"{name} {'dense' if s is None else s.label}" for name, s in schemes.items())
                raise ValueError(f"vLLM joins {mixed}: quantize them alike, with --set fused_alike=true")
            scheme = schemes[names[0]]
            return UnquantizedLinearMethod() if scheme is None else QuantkitLinearMethod(self, scheme, names)
        return None

    def members(self, prefix: str) -> list[str]:
        """Name the linears that vLLM joins into the linear `prefix`, itself if it joins none."""
        parent, _, leaf = prefix.rpartition(".")
        usual = next((members for joined, members in JOINED if joined == leaf), (leaf,))  # some classes do not tell
        return [f"{parent}.{member}".lstrip(".") for member in self.packed_modules_mapping.get(leaf, usual)]

    def _schemes(self, prefix: str, names: list[str]) -> dict[str, Scheme | None]:
        """Find the scheme of each linear that is joined, None for a dense one; on disk they may be joined too."""
        if self.is_dense(prefix) or self.scheme(prefix) != self.schemes.default:
            return dict.fromkeys(names, None if self.is_dense(prefix) else self.scheme(prefix))
        return {name: None if self.is_dense(name) else self.scheme(name) for name in names}

    def is_dense(self, name: str) -> bool:
        """Return True if the config leaves the linear, which vLLM calls `name`, dense."""
        return any(
            each in self._dense or any(matches(f"(?:{pattern}).*", each) for pattern in self._patterns)
            for each in self.in_folder(name)
        )

    def scheme(self, name: str) -> Scheme:
        """Give the scheme of the linear that vLLM calls `name`."""
        found = map(self.schemes.of, self.in_folder(name))
        return next((scheme for scheme in found if scheme != self.schemes.default), self.schemes.default)

    def in_folder(self, name: str) -> Iterator[str]:
        """Yield the names that a linear may have in the folder: vLLM's, and those before its renaming."""
        yield name
        if name in self._stated:
            yield self._stated[name]
        yield from (old + name[len(new) :] for new, old in self._prefixes.items() if name.startswith(new))


def is_kernel_layout(config: Mapping[str, Any]) -> bool:
    """Return True for a `quantization_config` of a layout that one of quantkit's kernels multiplies.

    A malformed one counts too, if another reader would take it for something else.
    """
    own = config.get("quantkit")
    if isinstance(own, Mapping):
        return own.get("layout") in tuple(KERNELS)
    try:
        return any(LAYOUTS[name].read_config(config) is not None for name in KERNELS)
    except CheckpointError:
        return config.get("quant_method") not in ("awq", "compressed-tensors")
