"""humming: FP6, FP5 and integers in their true bits, each row one little-endian bit stream
(docs/layouts.md 9b).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import FORMATS, FP5, FP6, Format
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import bit_streams, validation
from quantkit.layouts.base import Layout, Packing, Stored, Unpacking
from quantkit.layouts.expressions import literal
from quantkit.layouts.schemes import Schemes, read_dynamic, write_dynamic

#: A config's name for each format. Codes of integers are unsigned there, and half of their number
#: is zero.
DTYPES = {f"float{fmt.bits}{fmt.split}": fmt for fmt in (FP6, FP5)}
DTYPES |= {f"uint{fmt.bits}": fmt for fmt in FORMATS.values() if not fmt.is_float}
_NAMES = {fmt: name for name, fmt in DTYPES.items()}


class Humming(Layout):
    """humming: FP6 and FP5 with one scale per row, integers in groups too, k % 32 == 0."""

    NAME = "humming"
    QUANT_METHODS = ("humming",)
    HOLDS = "fp6, fp5 and integers"
    TENSORS = ("weight", "weight_scale", "zero_point")
    MARKER = "weight_scale"
    TITLE, MULTIPLES = "humming", (1, 32)

    def holds(self, fmt: Format) -> bool:
        return fmt in _NAMES

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.format.is_float and scheme.group_size is not None:
            rule = f"humming holds {scheme.format.name} with one scale per row"
            raise LayoutError(rule, Words("quantize with", Setting("group_size", "channel")))
        if scheme.group_size is not None and scheme.group_size % 32:
            rule = f"humming needs groups of a multiple of 32, not {scheme.group_size}"
            raise LayoutError(rule, Words("use", Setting("group_size", 32)))

    def check(self, scheme: Scheme, n: int, k: int) -> None:
        super().check(scheme, n, k)
        if not scheme.symmetric:  # zero points fill whole words
            validation.check_multiples(
                f"{self.TITLE} with zero points", (n, k), (32, 32), self.WAY_OUT
            )

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        bits, g = scheme.format.bits, scheme.groups(k)
        zeros = {} if scheme.symmetric else {"zero_point": (torch.int32, (n * bits // 32, g))}
        return {
            "weight": (torch.int32, (n, k * bits // 32)),
            "weight_scale": (torch.float16, (n, g)),
            **zeros,
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        n, words = validation.matrix(shapes, "weight")
        return n, validation.codes_in_words(words, scheme.format)

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        words = torch.empty(
            (n, k * scheme.format.bits // 32), dtype=torch.int32, device=scales.device
        )
        tensors = {"weight": words, "weight_scale": validation.half(scales)}
        if zeros is not None:
            tensors["zero_point"] = bit_streams.pack_zeros(zeros, scheme.format.bits)
        return Packing(tensors, bit_streams.packer(words, scheme.format.bits, k))

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        n, k = self.check_tensors(tensors, scheme)
        bits = scheme.format.bits
        zeros = (
            None
            if scheme.symmetric
            else bit_streams.unpack_zeros(tensors["zero_point"], bits, n, "zero_point")
        )
        fill = bit_streams.unpacker(tensors["weight"], bits, k, "weight")
        return Unpacking(scheme, (n, k), validation.half(tensors["weight_scale"]), zeros, fill)

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 9b; overrides go to `dynamic`.

        vLLM takes a plain entry of `ignore` for a part of a name, so an exact name is written as a
        pattern. A name without dots, such as the head's, stays plain, because wrapper models put a
        prefix before it.
        """
        self.check_all(schemes)
        ignore = [
            f"re:^{re.escape(entry)}$" if _is_exact(entry) else entry for entry in schemes.ignore
        ]
        usual = {"has_zero_point": False, **_entries(schemes.default)}

        def changes(scheme: Scheme) -> dict[str, Any]:
            own = {"has_zero_point": False, **_entries(scheme)}
            return {
                key: value for key, value in own.items() if key == "b_dtype" or value != usual[key]
            }

        dynamic = write_dynamic(schemes.overrides, changes)
        config = {"quant_method": "humming", **_entries(schemes.default), "ignore": ignore}
        return config | ({"dynamic": dynamic} if dynamic else {})

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes of a humming config, also with the older keys `dtype` and
        `group_size`.
        """
        if config.get("quant_method") != "humming":
            return None
        overrides, dense = read_dynamic(config, _scheme)
        ignore = tuple(map(_ignored, validation.strings(config, "ignore")))
        return Schemes(_scheme(config), overrides, (*ignore, *dense))


def _entries(scheme: Scheme) -> dict[str, Any]:
    entries = {"b_dtype": _NAMES[scheme.format], "weight_scale_group_size": scheme.group_size or 0}
    return entries if scheme.symmetric else {**entries, "has_zero_point": True}


def _scheme(config: Mapping[str, Any]) -> Scheme:
    dtype = validation.entry(config, "b_dtype" if "b_dtype" in config else "dtype", str)
    key = "weight_scale_group_size" if "weight_scale_group_size" in config else "group_size"
    group = validation.entry(config, key, int, default=0)
    if dtype not in DTYPES:
        raise CheckpointError(
            f"a humming checkpoint of {dtype!r:.40}: quantkit reads {', '.join(DTYPES)}, "
            f"{validation.ORIGINAL}"
        )
    fmt, zeros = DTYPES[dtype], validation.entry(config, "has_zero_point", bool, default=False)
    if group < 0 or (fmt.is_float and (group or zeros)):
        raise CheckpointError(
            f"a humming checkpoint of {dtype} with groups of "
            f"{group}{' and zero points' if zeros else ''}: "
            f"quantkit reads floats with one scale per row (0), {validation.ORIGINAL}"
        )
    return Scheme(fmt, group or None, symmetric=not zeros)


def _is_exact(entry: str) -> bool:
    return "." in entry and not entry.startswith("re:")


def _ignored(entry: str) -> str:
    """Translate an entry of humming's `ignore`: an exact pattern to a name, a part of a name to a
    pattern.
    """
    own = re.fullmatch(r"re:\^(.*)\$", entry)
    name = literal(own[1]) if own else None
    return name or (f"re:.*{re.escape(entry)}.*" if _is_exact(entry) else entry)
