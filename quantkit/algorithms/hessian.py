"""The Hessian of a linear, the sum of outer products of its calibration inputs, and its factor.

Every quantizer here minimises `delta H delta^T` for each row's error `delta` (ALGORITHMS 1 and 2).
With `R R^T = H` this loss is the squared length of `delta R`. The upper factor `R` is the lower
Cholesky factor of the matrix with both axes reversed. `factorize` first divides each channel by the
root of its diagonal. Damping is then added to a correlation matrix, and a massive channel cannot
drown the others (ALGORITHMS 5.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.numerics import (
    Terms,
    factor_dtype,
    is_finite,
    part_of,
    product,
    product_dtype,
    terms,
    working_dtype,
)
from quantkit.algorithms.options import Options
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.sparsity import QUAD, quads
from quantkit.core.threads import one_thread, side_by_side
from quantkit.errors import NumericError, Option, Setting, Words

# tokens per product; fixed, so that the sum does not depend on how the tokens were batched
CHUNK = 4096
# the same where a GPU sums few Hessians at a time: fewer products, and fewer launches to wait for
LONG_CHUNK = 16384
_PANELS = 8  # column blocks of a product; blocks right of the diagonal are not computed
_LEAST_WIDTH = {"cpu": 1, "cuda": 1024}  # of these blocks: narrow ones leave much of a GPU idle
_ROWS = {"cpu": 1024, "cuda": 8192}  # rows of a weight whose losses come from one product
_UNIT = 256  # the same for outputs: rows of several ranks begin at multiples of it
_LOSS_WIDTH = {"cpu": 256, "cuda": 4096}  # column blocks of that product, as above
# diagonal of a dead channel relative to the mean live one: enough to break ties in its favour
_DEAD = 1e-6
#: Part of its own diagonal by which a channel is damped at least, where the median one counts.
_OWN_PART = 1 / 32
_LEAST_DAMP_FLOAT32 = 1e-3  # below it a float32 factor loses its digits (ALGORITHMS 5.1)

#: float32 matrices `[k, k]` in `factorize`, by the dtype of factors: the sum, H, its copy, scratch,
#: the factor.
MATRICES = {torch.float32: 5, torch.float64: 8}


class Hessian:
    """Sum `x^T x` over tokens in float32, each with its weight.

    Tokens are summed in chunks of `chunk` in the order of their arrival, so their division between
    calls does not matter (ALGORITHMS 2). `tokens` counts them. With `checks` False no call waits
    for a GPU, and `may_be_broken` reports at the end whether numbers were not finite. `held_out`
    has inputs `[t, k]` of text that does not calibrate, by source.
    """

    def __init__(
        self, k: int, device: torch.device | str, *, checks: bool = True, chunk: int = CHUNK
    ) -> None:
        self.tokens = 0
        self.chunk = chunk
        self._totals: list[Tensor] | None = None if checks else []
        self._sum = torch.zeros(k, k, dtype=torch.float32, device=device)
        self._chunk: Tensor | None = None
        self._filled = 0
        self.held_out: dict[str, list[Tensor]] = {}

    @staticmethod
    def bytes(k: int) -> int:
        """Compute the bytes of a sum `[k, k]`, without its chunk of tokens."""
        return 4 * k * k

    @staticmethod
    def chunk_bytes(k: int, device: str = "cpu", itemsize: int = 4) -> int:
        """Compute the bytes of a chunk: CHUNK tokens in float32, or on a GPU LONG_CHUNK tokens in a
        dtype of `itemsize` bytes.
        """
        return (itemsize * LONG_CHUNK if device == "cuda" else 4 * CHUNK) * k

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add the tokens of `x` `[..., k]`, any float dtype; NumericError, with counts, if any
        entry is not finite.

        NumericError, too, if `k` differs from the linear's; without checks, only this error is
        raised. `weights`, float32, one for each token, multiply its part of the sum. On a GPU,
        half-precision inputs are multiplied with a float32 result. All other inputs are multiplied
        in float32.
        """
        if x.shape[-1] != len(self._sum):
            raise NumericError(
                f"activations of {x.shape[-1]} channels for a linear of {len(self._sum)}: "
                "config.json does not fit the weights, fetch the folder again"
            )
        x = x.detach().reshape(-1, len(self._sum))
        if self._totals is not None:
            self._totals.append(x.sum(dtype=torch.float32))
        elif not is_finite(x):
            finite = torch.isfinite(x)
            token, channel = (~finite).nonzero()[0].tolist()
            raise NumericError(
                f"{int((~finite).sum())} of {x.numel()} activations are NaN or infinite, the first "
                f"in token {token}, channel {channel}",
                "drop that document",
                Words("use", Option("device", "cpu"), ", which computes in float32"),
            )
        if self._chunk is None:
            keep = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
            self._chunk = x.new_empty(
                self.chunk, x.shape[1], dtype=x.dtype if keep else torch.float32
            )
        self.tokens += len(x)
        factors = None if weights is None else weights.flatten().sqrt().unsqueeze(-1)
        done = 0
        while done < len(x):
            taken = min(self.chunk - self._filled, len(x) - done)
            rows = self._chunk[self._filled : self._filled + taken]
            rows.copy_(x[done : done + taken])
            if factors is not None:
                rows.mul_(factors[done : done + taken])
            self._filled += taken
            done += taken
            if self._filled == self.chunk:
                _add_products(self._sum, self._chunk)
                self._filled = 0

    def hold_out(self, source: str, x: Tensor) -> None:
        """Keep inputs `[..., k]` of a source that do not enter the sum."""
        self.held_out.setdefault(source, []).append(x.detach().reshape(-1, x.shape[-1]).clone())

    def may_be_broken(self) -> bool:
        """Return True if the sum of a call's numbers is not finite: one of them is not, or they are
        very large.
        """
        return bool(self._totals) and not is_finite(torch.stack(self._totals or []))

    def part(self) -> Part:
        """Return the sums so far, for `absorb` of another Hessian; they share the memory of this
        one.
        """
        full = self.tokens - self._filled
        last = self._chunk[: self._filled] if self._chunk is not None and self._filled else None
        return Part(full, self._sum if full else None, last, self.held_out)

    def absorb(self, part: Part) -> None:
        """Add the sum of another rank's tokens. Call this in the order of the ranks.

        Its full chunks are added as a sum. Its last tokens continue the unfinished chunk here, so
        that a Hessian of few tokens does not depend on the number of ranks. This Hessian takes over
        the tensor of the first part and adds to it.
        """
        if part.total is not None:
            self._sum = self._sum.add_(part.total) if self.tokens else part.total
            self.tokens += part.tokens
        if part.last is not None:
            self.add(part.last)
        for source, inputs in part.held_out.items():
            self.held_out.setdefault(source, []).extend(inputs)

    def matrix(self) -> Tensor:
        """Return `H = (2 / T) sum w x^T x`, float32 `[k, k]`, symmetric; NumericError if no token
        was added.
        """
        if not self.tokens:
            raise NumericError(
                "no calibration token reached this linear", "add calibration text", "leave it dense"
            )
        total = self._sum.clone()
        if self._chunk is not None and self._filled:
            _add_products(total, self._chunk[: self._filled])
        lower = total.mul_(2 / self.tokens).tril_()
        return lower + lower.tril(-1).T


class Part(NamedTuple):
    """Hold a part of a Hessian: the sum over `tokens` tokens of full chunks, and the last tokens.

    `total` is float32 `[k, k]`, and only its lower triangle is used. It is None without a full
    chunk. `last` `[t, k]`, already weighted, is None if there are none. `held_out` as in Hessian.
    """

    tokens: int
    total: Tensor | None
    last: Tensor | None
    held_out: dict[str, list[Tensor]]


def _add_products(total: Tensor, x: Tensor) -> None:
    """Add `x^T x` to the lower triangle of `total`; the upper triangle is only partly updated."""
    k = total.shape[0]
    width = max(-(-k // _PANELS), _LEAST_WIDTH[total.device.type])
    bounds = [(a, min(a + width, k)) for a in range(0, k, width)]
    # The largest first, so that several threads end together.
    panels = [
        partial(product, (x[:, a:b].T,), (x[:, :b],), total[a:b, :b]) for a, b in reversed(bounds)
    ]
    side_by_side(total.device, panels)


def check_size(h: Tensor, k: int) -> None:
    """Raise NumericError unless `h` is a `[k, k]` matrix, as a weight `[n, k]` needs."""
    if h.shape != (k, k):
        raise NumericError(
            f"the Hessian is {list(h.shape)} and the weight has {k} input channels: calibrate this "
            "linear again"
        )


def live_diagonal(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of `h` `[k, k]` with dead channels raised to a small positive value, and
    the dead mask.

    A dead channel gets 1e-6 of the mean live one (1 if all are dead). It is then rounded to nearest
    and never outweighs a live channel. NumericError if `h` has a non-finite entry or a negative
    diagonal.
    """
    diagonal = h.diagonal().clone()
    # A row with an entry that is not finite has such a sum. Sums of finite entries overflow only
    # beyond 1e38 / k.
    if not bool(torch.isfinite(h.sum(0)).all()):
        raise NumericError(
            f"the Hessian has {int((~torch.isfinite(h)).sum())} entries that are NaN or infinite",
            "check the calibration text",
        )
    if bool((diagonal < 0).any()):
        raise NumericError(
            "the Hessian has a negative diagonal entry and is not a covariance: calibrate anew"
        )
    dead = diagonal == 0
    live = diagonal[~dead]
    diagonal[dead] = live.mean() * _DEAD if len(live) else 1.0
    return diagonal, dead


def usual_energy(diagonal: Tensor, options: Options) -> Tensor:
    """Return the energy that damping is measured by, a scalar, from a Hessian's diagonal `[k]`: the
    mean one or that of the median live channel.
    """
    if options.damp_kind == "mean":
        return diagonal.mean()
    return diagonal[diagonal > 0].median().nan_to_num()  # not a number if all channels are dead


def row_losses(weight: Tensor, tensor: QuantizedTensor | None, h: Tensor) -> Tensor:
    """Return the proxy loss `d H d^T` of each row of `weight - tensor`, float64 `[n]`.

    With `tensor` None, `d` is the weight `[n, k]` itself. `h` `[k, k]` is symmetric and undamped
    (ALGORITHMS 1).
    """
    d = _difference(weight, tensor)
    dtype = product_dtype(d, factor_dtype(d.device))
    losses = partial(_quadratic_forms, h=terms(h, dtype), dtype=dtype)
    parts = [partial(losses, rows) for rows in d.split(_ROWS[d.device.type])]
    return torch.cat(side_by_side(d.device, parts)).double().clamp_(min=0)


def diagonal_losses(weight: Tensor, tensor: QuantizedTensor, diagonal: Tensor) -> Tensor:
    """Return `row_losses` of a Hessian that is only its `diagonal` `[k]`."""
    d = _difference(weight, tensor)
    rows = d.split(_ROWS[d.device.type])
    return torch.cat([part.double().square() @ diagonal.double() for part in rows])


def output_losses(weight: Tensor, tensor: QuantizedTensor, x: Tensor) -> Tensor:
    """Return the squared length of each output of `weight - tensor` for inputs `x` `[t, k]`,
    float64 `[n]`. On a GPU, half-precision inputs have products with a float32 result.
    """
    d = _difference(weight, tensor).T
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        outputs = torch.mm(x, d.to(x.dtype), out_dtype=torch.float32)
    else:
        # A product of few rows has other last bits, so the last ones are a product of their own.
        outputs = torch.cat([x.float() @ part for part in d.float().split(_UNIT, 1)], 1)
    return outputs.square_().sum(0, dtype=torch.float64)


def _difference(weight: Tensor, tensor: QuantizedTensor | None) -> Tensor:
    """Return `weight - tensor`, or the weight itself without a tensor."""
    d = weight.to(working_dtype(weight))
    return d if tensor is None else d - tensor.dequantize(d.dtype)


def _quadratic_forms(rows: Tensor, h: Terms, dtype: torch.dtype) -> Tensor:
    """Return `d h d^T` of each of `rows` `[r, k]`; blocks above the diagonal count twice, blocks
    below it never.
    """
    d = terms(rows, dtype)
    total = rows.new_zeros(len(rows), dtype=factor_dtype(rows.device))
    width = _LOSS_WIDTH[rows.device.type]
    for a in range(0, rows.shape[1], width):
        every, before, panel = slice(None), slice(a), slice(a, a + width)
        outputs = product(part_of(d, every, panel), part_of(h, panel, panel))
        product(part_of(d, every, before), part_of(h, before, panel), to=outputs, alpha=2)
        total += outputs.mul_(rows[:, panel]).sum(-1)
    return total


@dataclass(frozen=True, eq=False)
class Factor:
    """Hold the factor of a damped Hessian: `r` upper triangular `[k, k]`, rows and columns in
    processing `order`.

    `order` int64 `[k]` is the processing order of the columns. `diagonal` `[k]`, in natural order,
    is the damped diagonal. `damp` is the damping that sufficed, `rungs` lists all tried values.
    `dead` bool `[k]` marks channels whose input was always zero.
    """

    r: Tensor
    order: Tensor
    diagonal: Tensor
    dead: Tensor
    damp: float
    rungs: tuple[float, ...]

    def unit(self, dtype: torch.dtype) -> Tensor:
        """Return `V`: `R` with each column divided by its diagonal, `[k, k]`. The sweep needs
        nothing else.
        """
        return (self.r / self.r.diagonal()).to(dtype)


def factorize(h: Tensor, options: Options, sparse: bool = False) -> Factor:
    """Factor the damped Hessian `h` `[k, k]`, in float64 where the device computes it fast
    (ALGORITHMS 5.1).

    `sparse` sorts groups of four columns for 2:4 weights (ALGORITHMS 9). A failing factorisation is
    repeated with ten times the damping, up to 1; `rungs` records this. NumericError if no damping
    suffices, every channel is dead, `h` is not finite or no covariance, or `damp` is too small for
    float32. LayoutError if `sparse` and 4 does not divide k.
    """
    dtype = factor_dtype(h.device)
    if dtype == torch.float32 and options.damp < _LEAST_DAMP_FLOAT32:
        raise NumericError(
            f"gptq.damp {options.damp} is too small for float32 on this GPU", "use 0.001 or more"
        )
    diagonal, dead = live_diagonal(h.to(dtype))  # a copy that is free again
    if bool(dead.all()):
        raise NumericError(
            "no input channel ever moved in calibration, as after a weight of zeros",
            Words("use other text,", Setting("skip"), ", or on_unsolvable: rtn"),
        )
    order = _processing_order(diagonal, options, sparse)
    scale = diagonal[order].sqrt()
    correlation = (
        h.index_select(0, order)
        .index_select(1, order)
        .to(dtype)
        .div_(scale)
        .div_(scale.unsqueeze(-1))
    )
    low, high = correlation.aminmax()
    if max(-low, high) > 1.01:
        raise NumericError(
            "the Hessian is no covariance: an entry exceeds what its diagonal allows: calibrate "
            "anew"
        )
    # Huge channels that move together have nearly equal rows, so each gets a part of its own.
    unit = diagonal * {"own": 1.0, "mean": 0.0, "median": _OWN_PART}[options.damp_kind]
    if options.damp_kind != "own":
        unit = torch.maximum(unit, usual_energy(h.diagonal().to(dtype), options))
    rungs: list[float] = []
    while not rungs or rungs[-1] < 1:
        rungs.append(min(10 * rungs[-1], 1.0) if rungs else options.damp)
        extra = rungs[-1] * unit
        correlation.diagonal().copy_(1 + (extra / diagonal)[order])
        r = _upper_factor(correlation)
        if r is not None:
            return Factor(
                r.mul_(scale.unsqueeze(-1)), order, diagonal + extra, dead, rungs[-1], tuple(rungs)
            )
    raise NumericError(
        "the Hessian is no covariance: it is indefinite even with damping 1: calibrate anew"
    )


@contextmanager
def damped(h: Tensor, factor: Factor) -> Iterator[None]:
    """Let `h` `[k, k]` have the damped diagonal of its factor inside the context; a copy of all of
    it may be a gigabyte.
    """
    diagonal = h.diagonal().clone()
    h.diagonal().copy_(factor.diagonal)
    try:
        yield
    finally:
        h.diagonal().copy_(diagonal)


def factorize_blocks(blocks: Tensor, diagonals: Tensor) -> Tensor:
    """Return upper triangular float64 `R` with `R R^T = block` for `blocks` `[m, g, g]`.

    A block's diagonal is taken from `diagonals` `[m, g]`. A block may be singular, so 1e-7 of each
    channel's own diagonal is added. Rounding errors in the sums may need more. NumericError if 1e-2
    is not enough.
    """
    scale = diagonals.double().sqrt()
    # A single block may be as wide as the weight, so extra copies are avoided.
    correlation = (
        blocks.to(torch.float64, copy=True).div_(scale.unsqueeze(1)).div_(scale.unsqueeze(2))
    )
    factors: Tensor | None = None
    left = torch.arange(len(blocks), device=blocks.device)
    for i in range(6):
        correlation.diagonal(dim1=1, dim2=2).fill_(1 + 1e-7 * 10**i)
        with one_thread(blocks.device):
            lower, failed = torch.linalg.cholesky_ex(
                (correlation if factors is None else correlation[left]).flip(1, 2)
            )
        upper = lower.flip(1, 2)
        del lower
        factors = upper if factors is None else factors.index_copy_(0, left, upper)
        left = left[failed != 0]
        if not len(left):
            return factors.mul_(scale.unsqueeze(2))
    raise NumericError("the Hessian is indefinite and so not a covariance: calibrate anew")


def _processing_order(diagonal: Tensor, options: Options, sparse: bool) -> Tensor:
    """Return the columns int64 `[k]` in the order of `act_order`, four at a time if
    `sparse`.
    """
    if options.act_order == "off":
        return torch.arange(len(diagonal), device=diagonal.device)
    units = diagonal.view(quads(len(diagonal)) if sparse else -1, QUAD if sparse else 1)
    first = torch.argsort(units.sum(-1), descending=True, stable=True) * units.shape[1]
    return (first.unsqueeze(-1) + torch.arange(units.shape[1], device=diagonal.device)).flatten()


def _upper_factor(matrix: Tensor) -> Tensor | None:
    """Return upper triangular `R` with `R R^T = matrix` `[k, k]`, or None if the matrix is not
    positive definite.
    """
    with one_thread(matrix.device):
        lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    return None if bool(failed) else lower.flip(0, 1)
