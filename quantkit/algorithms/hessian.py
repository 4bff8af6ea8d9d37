"""What calibration knows of a linear's inputs: the sum of their outer products, and triangular factors of it.

Every error that the quantizers minimise is `delta H delta^T`; with `R R^T = H` it is the squared length of `delta R`.
The upper factor comes from one Cholesky factorisation of the matrix with its axes reversed (ALGORITHMS 5.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import NumericError

CHUNK = 4096  # tokens a product; fixed, so that a sum does not depend on how the tokens were batched
_PANELS = 8  # column blocks of a product; those right of the diagonal are not computed
_DEAD = 1e-6  # what a dead channel counts, relative to the mean live one: enough to break ties in its favour
_FULL_RATE_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # compute capabilities of data-centre GPUs


class Hessian:
    """The running sum of `x^T x` over tokens, in float32, in chunks of 4096 tokens in the order of their arrival.

    `tokens` counts what was added. The sum does not depend on how tokens were divided between calls (ALGORITHMS 2).
    """

    def __init__(self, k: int, device: torch.device | str) -> None:
        self.tokens = 0
        self._sum = torch.zeros(k, k, dtype=torch.float32, device=device)
        self._chunk: Tensor | None = None
        self._filled = 0

    def add(self, x: Tensor) -> None:
        """Add the tokens of `x` `[..., k]`, any float dtype; NumericError, with counts, if any entry is not finite.

        Half-precision inputs on a GPU are multiplied as they are with a float32 result, all others as float32.
        """
        x = x.detach().reshape(-1, self._sum.shape[0])
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            token, channel = (~finite).nonzero()[0].tolist()
            raise NumericError(
                f"{int((~finite).sum())} of {x.numel()} activations are NaN or infinite, the first in token {token}, "
                f"channel {channel}: drop that document, or use --device cpu, which computes in float32"
            )
        if self._chunk is None:
            keep = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
            self._chunk = x.new_empty(CHUNK, x.shape[1], dtype=x.dtype if keep else torch.float32)
        self.tokens += len(x)
        while len(x):
            taken = min(CHUNK - self._filled, len(x))
            self._chunk[self._filled : self._filled + taken] = x[:taken]
            self._filled += taken
            x = x[taken:]
            if self._filled == CHUNK:
                _add_products(self._sum, self._chunk)
                self._filled = 0

    def matrix(self) -> Tensor:
        """Return `H = (2 / T) sum x^T x`, float32 `[k, k]`, symmetric; NumericError if no token was added."""
        if self._chunk is None or not self.tokens:
            raise NumericError("no calibration token reached this linear: add calibration text, or leave it dense")
        total = self._sum.clone()
        if self._filled:
            _add_products(total, self._chunk[: self._filled])
        lower = total.mul_(2 / self.tokens).tril_()
        return lower + lower.tril(-1).T


def _add_products(total: Tensor, x: Tensor) -> None:
    """Add `x^T x` to the lower triangle of `total`; what lies above it is left half done."""
    k = total.shape[0]
    width = -(-k // _PANELS)
    for a in range(0, k, width):
        b = min(a + width, k)
        if x.dtype == torch.float32:
            total[a:b, :b].addmm_(x[:, a:b].T, x[:, :b])
        else:
            total[a:b, :b] += torch.mm(x[:, a:b].T, x[:, :b], out_dtype=torch.float32)


def precise(device: torch.device) -> torch.dtype:
    """Return float64 where it is fast enough to factor in (CPUs, data-centre GPUs), else float32 (ALGORITHMS 5.1)."""
    slow = device.type == "cuda" and torch.cuda.get_device_capability(device) not in _FULL_RATE_FLOAT64
    return torch.float32 if slow else torch.float64


def live_diagonal(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of `h` `[k, k]` with dead channels raised to a small positive value, and which are dead.

    NumericError if `h` has an entry that is not finite, or a negative diagonal. A channel that never moved is worth
    1e-6 of the mean live one (1 if all are dead), so that it is rounded to nearest and never outweighs a live one.
    """
    diagonal = h.diagonal().clone()
    # The sum of a row is not finite if an entry is not; overflow of a finite sum cannot happen short of 1e38 / k.
    if not bool(torch.isfinite(h.sum(0)).all()):
        broken = int((~torch.isfinite(h)).sum())
        raise NumericError(f"the Hessian has {broken} entries that are NaN or infinite: check the calibration text")
    if bool((diagonal < 0).any()):
        raise NumericError("the Hessian has a negative diagonal entry and is not a covariance: calibrate anew")
    dead = diagonal == 0
    live = diagonal[~dead]
    diagonal[dead] = live.mean() * _DEAD if len(live) else 1.0
    return diagonal, dead


def upper_factor(matrix: Tensor) -> Tensor | None:
    """Return upper triangular `R` with `R R^T = matrix` `[k, k]`, or None if the matrix is not positive definite."""
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    return None if bool(failed) else lower.flip(0, 1)


def root(block: Tensor, diagonal: Tensor) -> Tensor:
    """Return upper triangular float64 `R` with `R R^T = block` `[g, g]`, whose diagonal is taken from `diagonal`.

    `block` may be singular: 1e-7 of each channel's own diagonal is added, and more only if rounding of the sums asks
    for it. NumericError if 1e-2 is not enough: then it is no covariance.
    """
    scale = diagonal.double().sqrt()
    correlation = block.double() / scale / scale[:, None]
    for i in range(6):
        correlation.fill_diagonal_(1 + 1e-7 * 10**i)
        factor = upper_factor(correlation)
        if factor is not None:
            return factor.mul_(scale[:, None])
    raise NumericError("the Hessian is indefinite and so not a covariance: calibrate anew")
