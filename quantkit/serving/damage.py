"""Compare a folder with its recorded hashes in the background, while an engine reads it, as `quantkit.load` does."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from quantkit.checkpoint.provenance import checked
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, Words

#: The variable of the environment that switches the comparison off, by the value 0.
VARIABLE = "QUANTKIT_CHECK"


class FolderCheck:
    """The comparison of one model: `begin` it when its files are read, and `require` it before they are used."""

    def __init__(self) -> None:
        self._model: tuple[str, str | None, str | None] | None = None
        self._running: Future[None] | None = None

    def expect(self, model: str, revision: str | None, cache: str | None) -> None:
        """Name the folder, or the hub id whose snapshot is in `cache`."""
        if os.environ.get(VARIABLE) != "0":
            self._model = model, revision, cache

    def begin(self) -> None:
        """Start comparing the expected model; a second call does nothing."""
        if self._model is not None and self._running is None:
            pool = ThreadPoolExecutor(1, "quantkit-check")
            self._running, self._model = pool.submit(_compare, *self._model), None
            pool.shutdown(wait=False)

    def require(self) -> None:
        """Wait for the comparison; CheckpointError for a file that was changed."""
        if self._running is not None:
            self._running.result()
            self._running = None  # an engine may copy its config


def _compare(model: str, revision: str | None, cache: str | None) -> None:
    folder = Path(model) if os.path.isdir(model) else _snapshot(model, revision, cache)
    if folder is None:  # other loaders of an engine read from elsewhere
        return
    try:
        with checked(Checkpoint(folder, trust_remote_code=True)):
            pass
    except CheckpointError as error:
        error.ways_out = (*error.ways_out[:-1], Words(f"set {VARIABLE}=0 to use it as it is"))
        raise


def _snapshot(model: str, revision: str | None, cache: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # the hub's client has several for what is not there
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    return None
