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

import msgspec
import torch
from torch import Tensor

from quantkit.core import sparsity
from quantkit.core.formats import INT4
from quantkit.core.scheme import Scheme
from quantkit.core.tensors import aligned
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

CODES = Arrangement("N j:4 y:2 w:8", "K d:2 e:4 f:2", "K N w e j f y d")
GROUPED_SCALES = Arrangement("G", "N a:8 b:8", "G N b a")
SINGLE_SCALES = Arrangement("G", "N a:4 b:4 c:2", "G N b a c")

#: The public name of the format, and vLLM's own name of the method.
FORMAT, METHOD = "marlin_24", "gptq_marlin_24"

KEPT = Arrangement("N a:8 b:2 j:4", "K h:2 q:4 e:2", "K N a q j e b h")
SPARSE_SCALES = Arrangement("G", "N b:2 c:4", "G N c b")
#: The order of metadata (docs/layouts.md 4.4).
METADATA_ORDER = Arrangement("N e:8 n2:2 n1:2 n0:2", "C d:2 q:4", "C N n1 e n0 d n2 q")
#: Index: bit i is set if code i of four is not zero. Entry: `i0 | i1 << 2` for the stored
#: positions, or REFUSED for three and four nonzero codes (docs/layouts.md 4.1).
REFUSED = 0
METADATA = (0xE, 0x8, 0x9, 0x4, 0xE, 0x8, 0x9, 0x0, 0xE, 0xC, 0xD, 0x0, 0xE, 0x0, 0x0, 0x0)


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


class Marlin24(Layout):
    """Sparse-MARLIN: groups of 128 or one scale per row, n % 128 == 0 and k % 128 == 0."""

    NAME = "marlin24"
    QUANT_METHODS: ClassVar[tuple[str, ...]] = ("gptq", METHOD)
    CONFIG: ClassVar[type[msgspec.Struct]] = GptqConfig
    #: Stored codes, metadata and scales, in this order.
    TENSORS = ("B_24", "B_meta", "s")
    MARKER = "B_24"
    SIDE_FILE: ClassVar[SideFile | None] = SideFile("quantize_config.json")
    TITLE, MULTIPLES = "Sparse-MARLIN", (128, 128)
    STACKING_UNIT = 128

    def check_scheme(self, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if scheme.sparsity is None:
            raise LayoutError(
                "Sparse-MARLIN holds 2:4 weights only, two of four along k",
                Words("quantize with", Setting("prune", "2:4")),
                Words("use", Setting("layout", "marlin")),
            )
        check_group_size(self.TITLE, scheme)

    def stored(self, scheme: Scheme, n: int, k: int) -> Stored:
        kept, metadata, scales = self.TENSORS
        return {
            kept: (torch.int32, (k // 32, 2 * n)),
            metadata: (torch.int16, (k // 32, 2 * n)),
            scales: (torch.float16, (scheme.groups(k), n)),
        }

    def size(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> tuple[int, int]:
        rows, columns = matrix(shapes, self.TENSORS[0])
        return columns // 2, 32 * rows

    def packer(
        self,
        tensors: Mapping[str, Tensor],
        scheme: Scheme,
        shape: tuple[int, int],
        scales: Tensor,
        zeros: Tensor | None,
    ) -> OnRows:
        n, k = shape
        kept_words, meta_words, stored = (tensors[name] for name in self.TENSORS)
        pack_kept = KEPT.packer(kept_words.view(-1), 4, (n, k // 2))
        meta_words = meta_words.view(-1).view(torch.int32)
        pack_metadata = METADATA_ORDER.packer(meta_words, 4, (n, k // 4))
        grouped = stored.shape[0] > 1  # as in MARLIN (docs/layouts.md 5.2)
        stored.copy_(SPARSE_SCALES(scales.t()).view(stored.shape) if grouped else scales.t())

        def add(first: int, codes: Tensor) -> None:
            kept, metadata = compress(codes, INT4.zero_code)
            pack_kept(first, kept)
            pack_metadata(first, metadata)

        return add

    def unpacker(
        self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, OnRows]:
        """Make a row-wise unpacker. It raises LayoutError for metadata that do not describe two of
        four.

        The library of compressed-tensors left the scales of k = 256 in groups of 128 unpermuted,
        which nothing in the file shows. They are read as the kernel reads them, permuted
        (docs/layouts.md 5.5).
        """
        n, k = shape
        words, meta, scales = (tensors[name] for name in self.TENSORS)
        fill_kept = KEPT.unpacker(words, 4, (n, k // 2))
        fill_metadata = METADATA_ORDER.unpacker(aligned(meta).view(torch.int32), 4, (n, k // 4))

        def fill(first: int, codes: Tensor) -> None:
            kept, metadata = (codes.new_empty(len(codes), k // size) for size in (2, 4))
            fill_kept(first, kept)
            fill_metadata(first, metadata)
            expand(kept, metadata, INT4.zero_code, out=codes)

        if len(scales) > 1:  # the number of rows decides
            scales = SPARSE_SCALES.inverse(scales, (len(scales), n))
        return scales.t(), None, fill

    def config(self, schemes: Schemes) -> msgspec.Struct:
        """Make the config of docs/layouts.md 5.4; overrides and dense linears other than `lm_head`
        are in the `quantkit` key only.

        The method is not METHOD, because readers that do not know it take it for a dense model.
        """
        return GptqConfig(
            **GptqConfig.settings(schemes.default),
            checkpoint_format=FORMAT,
            lm_head=schemes.quantizes_head,
        )

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Recognize the name of the format, and vLLM's method."""
        stated = (config.get("checkpoint_format"), config.get("format"))
        return config["quant_method"] == METHOD or FORMAT in stated

    def entries(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"bits": 4, "sym": True, **config}

    def schemes(self, config: Any) -> Schemes:
        return Schemes(replace(config.scheme, sparsity="2:4"), ignore=config.dense_head)


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

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("format") == MARLIN24

    def entries(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config

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
        overrides = tuple((name, replace(s, sparsity="2:4")) for name, s in found.overrides)
        return Schemes(replace(found.default, sparsity="2:4"), overrides, found.ignore)


def compress(codes: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """Compress 2:4-sparse codes uint8 `[n, k]` below 16 to the stored codes `[n, k/2]` and metadata
    `[n, k/4]`.

    LayoutError for a group of four with more than two codes other than `zero`, and unless `k` is a
    multiple of 4.
    """
    n, k = codes.shape
    kept = torch.empty((n, k // 2), dtype=torch.uint8, device=codes.device)
    metadata = torch.empty((n, sparsity.quads(k)), dtype=torch.uint8, device=codes.device)
    table = _compressed(zero, codes.device)
    for some, pairs, places in blocks(k, aligned(codes), kept, metadata):
        quads = some.view(-1).view(torch.int32)
        found = table.index_select(0, (quads >> 12).bitwise_or_(quads).bitwise_and_(0xFFFF))
        pairs.view(-1).view(torch.int16).copy_(found)  # which drops the metadata above
        places.view(-1).copy_(found.bitwise_right_shift_(16))
    if metadata.numel() and int(metadata.min()) == REFUSED:
        sparsity.check(codes, zero)  # which names the first one
    return kept, metadata


def expand(kept: Tensor, metadata: Tensor, zero: int, out: Tensor) -> None:
    """Fill uint8 `out` `[n, k]` from stored codes `[n, k/2]` and metadata `[n, k/4]`; all other
    codes are `zero`.

    The metadata of a file may differ from `compress` where a stored code is zero. LayoutError for
    metadata that do not name two places in rising order.
    """
    wrong = (metadata & 3) >= (metadata >> 2)
    if bool(wrong.any()):
        row, quad = wrong.nonzero()[0].tolist()
        raise LayoutError(
            f"metadata does not describe two of four: {int(wrong.sum())} codes are none of 4, 8, "
            "9, C, D, E, first "
            f"{int(metadata[row, quad]):X} at row {row}, columns {4 * quad} to {4 * quad + 3}: the "
            "file is damaged"
        )
    table = _expanded(zero, kept.device)
    for pairs, places, part in blocks(out.shape[1], aligned(kept), metadata, out):
        index = (places.to(torch.int16) << 4).view(-1).bitwise_or_(pairs.view(-1).view(torch.int16))
        part.copy_(table.index_select(0, index.int()).view(torch.uint8).view(part.shape))


@lru_cache(maxsize=4)
def _compressed(zero: int, device: torch.device) -> Tensor:
    """Tabulate stored codes, in the low two bytes, and metadata above. Index: the nibbles 0, 2, 1,
    3 of a group of four.
    """
    number = torch.arange(1 << 16)
    quads = torch.stack([number >> shift & 15 for shift in (0, 8, 4, 12)], 1)
    flags = ((quads != zero).long() << torch.arange(4)).sum(1)
    metadata = torch.tensor(METADATA)[flags]
    first, second = (
        quads.gather(1, places.view(-1, 1)).view(-1) for places in (metadata & 3, metadata >> 2)
    )
    return (first | second << 8 | metadata << 16).int().to(device)


@lru_cache(maxsize=4)
def _expanded(zero: int, device: torch.device) -> Tensor:
    """Tabulate groups of four, a byte each. Index: the stored codes in the low two bytes, with
    metadata between them.
    """
    number = torch.arange(1 << 12)
    first, metadata, second = (number >> shift & 15 for shift in (0, 4, 8))
    quads = torch.full((len(number), 4), zero)
    for places, kept in ((metadata & 3, first), (metadata >> 2, second)):
        quads.scatter_(1, places.view(-1, 1), kept.view(-1, 1))
    return quads.to(torch.uint8).view(torch.int32).view(-1).to(device)


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
