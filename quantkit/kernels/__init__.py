"""Which layouts a CUDA kernel of ours multiplies, and whether kernels could be compiled here.

`MATMULS` is the table from a layout's name to its `matmul` (ARCHITECTURE 7 and 8). No kernel is shipped yet, so it is
empty: `verify` proves the bits and says that no kernel ran, `plan` and `doctor` say the same beforehand.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

#: layout name -> matmul(x, tensors, scheme, n, k) -> float16 [m, n]
MATMULS: dict[str, Callable[..., Tensor]] = {}

NONE_YET = "quantkit ships no CUDA kernels yet"


def toolchain() -> dict[str, str | None]:
    """Return the versions of CuPy and of its NVRTC, each None when it cannot be used, and the `problem` met."""
    found: dict[str, str | None] = {"cupy": None, "nvrtc": None, "problem": None}
    try:
        import cupy
        from cupy.cuda import nvrtc

        found["cupy"] = cupy.__version__
        found["nvrtc"] = ".".join(str(part) for part in nvrtc.getVersion())
    except (
        Exception
    ) as error:  # a CuPy that does not match the machine fails to load in many ways, and any is the answer
        found["problem"] = " ".join(str(error).split()) or type(error).__name__
    return found
