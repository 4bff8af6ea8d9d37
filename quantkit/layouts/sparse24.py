"""The 2:4 encoding: the two kept codes of each quad of four, and metadata that says which they are
(docs/layouts.md 4).

Codes have four bits, so a quad is one of 2**16 numbers, and a table has its kept codes and metadata
at once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.core import sparsity
from quantkit.core.tensors import aligned
from quantkit.errors import LayoutError
from quantkit.layouts.arrangement import Arrangement, blocks

#: Index: bit i is set if code i of the quad is not zero. Entry: `i0 | i1 << 2` for the kept places,
#: or REFUSED for three and four nonzero codes (docs/layouts.md 4.1).
REFUSED = 0
METADATA = (
    0xE,
    0x8,
    0x9,
    0x4,
    0xE,
    0x8,
    0x9,
    REFUSED,
    0xE,
    0xC,
    0xD,
    REFUSED,
    0xE,
    REFUSED,
    REFUSED,
    REFUSED,
)

#: The order of metadata in Sparse-MARLIN (docs/layouts.md 4.4).
SPARSE_MARLIN = Arrangement("N e:8 n2:2 n1:2 n0:2", "C d:2 q:4", "C N n1 e n0 d n2 q")


def compress(codes: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """Compress 2:4-sparse codes uint8 `[n, k]` below 16 to the kept codes `[n, k/2]` and metadata
    `[n, k/4]`.

    LayoutError for a quad with more than two codes other than `zero`, and unless `k` is a multiple
    of 4.
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
    """Fill uint8 `out` `[n, k]` from kept codes `[n, k/2]` and metadata `[n, k/4]`; all other codes
    are `zero`.

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
    """Tabulate kept codes, in the low two bytes, and metadata above. Index: the nibbles 0, 2, 1, 3
    of a quad.
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
    """Tabulate quads, a byte each. Index: the kept codes in the low two bytes, with metadata
    between them.
    """
    number = torch.arange(1 << 12)
    first, metadata, second = (number >> shift & 15 for shift in (0, 4, 8))
    quads = torch.full((len(number), 4), zero)
    for places, kept in ((metadata & 3, first), (metadata >> 2, second)):
        quads.scatter_(1, places.view(-1, 1), kept.view(-1, 1))
    return quads.to(torch.uint8).view(torch.int32).view(-1).to(device)
