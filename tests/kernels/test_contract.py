"""What a launcher refuses before a GPU is asked; what needs one for it is in test_naive.py."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.kernels import JUDGES
from quantkit.tensor import Scheme
from tests.kernels.operands import ONE_EACH, packed, weight


@pytest.mark.parametrize(("layout", "label", "n", "k"), ONE_EACH)
def test_operands_that_no_kernel_takes_are_one_clear_line(layout: str, label: str, n: int, k: int) -> None:
    q = weight(label, n, k)
    tensors = packed(layout, q)
    x = torch.ones(3, k, dtype=torch.float16)
    multiply = JUDGES[layout]
    cases = [
        (r"m >= 1", lambda: multiply(x[:0], tensors, q.scheme, n, k)),
        (rf"\[m, {k}\]", lambda: multiply(x[:, :-16], tensors, q.scheme, n, k)),
        (rf"\[m, {k}\]", lambda: multiply(x[0], tensors, q.scheme, n, k)),
        (r"CUDA device, not on cpu", lambda: multiply(x, tensors, q.scheme, n, k)),
        (r"n to be a multiple", lambda: multiply(x, tensors, q.scheme, n - 8, k)),
        (r"n to be a multiple", lambda: multiply(x, tensors, q.scheme, 0, k)),
        (r"kernel takes", lambda: multiply(x, tensors, Scheme.parse("int4:g16"), n, k)),
        (r"multiple of|does not divide", lambda: multiply(x, tensors, q.scheme, n, k + 8)),
    ]
    for pattern, call in cases:
        with pytest.raises(QuantkitError, match=pattern) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        ("marlin", "int4:g128:asym"),
        ("marlin", "int4:g256"),
        ("marlin", "fp6:channel"),
        ("marlin24", "int4:g128"),
        ("marlin24", "int4:g64:24"),
        ("tcfpx", "int4:channel"),
        ("tcfpx", "fp6:g128"),
        ("quick", "int4:channel"),
        ("quick", "int4:g16"),
        ("quick", "fp5:channel"),
    ],
)
def test_a_scheme_that_a_kernel_would_read_wrongly_is_refused(layout: str, label: str) -> None:
    with pytest.raises(QuantkitError, match=f"the {layout} kernel takes .*, not {label}"):
        JUDGES[layout](torch.ones(1, 256, dtype=torch.float16), {}, Scheme.parse(label), 256, 256)
