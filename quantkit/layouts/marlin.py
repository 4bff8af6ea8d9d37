"""MARLIN: symmetric INT4 in the order of the kernel's tensor-core fragments (docs/layouts.md 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Layout, Packing, SideFile, Stored, Unpacking
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
        rows, columns = validation.matrix(shapes, "B")
        return columns // 2, 16 * rows

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        g = scales.shape[1]
        words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
        tensors = {
            "B": words.view(k // 16, 2 * n),
            "s": _scale_order(g)(validation.half(scales).t()).view(g, n),
        }
        return Packing(tensors, CODES.packer(words, 4, shape))

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        n, k = self.check_tensors(tensors, scheme)
        g = scheme.groups(k)
        scales = validation.half(_scale_order(g).inverse(tensors["s"], (g, n)).t())
        return Unpacking(scheme, (n, k), scales, None, CODES.unpacker(tensors["B"], 4, (n, k)))

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make the config of docs/layouts.md 3.5, with both published keys.

        Overrides and dense linears other than `lm_head` are in the `quantkit` key only.
        """
        self.check_all(schemes)
        return {
            **gptq_config(schemes, "marlin"),
            "is_marlin_format": True,
            "lm_head": schemes.quantizes_head,
        }

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        """Read the schemes of a MARLIN config in any of its three published forms; None for another
        layout.
        """
        method = config.get("quant_method")
        marked = config.get("is_marlin_format") is True or "marlin" in (
            config.get("checkpoint_format"),
            config.get("format"),
        )
        if method != "marlin" and not (method == "gptq" and marked):
            return None
        scheme = read_scheme(config, "MARLIN", "it can only be 4, 128 or -1, and true")
        return Schemes(scheme, ignore=validation.dense_head(config))


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


def gptq_config(schemes: Schemes, checkpoint_format: str) -> dict[str, Any]:
    """Make the entries that both MARLIN layouts share with a GPTQ config."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": schemes.default.group_size or -1,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": checkpoint_format,
    }


def read_scheme(config: Mapping[str, Any], title: str, rule: str) -> Scheme:
    """Read the dense scheme of a config of either MARLIN layout; CheckpointError, which ends in
    `rule`, for others.
    """
    bits = validation.entry(config, "bits", int, default=4)
    group = validation.entry(config, "group_size", int)
    symmetric = validation.entry(config, "sym", bool, default=True)
    if bits != 4 or group not in (128, -1) or not symmetric:
        raise CheckpointError(
            f"a {title} config with bits {bits}, group_size {group}, sym {symmetric}: {rule}"
        )
    return Scheme(INT4, None if group == -1 else group)


def _scale_order(g: int) -> Arrangement:
    # The kernel goes by the number of scale rows: one group of 128 in k = 128 counts as per row
    # (docs/layouts.md 3.3).
    return GROUPED_SCALES if g > 1 else SINGLE_SCALES
