"""GPTQ checkpoints: plain words without interleaving, eight rows of the transposed weight a word
(docs/layouts.md 1).

The two variants differ in zero points: v1, of AutoGPTQ, stores them less one, v2 as they are.
Act-order is read only where it is static (`g_idx` is `k // g`), because no other layout can hold a
shuffled one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Layout, Packing, SideFile, Stored, Unpacking, static_groups
from quantkit.layouts.schemes import Schemes, read_dynamic, write_dynamic

CODES = Arrangement("N", "K i:8", "K N i")
ZEROS = Arrangement("N i:8", "G", "G N i")


class Gptq(Layout):
    """GPTQ v1: a stored zero point is one less than the zero point, so 0 cannot be stored
    (docs/layouts.md 1.4).
    """

    NAME = "gptq"
    QUANT_METHODS = ("gptq",)
    TENSORS = ("qweight", "qzeros", "scales", "g_idx")
    OPTIONAL = ("g_idx",)
    MARKER = "qweight"
    SIDE_FILE = SideFile("quantize_config.json")
    TITLE, MULTIPLES = "the GPTQ layout", (32, 32)
    INTEGERS_IF = "g_idx is static (k // group size)"
    ZEROS_IF: ClassVar[str | None] = "no zero point is 0"
    ZEROS_NOTICE: ClassVar[str | None] = (
        "gptq (v1) cannot store a zero point of 0: use gptq-v2 if the run stops at one"
    )
    ZEROS_IN_DOUBT = (
        "asymmetric ones do not show whether they are v1 or v2 (LAYOUTS 1.4), so check the "
        "perplexity"
    )
    #: Zero point minus stored zero point.
    OFFSET: ClassVar[int] = 1

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        return {
            "qweight": (torch.int32, (k // 8, n)),
            "qzeros": (torch.int32, (g, n // 8)),
            "scales": (torch.float16, (g, n)),
            "g_idx": (torch.int32, (k,)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        words, n = validation.matrix(shapes, "qweight")
        return n, 8 * words

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        points = zero_points(scales, zeros)
        if bool((points < self.OFFSET).any()):
            raise LayoutError(
                "a zero point of 0 cannot be stored in GPTQ v1 (LAYOUTS 1.4)",
                Words("use", Setting("layout", "gptq-v2")),
            )
        words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
        tensors = {
            "qweight": words.view(k // 8, n),
            "qzeros": ZEROS.pack(points - self.OFFSET, 4).view(-1, n // 8),
            "scales": validation.half(scales).t().contiguous(),
            "g_idx": static_groups(scheme, k, scales.device),
        }
        return Packing(tensors, CODES.packer(words, 4, shape))

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        """Make a row-wise unpacker; a missing `g_idx` counts as `k // g`.

        Symmetric files are read by their data, whatever the label: all zero points 7 is v1 and all
        8 is v2 (docs/layouts.md 1.4).
        """
        n, k = self.check_tensors(tensors, scheme)
        order = tensors.get("g_idx")
        if order is not None and not torch.equal(order, static_groups(scheme, k, order.device)):
            raise LayoutError(
                "g_idx is not k // group_size, act-order at run time is not read",
                validation.ORIGINAL,
            )
        zeros = self._zeros(ZEROS.unpack(tensors["qzeros"], 4, (n, scheme.groups(k))), scheme)
        fill = CODES.unpacker(tensors["qweight"], 4, (n, k))
        return Unpacking(scheme, (n, k), validation.half(tensors["scales"].t()), zeros, fill)

    def stored_as(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> str:
        if not scheme.symmetric or "qzeros" not in tensors:
            return self.NAME
        all_8 = 0x88888888 - 2**32  # a word of zero points of 8, in two's complement
        return GptqV2.NAME if bool((tensors["qzeros"] == all_8).all()) else Gptq.NAME

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 1.3; overrides and dense linears go to `dynamic`."""
        self.check_all(schemes)
        label = self.NAME.replace("-", "_")
        dynamic: dict[str, dict[str, Any]] = {}
        for module in schemes.ignore:
            if module.startswith("re:"):
                dynamic[f"-:{module[3:]}"] = {}
            elif module != "lm_head":  # which has a key of its own
                dynamic[f"-:^(?:{re.escape(module)})$"] = {}
        dynamic |= write_dynamic(schemes.overrides, _entries)
        config = {
            "quant_method": "gptq",
            **_entries(schemes.default),
            "desc_act": False,
            "checkpoint_format": label,
            "format": label,
            "lm_head": schemes.quantizes_head,
            "pack_dtype": "int32",
        }
        return config | ({"dynamic": dynamic} if dynamic else {})

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        if config.get("quant_method") != "gptq" or config.get("is_marlin_format") is True:
            return None
        older, newer = (
            validation.entry(config, key, str, type(None), default=None)
            for key in ("checkpoint_format", "format")
        )
        if older and newer and older != newer:
            raise CheckpointError(
                f"checkpoint_format {older!r:.40} contradicts format {newer!r:.40}",
                "keep the right one",
            )
        if (newer or older or Gptq.NAME) != self.NAME.replace("-", "_"):
            return None
        if validation.entry(config, "pack_dtype", str, default="int32") != "int32":
            raise CheckpointError(
                f"GPTQ words of pack_dtype {config['pack_dtype']!r:.40}: only int32 is read, "
                f"{validation.ORIGINAL}"
            )
        head = validation.dense_head(config)
        overrides, ignore = read_dynamic(config, _scheme)
        return Schemes(_scheme(config), overrides, (*head, *ignore))

    def _zeros(self, stored: Tensor, scheme: Scheme) -> Tensor | None:
        if scheme.symmetric:
            if not any(bool((stored == zero).all()) for zero in (7, 8)):
                raise LayoutError(
                    "the config says symmetric, but qzeros are neither all 7 (v1) nor all 8 (v2)"
                )
            return None
        if self.OFFSET and bool((stored == 15).any()):
            raise LayoutError(
                "a stored zero point of 15 means 16 in GPTQ v1, and readers disagree on it "
                "(LAYOUTS 1.4): if these are "
                "v2's zero points under v1's label, set checkpoint_format and format to gptq_v2 in "
                "config.json"
            )
        return stored + self.OFFSET


class GptqV2(Gptq):
    """GPTQ v2: zero points are stored as they are, 0 included."""

    NAME = "gptq-v2"
    VARIANT_OF = Gptq.NAME
    ZEROS_IF = ZEROS_NOTICE = None
    OFFSET = 0


def zero_points(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Give the zero points uint8 `[n, g]` of a record, all 8 if it is symmetric."""
    return torch.full_like(scales, INT4.zero_code, dtype=torch.uint8) if zeros is None else zeros


def _entries(scheme: Scheme) -> dict[str, Any]:
    return {
        "bits": scheme.format.bits,
        "group_size": scheme.group_size or -1,
        "sym": scheme.symmetric,
    }


def _scheme(config: Mapping[str, Any]) -> Scheme:
    bits, group = validation.entry(config, "bits", int), validation.entry(config, "group_size", int)
    if bits != 4:
        raise CheckpointError(
            f"a GPTQ checkpoint of {bits} bits: quantkit reads 4, {validation.ORIGINAL}"
        )
    group_size = validation.group_size(group, "GPTQ")
    return Scheme(INT4, group_size, symmetric=validation.entry(config, "sym", bool))
