"""QUICK: AWQ's weights in the order of a kernel that needs no shared memory for them
(docs/layouts.md 8).

The words are MARLIN's in another order, which depends on `n`. Scales and zero points are stored
twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts import awq, validation
from quantkit.layouts.arrangement import Arrangement
from quantkit.layouts.base import Layout, Packing, SideFile, Stored, Unpacking
from quantkit.layouts.gptq import zero_points
from quantkit.layouts.schemes import Schemes

CODES = Arrangement("N t:2 j:4 b:2 h:2 a:4", "K s:2 r:2 q:4 e:2", "K t h N a q s j e b r")
#: Scales and zero points `[g, n]`, before every one is repeated.
SCALES = Arrangement("G", "N t:2 c:8 h:2 a:4", "G t h N a c")
#: Zero points that are permuted and repeated already.
ZERO_WORDS = Arrangement("G", "N i:8", "G N i")


def _older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the side file: the loader takes exactly these keys, and the version in capitals
    (docs/layouts.md 8.4).
    """
    return {
        "zero_point": config["zero_point"],
        "q_group_size": config["group_size"],
        "w_bit": config["bits"],
        "version": config["version"].upper(),
        "modules_to_not_convert": config["modules_to_not_convert"],
    }


class Quick(Layout):
    """QUICK. The published packer fails when n / 128 is odd and not 1; the formulas of
    docs/layouts.md 8.2 do not.
    """

    NAME = "quick"
    QUANT_METHODS = ("awq",)
    TENSORS = ("qweight", "qzeros", "scales")
    MARKER = "qweight"
    SIDE_FILE = SideFile("quant_config.json", _older_keys)
    TITLE, MULTIPLES = "QUICK", (128, 32)
    WAY_OUT = Words(Setting("skip"), "the weight, or use", Setting("layout", "awq"))

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.group_size is None:  # its loader divides k by the group size, which would be -1
            raise LayoutError(
                "QUICK cannot load one scale per row", Words("use", Setting("group_size", 128))
            )
        if scheme.group_size % 32:
            raise LayoutError(
                f"QUICK has groups of a multiple of 32, not of {scheme.group_size}",
                Words("use", Setting("group_size", 128), "or", Setting("layout", "awq")),
            )

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        return {
            "qweight": (torch.int32, (k // 4, n // 2)),
            "qzeros": (torch.int32, (g, n // 4)),
            "scales": (torch.float16, (g, 2 * n)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        rows, columns = validation.matrix(shapes, "qweight")
        return 2 * columns, 4 * rows

    def packing(
        self, scheme: Scheme, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None
    ) -> Packing:
        n, k = shape
        self.check(scheme, n, k)
        g = scales.shape[1]
        points = SCALES(zero_points(scales, zeros).t()).view(g, n // 4, 1, 4).repeat(1, 1, 2, 1)
        words = torch.empty([n * k // 8], dtype=torch.int32, device=scales.device)
        tensors = {
            "qweight": words.view(k // 4, n // 2),
            "qzeros": ZERO_WORDS.pack(points.view(g, 2 * n), 4).view(g, n // 4),
            "scales": SCALES(validation.half(scales).t())
            .view(g, n, 1)
            .repeat(1, 1, 2)
            .view(g, 2 * n),
        }
        return Packing(tensors, CODES.packer(words, 4, shape))

    def unpacking(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> Unpacking:
        n, k = self.check_tensors(tensors, scheme)
        g = scheme.groups(k)
        scales = _first_copy(tensors["scales"].contiguous().view(g, n, 2, 1), "scales")
        points = _first_copy(
            ZERO_WORDS.unpack(tensors["qzeros"], 4, (g, 2 * n)).view(g, n // 4, 2, 4), "qzeros"
        )
        zeros = awq.zeros_of_record(SCALES.inverse(points, (g, n)).t(), scheme)
        fill = CODES.unpacker(tensors["qweight"], 4, (n, k))
        return Unpacking(
            scheme, (n, k), validation.half(SCALES.inverse(scales, (g, n)).t()), zeros, fill
        )

    def write_config(self, schemes: Schemes) -> dict[str, Any]:
        """Make AWQ's config with the version `quick` (docs/layouts.md 8.4)."""
        self.check_all(schemes)
        return awq.config_of(schemes, self.NAME)

    def read_config(self, config: Mapping[str, Any]) -> Schemes | None:
        if awq.version_of(config) != self.NAME:
            return None
        schemes = awq.schemes_of(config)
        try:
            self.check_scheme(schemes.default)
        except LayoutError as error:
            raise CheckpointError("no checkpoint of QUICK's is like this", error.typed) from error
        return schemes


def _first_copy(copies: Tensor, name: str) -> Tensor:
    """Give the first copy of `[g, blocks, 2, entries]`, flat; raise LayoutError unless the bits of
    both agree.
    """
    first, second = copies.unbind(2)
    if not torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)):
        raise LayoutError(
            f"tensor {name!r} holds every entry twice, and two copies differ: it is damaged"
        )
    return first.reshape(-1)
