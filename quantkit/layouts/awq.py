"""AWQ checkpoints: eight neighbouring outputs a word (docs/layouts.md 2), and QUICK's (8).

Zero points are always stored, without an offset. They are all 8 for a symmetric weight, and its
config says `zero_point` too. Only vLLM reads one scale per row; AutoAWQ's own packing fails on it.

QUICK has the same weights in the order of a kernel that needs no shared memory for them. The words
are MARLIN's in another order, which depends on `n`. Scales and zero points are stored twice.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import torch
from msgspec import UNSET, Struct, UnsetType
from torch import Tensor

from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import Scheme, Shape, Shapes, Tensors
from quantkit.errors import LayoutError, Setting, Words
from quantkit.layouts.arrangement import Arrangement, OnRows
from quantkit.layouts.base import Layout, SideFile, Stored, matrix
from quantkit.layouts.gptq import zero_points
from quantkit.layouts.schemes import GroupSize, Schemes, literal
from quantkit.names import JsonView

#: Codes `[n, k]` and zero points `[n, g]`: the even outputs of eight lie in the low half of a word.
WORDS = Arrangement("N h:4 o:2", "K", "K N o h")
#: The codes of QUICK.
CODES = Arrangement("N t:2 j:4 b:2 h:2 a:4", "K s:2 r:2 q:4 e:2", "K t h N a q s j e b r")
#: Scales and zero points `[g, n]`, before every one is repeated.
SCALES = Arrangement("G", "N t:2 c:8 h:2 a:4", "G t h N a c")
#: Zero points that are permuted and repeated already.
ZERO_WORDS = Arrangement("G", "N i:8", "G N i")


class AwqConfig(Struct, kw_only=True):
    """The config of AWQ (docs/layouts.md 2), and of QUICK."""

    bits: Literal[4]
    group_size: GroupSize
    zero_point: bool = True
    version: str | None = None
    modules_to_not_convert: list[str] | None = None
    lm_head: bool | UnsetType = UNSET


class Awq(Layout):
    """AWQ in the GEMM packing. The reference writer takes only multiples of 32; `check` has the
    rule of the readers.
    """

    NAME = "awq"
    QUANT_METHODS = ("awq",)
    TENSORS = ("qweight", "qzeros", "scales")
    MARKER = "qweight"
    TITLE, MULTIPLES = "the AWQ layout", (8, 1)
    CONFIG = AwqConfig
    #: The version in a config.
    VERSION: ClassVar[str] = "gemm"

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        g = scheme.groups(k)
        return {
            "qweight": (torch.int32, (k, n // 8)),
            "qzeros": (torch.int32, (g, n // 8)),
            "scales": (torch.float16, (g, n)),
        }

    def size(self, shapes: Shapes, scheme: Scheme) -> Shape:
        k, words = matrix(shapes, "qweight")
        return 8 * words, k

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        tensors["qzeros"].view(-1).copy_(WORDS.pack(zero_points(scales, zeros), 4))
        tensors["scales"].copy_(scales.t())
        return WORDS.packer(tensors["qweight"].view(-1), 4, shape)

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        n, k = shape
        zeros = zeros_of_record(WORDS.unpack(tensors["qzeros"], 4, (n, scheme.groups(k))), scheme)
        return tensors["scales"].t(), zeros, WORDS.unpacker(tensors["qweight"], 4, shape)

    def config(self, schemes: Schemes) -> AwqConfig:
        """Make the config; overrides are in the `quantkit` key only.

        `modules_to_not_convert` is a list of substrings. So only those patterns of `ignore` that
        match a substring are in it.
        """
        dense = [_substring(module) for module in schemes.ignore if module != "lm_head"]
        return AwqConfig(
            bits=4,
            group_size=schemes.default.group_size or -1,
            version=self.VERSION,
            modules_to_not_convert=[part for part in dense if part] or None,
            lm_head=schemes.quantizes_head or UNSET,
        )

    def claims(self, config: JsonView) -> bool:
        """Recognize the version, whose words are in an order of their own, by each of its names."""
        stated = [
            config[key] for key in ("version", "format", "checkpoint_format") if config.get(key)
        ]
        versions = {str(version).lower() for version in stated or [Awq.VERSION]}
        return versions == {self.VERSION} and config.get("backend") != "llm-awq"

    def entries(self, config: JsonView) -> JsonView:
        """Read the older keys `w_bit` and `q_group_size` too."""
        older = {"w_bit": "bits", "q_group_size": "group_size"}
        return {**config, **{new: config[old] for old, new in older.items() if old in config}}

    def schemes(self, config: AwqConfig) -> Schemes:
        """Read the schemes; `zero_point` false, which no packer writes, reads as symmetric: zero
        points other than 8 are then refused.
        """
        size = None if config.group_size == -1 else config.group_size
        head = () if config.lm_head else ("lm_head",)
        dense = [part for part in config.modules_to_not_convert or () if part != "lm_head"]
        return Schemes(
            Scheme(INT4, size, symmetric=not config.zero_point),
            ignore=(*head, *(f"re:.*{re.escape(part)}.*" for part in dense)),
        )


class Quick(Awq):
    """QUICK. The published packer fails when n / 128 is odd and not 1; the formulas of
    docs/layouts.md 8.2 do not.
    """

    NAME = "quick"
    VERSION = "quick"
    #: The loader takes exactly these keys, and the version in capitals (docs/layouts.md 8.4).
    SIDE_FILE = SideFile(
        "quant_config.json",
        lambda config: {
            "zero_point": config["zero_point"],
            "q_group_size": config["group_size"],
            "w_bit": config["bits"],
            "version": config["version"].upper(),
            "modules_to_not_convert": config["modules_to_not_convert"],
        },
    )
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

    def size(self, shapes: Shapes, scheme: Scheme) -> Shape:
        rows, columns = matrix(shapes, "qweight")
        return 2 * columns, 4 * rows

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        n, g = scales.shape
        points = SCALES(zero_points(scales, zeros).t()).view(g, n // 4, 1, 4).repeat(1, 1, 2, 1)
        tensors["qzeros"].view(-1).copy_(ZERO_WORDS.pack(points.view(g, 2 * n), 4))
        tensors["scales"].copy_(SCALES(scales.t()).view(g, n, 1).repeat(1, 1, 2).view(g, 2 * n))
        return CODES.packer(tensors["qweight"].view(-1), 4, shape)

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        n, g = shape[0], scheme.groups(shape[1])
        scales = _first_copy(tensors["scales"].contiguous().view(g, n, 2, 1), "scales")
        points = ZERO_WORDS.unpack(tensors["qzeros"], 4, (g, 2 * n)).view(g, n // 4, 2, 4)
        zeros = SCALES.inverse(_first_copy(points, "qzeros"), (g, n)).t()
        fill = CODES.unpacker(tensors["qweight"], 4, shape)
        return SCALES.inverse(scales, (g, n)).t(), zeros_of_record(zeros, scheme), fill


def zeros_of_record(zeros: Tensor, scheme: Scheme) -> Tensor | None:
    """Return zero points `[n, g]`, None if the scheme is symmetric; raise LayoutError if they are
    then not all 8.
    """
    if not scheme.symmetric:
        return zeros
    other = zeros != INT4.zero_code
    if bool(other.any()):
        row, group = other.nonzero()[0].tolist()
        raise LayoutError(
            f"the config says symmetric, and the zero point of row {row}, group {group} is "
            f"{int(zeros[row, group])}, "
            "not 8: the config or the tensors are wrong, fetch both again"
        )
    return None


def _substring(module: str) -> str | None:
    """Give the substring that an entry of `ignore` matches, None for other patterns."""
    if not module.startswith("re:"):
        return module
    inner = module.removeprefix("re:")
    is_substring = inner.startswith(".*") and inner.endswith(".*") and len(inner) > 4
    return literal(inner[2:-2]) if is_substring else None


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
