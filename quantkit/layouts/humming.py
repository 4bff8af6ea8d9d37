"""humming: FP6, FP5 and integers in their true bits, each row one little-endian bit stream
(docs/layouts.md 9b).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from msgspec import UNSET, Struct, UnsetType
from torch import Tensor

from quantkit.core.formats import FORMATS, FP5, FP6, Format
from quantkit.core.quantized_tensor import Scheme, Shape, Tensors
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.keys import Count
from quantkit.layouts.arrangement import (
    OnRows,
    decoded_rows,
    pack_zeros,
    stream_packer,
    stream_unpacker,
    unpack_zeros,
)
from quantkit.layouts.base import Layout, Stored, codes_in_words, matrix
from quantkit.layouts.schemes import (
    ORIGINAL,
    Dynamic,
    Schemes,
    literal,
    read,
    read_dynamic,
    write_dynamic,
)
from quantkit.names import Json, JsonView

#: A config's name for each format. Codes of integers are unsigned there, and half of their number
#: is zero.
DTYPES = {f"float{fmt.bits}{fmt.split}": fmt for fmt in (FP6, FP5)} | {
    f"uint{fmt.bits}": fmt for fmt in FORMATS.values() if not fmt.is_float
}
_NAMES = {fmt: name for name, fmt in DTYPES.items()}


class HummingConfig(Struct, kw_only=True):
    """The config of humming (docs/layouts.md 9b); groups of 0 stand for one scale per row."""

    b_dtype: str
    weight_scale_group_size: Count = 0
    has_zero_point: bool | UnsetType = UNSET
    ignore: list[str] | None = None
    dynamic: Dynamic = UNSET


class Humming(Layout):
    """humming: FP6 and FP5 with one scale per row, integers in groups too, k % 32 == 0."""

    NAME = "humming"
    QUANT_METHODS = ("humming",)
    CONFIG = HummingConfig
    HOLDS = "fp6, fp5 and integers"
    TENSORS = ("weight", "weight_scale", "zero_point")
    MARKER = "weight_scale"
    TITLE, MULTIPLES = "humming", (1, 32)
    MULTIPLES_WITH_ZEROS = (32, 32)  # zero points fill whole words
    GATHERS = True

    def holds(self, fmt: Format) -> bool:
        return fmt in _NAMES

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.group_size is not None and scheme.group_size % 32:
            raise LayoutError(
                f"humming needs groups of a multiple of 32, not {scheme.group_size}",
                Words("use", Setting("group_size", 32)),
            )

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        bits, g = scheme.format.bits, scheme.groups(k)
        zeros = {} if scheme.symmetric else {"zero_point": (torch.int32, (n * bits // 32, g))}
        return {
            "weight": (torch.int32, (n, k * bits // 32)),
            "weight_scale": (torch.float16, (n, g)),
            **zeros,
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Shape:
        n, words = matrix(shapes, "weight")
        return n, codes_in_words(words, scheme.format)

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        if zeros is not None:
            tensors["zero_point"].copy_(pack_zeros(zeros, scheme.format.bits))
        tensors["weight_scale"].copy_(scales)
        return stream_packer(tensors["weight"], scheme.format.bits, shape[1])

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        (n, k), bits, zeros = shape, scheme.format.bits, None
        if not scheme.symmetric:
            zeros = unpack_zeros(tensors["zero_point"], bits, n, "zero_point")
        return tensors["weight_scale"], zeros, stream_unpacker(tensors["weight"], bits, k, "weight")

    def gather(self, scheme: Scheme, tensors: Tensors, rows: Tensor, k: int) -> Tensor:
        return decoded_rows(
            scheme,
            rows,
            k,
            tensors["weight"],
            tensors["weight_scale"],
            tensors.get("zero_point"),
        )

    def config(self, schemes: Schemes) -> HummingConfig:
        """Make the config of docs/layouts.md 9b; overrides go to `dynamic`.

        vLLM takes a plain entry of `ignore` for a part of a name, so an exact name is written as a
        pattern. A name without dots, such as the head's, stays plain, because wrapper models put a
        prefix before it.
        """
        usual = _settings(schemes.default)

        def changes(scheme: Scheme) -> Json:
            own = _settings(scheme)
            return {
                key: value for key, value in own.items() if key == "b_dtype" or value != usual[key]
            }

        return HummingConfig(
            b_dtype=usual["b_dtype"],
            weight_scale_group_size=usual["weight_scale_group_size"],
            has_zero_point=usual["has_zero_point"] or UNSET,
            ignore=[f"re:^{re.escape(e)}$" if _is_exact(e) else e for e in schemes.ignore],
            dynamic=write_dynamic(schemes.overrides, changes) or UNSET,
        )

    def entries(self, config: JsonView) -> JsonView:
        """Read the older keys `dtype` and `group_size` too."""
        older = {"dtype": "b_dtype", "group_size": "weight_scale_group_size"}
        return {new: config[old] for old, new in older.items() if old in config} | {**config}

    def schemes(self, config: HummingConfig) -> Schemes:
        default = _scheme(config)

        def changed(changes: JsonView) -> Scheme:
            return _scheme(read(HummingConfig, {**_settings(default), **self.entries(changes)}))

        overrides, dense = read_dynamic(config.dynamic, changed)
        return Schemes(default, overrides, (*map(_ignored, config.ignore or ()), *dense))


def _settings(scheme: Scheme) -> Json:
    return {
        "has_zero_point": not scheme.symmetric,
        "b_dtype": _NAMES[scheme.format],
        "weight_scale_group_size": scheme.group_size or 0,
    }


def _scheme(config: HummingConfig) -> Scheme:
    if config.b_dtype not in DTYPES:
        raise CheckpointError(
            f"a humming checkpoint of {config.b_dtype!r:.40}: quantkit reads {', '.join(DTYPES)}",
            ORIGINAL,
        )
    return Scheme(
        DTYPES[config.b_dtype],
        config.weight_scale_group_size or None,
        symmetric=not config.has_zero_point,
    )


def _is_exact(entry: str) -> bool:
    return "." in entry and not entry.startswith("re:")


def _ignored(entry: str) -> str:
    """Translate an entry of humming's `ignore`: an exact pattern to a name, a part of a name to a
    pattern.
    """
    own = re.fullmatch(r"re:\^(.*)\$", entry)
    name = literal(own[1]) if own else None
    return name or (f"re:.*{re.escape(entry)}.*" if _is_exact(entry) else entry)
