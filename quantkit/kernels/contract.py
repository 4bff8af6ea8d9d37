"""Checks of a kernel's operands before anything is launched; the first problem becomes a one-line
error.

A kernel that read the wrong bytes would return wrong numbers. One that read past them would break
the CUDA context of the whole process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.core.formats import dtype_name
from quantkit.errors import KernelError

#: dtype of activations and outputs -> its name in the CUDA sources.
TYPES = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}
ACTIVATIONS = (torch.float16, torch.bfloat16)
#: Bytes that vector loads are aligned to.
ALIGNMENT = 16
#: The kernels find the group of an index along k by a multiplication, which is exact below this
#: value of group * k.
GROUP_LIMIT = 1 << 34


@dataclass(frozen=True)
class Weight:
    """The packed weight `[n, k]` that the kernels of a layout expect.

    `tensors` maps a suffix to its dtype and shape, the scales last. `n` and `k` must be multiples
    of `n_unit` and `k_unit`. `group` is the number of weights along k that share a scale; None if
    the kernels take no such argument.
    """

    layout: str
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    n: int
    k: int
    n_unit: int
    k_unit: int
    group: int | None = None

    @property
    def group_argument(self) -> list[int]:
        return [] if self.group is None else [self.group]

    def stacked(self, experts: int) -> Weight:
        """Describe the weights of several experts, stacked `[experts, ...]`."""
        return replace(
            self,
            tensors={
                name: (dtype, (experts, *shape)) for name, (dtype, shape) in self.tensors.items()
            },
        )


def check(
    weight: Weight,
    x: Tensor,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Check all operands, and return `out` or a new tensor `[m, n]` of the dtype of `x` for the
    product.

    KernelError unless `x` is float16 or bfloat16 `[m, k]` with m >= 1, `tensors` match `weight`,
    `bias` is `[n]` of the dtype of `x`, and `out` is `[m, n]` of that dtype or float32. All must be
    contiguous, on one CUDA device, and (except the bias) at addresses that are multiples of 16
    bytes.
    """
    name, n, k = weight.layout, weight.n, weight.k
    check_sizes(weight)
    if x.ndim != 2 or x.shape[1] != k or not 1 <= x.shape[0] < 2**31:
        raise KernelError(
            f"the {name} kernel takes activations [m, {k}] with m >= 1, not {list(x.shape)}"
        )
    check_operand(name, "activations", x, ACTIVATIONS, (x.shape[0], k), x.device)
    check_packed(weight, tensors, x.device)
    if bias is not None:
        check_operand(name, "bias", bias, (x.dtype,), (n,), x.device, alignment=1)
    if out is not None:
        check_operand(name, "out", out, (x.dtype, torch.float32), (x.shape[0], n), x.device)
    if x.device.type != "cuda":  # all other operands are on the same device
        raise not_on_a_gpu(name, "activations", x.device)
    return torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if out is None else out


def check_sizes(weight: Weight) -> None:
    """Raise KernelError for a weight whose n, k or groups the kernels do not support."""
    for letter, size, unit in (("n", weight.n, weight.n_unit), ("k", weight.k, weight.k_unit)):
        if size < 1 or size % unit:
            raise KernelError(
                f"the {weight.layout} kernel needs {letter} to be a multiple of {unit}, and it is "
                f"{size}"
            )
    group, k = weight.group, weight.k
    if group is not None and group < k and group * k >= GROUP_LIMIT:
        raise KernelError(
            f"the {weight.layout} kernel takes groups of fewer than {GROUP_LIMIT // k} for k = "
            f"{k}, not {group}"
        )


def check_packed(weight: Weight, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Raise KernelError unless the packed tensors match `weight`, and are contiguous and aligned on
    `device`.
    """
    for suffix, (dtype, shape) in weight.tensors.items():
        if suffix not in tensors:
            raise KernelError(
                f"the {weight.layout} kernel needs the tensor {suffix!r}, which is missing"
            )
        check_operand(weight.layout, suffix, tensors[suffix], (dtype,), shape, device)


def check_addresses(
    weight: Weight, packed: Sequence[Tensor], device: torch.device, checked: set[tuple[int, ...]]
) -> None:
    """Check packed tensors in the order of `weight.tensors`, and add their addresses to `checked`;
    errors as `check_packed`.
    """
    check_packed(weight, dict(zip(weight.tensors, packed, strict=True)), device)
    if len(checked) > 4096:  # weights that move between devices
        checked.clear()
    checked.add(tuple([tensor.data_ptr() for tensor in packed]))


def check_operand(
    layout: str,
    what: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    alignment: int = ALIGNMENT,
) -> None:
    """Raise KernelError unless a tensor, called `what`, is contiguous with this shape and address,
    of one of `dtypes`, on the device of the activations.
    """
    where = f"the {layout} kernel's {what}"
    if tensor.device != device:
        if device.type != "cuda":
            raise not_on_a_gpu(layout, "activations", device)
        if tensor.device.type != "cuda":
            raise not_on_a_gpu(layout, what, tensor.device)
        raise KernelError(
            f"{where} must be on {device} as the activations are, not on {tensor.device}",
            "move it there",
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(dtype_name, dtypes))
        raise KernelError(
            f"{where} must be {wanted}, not {dtype_name(tensor.dtype)}", "convert it with .to()"
        )
    if tensor.shape != shape:
        raise KernelError(f"{where} must have shape {list(shape)}, not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise KernelError(f"{where} must be contiguous", "call .contiguous() first")
    if tensor.data_ptr() % alignment:
        raise KernelError(
            f"{where} must begin at a multiple of {alignment} bytes", "call .clone() first"
        )


def not_on_a_gpu(layout: str, what: str, device: torch.device) -> KernelError:
    """Make the error of an operand that is not on a GPU."""
    return KernelError(
        f"the {layout} kernel's {what} must be on a CUDA device, not on {device}",
        "move it with .to('cuda')",
    )
