"""Products of many tokens: strips of the packed weight are decoded to 16 bits, kernels/decode.cu, for cuBLAS.

A packed weight saves reading, and decoding it again for each tile of tokens costs time. From some number of tokens on a
product is faster if the weight is decoded once. Decoded rows go into a buffer of fixed size, one for each stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.kernels import driver, loader
from quantkit.kernels.contract import ACTIVATIONS, TYPES, Weight, check, check_same_dtype
from quantkit.kernels.hopper_tiles import ceil
from quantkit.kernels.workspace import workspace

#: Bytes of the buffer. Larger strips make fewer products, smaller ones stay in the L2 cache.
BUFFER = 64 << 20
#: As in the source: rows of a block and columns of a row that a block of threads decodes, and its threads.
ROWS, COLUMNS, THREADS = 64, 256, 256
#: Strips have a multiple of these rows where they can, as the tiles of cuBLAS.
WHOLE_ROWS = 256
#: The activations whose products may use decoded weights. Weights rounded to bfloat16 would put an error of 1.6e-3 on a
#: product, above `proof.BOUND`. float16 adds 2e-4.
DTYPES = (torch.float16,)
#: More tokens than any product has.
NEVER = 1 << 40


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of large products in cuBLAS, bytes/s of decoding, and the speed of portable kernels beside cuBLAS."""

    multiply: float
    decode: float
    portable: float


#: An H100: cuBLAS and copies as of kernels_*.csv, less the bandwidth that an H200 has more.
HOPPER = Speeds(multiply=720e12, decode=2.8e12, portable=0.32)
#: An A100 by its data sheet. Not measured.
OTHERS = Speeds(multiply=250e12, decode=1.6e12, portable=0.6)
#: Seconds that each strip adds.
STRIP_S = 6e-6


@dataclass(frozen=True, eq=False)
class DecodedKernel:
    """The kernel `name` in kernels/decode.cu; `variant` are its template arguments after the dtype."""

    name: str
    variant: str = ""
    source: ClassVar[str] = "decode"
    path: ClassVar[str] = "cublas"

    def instance(self, dtype: torch.dtype) -> str:
        """Build the C++ name of the instance for decoded weights of a dtype."""
        return f"{self.name}<{', '.join(filter(None, (TYPES[dtype], self.variant)))}>"

    @functools.cached_property
    def instances_by_dtype(self) -> dict[torch.dtype, tuple[str, ...]]:
        """dtype of the decoded weights -> its instance."""
        return {dtype: (self.instance(dtype),) for dtype in ACTIVATIONS}

    @property
    def instances(self) -> tuple[str, ...]:
        return sum(self.instances_by_dtype.values(), ())

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile and load the instance for a dtype."""
        loader.load(self.source, self.instances_by_dtype[dtype], device)

    def multiply(
        self, weight: Weight, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Check the operands and multiply; returns `[m, n]` in the dtype of `x`, see `contract.check`."""
        out = check(weight, x, tensors, bias, out)
        check_same_dtype(weight.layout, x, out)
        self.launch(weight, x, [tensors[suffix] for suffix in weight.tensors], bias, out)
        return out

    def launch(self, weight: Weight, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, out: Tensor) -> None:
        """Write the product into `out`, for operands that are checked, `packed` in the order of `weight.tensors`.

        Neither a strip nor cuBLAS begins before the work in front of it has ended, so the buffer is free.
        """
        n, k, device = weight.n, weight.k, x.device
        buffer = workspace(self.source, device, driver.stream_state(device), BUFFER // 4, 1)[0].view(x.dtype)
        for start, end in strips(n, k):
            rows = buffer[: (end - start) * k].view(-1, k)
            self.decode(weight, packed, start, rows)
            product = out[:, start:end]
            if bias is None:
                torch.mm(x, rows.t(), out=product)
            else:
                torch.addmm(bias[start:end], x, rows.t(), out=product)

    def decode(self, weight: Weight, packed: Sequence[Tensor], start: int, rows: Tensor) -> None:
        """Decode the weight from row `start` on into `rows` `[r, k]`, float16 or bfloat16; multiples of 64 rows."""
        function = loader.load(self.source, self.instances_by_dtype[rows.dtype], rows.device).functions
        grid = (ceil(weight.k, COLUMNS), len(rows) // ROWS)
        arguments: list[Tensor | int] = [*packed, rows, start // ROWS, weight.n, weight.k, *weight.group_argument]
        loader.launch(function[self.instance(rows.dtype)], grid, (THREADS,), arguments)


@functools.lru_cache(maxsize=4096)
def strips(n: int, k: int) -> tuple[tuple[int, int], ...]:
    """Divide `n` rows of `k` 16-bit weights into strips of nearly equal size that fit into the buffer."""
    most = BUFFER // (2 * k * ROWS) * ROWS
    wanted = ceil(ceil(n, ceil(n, most)), WHOLE_ROWS) * WHOLE_ROWS
    size = wanted if wanted <= most else most
    return tuple((start, min(start + size, n)) for start in range(0, n, size))


def tokens_from(weight: Weight, dtype: torch.dtype, hopper: bool, share: float | None) -> int:
    """Compute the number of tokens from which on decoding a weight is faster than multiplying it packed.

    `share` is the speed of Hopper's kernel beside cuBLAS with many tokens, None for the portable kernel. A product
    of m tokens takes `2 m n k` operations on either path. Decoding adds the time to read the packed weight and to write
    16 bits for each of n k weights. cuBLAS reads these from the L2 cache or in the shade of its arithmetic.
    """
    n, k, speeds = weight.n, weight.k, HOPPER if hopper else OTHERS
    share = speeds.portable if share is None else share
    if share >= 1 or dtype not in DTYPES or 2 * k * ROWS > BUFFER:
        return NEVER
    packed = sum(math.prod(shape) * kind.itemsize for kind, shape in weight.tensors.values())
    added = (packed + 2 * n * k) / speeds.decode + STRIP_S * len(strips(n, k))
    saved = 2 * n * k / speeds.multiply * (1 / share - 1)
    return math.ceil(added / saved)
