"""Compare an engine's input with the folder: files with their recorded hashes, tensors with the
files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.provenance import checked
from quantkit.checkpoint.reader import Checkpoint
from quantkit.core.tensors import raw_bytes
from quantkit.errors import CheckpointError, QuantkitError, Words

#: The variable of the environment that switches the comparison off, by the value 0.
VARIABLE = "QUANTKIT_CHECK"
#: Places of a tensor that are compared, and the least bytes of each.
PLACES, BYTES = 8, 256


class FolderCheck:
    """The comparison of a model with its folder: `begin` when files are read, and `require` before
    weights are used.
    """

    def __init__(self) -> None:
        self._model: tuple[str, str | None, str | None] | None = None
        self._hashes = False
        self._folder: Checkpoint | None = None
        self._names: frozenset[str] = frozenset()
        self._running: Future[None] | None = None

    def expect(self, model: str, revision: str | None, cache: str | None, hashes: bool) -> None:
        """Name the folder, or the hub id whose snapshot is in `cache`; with `hashes` this process
        hashes its files.
        """
        if os.environ.get(VARIABLE) != "0":
            self._model, self._hashes = (model, revision, cache), hashes

    def begin(self) -> None:
        """Open the expected model, and start hashing its files; a second call does nothing."""
        if self._model is None or self._folder is not None:
            return
        model, *where = self._model
        self._model, folder = (
            None,
            Path(model) if os.path.isdir(model) else _snapshot(model, *where),
        )
        if folder is None:  # other loaders of an engine read from elsewhere
            return
        self._folder = Checkpoint(folder, trust_remote_code=True)
        self._names = frozenset(self._folder.names())
        if self._hashes:
            pool = ThreadPoolExecutor(1, "quantkit-check")
            self._running = pool.submit(_compare, self._folder)
            pool.shutdown(wait=False)

    def is_stored(self, names: Iterable[str], tensor: Tensor) -> bool:
        """Return False if the folder has a tensor under one of `names` that differs from `tensor`
        in a few sampled places.
        """
        name = next((name for name in names if name in self._names), None)
        if self._folder is None or name is None:
            return True
        if self._folder.shape(name) != tuple(tensor.shape):
            return False
        rows = max(1, -(-BYTES * len(tensor) // max(1, tensor.nbytes)))
        for start in sorted({len(tensor) * place // PLACES for place in range(PLACES)}):
            part = slice(start, start + rows)
            if not torch.equal(
                raw_bytes(tensor[part].contiguous()), raw_bytes(self._folder.get(name, part))
            ):
                return False
        return True

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Prefer the damage of a file to an error that follows from it."""
        try:
            yield
        except QuantkitError:
            self.require()
            raise

    def require(self) -> None:
        """Wait for the hashes; CheckpointError for a file that was changed."""
        if self._running is not None:
            self._running.result()
        self._folder = self._running = None  # an engine may copy its config
        self._names = frozenset()


def _compare(folder: Checkpoint) -> None:
    try:
        with checked(folder):
            pass
    except CheckpointError as error:
        error.ways_out = (*error.ways_out[:-1], Words(f"set {VARIABLE}=0 to use it as it is"))
        raise


def _snapshot(model: str, revision: str | None, cache: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # the hub's client has several errors for a missing file
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    return None
