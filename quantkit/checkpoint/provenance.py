"""A model's files against the hashes recorded of them: a damaged model is refused.

Three places record hashes: a quantkit report, a list by `sha256sum`, and the hub's cache, which
names a large file by its SHA-256. A file is hashed by the same algorithm, and the new report lists
that hash. Weight files of ours also state a digest of each tensor, which is compared if no hash is
recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from quantkit.algorithms.numerics import check_finite, is_finite
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import REPORT, load as load_report
from quantkit.core.tensors import FLOATS
from quantkit.errors import CheckpointError, Option, Words, about
from quantkit.io import files, model_folder
from quantkit.io.model_folder import SUMS
from quantkit.io.safetensors_files import damaged_tensors

#: The most bytes that are read of that list.
_LIMIT = 2**20
#: Files that are hashed at a time while a model is loaded.
READERS = 2
_LINE = re.compile(rb"([0-9a-fA-F]{64}) [ *](?:\./)?([^\r\n]+)")


class Recorded(NamedTuple):
    """Hold a recorded hash, the place that records it, and the remedy if the file has another."""

    digest: object
    by: str
    remedy: str


def recorded_hashes(src: Checkpoint) -> dict[str, Recorded]:
    """Look up file name -> recorded hash, for the files that have one; the report comes before the
    others.

    Only existing files that quantkit or a library opens are looked up.
    """
    found = {
        name: Recorded(path.name, "its name in the hub's cache says", "download it again")
        for name, path in src.sources().items()
        if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name)
    }
    for name, digest in _sums(src.path).items():
        found[name] = Recorded(
            digest, f"{SUMS} lists", f"restore it, or mend {SUMS} if that was meant"
        )
    for name, listed in load_report(src.path).get("files", {}).items():
        found[name] = Recorded(
            listed, f"{REPORT} lists", "restore it, or remove the report if that was meant"
        )
    there = {*src.sources(), *model_folder.opened(src.path)}
    return {name: entry for name, entry in found.items() if name in there}


def require_unchanged(
    src: Checkpoint, sources: Mapping[str, str], known: Mapping[str, Recorded]
) -> list[str]:
    """Raise CheckpointError for a weight file with another hash than recorded; `sources` has the
    files' hashes.

    A weight file without a recorded hash must have the digests that its own metadata states. Other
    files may have been edited on purpose: returns a line for each that changed.
    """
    for name, found in sources.items():
        if name.endswith(".safetensors"):
            _require_whole(src, name, known.get(name), found)
    return [
        f"{name}: its hash is not the one that {entry.by}: the changed file was taken"
        for name, entry in known.items()
        if not name.endswith(".safetensors") and _hash(src, name, entry) != entry.digest
    ]


def source_hashes(
    src: Checkpoint,
    readers: int = 1,
    finite: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, str], list[str]]:
    """Hash a source's files; returns the hashes and the lines of `require_unchanged`, with its
    CheckpointError.

    `readers` files are hashed at a time; `check` is called between pieces, and may raise. With
    `finite`, the same pass raises NumericError at the first tensor with NaN or infinity.
    """
    known = recorded_hashes(src)
    unfit = set[str]()
    plain = {
        file: {name: info for name, info in found.items() if finite and info.dtype in FLOATS}
        for file, found in src.plain().items()
    }

    def hash_file(name: str) -> str:
        floats = plain[name]
        starts, names = [info.start for info in floats.values()], list(floats)

        def see(start: int, piece: memoryview) -> None:
            check()
            at = bisect_right(starts, start) - 1
            if at >= 0 and start < (info := floats[names[at]]).end:
                whole = (
                    (start - info.start) % info.dtype.itemsize
                    == len(piece) % info.dtype.itemsize
                    == 0
                )
                if not whole or not is_finite(torch.frombuffer(piece, dtype=info.dtype)):
                    unfit.add(names[at])  # or perhaps so: it is looked at below

        borders = sorted({border for info in floats.values() for border in (info.start, info.end)})
        like = known[name].digest if name in known else None
        return files.hash_of_file(src.sources()[name], like, see, borders)

    # Otherwise each reader would start as many threads of torch again.
    pool = ThreadPoolExecutor(readers, "quantkit-hash", torch.set_num_threads, (1,))
    try:
        hashes = dict(zip(src.sources(), pool.map(hash_file, src.sources()), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
    edited = require_unchanged(src, hashes, known)
    fit = {name for found in plain.values() for name in found} - unfit
    for name in src.names() if finite else ():
        if name not in fit and src.dtype(name).is_floating_point:  # a computed tensor can overflow
            check()
            with about(name):
                check_finite(src.get(name))
    return hashes, edited


@contextmanager
def checked(src: Checkpoint, check: bool = True) -> Iterator[None]:
    """Check a model's files while the block reads them; without `check`, do nothing.

    Every file with a recorded hash must have it, and every other weight file the digests that it
    states. If a file has another hash, the block ends with a CheckpointError that replaces its own
    error.
    """
    if not check:
        yield
        return
    known = recorded_hashes(src)
    weights = [name for name in src.sources() if name.endswith(".safetensors")]
    with ThreadPoolExecutor(READERS, "quantkit-check") as pool:
        running = [
            pool.submit(_check, src, name, known.get(name))
            for name in dict.fromkeys([*weights, *known])
        ]
        try:
            yield
        except Exception:
            for each in running:
                each.result()  # damage is the cause of the other error
            raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for each in running:
            each.result()


def damage(name: str, path: Path, by: str) -> str:
    """Describe a file with another hash than the recorded one, and name the tensors whose digests
    changed.
    """
    tensors = None
    if name.endswith(".safetensors"):
        with suppress(CheckpointError):  # then its header is damaged
            tensors = damaged_tensors(path)
    what = (
        "the file"
        if not tensors
        else tensors[0]
        if len(tensors) == 1
        else f"{tensors[0]} ({len(tensors)} tensors)"
    )
    return f"{name}: its hash is not the one that {by}, {what} was changed"


def _require_whole(src: Checkpoint, name: str, entry: Recorded | None, found: str | None) -> None:
    """Raise CheckpointError if the hash `found` of a file is not the recorded one. Without a
    record, the file must have the digests that its metadata states.
    """
    path = src.locate(name)
    if entry is not None and found != entry.digest:
        raise CheckpointError(damage(name, path, entry.by), entry.remedy)
    if entry is None and (tensors := damaged_tensors(path)):
        more = f" ({len(tensors)} tensors)" if len(tensors) > 1 else ""
        raise CheckpointError(
            f"{tensors[0]}{more} does not have the digest that the file states, it was changed",
            "restore it",
            subject=name,
        )


def _check(src: Checkpoint, name: str, entry: Recorded | None) -> None:
    try:
        with about(str(src.path)):
            _require_whole(src, name, entry, None if entry is None else _hash(src, name, entry))
    except CheckpointError as error:
        error.ways_out += (Words("use it as it is with", Option("check", False)),)
        raise


def _hash(src: Checkpoint, name: str, entry: Recorded) -> str:
    return files.hash_of_file(src.locate(name), entry.digest)


def _sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    if not path.exists() and not path.is_symlink():
        return {}
    with files.open_regular(model_folder.inside(folder, SUMS)) as file, files.guarded(path):
        lines = (_LINE.fullmatch(line) for line in file.read(_LIMIT).splitlines())
        return {
            found[2].decode(errors="replace"): found[1].decode().lower() for found in lines if found
        }
