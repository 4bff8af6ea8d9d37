"""MARLIN: symmetric INT4 in the order of the kernel's tensor-core fragments (docs/layouts.md 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.errors import LayoutError, Setting, Words
from quantkit.layouts.arrangement import Arrangement, OnRows
from quantkit.layouts.base import Layout, SideFile, Stored, matrix
from quantkit.layouts.gptq import GptqConfig
from quantkit.layouts.schemes import Schemes

CODES = Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")
GROUPED_SCALES = Arrangement("G", "N a:8 b:8", "G N b a")
SINGLE_SCALES = Arrangement("G", "N a:4 b:4 c:2", "G N b a c")


class Marlin(Layout):
    """MARLIN: groups of 128 or one scale per row, n % 64 == 0 and k % 128 == 0."""

    NAME = "marlin"
    QUANT_METHODS = ("gptq", "marlin")
    TENSORS = ("B", "s")
    MARKER = "B"
    SIDE_FILE = SideFile("quantize_config.json")
    TITLE, MULTIPLES = "MARLIN", (64, 128)
    STACKING_UNIT = 64
    CONFIG = GptqConfig
    LABEL = "marlin"

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if not scheme.symmetric:
            raise LayoutError(
                "MARLIN is symmetric only",
                Words("quantize without", Setting("asym", True)),
                Words("use", Setting("layout", "gptq-v2", "compressed-tensors")),
            )
        check_group_size(self.TITLE, scheme)

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        return {"B": (torch.int32, (k // 16, 2 * n)), "s": (torch.float16, (scheme.groups(k), n))}

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        rows, columns = matrix(shapes, "B")
        return columns // 2, 16 * rows

    def packer(
        self,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        shape: tuple[int, int],
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        n, g = scales.shape
        tensors["s"].copy_(_scale_order(g)(scales.t()).view(g, n))
        return CODES.packer(tensors["B"].view(-1), 4, shape)

    def unpacker(
        self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        order = _scale_order(len(tensors["s"]))
        scales = order.inverse(tensors["s"], (len(tensors["s"]), shape[0])).t()
        return scales, None, CODES.unpacker(tensors["B"], 4, shape)

    def config(self, schemes: Schemes) -> GptqConfig:
        """Make the config of docs/layouts.md 3.5; overrides and dense linears other than `lm_head`
        are in the `quantkit` key only.
        """
        return GptqConfig(
            **GptqConfig.settings(schemes.default),
            checkpoint_format=self.LABEL,
            is_marlin_format=True,
            lm_head=schemes.quantizes_head,
        )

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Recognize the three published forms: a method, a flag and the name of a format."""
        return (
            config["quant_method"] != "gptq"
            or config.get("is_marlin_format") is True
            or self.LABEL in (config.get("checkpoint_format"), config.get("format"))
        )

    def entries(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"bits": 4, "sym": True, **config}

    def schemes(self, config: GptqConfig) -> Schemes:
        return Schemes(config.scheme, ignore=config.dense_head)


def check_group_size(title: str, scheme: Scheme) -> None:
    """Raise LayoutError unless the group size is 128 or the whole row, as in both
    MARLIN layouts.
    """
    if scheme.group_size not in (128, None):
        raise LayoutError(
            f"{title} has groups of 128 or one scale per row, not groups of {scheme.group_size}",
            Words("quantize with", Setting("group_size", 128, "channel")),
            Words("use", Setting("layout", "gptq")),
        )


def _scale_order(g: int) -> Arrangement:
    # The kernel goes by the number of scale rows: one group of 128 in k = 128 counts as per row
    # (docs/layouts.md 3.3).
    return GROUPED_SCALES if g > 1 else SINGLE_SCALES
