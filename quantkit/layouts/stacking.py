"""Several packed weights as one: what a layout stores for the weights of linears below each other, `[n + n', k]`.

MARLIN and Sparse-MARLIN have n along their columns, so packings stand side by side (LAYOUTS 3.1, 5.1). TC-FPx is one
flat buffer of planes, each with n as its slowest axis: there the planes follow each other (LAYOUTS 7.2). QUICK turns
columns within the whole of n, and the interchange layouts have no kernel that would gain by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantkit.core.scheme import Scheme

#: Layouts that can be stacked -> what n of every weight is a multiple of, so that none shares a tile with another.
UNITS = {"marlin": 64, "marlin24": 128, "marlin24-ct": 128, "tcfpx": 64}


def stack(layout: str, scheme: Scheme, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the packed tensors, suffix -> tensor, of weights of one scheme and k below each other, in new memory."""
    found = {}
    for suffix in parts[0]:
        tensors = [part[suffix] for part in parts]
        if layout != "tcfpx":
            found[suffix] = torch.cat(tensors, 1)
        elif suffix == "weight":
            planes = zip(*(_planes(tensor, scheme) for tensor in tensors), strict=True)
            flat = torch.cat([piece.reshape(-1) for plane in planes for piece in plane])
            found[suffix] = flat.view(-1, tensors[0].shape[1])
        else:
            found[suffix] = torch.cat(tensors)
    return found


def cut(layout: str, scheme: Scheme, tensors: Mapping[str, Tensor], n: int, rows: range) -> dict[str, Tensor]:
    """Return the packed tensors of some rows of a stacked weight `[n, k]`, in new memory; the inverse of `stack`."""
    found = {}
    for suffix, tensor in tensors.items():
        if layout != "tcfpx":
            each = tensor.shape[1] // n
            found[suffix] = tensor[:, each * rows.start : each * rows.stop].clone(memory_format=torch.contiguous_format)
        elif suffix == "weight":
            pieces = [plane[rows.start : rows.stop].reshape(-1) for plane in _planes(tensor, scheme)]
            found[suffix] = torch.cat(pieces).view(len(rows), -1)
        else:
            found[suffix] = tensor[rows.start : rows.stop].clone()
    return found


def _planes(words: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the high and the low plane of TC-FPx's words, each `[n, words of a row]`; blocks of 64 rows are whole."""
    n, bits = len(words), scheme.format.bits
    flat = words.reshape(-1)
    high = flat.numel() * (bits - 4) // bits
    return flat[:high].view(n, -1), flat[high:].view(n, -1)
