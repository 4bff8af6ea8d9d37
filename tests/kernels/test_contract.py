"""Launchers refuse bad operands before anything is launched.

Operands on a CPU show this too, because the device is checked last. test_bad_input.py does the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from quantkit.core.scheme import Scheme
from quantkit.errors import KernelError, QuantkitError
from quantkit.kernels import JUDGES
from tests.kernels.calls import KERNELS, LAYOUTS, Kernel, calls, unfit
from tests.kernels.operands import packed, weight


@KERNELS
@LAYOUTS
def test_operands_that_no_kernel_takes_are_one_clear_line(
    table: dict[str, Kernel], layout: str, label: str, n: int, k: int
) -> None:
    q = weight(label, n, k)
    tensors, x = packed(layout, q), torch.ones(4, k, dtype=torch.float16)
    call = calls(table[layout], x, tensors, q.scheme, n, k)
    for pattern, bad in unfit(call, layout, x, tensors, n, k):
        with pytest.raises(QuantkitError, match=pattern) as caught:
            bad()
        assert "\n" not in str(caught.value)


@KERNELS
@LAYOUTS
def test_operands_on_other_devices_are_refused(
    table: dict[str, Kernel], layout: str, label: str, n: int, k: int
) -> None:
    """If the activations are not on a GPU, the error says to move these, wherever the other operands are."""
    q = weight(label, n, k)
    tensors, x = packed(layout, q), torch.ones(4, k, dtype=torch.float16)
    call = calls(table[layout], x, tensors, q.scheme, n, k)
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    cases = {
        "cpu": [call(), call(bias=x.new_zeros(n)), call(out=x.new_zeros(4, n)), call(**on_meta)],
        "meta": [call(x.to("meta")), call(x.to("meta"), **on_meta)],
    }
    for device, refused in cases.items():
        for bad in refused:
            with pytest.raises(KernelError, match=f"activations must be on a CUDA device, not on {device}: move it"):
                bad()


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
