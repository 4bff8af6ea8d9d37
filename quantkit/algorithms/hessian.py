"""The Hessian of a linear: the sum of outer products of its calibration inputs.

Every quantizer here minimises `delta H delta^T` for each row's error `delta` (ALGORITHMS 1 and 2). A few tokens with
extreme outputs would dominate that sum, so they are scaled down.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.algorithms.numerics import factor_dtype, is_finite, working_dtype
from quantkit.core.quantized_tensor import QuantizedTensor
from quantkit.core.threads import one_thread, side_by_side
from quantkit.errors import NumericError, Option, Words
from quantkit.kernels import gptq as kernels

CHUNK = 4096  # tokens per product; fixed, so that the sum does not depend on how the tokens were batched
LONG_CHUNK = 16384  # the same where a GPU sums few Hessians at a time: fewer products, and fewer launches to wait for
_PANELS = 8  # column blocks of a product; blocks right of the diagonal are not computed
_LEAST_WIDTH = {"cpu": 1, "cuda": 1024}  # of these blocks: narrow ones leave much of a GPU idle
_ROWS = {"cpu": 1024, "cuda": 2048}  # rows of a weight whose losses come from one product
_LOSS_WIDTH = {"cpu": 256, "cuda": 1024}  # column blocks of that product, as above
EXTREME = 10.0  # a token whose norm is more than this many times the median norm is set aside
_ASIDE = 1024  # tokens that are set aside; those that come later get the median norm at once
_SLICE = 512  # tokens or channels for which norms and medians are computed at a time, to save memory
EVERY_TOKEN = {"cpu": False, "cuda": True}  # whether all are scaled, as a GPU would wait for a list of some
_SAMPLE = 1024  # beyond so many tokens, every seventh decides the medians; documents seldom have 7 or 14 tokens
_STRIDE = 7
_DEAD = 1e-6  # diagonal of a dead channel relative to the mean live one: enough to break ties in its favour


class Hessian:
    """Sum `x^T x` over tokens in float32.

    Tokens are summed in chunks of `chunk` in the order of their arrival, so their division between calls does not
    matter (ALGORITHMS 2). `tokens` counts them. With `cap_tokens`, tokens of extreme norm are set aside until the
    weights are known. The first 4096 tokens decide which norms are extreme.

    With `checks` False no call waits for a GPU, and `may_be_broken` reports at the end whether numbers were not finite.
    """

    def __init__(
        self,
        k: int,
        device: torch.device | str,
        *,
        cap_tokens: bool = True,
        checks: bool = True,
        chunk: int = CHUNK,
    ) -> None:
        self.tokens = 0
        self.chunk = chunk
        self._cap_tokens = cap_tokens
        self._cap: Cap | None = None
        self._aside: Tensor | None = None
        self._extreme = torch.zeros((), dtype=torch.int64, device=device)
        self._totals: list[Tensor] | None = None if checks else []
        self._sum = torch.zeros(k, k, dtype=torch.float32, device=device)
        self._chunk: Tensor | None = None
        self._filled = 0

    @staticmethod
    def bytes(k: int) -> int:
        """Compute the bytes of a sum `[k, k]`, without its chunk of tokens."""
        return 4 * k * k

    @staticmethod
    def chunk_bytes(k: int, device: str = "cpu", itemsize: int = 4) -> int:
        """Compute the bytes of a chunk of tokens: in float32, on a GPU a long one with `itemsize` bytes a number."""
        return (itemsize * LONG_CHUNK if device == "cuda" else 4 * CHUNK) * k

    def add(self, x: Tensor) -> None:
        """Add the tokens of `x` `[..., k]`, any float dtype; NumericError, with counts, if any entry is not finite.

        NumericError, too, if `k` differs from the linear's. Without checks this is the only one.

        Half-precision inputs on a GPU are multiplied as they are with a float32 result, all others as float32.
        """
        if x.shape[-1] != len(self._sum):
            raise NumericError(
                f"activations of {x.shape[-1]} channels for a linear of {len(self._sum)}: config.json does not fit the "
                "weights, fetch the folder again"
            )
        x = x.detach().reshape(-1, len(self._sum))
        if self._totals is not None:
            self._totals.append(x.sum(dtype=torch.float32))
        elif not is_finite(x):
            finite = torch.isfinite(x)
            token, channel = (~finite).nonzero()[0].tolist()
            raise NumericError(
                f"{int((~finite).sum())} of {x.numel()} activations are NaN or infinite, the first in token {token}, "
                f"channel {channel}",
                "drop that document",
                Words("use", Option("device", "cpu"), ", which computes in float32"),
            )
        if self._chunk is None:
            keep = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
            self._chunk = x.new_empty(self.chunk, x.shape[1], dtype=x.dtype if keep else torch.float32)
        self.tokens += len(x)
        while len(x):
            taken = min(self.chunk - self._filled, len(x))
            self._chunk[self._filled : self._filled + taken] = x[:taken]
            self._filled += taken
            x = x[taken:]
            if self._filled == self.chunk:
                if self._cap_tokens:
                    self._cap = self._cap or find_cap(self._chunk[:CHUNK])
                    if self._aside is None:
                        self._aside = empty_aside(self._chunk)
                    self._extreme = self._cap.take_out(self._chunk, self._aside, self._extreme)
                _add_products(self._sum, self._chunk)
                self._filled = 0

    def may_be_broken(self) -> bool:
        """Return True if the sum of a call's numbers is not finite: one of them is not, or they are very large."""
        return bool(self._totals) and not is_finite(torch.stack(self._totals or []))

    def part(self) -> Part:
        """Return the sums so far, for `absorb` of another Hessian; they share the memory of this one."""
        full, extreme = self.tokens - self._filled, int(self._extreme)
        aside = self._aside[: min(extreme, _ASIDE)].float() if self._aside is not None and extreme else None
        last = self._chunk[: self._filled] if self._chunk is not None and self._filled else None
        return Part(full, self._sum if full else None, self._cap, aside, max(0, extreme - _ASIDE), last)

    def absorb(self, part: Part) -> None:
        """Add the sum of another rank's tokens. Call this in the order of the ranks.

        Its full chunks are added as a sum, capped by its own first chunk. Its last tokens continue the unfinished chunk
        here, so that a Hessian of few tokens does not depend on the number of ranks. This Hessian takes over the tensor
        of the first part and adds to it.
        """
        if part.total is not None:
            self._sum = self._sum.add_(part.total) if self.tokens else part.total
            self.tokens += part.tokens
            self._cap = self._cap or part.cap
            if part.aside is not None and self._cap is not None:
                before = int(self._extreme)
                kept, rest = part.aside.tensor_split([max(0, _ASIDE - before)])
                if self._aside is None:
                    self._aside = empty_aside(kept)
                self._aside[before : before + len(kept)] = kept
                self._extreme = self._extreme + len(part.aside) + part.late
                if len(rest):
                    _add_products(self._sum, rest * self._cap.factors(rest))
        if part.last is not None:
            self.add(part.last)

    def check_size(self, k: int) -> None:
        """Raise NumericError unless the inputs have `k` channels, as a weight `[n, k]` needs."""
        check_size(self._sum, k)

    def matrix(self) -> Tensor:
        """Return `H = (2 / T) sum x^T x`, float32 `[k, k]`, symmetric; NumericError if no token was added.

        A token of extreme norm counts as a median one. `limited` judges it better, where the weights are known.
        """
        total, tail = self._parts()
        return self._joined(total, tail.aside * tail.cap.factors(tail.aside) if tail.cap else tail.aside)

    def limited(self, weights: Collection[Tensor]) -> tuple[Tensor, int]:
        """Return `H` as `matrix` for linears of `weights` `[n, k]`, and the number of tokens that were scaled down.

        A token of extreme norm is scaled down until its outputs are no larger than those of other tokens, by RMS
        (ALGORITHMS 2). If they are not, it keeps its weight.
        """
        total, (aside, _, late) = self._parts()
        if not len(aside):
            return self._joined(total, aside), late
        ordinary = total.tril()
        ordinary += ordinary.tril(-1).T
        energy = torch.stack([row_losses(w, None, ordinary).sum() for w in weights]).sum()
        limit = (energy / (self.tokens - len(aside))).sqrt()
        norms = _output_norms(aside, weights)
        loud = norms > limit
        aside = aside * torch.where(loud, limit / norms, 1).to(aside.dtype).unsqueeze(-1)
        return self._joined(total, aside), late + int(loud.sum())

    @property
    def capped_tokens(self) -> int:
        """Count the tokens whose norm is extreme."""
        _, tail = self._last_chunk()
        return len(tail.aside) + tail.late

    def _parts(self) -> tuple[Tensor, _Extreme]:
        """Return the lower triangle of the sum over ordinary tokens, and the extreme tokens."""
        if not self.tokens:
            raise NumericError("no calibration token reached this linear", "add calibration text", "leave it dense")
        total = self._sum.clone()
        x, extreme = self._last_chunk()
        if len(x):
            _add_products(total, x)
        return total, extreme

    def _last_chunk(self) -> tuple[Tensor, _Extreme]:
        """Return a copy of the ordinary tokens of the unfinished chunk, zeros for others; and all extreme tokens."""
        aside, extreme, cap = self._aside, self._extreme, self._cap
        x = self._sum[:0] if self._chunk is None else self._chunk[: self._filled].clone()
        if self._cap_tokens and len(x):
            cap = cap or find_cap(x[:CHUNK])
            aside = empty_aside(x) if aside is None else aside.clone()
            extreme = cap.take_out(x, aside, extreme)
        count = int(extreme)
        kept = self._sum[:0] if aside is None else aside[: min(count, _ASIDE)].float()
        return x, _Extreme(kept, cap, count - len(kept))

    def _joined(self, total: Tensor, aside: Tensor) -> Tensor:
        """Add tokens `[e, k]` to the lower triangle of a sum, in place; return the whole matrix, divided once."""
        if len(aside):
            _add_products(total, aside)
        lower = total.mul_(2 / self.tokens).tril_()
        return lower + lower.tril(-1).T


class Part(NamedTuple):
    """Hold a part of a Hessian: the sum over `tokens` tokens of full chunks, the tokens set aside, and the last tokens.

    `total` is float32 `[k, k]`, and only its lower triangle is used. It is None without a full chunk. `aside` `[e, k]`
    and `last` `[t, k]` are None if there are none. `late` counts the extreme tokens that were scaled down at once.
    """

    tokens: int
    total: Tensor | None
    cap: Cap | None
    aside: Tensor | None
    late: int
    last: Tensor | None


class _Extreme(NamedTuple):
    """Hold tokens of extreme norm: stored tokens float32 `[e, k]`, the cap, and the number of later ones."""

    aside: Tensor
    cap: Cap | None
    late: int


class Cap(NamedTuple):
    """Hold the typical magnitude of each channel, float32 `[k]`, and the median norm of a token in these units."""

    magnitudes: Tensor
    median: Tensor

    def take_out(self, x: Tensor, aside: Tensor, before: Tensor) -> Tensor:
        """Move the extreme tokens of `x` `[t, k]` behind the `before` ones in `aside`; return how many there now are.

        In `x` zeros replace them. Tokens beyond its size are scaled down to the median norm. The last row of `aside` is
        scratch. On a GPU nothing waits for the number of extreme tokens.
        """
        norms = weighted_norms(x, self.magnitudes)
        extreme = norms > EXTREME * self.median
        kept = extreme & (before + extreme.cumsum(0) <= _ASIDE)
        factors = torch.where(kept, 0, torch.where(extreme, self.median / norms, 1)).unsqueeze(-1)
        if EVERY_TOKEN[x.device.type]:
            # The extreme ones come first. Rows behind their number are overwritten, or never read.
            rows = extreme.int().sort(descending=True, stable=True).indices[:_ASIDE]
        else:
            rows = extreme.nonzero().flatten()
        place = (before + torch.arange(len(rows), device=x.device)).clamp_max(_ASIDE)
        aside.index_copy_(0, place, x[rows].to(aside.dtype))
        if kernels.takes_tokens(x):
            kernels.scale_tokens(x, factors.flatten())
        elif EVERY_TOKEN[x.device.type]:
            x *= factors
        else:
            x[rows] *= factors[rows]
        return before + extreme.sum()

    def factors(self, x: Tensor) -> Tensor:
        """Return the factors `[t, 1]` that give tokens `[t, k]` the median norm."""
        return (self.median / weighted_norms(x, self.magnitudes)).unsqueeze(-1)


def find_cap(x: Tensor) -> Cap:
    """Return the cap that the tokens of `x` `[t, k]` imply (ALGORITHMS 2).

    A channel's magnitude is its median over tokens. Each magnitude is at least the median token's average, so that a
    channel that seldom fires makes no token extreme.
    """
    k = x.shape[1]
    average = _live_median(weighted_norms(x, torch.ones(k, device=x.device))) / k**0.5
    sample = x[::_STRIDE] if len(x) > _SAMPLE else x
    # `median` along an axis has no deterministic form on GPUs; `sort` has.
    medians = [part.abs().sort(0).values[len(part) // 2] for part in sample.split(_SLICE, 1)]
    magnitudes = torch.maximum(torch.cat(medians).float(), average)
    return Cap(magnitudes, _live_median(weighted_norms(x, magnitudes)))


def weighted_norms(x: Tensor, magnitudes: Tensor) -> Tensor:
    """Return the norm of each token of `x` `[t, k]`, channels divided by their magnitudes, float32 `[t]`."""
    if kernels.takes_tokens(x):
        return kernels.token_norms(x, magnitudes)
    parts = x.split(CHUNK if x.is_cuda else _SLICE)
    return torch.cat([torch.linalg.vector_norm(part / magnitudes, dim=1) for part in parts])


def empty_aside(x: Tensor) -> Tensor:
    """Return memory for the tokens that are set aside from `x` `[t, k]`, and a row of scratch."""
    return x.new_empty(_ASIDE + 1, x.shape[1])


def _output_norms(x: Tensor, weights: Collection[Tensor]) -> Tensor:
    """Return the norm of all outputs of each token of `x` `[e, k]`, for weights `[n, k]`, float64 `[e]`."""
    squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    with one_thread(x.device):
        for rows in (part for weight in weights for part in weight.split(_ROWS[x.device.type])):
            squares += torch.linalg.vector_norm(x @ rows.to(x.dtype).T, dim=1, dtype=torch.float64).square()
    return squares.sqrt()


def _live_median(norms: Tensor) -> Tensor:
    """Return the median norm of the tokens that are not zero, infinity if there is none."""
    live = norms[norms > 0]
    return live.median() if len(live) else norms.new_tensor(torch.inf)


def _add_products(total: Tensor, x: Tensor) -> None:
    """Add `x^T x` to the lower triangle of `total`; the upper triangle is only partly updated."""
    k = total.shape[0]
    width = max(-(-k // _PANELS), _LEAST_WIDTH[total.device.type])
    bounds = [(a, min(a + width, k)) for a in range(0, k, width)]
    # The largest first, so that several threads end together.
    side_by_side(total.device, [partial(_add_panel, total, x, a, b) for a, b in reversed(bounds)])


def _add_panel(total: Tensor, x: Tensor, a: int, b: int) -> None:
    panel = total[a:b, :b]
    if x.dtype == torch.float32:
        panel.addmm_(x[:, a:b].T, x[:, :b])
    else:
        torch.addmm(panel, x[:, a:b].T, x[:, :b], out_dtype=torch.float32, out=panel)


def check_size(h: Tensor, k: int) -> None:
    """Raise NumericError unless `h` is a `[k, k]` matrix, as a weight `[n, k]` needs."""
    if h.shape != (k, k):
        raise NumericError(
            f"the Hessian is {list(h.shape)} and the weight has {k} input channels: calibrate this linear again"
        )


def live_diagonal(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of `h` `[k, k]` with dead channels raised to a small positive value, and the dead mask.

    A dead channel gets 1e-6 of the mean live one (1 if all are dead). It is then rounded to nearest and never outweighs
    a live channel. NumericError if `h` has a non-finite entry or a negative diagonal.
    """
    diagonal = h.diagonal().clone()
    # The sum of a row is not finite if an entry is not; a finite sum overflows only beyond 1e38 / k.
    if not bool(torch.isfinite(h.sum(0)).all()):
        broken = int((~torch.isfinite(h)).sum())
        raise NumericError(f"the Hessian has {broken} entries that are NaN or infinite", "check the calibration text")
    if bool((diagonal < 0).any()):
        raise NumericError("the Hessian has a negative diagonal entry and is not a covariance: calibrate anew")
    dead = diagonal == 0
    live = diagonal[~dead]
    diagonal[dead] = live.mean() * _DEAD if len(live) else 1.0
    return diagonal, dead


def row_losses(weight: Tensor, tensor: QuantizedTensor | None, h: Tensor) -> Tensor:
    """Return the proxy loss `d H d^T` of each row of `weight - tensor`, float64 `[n]`.

    With `tensor` None, `d` is the weight `[n, k]` itself. `h` `[k, k]` is symmetric and undamped (ALGORITHMS 1).
    """
    h = h.to(factor_dtype(h.device))
    d = weight.to(working_dtype(weight))
    if tensor is not None:
        d = d - tensor.dequantize(d.dtype)
    parts = side_by_side(h.device, [partial(_quadratic_forms, rows, h) for rows in d.split(_ROWS[h.device.type])])
    return torch.cat(parts).double().clamp_(min=0)


def _quadratic_forms(rows: Tensor, h: Tensor) -> Tensor:
    """Return `d h d^T` of each of `rows` `[r, k]`; blocks above the diagonal count twice, blocks below it never."""
    rows = rows.to(h.dtype)
    total = rows.new_zeros(len(rows))
    width = _LOSS_WIDTH[h.device.type]
    for a in range(0, len(h), width):
        panel = slice(a, a + width)
        product = rows[:, panel] @ h[panel, panel]
        product.addmm_(rows[:, :a], h[:a, panel], alpha=2)
        total += product.mul_(rows[:, panel]).sum(-1)
    return total
