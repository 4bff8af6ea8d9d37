"""torch's settings that change values, as torch itself begins with them, whatever a caller of the
Python API has set.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch


class _OfProcess:
    """Settings of all threads: the first user sets them, the last one gives the caller's back."""

    def __init__(self) -> None:
        self._lock, self._users, self._undo = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo.close()

    def _set(self) -> None:
        if (dtype := torch.get_default_dtype()) != torch.float32:
            self._undo.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        backends: Any = torch.backends
        products = (backends.cuda.matmul, backends.mkldnn.matmul)
        found = [each.fp32_precision for each in products]
        if not {*found} <= {"none", "ieee"}:
            for each, precision in zip(products, found, strict=True):
                self._undo.callback(setattr, each, "fp32_precision", precision)
            with suppress(RuntimeError):  # not to be read after a newer name was set
                before = torch.get_float32_matmul_precision()
                self._undo.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision("highest")


_OF_PROCESS = _OfProcess()


@contextmanager
def usual_settings() -> Iterator[None]:
    """Compute in full float32 and on the CPU where nothing else is named, without autocast and
    inference mode, inside the context.
    """
    with ExitStack() as stack:
        stack.enter_context(_OF_PROCESS)
        stack.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
