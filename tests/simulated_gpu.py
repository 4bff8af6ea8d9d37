"""A GPU that a CPU simulates: its tensors are on `cuda`, and its sums have another order.

Operations on tensors of both devices fail, as on a real GPU. Sums differ from the CPU's within the error of an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
#: Operations that bring values to the CPU, or copy between both devices.
COPIES = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}
BAG = aten._embedding_bag_forward_only.default
SUMS = {aten.sum.dim_IntList, aten.linalg_vector_norm.default, BAG}


class OnGpu(Tensor):
    """A tensor on the simulated GPU, whose values are in `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        like = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
        make: Any = Tensor._make_subclass  # type: ignore[attr-defined]
        made: OnGpu = make(cls, like, False, dispatch_device=True, device_for_backend_keys=CUDA)
        made.held = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    # torch's own forms of these look for a real GPU
    def __invert__(self) -> Any:
        return OnGpu(~self.held)

    def __int__(self) -> int:
        return int(self.held)

    def tolist(self) -> Any:
        return self.held.tolist()

    def copy_(self, value: Tensor, *rest: Any) -> Any:
        self.held.copy_(held(value))
        return self

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        return tree_map(OnGpu, self.held.nonzero(as_tuple=as_tuple))

    def __getitem__(self, index: Any) -> Any:
        return OnGpu(self.held[tree_map(held, index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not isinstance(value, Tensor) or isinstance(value, OnGpu)
        self.held[tree_map(held, index)] = held(value)


def held(value: Any) -> Any:
    """Return the values of a tensor on the simulated GPU, and anything else unchanged."""
    return value.held if isinstance(value, OnGpu) else value


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation on the CPU, and wrap its results if they belong on the GPU."""
    if func is torch.ops.prim.device.default:
        return CUDA
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    here = [isinstance(value, OnGpu) for value in given]
    mixed = any(here) and not all(there or value.ndim == 0 for there, value in zip(here, given, strict=True))
    assert not mixed or func in COPIES or "index" in str(func), f"{func} has tensors on both devices"
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    plain = tree_map(held, (args, kwargs))
    found = func(*plain[0], **plain[1])
    if func in SUMS and any(here):
        found = reordered(held(given[int(func is BAG)]).numel(), found)
    gives = asked.type == "cuda" if asked is not None else any(here)
    if func is aten.copy_.default:
        return args[0]
    if str(func).split(".")[1].endswith("_") and args and isinstance(args[0], OnGpu):
        return args[0]
    return tree_map(lambda value: OnGpu(value) if isinstance(value, Tensor) and gives else value, found)


def reordered(count: int, found: Any) -> Any:
    """Change a sum of `count` numbers in all, or the first result, as another order of additions can."""
    if isinstance(found, tuple):
        return reordered(count, found[0]), *found[1:]
    if not found.is_floating_point():
        return found
    each = count / max(1, found.numel())
    drawn = torch.rand(found.shape, generator=torch.Generator().manual_seed(count)).to(found.dtype)
    return found * (1 + (2 * drawn - 1) * (each - 1) * torch.finfo(found.dtype).eps / 2)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Let tensors be moved to, and made on, the simulated GPU."""
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    try:
        with pytest.MonkeyPatch.context() as patch, _Mode():
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]
