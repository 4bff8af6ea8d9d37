"""A source's files against the hashes recorded of them: a damaged source is refused.

Three places record hashes: a quantkit report, a list by `sha256sum`, and the hub's cache, which names a large file by
its SHA-256. A file is hashed by the same algorithm, and the new report lists that hash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.io import files, model_folder
from quantkit.io.model_folder import SUMS
from quantkit.reporting.report import REPORT
from quantkit.reporting.report import load as load_report

#: The most bytes of that list that are read.
_LIMIT = 2**20
_LINE = re.compile(rb"([0-9a-fA-F]{64}) [ *](?:\./)?([^\r\n]+)")


class Recorded(NamedTuple):
    """Hold a recorded hash, the place that records it, and the remedy if the file has another."""

    digest: object
    by: str
    remedy: str


def recorded_hashes(src: Checkpoint) -> dict[str, Recorded]:
    """Look up file name -> recorded hash, for the files that have one; the report comes before the others."""
    found = {
        name: Recorded(path.name, "its name in the hub's cache says", "download it again")
        for name, path in src.sources().items()
        if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name)
    }
    for name, digest in _sums(src.path).items():
        found[name] = Recorded(digest, f"{SUMS} lists", f"restore it, or mend {SUMS} if that was meant")
    for name, listed in load_report(src.path).get("files", {}).items():
        found[name] = Recorded(listed, f"{REPORT} lists", "restore it, or remove the report if that was meant")
    return found


def digests(known: Mapping[str, Recorded]) -> dict[str, object]:
    """Reduce recorded hashes to file name -> hash, as `Checkpoint.hashes` takes them."""
    return {name: entry.digest for name, entry in known.items()}


def require_unchanged(sources: Mapping[str, str], known: Mapping[str, Recorded]) -> None:
    """Raise CheckpointError for a weight file whose hash is not the recorded one."""
    for name, digest in sources.items():
        if name.endswith(".safetensors") and name in known and known[name].digest != digest:
            raise CheckpointError(
                f"{name}: its hash is not the one that {known[name].by}, the file was changed: {known[name].remedy}"
            )


def source_hashes(src: Checkpoint) -> dict[str, str]:
    """Hash a source's files; CheckpointError if one is not what was recorded."""
    known = recorded_hashes(src)
    hashes = src.hashes(digests(known))
    require_unchanged(hashes, known)
    return hashes


def _sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    if not path.exists() and not path.is_symlink():
        return {}
    with files.open_regular(model_folder.inside(folder, SUMS)) as file, files.guarded(path):
        lines = (_LINE.fullmatch(line) for line in file.read(_LIMIT).splitlines())
        return {found[2].decode(errors="replace"): found[1].decode().lower() for found in lines if found}
