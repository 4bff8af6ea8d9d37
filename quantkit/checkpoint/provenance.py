"""Hashes of a source's files that something beside them states: what is not what was meant is not converted further.

Three places state them: a quantkit report, a list by `sha256sum`, and the hub's cache, where a large file is named by
its SHA-256. A file is hashed as the hash there is, which a report then has of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.io import files, model_folder
from quantkit.reporting.report import REPORT
from quantkit.reporting.report import load as load_report

SUMS = "SHA256SUMS"
#: The most bytes of that list that are read.
_LIMIT = 2**20
_LINE = re.compile(rb"([0-9a-fA-F]{64}) [ *](?:\./)?([^\r\n]+)")


class Stated(NamedTuple):
    """A hash as it was found, what states it, and what to do about a file that has another."""

    digest: object
    by: str
    way: str


def stated(src: Checkpoint) -> dict[str, Stated]:
    """Return file name -> hash for every file of a source of which one is stated; the report comes first."""
    found = {
        name: Stated(path.name, "its name in the hub's cache says", "download it again")
        for name, path in src.sources().items()
        if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name)
    }
    for name, digest in _sums(src.path).items():
        found[name] = Stated(digest, f"{SUMS} lists", f"restore it, or mend {SUMS} if that was meant")
    for name, listed in load_report(src.path).get("files", {}).items():
        found[name] = Stated(listed, f"{REPORT} lists", "restore it, or remove the report if that was meant")
    return found


def digests(known: Mapping[str, Stated]) -> dict[str, object]:
    """Return the hashes alone, for `Checkpoint.hashes` and what else takes recorded ones."""
    return {name: entry.digest for name, entry in known.items()}


def require_unchanged(sources: Mapping[str, str], known: Mapping[str, Stated]) -> None:
    """Refuse weight files whose hashes are not those `stated`: dense tensors have no digest of their own."""
    for name, digest in sources.items():
        if name.endswith(".safetensors") and name in known and known[name].digest != digest:
            raise CheckpointError(
                f"{name}: its hash is not the one that {known[name].by}, the file was changed: {known[name].way}"
            )


def source_hashes(src: Checkpoint) -> dict[str, str]:
    """Return the hashes of a source's files, after `require_unchanged`."""
    known = stated(src)
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
