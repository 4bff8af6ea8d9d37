"""MARLIN: symmetric INT4 in the order of the kernel's tensor-core fragments (docs/layouts.md 3).

Sparse-MARLIN has 2:4-sparse weights: the two nonzero codes of each four as MARLIN fragments
(docs/layouts.md 5). The metadata, which say where these codes belong, are computed from the codes
and stored beside them. Files whose metadata came from a pruning mask are read too, with the same
values. Written again, they get the metadata of docs/layouts.md 4.1, and `verify` reports it. The
variant of compressed-tensors holds the same bytes under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from msgspec import UNSET, Struct
from torch import Tensor

from quantkit.core import sparsity
from quantkit.core.formats import INT4, aligned
from quantkit.core.quantized_tensor import Scheme, Shape, Sparsity, Tensors
from quantkit.errors import CheckpointError, LayoutError, Setting, Words
from quantkit.layouts.arrangement import Arrangement, OnRows, blocks
from quantkit.layouts.base import Layout, SideFile, Stored, matrix
from quantkit.layouts.compressed_tensors import (
    MARLIN24,
    METHOD as COMPRESSED_TENSORS,
    CompressedTensors,
    CompressedTensorsConfig,
    schemes_of,
)
from quantkit.layouts.gptq import GptqConfig
from quantkit.layouts.schemes import ORIGINAL, Schemes
from quantkit.names import JsonView

CODES = Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")
GROUPED_SCALES = Arrangement("G", "N a:8 b:8", "G N b a")
SINGLE_SCALES = Arrangement("G", "N a:4 b:4 c:2", "G N b a c")

#: The stored codes of a 2:4 weight: two of each four.
PAIRS = Arrangement("N a:8 b:2 j:4", "K h:2 q:4 e:2", "K N a q j e b h")
SPARSE_SCALES = Arrangement("G", "N b:2 c:4", "G N c b")
PLAIN_SCALES = Arrangement("G", "N", "G N")
#: The order of metadata (docs/layouts.md 4.4).
METADATA_ORDER = Arrangement("N e:8 n2:2 n1:2 n0:2", "C d:2 q:4", "C N n1 e n0 d n2 q")
#: Index: bit i is set if code i of four is not zero. Entry: `i0 | i1 << 2` for the stored
#: positions, or REFUSED for three and four nonzero codes (docs/layouts.md 4.1).
REFUSED = 0
METADATA = (0xE, 0x8, 0x9, 0x4, 0xE, 0x8, 0x9, 0x0, 0xE, 0xC, 0xD, 0x0, 0xE, 0x0, 0x0, 0x0)


class Marlin(Layout):
    """MARLIN: groups of 128 or one scale per row, n % 64 == 0 and k % 128 == 0."""

    NAME = "marlin"
    QUANT_METHODS: ClassVar[tuple[str, ...]] = ("gptq", "marlin")
    #: Stored codes first, scales last.
    TENSORS: ClassVar[tuple[str, ...]] = ("B", "s")
    MARKER = "B"
    SIDE_FILE: ClassVar[SideFile | None] = SideFile("quantize_config.json")
    TITLE, MULTIPLES = "MARLIN", (64, 128)
    STACKING_UNIT = 64
    CONFIG: ClassVar[type[Struct]] = GptqConfig
    #: The public name of the format.
    LABEL = "marlin"
    #: The sparsity of all weights.
    SPARSITY: ClassVar[Sparsity] = None
    #: Columns of the weight in a row of words.
    COLUMNS = 16
    #: The order of one scale per row, and of scales of groups. The kernel goes by the number of
    #: scale rows: one group of 128 in k = 128 counts as per row (docs/layouts.md 3.3).
    SCALE_ORDERS = (SINGLE_SCALES, GROUPED_SCALES)

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if self.SPARSITY is not None and scheme.sparsity is None:
            raise LayoutError(
                f"{self.TITLE} holds 2:4 weights only, two of four along k",
                Words("quantize with", Setting("prune", "2:4")),
                Words("use", Setting("layout", "marlin")),
            )
        if not scheme.symmetric:
            raise LayoutError(
                f"{self.TITLE} is symmetric only",
                Words("quantize without", Setting("asym", True)),
                Words("use", Setting("layout", "gptq-v2", "compressed-tensors")),
            )
        if scheme.group_size not in (128, None):
            raise LayoutError(
                f"{self.TITLE} has groups of 128 or one scale per row, not groups of "
                f"{scheme.group_size}",
                Words("quantize with", Setting("group_size", 128, "channel")),
                Words("use", Setting("layout", "gptq")),
            )

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        codes, *metadata, scales = self.TENSORS
        words = (k // self.COLUMNS, 2 * n)
        return {
            codes: (torch.int32, words),
            **{name: (torch.int16, words) for name in metadata},
            scales: (torch.float16, (scheme.groups(k), n)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Shape:
        rows, columns = matrix(shapes, self.TENSORS[0])
        return columns // 2, self.COLUMNS * rows

    def packer(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        stored = tensors[self.TENSORS[-1]]
        stored.copy_(self.SCALE_ORDERS[len(stored) > 1](scales.t()).view(stored.shape))
        return self.code_packer(tensors, shape)

    def unpacker(
        self, tensors: Tensors, scheme: Scheme, shape: Shape
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        """Make a row-wise unpacker. Of Sparse-MARLIN, it raises LayoutError for metadata that do
        not describe two of four.

        The library of compressed-tensors left the scales of k = 256 in groups of 128 unpermuted,
        which nothing in the file shows. They are read as the kernel reads them, permuted
        (docs/layouts.md 5.5).
        """
        stored = tensors[self.TENSORS[-1]]
        scales = self.SCALE_ORDERS[len(stored) > 1].inverse(stored, (len(stored), shape[0])).t()
        return scales, None, self.code_unpacker(tensors, shape)

    def code_packer(self, tensors: Tensors, shape: Shape) -> OnRows:
        """Make the function that packs rows of codes."""
        return CODES.packer(tensors[self.TENSORS[0]].view(-1), 4, shape)

    def code_unpacker(self, tensors: Tensors, shape: Shape) -> OnRows:
        """Make the function that unpacks rows of codes."""
        return CODES.unpacker(tensors[self.TENSORS[0]], 4, shape)

    def config(self, schemes: Schemes) -> Struct:
        """Make the config of docs/layouts.md 3.5 or 5.4; overrides and dense linears other than
        `lm_head` are in the `quantkit` key only.

        The method of Sparse-MARLIN is not vLLM's, because readers that do not know it take it for a
        dense model.
        """
        return GptqConfig(
            **GptqConfig.settings(schemes.default),
            checkpoint_format=self.LABEL,
            is_marlin_format=True if self.SPARSITY is None else UNSET,
            lm_head=schemes.quantizes_head,
        )

    def claims(self, config: JsonView) -> bool:
        """Recognize the published forms: a method, the name of a format and, of MARLIN, a flag."""
        flag = self.SPARSITY is None and config.get("is_marlin_format") is True
        stated = (config.get("checkpoint_format"), config.get("format"))
        return config["quant_method"] != "gptq" or flag or self.LABEL in stated

    def entries(self, config: JsonView) -> JsonView:
        return {"bits": 4, "sym": True, **config}

    def schemes(self, config: Any) -> Schemes:
        return Schemes(replace(config.scheme, sparsity=self.SPARSITY), ignore=config.dense_head)


class Marlin24(Marlin):
    """Sparse-MARLIN: groups of 128 or one scale per row, n % 128 == 0 and k % 128 == 0."""

    NAME = "marlin24"
    QUANT_METHODS: ClassVar[tuple[str, ...]] = ("gptq", "gptq_marlin_24")  # vLLM has its own
    TENSORS = ("B_24", "B_meta", "s")
    MARKER = "B_24"
    TITLE, MULTIPLES = "Sparse-MARLIN", (128, 128)
    STACKING_UNIT = 128
    LABEL = "marlin_24"
    SPARSITY = "2:4"
    COLUMNS = 32
    SCALE_ORDERS = (PLAIN_SCALES, SPARSE_SCALES)  # docs/layouts.md 5.2

    def code_packer(self, tensors: Tensors, shape: Shape) -> OnRows:
        n, k = shape
        words, meta = (tensors[name].view(-1).view(torch.int32) for name in self.TENSORS[:2])
        pack_pairs = PAIRS.packer(words, 4, (n, k // 2))
        pack_metadata = METADATA_ORDER.packer(meta, 4, (n, k // 4))

        def add(first: int, codes: Tensor) -> None:
            pairs, metadata = compress(codes, INT4.zero_code)
            pack_pairs(first, pairs)
            pack_metadata(first, metadata)

        return add

    def code_unpacker(self, tensors: Tensors, shape: Shape) -> OnRows:
        n, k = shape
        words, meta = (aligned(tensors[name]).view(torch.int32) for name in self.TENSORS[:2])
        fill_pairs = PAIRS.unpacker(words, 4, (n, k // 2))
        fill_metadata = METADATA_ORDER.unpacker(meta, 4, (n, k // 4))

        def fill(first: int, codes: Tensor) -> None:
            pairs, metadata = (codes.new_empty(len(codes), k // size) for size in (2, 4))
            fill_pairs(first, pairs)
            fill_metadata(first, metadata)
            expand(pairs, metadata, INT4.zero_code, out=codes)

        return fill


class Marlin24CompressedTensors(Marlin24):
    """Sparse-MARLIN as compressed-tensors stores it, format `marlin-24` (docs/layouts.md 5.1)."""

    NAME = "marlin24-ct"
    VARIANT_OF = Marlin24.NAME
    QUANT_METHODS = (COMPRESSED_TENSORS,)
    CONFIG = CompressedTensorsConfig
    TENSORS = ("weight_packed", "meta", "scale_packed")
    MARKER = "scale_packed"
    SIDE_FILE = None

    def config(self, schemes: Schemes) -> CompressedTensorsConfig:
        """Make the config of docs/layouts.md 5.4, with the format in every config group too.

        A library that cannot read the format then refuses it by name. Otherwise it would take the
        tensors for `pack-quantized`.
        """
        config = CompressedTensors().config(schemes)
        config.format = MARLIN24
        for group in config.config_groups.values():
            group.format = MARLIN24
        return config

    def claims(self, config: JsonView) -> bool:
        return config.get("format") == MARLIN24

    def schemes(self, config: CompressedTensorsConfig) -> Schemes:
        """Read the schemes; `sparsity_config` may say 2:4, and that nothing more was packed."""
        sparse = (config.sparsity_config or {}).get("format", "dense")
        if sparse not in ("dense", MARLIN24):
            raise CheckpointError(
                f"a {MARLIN24} checkpoint with sparsity {str(sparse)!r:.40}: only dense is read",
                ORIGINAL,
            )
        config.sparsity_config = None
        found = schemes_of(config, MARLIN24)
        return Schemes(
            replace(found.default, sparsity="2:4"),
            tuple((name, replace(s, sparsity="2:4")) for name, s in found.overrides),
            found.ignore,
        )


def compress(codes: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """Compress 2:4-sparse codes uint8 `[n, k]` below 16 to the stored codes `[n, k/2]` and metadata
    `[n, k/4]`.

    LayoutError for a group of four with more than two codes other than `zero`, and unless `k` is a
    multiple of 4.
    """
    n, k = codes.shape
    stored = torch.empty((n, k // 2), dtype=torch.uint8, device=codes.device)
    metadata = torch.empty((n, sparsity.quads(k)), dtype=torch.uint8, device=codes.device)
    table = _compressed(zero, codes.device)
    for some, pairs, places in blocks(k, aligned(codes), stored, metadata):
        fours = some.view(-1).view(torch.int32)
        found = table.index_select(0, (fours >> 12).bitwise_or_(fours).bitwise_and_(0xFFFF))
        pairs.view(-1).view(torch.int16).copy_(found)  # which drops the metadata above
        places.view(-1).copy_(found.bitwise_right_shift_(16))
    if metadata.numel() and int(metadata.min()) == REFUSED:
        sparsity.check(codes, zero)  # which names the first one
    return stored, metadata


def expand(stored: Tensor, metadata: Tensor, zero: int, out: Tensor) -> None:
    """Fill uint8 `out` `[n, k]` from stored codes `[n, k/2]` and metadata `[n, k/4]`; all other
    codes are `zero`.

    The metadata of a file may differ from `compress` where a stored code is zero. LayoutError for
    metadata that do not name two places in rising order.
    """
    wrong = (metadata & 3) >= (metadata >> 2)
    if bool(wrong.any()):
        row, group = wrong.nonzero()[0].tolist()
        raise LayoutError(
            f"metadata does not describe two of four: {int(wrong.sum())} codes are none of 4, 8, "
            f"9, C, D, E, first {int(metadata[row, group]):X} at row {row}, columns {4 * group} to "
            f"{4 * group + 3}: the file is damaged"
        )
    table = _expanded(zero, stored.device)
    for pairs, places, part in blocks(out.shape[1], aligned(stored), metadata, out):
        index = (places.to(torch.int16) << 4).view(-1).bitwise_or_(pairs.view(-1).view(torch.int16))
        part.copy_(table.index_select(0, index.int()).view(torch.uint8).view(part.shape))


@lru_cache(maxsize=4)
def _compressed(zero: int, device: torch.device) -> Tensor:
    """Tabulate stored codes, in the low two bytes, and metadata above. Index: the nibbles 0, 2, 1,
    3 of a group of four.
    """
    number = torch.arange(1 << 16)
    fours = torch.stack([number >> shift & 15 for shift in (0, 8, 4, 12)], 1)
    flags = ((fours != zero).long() << torch.arange(4)).sum(1)
    metadata = torch.tensor(METADATA)[flags]
    first, second = (
        fours.gather(1, places.view(-1, 1)).view(-1) for places in (metadata & 3, metadata >> 2)
    )
    return (first | second << 8 | metadata << 16).int().to(device)


@lru_cache(maxsize=4)
def _expanded(zero: int, device: torch.device) -> Tensor:
    """Tabulate groups of four, a byte each. Index: the stored codes in the low two bytes, with
    metadata between them.
    """
    number = torch.arange(1 << 12)
    first, metadata, second = (number >> shift & 15 for shift in (0, 4, 8))
    fours = torch.full((len(number), 4), zero)
    for places, stored in ((metadata & 3, first), (metadata >> 2, second)):
        fours.scatter_(1, places.view(-1, 1), stored.view(-1, 1))
    return fours.to(torch.uint8).view(torch.int32).view(-1).to(device)
