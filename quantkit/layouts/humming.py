"""humming: FP6 and FP5 in their true six and five bits, each row one little-endian bit stream (docs/layouts.md 9b)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import FP5, FP6, Format
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import bit_streams, validation
from quantkit.layouts.base import Layout, Packing, Stored, Unpacking
from quantkit.layouts.dynamic import read_dynamic, write_dynamic
from quantkit.layouts.expressions import literal
from quantkit.layouts.schemes import Schemes

#: A config's name for each format.
DTYPES = {f"float{fmt.bits}{fmt.split}": fmt for fmt in (FP6, FP5)}
_NAMES = {fmt: name for name, fmt in DTYPES.items()}


class Humming(Layout):
    """humming: one scale per row and k % 32 == 0."""

    NAME = "humming"
    QUANT_METHODS = ("humming",)
    HOLDS = "fp6 and fp5"
    TENSORS = ("weight", "weight_scale")
    MARKER = "weight_scale"
    TITLE, MULTIPLES = "humming", (1, 32)

    def holds(self, fmt: Format) -> bool:
        return fmt in _NAMES

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.group_size is not None:
            raise LayoutError("humming has one scale per row", Words("quantize with", Setting("group_size", "channel")))

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        return {"weight": (torch.int32, (n, k * scheme.format.bits // 32)), "weight_scale": (torch.float16, (n, 1))}

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        n, words = validation.matrix(shapes, "weight")
        return n, validation.codes_in_words(words, scheme.format)

    def packing(self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        words = torch.empty((n, k * scheme.format.bits // 32), dtype=torch.int32, device=scales.device)
        tensors = {"weight": words, "weight_scale": validation.half(scales)}
        return Packing(tensors, bit_streams.packer(words, scheme.format.bits, k))

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        n, k = self.check_tensors(tensors, scheme)
        fill = bit_streams.unpacker(tensors["weight"], scheme.format.bits, k, "weight")
        return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), None, fill)

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 9b; overrides go to `dynamic`.

        vLLM takes a plain entry of `ignore` for a part of a name, so an exact name is written as a pattern. A name
        without dots, such as the head's, stays plain, because wrapper models put a prefix before it.
        """
        self.check_all(schemes)
        ignore = [f"re:^{re.escape(entry)}$" if _is_exact(entry) else entry for entry in schemes.ignore]
        dynamic = write_dynamic(schemes.overrides, lambda scheme: {"b_dtype": _NAMES[scheme.format]})
        config = {
            "quant_method": "humming",
            "b_dtype": _NAMES[schemes.default.format],
            "weight_scale_group_size": 0,
            "ignore": ignore,
        }
        return config | ({"dynamic": dynamic} if dynamic else {})

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes of a humming config, also with the older keys `dtype` and `group_size`."""
        if config.get("quant_method") != "humming":
            return None
        overrides, dense = read_dynamic(config, _scheme)
        ignore = tuple(map(_ignored, validation.strings(config, "ignore")))
        return Schemes(_scheme(config), overrides, (*ignore, *dense))


def _scheme(config: Mapping[str, Any]) -> Scheme:
    dtype = validation.entry(config, "b_dtype" if "b_dtype" in config else "dtype", str)
    key = "weight_scale_group_size" if "weight_scale_group_size" in config else "group_size"
    group = validation.entry(config, key, int, default=0)
    if dtype not in DTYPES:
        raise CheckpointError(
            f"a humming checkpoint of {dtype!r:.40}: quantkit reads {' and '.join(DTYPES)}, {validation.ORIGINAL}"
        )
    if group != 0:
        raise CheckpointError(
            f"a humming checkpoint with groups of {group}: quantkit reads one scale per row (0), {validation.ORIGINAL}"
        )
    return Scheme(DTYPES[dtype])


def _is_exact(entry: str) -> bool:
    return "." in entry and not entry.startswith("re:")


def _ignored(entry: str) -> str:
    """Translate an entry of humming's `ignore`: an exact pattern to a name, a part of a name to a pattern."""
    own = re.fullmatch(r"re:\^(.*)\$", entry)
    name = literal(own[1]) if own else None
    return name or (f"re:.*{re.escape(entry)}.*" if _is_exact(entry) else entry)
