"""GPTQ checkpoints: plain words without interleaving, eight rows of the transposed weight a word
(docs/layouts.md 1).

The two variants differ in zero points: v1, of AutoGPTQ, stores them minus one, v2 unchanged.
Act-order is a layout only where it is static (`g_idx` is `k // g`), because no other layout can
hold a shuffled one; such a folder is read as a dense source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from msgspec import UNSET, Struct, UnsetType
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import Scheme, Shape, Tensors
from quantkit.errors import LayoutError, Setting, Words
from quantkit.layouts.arrangement import Arrangement, OnRows
from quantkit.layouts.base import DAMAGED, Layout, SideFile, Stored, matrix, static_groups
from quantkit.layouts.schemes import (
    ORIGINAL,
    Dynamic,
    GroupSize,
    Schemes,
    read,
    read_dynamic,
    write_dynamic,
)
from quantkit.names import Json

CODES = Arrangement("N", "K i:8", "K N i")
ZEROS = Arrangement("N i:8", "G", "G N i")


class GptqConfig(Struct, kw_only=True):
    """The config of GPTQ (docs/layouts.md 1.3), and of both MARLIN layouts."""

    bits: Literal[4]
    group_size: GroupSize
    sym: bool
    desc_act: Any = False
    checkpoint_format: str | None = None
    format: str | UnsetType | None = UNSET
    is_marlin_format: Any = UNSET
    lm_head: bool = False
    pack_dtype: Literal["int32"] | UnsetType = UNSET
    dynamic: Dynamic = UNSET

    def __post_init__(self) -> None:
        if self.format and self.checkpoint_format not in (None, "", self.format):
            raise ValueError(
                f"checkpoint_format {self.checkpoint_format!r:.40} contradicts format "
                f"{self.format!r:.40}"
            )

    @staticmethod
    def settings(scheme: Scheme) -> Json:
        """Give the entries that state a scheme."""
        return {"bits": 4, "group_size": scheme.group_size or -1, "sym": scheme.symmetric}

    @property
    def scheme(self) -> Scheme:
        """The default scheme; RecipeError for groups of no column."""
        return Scheme(INT4, None if self.group_size == -1 else self.group_size, self.sym)

    @property
    def dense_head(self) -> tuple[str, ...]:
        """The output head, unless it is quantized."""
        return () if self.lm_head else ("lm_head",)


class Gptq(Layout):
    """GPTQ v1: a stored zero point is one less than the zero point, so 0 cannot be stored
    (docs/layouts.md 1.4).
    """

    NAME = "gptq"
    QUANT_METHODS = ("gptq",)
    CONFIG = GptqConfig
    TENSORS = ("qweight", "qzeros", "scales", "g_idx")
    OPTIONAL = ("g_idx",)
    ORDER = "g_idx"
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
    #: The name of the variant in a config; others that mean the same.
    LABEL: ClassVar[str] = "gptq"
    ALIASES: ClassVar[tuple[str, ...]] = ()

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        return {
            "qweight": (torch.int32, (k // 8, n)),
            "qzeros": (torch.int32, (g, n // 8)),
            "scales": (torch.float16, (g, n)),
            "g_idx": (torch.int32, (k,)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Shape:
        words, n = matrix(shapes, "qweight")
        return n, 8 * words

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        points = zero_points(scales, zeros)
        if bool((points < self.OFFSET).any()):
            raise LayoutError(
                "a zero point of 0 cannot be stored in GPTQ v1 (LAYOUTS 1.4)",
                Words("use", Setting("layout", "gptq-v2")),
            )
        tensors["qzeros"].view(-1).copy_(ZEROS.pack(points - self.OFFSET, 4))
        tensors["scales"].copy_(scales.t())
        tensors["g_idx"].copy_(static_groups(scheme, shape[1], scales.device))
        return CODES.packer(tensors["qweight"].view(-1), 4, shape)

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        """Make a row-wise unpacker; a missing `g_idx` counts as `k // g`.

        Symmetric files are read by their data, and the label is ignored: zero points of 7 are v1,
        of 8 v2 (docs/layouts.md 1.4).
        """
        check_static(tensors, "g_idx", scheme, shape[1])
        stored = ZEROS.unpack(tensors["qzeros"], 4, (shape[0], scheme.groups(shape[1])))
        fill = CODES.unpacker(tensors["qweight"], 4, shape)
        return tensors["scales"].t(), self._zeros(stored, scheme), fill

    def stored_as(self, tensors: Tensors, scheme: Scheme) -> str:
        if not scheme.symmetric or "qzeros" not in tensors:
            return self.NAME
        all_8 = 0x88888888 - 2**32  # a word of zero points of 8, in two's complement
        return GptqV2.NAME if bool((tensors["qzeros"] == all_8).all()) else Gptq.NAME

    def config(self, schemes: Schemes) -> GptqConfig:
        """Make the config; overrides and dense linears go to `dynamic`."""
        dynamic: dict[str, Json | None] = {}
        for module in schemes.ignore:
            if module.startswith("re:"):
                dynamic[f"-:{module[3:]}"] = {}
            elif module != "lm_head":
                dynamic[f"-:^(?:{re.escape(module)})$"] = {}
        dynamic |= write_dynamic(schemes.overrides, GptqConfig.settings)
        return GptqConfig(
            **GptqConfig.settings(schemes.default),
            checkpoint_format=self.LABEL,
            format=self.LABEL,
            lm_head=schemes.quantizes_head,
            pack_dtype="int32",
            dynamic=dynamic or UNSET,
        )

    def claims(self, config: Mapping[str, Any]) -> bool:
        label = config.get("format") or config.get("checkpoint_format") or Gptq.LABEL
        return label in (self.LABEL, *self.ALIASES) and config.get("is_marlin_format") is not True

    def schemes(self, config: GptqConfig) -> Schemes:
        settings = GptqConfig.settings(config.scheme)
        overrides, ignore = read_dynamic(
            config.dynamic, lambda changes: read(GptqConfig, {**settings, **changes}).scheme
        )
        return Schemes(config.scheme, overrides, (*config.dense_head, *ignore))

    def _zeros(self, stored: Tensor, scheme: Scheme) -> Tensor | None:
        if scheme.symmetric:
            if not any(bool((stored == zero).all()) for zero in (7, 8)):
                raise LayoutError(
                    "the config says symmetric, but qzeros are neither all 7 (v1) nor all 8 (v2)",
                    'set "sym": false there if the weights have zero points',
                    DAMAGED,
                )
            return None
        if self.OFFSET and bool((stored == 15).any()):
            raise LayoutError(
                "a stored zero point of 15 means 16 in GPTQ v1, and readers disagree on it "
                "(LAYOUTS 1.4): if these are v2's zero points under v1's label, set "
                "checkpoint_format and format to gptq_v2 in config.json"
            )
        return stored + self.OFFSET


class GptqV2(Gptq):
    """GPTQ v2: zero points are stored unchanged, 0 included.

    GPTQModel's `gptq_p` stores codes in planes of bits. 4 bits are one plane: the words are v2's.
    """

    NAME = "gptq-v2"
    VARIANT_OF = Gptq.NAME
    ZEROS_IF = ZEROS_NOTICE = None
    OFFSET = 0
    LABEL = "gptq_v2"
    ALIASES = ("gptq_p",)


def zero_points(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Give the zero points uint8 `[n, g]` of a record, all 8 if it is symmetric."""
    return torch.full_like(scales, INT4.zero_code, dtype=torch.uint8) if zeros is None else zeros


def check_static(tensors: Tensors, name: str, scheme: Scheme, k: int) -> None:
    """Raise LayoutError if the file states the group of each column, and it is not `k // g`."""
    order = tensors.get(name)
    if order is not None and not torch.equal(order, static_groups(scheme, k, order.device)):
        raise LayoutError(
            "g_idx is not k // group_size, act-order at run time is not read", ORIGINAL
        )
