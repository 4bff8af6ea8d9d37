"""Inputs of the kernels of coordinate descent and of tuning, and the results of torch to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import rtn
from quantkit.algorithms.block_tuning import TunedWeight
from quantkit.algorithms.coordinate_descent import descend_block, descend_fours
from quantkit.algorithms.numerics import round_to_codes
from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import Scheme
from quantkit.core.sparsity import QUAD, best_two
from quantkit.kernels import gptq as kernels
from quantkit.kernels.gptq import Columns

KINDS = ("plain", "signed", "frozen", "dead", "zeros")
#: (format, rows, columns, kind).
CASES = [
    (name, n, b, kind)
    for name in FORMATS
    if name not in ("int3", "int5", "int6", "mxfp4")
    for kind in KINDS
    if kind in ("plain", "dead") or (kind == "frozen" and name != "fp5") or name in ("int4", "int8")
    for n, b in ((4096, 128), (1000, 128), (33, 97), (1, 1), (31, 32), (64, 128))
]
#: Share of codes that may differ, where a target lies between two values up to rounding errors.
TIES = 1e-4
#: Schemes, with a group that no number of lanes divides, and one wider than a warp takes at a time.
TUNED = (
    *("int4:g32", "int4:g24:asym", "int4:channel", "int8:g128", "fp6:channel", "fp5:g32", "int4:g32:24"),
    *("nvfp4:g16", "mxfp4:g32"),
)


class Block(NamedTuple):
    """The arguments of `descend_block` but the format, changed in place."""

    slope: Tensor
    e: Tensor
    v: Tensor
    h: Tensor
    columns: Columns
    frozen: bool

    def on(self, device: str) -> Block:
        """Copy the block to a device."""
        columns = Columns(*(None if x is None else x.to(device, copy=True) for x in self.columns))  # type: ignore[arg-type]
        slope, e, v = (x.to(device, copy=True) for x in (self.slope, self.e, self.v))
        return Block(slope, e, v, self.h.to(device), columns, self.frozen)


def problem(name: str, n: int, b: int, kind: str, seed: int = 0) -> Block:
    """Make a block of rounded weights with three groups of scales in no order, and H inside a larger matrix of NaN."""
    fmt, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    w = torch.randn(b, n, generator=generator)
    x = torch.randn(4 * b, b, generator=generator) @ (torch.eye(b) + torch.randn(b, b, generator=generator) / b**0.5)
    h = x.T @ x
    h = (h + h.T) / 2
    if kind == "dead":
        h[b // 3] = h[:, b // 3] = 0
        h[b // 2, b // 2] = 1e-42  # its target is infinite
    scales = (0.1 + torch.rand(3, n, generator=generator) / 2).half().float()
    if name not in ("int2", "int4"):
        scales /= 4
    if kind == "signed":
        scales *= torch.rand(3, n, generator=generator).sub(0.5).sign()
    group_of = torch.randint(0, 3, (b,), generator=generator).int()
    zeros = torch.randint(0, 16, (3, n), generator=generator).float() if kind == "zeros" else None
    scale = scales[group_of]
    if zeros is None:
        v = fmt.decode(fmt.encode(w / scale)).float()
    else:
        v = (w / scale + zeros[group_of]).round().clamp(0, 15) - zeros[group_of]
    if kind == "frozen":
        v = v * (torch.rand(b, n, generator=generator) < 0.5)
    e = w - v * scale
    larger = torch.full((b + 3, b + 5), torch.nan)
    larger[:b, :b] = h
    # Errors of columns before the block contribute to the slopes, too.
    slope = h @ e + 0.1 * h.diagonal().mean() * torch.randn(b, n, generator=generator)
    return Block(slope, e, v, larger[:b, :b], Columns(scales, zeros, group_of), kind == "frozen")


def solved(name: str, block: Block, run: Callable[..., None] = descend_block) -> Block:
    """Return the block after its columns have moved."""
    run(*block[:5], FORMATS[name], block.frozen)
    return block


#: (format or None, rows, columns, kind) of blocks of a 2:4 weight.
FOURS = [
    (name, n, b, kind)
    for name in ("int4", "int8", None)
    for kind in ("plain", "signed", "dead")
    for n, b in ((4096, 128), (33, 96), (1, 4), (64, 128))
]


def fours(name: str | None, n: int, b: int, kind: str) -> Block:
    """Make a block of which a random pair of each aligned four stays; with `dead`, one column never moves."""
    block, generator = problem(name or "int4", n, b, kind), torch.Generator().manual_seed(1)
    group_of = (torch.arange(b) // QUAD % 3).int()
    scale = block.columns.scales[group_of] if name else 1.0
    w = block.e + block.v * block.columns.scales[block.columns.group_of]
    kept = best_two(torch.rand(b * n // QUAD, QUAD, generator=generator).T).T.reshape(n, b).T
    v = (round_to_codes(w / scale, FORMATS[name], None) if name else w) * kept
    e = w - v * scale
    slope = block.h @ e + 0.1 * block.h.diagonal().mean() * torch.randn(b, n, generator=generator)
    return Block(slope, e, v, block.h, block.columns._replace(group_of=group_of), False)


def solved_fours(name: str | None, block: Block, run: Callable[..., None] = descend_fours) -> Block:
    """Return the block after its fours have moved."""
    columns, fmt = (block.columns, FORMATS[name]) if name else (None, None)
    run(*block[:4], columns, fmt)
    return block


def same_rows(expected: Block, found: Block) -> None:
    """Fail unless values and errors are equal in all rows but for a few ties."""
    # After a tie that went the other way, the rest of a row differs.
    same = torch.isclose(expected.v, found.v, atol=1e-4).all(0)
    b, n = expected.v.shape
    assert (~same).sum() <= max(1, TIES * b * n), f"{int((~same).sum())} of {n} rows differ"
    torch.testing.assert_close(found.e[:, same], expected.e[:, same], atol=1e-5, rtol=1e-5)


def same_tuning(label: str, stored: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless a few steps by the kernel give the codes, scales and weights of steps in torch on a CPU."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(6, 384, generator=generator).to(stored)
    weight[3] = 0
    scheme = Scheme.parse(label)
    weight[5] *= scheme.format.largest_weight / 8.7  # scales that would overflow
    start, _ = rtn.quantize(weight, scheme, signed=label == "int4:g32")
    gradients = [torch.randn(6, 384, generator=generator).to(torch.bfloat16) for _ in range(4)]

    def tuned(device: str, by_kernel: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        monkeypatch.setattr(kernels, "runs_on", lambda given: by_kernel)
        given = type(start)(
            start.scheme, *(x if x is None else x.to(device) for x in (start.codes, start.scales, start.zeros))
        )
        made = TunedWeight(weight.to(device), given)
        before = made.dense().clone()
        for number, gradient in enumerate(gradients):
            made.descend(gradient.to(device) if by_kernel else gradient.float(), 0.2 if number else 0.05)
        found = made.tensor()
        if by_kernel:
            assert torch.equal(made.dense(), found.dequantize(torch.bfloat16)), "the weight is not that of its record"
            assert not torch.equal(made.dense(), before)
        return found.codes.cpu(), found.scales.cpu(), made.dense().float().cpu(), start.codes

    codes, scales, dense, begun = tuned("cpu", by_kernel=False)
    first = tuned(device, by_kernel=True)
    again = tuned(device, by_kernel=True) if device == "cuda" else first
    assert all(map(torch.equal, first, again)), "two runs differ"
    assert (first[0] != codes).float().mean() < 2e-3, "codes differ by more than ties"
    torch.testing.assert_close(first[1], scales, rtol=2e-3, atol=0)
    same = first[0] == codes
    torch.testing.assert_close(first[2][same], dense[same], rtol=1e-2, atol=0)
    assert (codes != begun).float().mean() > 0.05
