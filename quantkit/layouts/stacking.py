"""Packed weights of linears below each other, `[n + n', k]`, stacked into one weight and cut into parts again.

MARLIN and Sparse-MARLIN have n along their columns, so packed weights are joined side by side (docs/layouts.md 3.1,
5.1). TC-FPx has two planes with n as their slowest axis, and each is joined (7.2). QUICK permutes columns across all of
n, and the interchange layouts have no kernel that would gain by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.layouts import tcfpx

#: Layouts that can be stacked, with the multiple that n of every weight must be, so that none shares a tile.
UNITS = {"marlin": 64, "marlin24": 128, "marlin24-ct": 128, "tcfpx": 64}


def stack(layout: str, scheme: Scheme, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the packed tensors, by suffix, of weights of one scheme and `k`, in new memory."""
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
    """Copy the packed tensors of some rows of a stacked weight `[n, k]`: the inverse of `stack`."""
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


def _planes(words: Tensor, scheme: Scheme) -> list[Tensor]:
    """View both planes of TC-FPx as `[n, words of a row]`."""
    return [plane.view(len(words), -1) for plane in tcfpx.planes(words.reshape(-1), scheme.format.bits)]
