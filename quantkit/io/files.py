"""The only module that writes to disk, so that every output is complete or absent, and every interruption resumable.

A run works in a sibling of its output folder, `OUT.partial-<8 hex>`, which holds final shard files, a journal with one
line for each committed unit of work, and activation snapshots. The last step renames it to OUT (RELIABILITY 1 and 2).
Every operation on the disk first calls `FAULT`, through which tests stop the run or fill the disk at any point.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantkit.core.tensors import raw_bytes
from quantkit.errors import CheckpointError

FAULT: Callable[[str, Path], None] | None = None
"""Called with "open", "write", "fsync", "rename", "mkdir" or "unlink" and a path, before each such operation."""

JOURNAL = "journal.jsonl"
LOCK = "lock"
CHUNK = 64 * 2**20


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one, never a part."""
    with _replacing(path, needed=len(data)) as file:
        write(file, memoryview(data), path)


def copy_atomic(src: Path, dst: Path) -> None:
    """Copy the bytes of a regular file as `write_atomic` does, making the folder of `dst` if it is missing."""
    if not dst.parent.exists():
        make_folder(dst.parent)
    with open_regular(src) as source, _replacing(dst, needed=os.fstat(source.fileno()).st_size) as file:
        while chunk := source.read(CHUNK):
            write(file, memoryview(chunk), dst)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder; CheckpointError if it exists or its parent does not, unless `parents` allows both."""
    with guarded(path):
        _fault("mkdir", path)
        path.mkdir(parents=parents, exist_ok=parents)
        sync_folder(path.parent)


def save_tensor(path: Path, tensor: Tensor) -> str:
    """Write the raw bytes of a tensor as `write_atomic` does; returns their SHA-256, which `load_tensor` asks for."""
    data = raw_bytes(tensor).numpy().data
    seen = hashlib.sha256()
    with _replacing(path, needed=len(data)) as file:
        for i in range(0, len(data), CHUNK):
            seen.update(data[i : i + CHUNK])
            write(file, data[i : i + CHUNK], path)
    return seen.hexdigest()


def load_tensor(path: Path, shape: tuple[int, ...], dtype: torch.dtype, sha256: str) -> Tensor:
    """Read back what `save_tensor` wrote; CheckpointError if the file is missing, short, long or changed."""
    size = prod(shape) * dtype.itemsize
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise CheckpointError(f"{path}: not the {size} bytes that were written: recompute it")
        data = read_exactly(file, 0, size, path)
    if hashlib.sha256(data.numpy().data).hexdigest() != sha256:
        raise CheckpointError(f"{path}: its bytes changed since they were written: recompute it")
    return data.view(dtype).reshape(shape)


def mapped_tensor(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a new tensor whose memory is the file `path`, for data past a budget of RAM; its content is undefined."""
    size = prod(shape) * dtype.itemsize
    with guarded(path, needed=size), create(path) as file:
        _fault("write", path)
        os.ftruncate(file.fileno(), size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here: later it would kill the process
    return torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).reshape(shape)


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; CheckpointError for links, folders, FIFOs, devices and what cannot be read."""
    with guarded(path):
        # Looked at before it is opened: opening a FIFO or a device can block or have effects.
        file: FileIO | None = None
        if stat.S_ISREG(os.lstat(path).st_mode):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            file = os.fdopen(fd, "rb", buffering=0)
        if file is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file: put the file itself there")
        return file


def read_exactly(file: FileIO, start: int, size: int, path: Path) -> Tensor:
    """Return `size` bytes from offset `start` as a uint8 tensor `[size]`; CheckpointError if the file is shorter."""
    view = (data := torch.empty([size], dtype=torch.uint8)).numpy().data
    with guarded(path):
        file.seek(start)
        while view:
            got = file.readinto(view[:CHUNK])
            if not got:
                raise CheckpointError(f"{path}: ends {len(view)} bytes too early: download it again")
            view = view[got:]
    return data


def append_journal(path: Path, line: dict[str, Any]) -> None:
    """Add one line to a journal and make it durable; what a crash left of an unfinished line is cut off first."""
    text = json.dumps(line)
    data = f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "line": {text}}}\n'.encode()
    with guarded(path, needed=len(data)):
        _fault("open", path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                _fault("write", path)
                file.truncate(whole)
            file.seek(whole)
            write(file, memoryview(data), path)
            sync(file, path)
        if not whole:
            sync_folder(path.parent)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return a journal's lines, [] if there is none, without an unfinished last one; CheckpointError if damaged."""
    if not os.path.lexists(path):
        return []
    with open_regular(path) as file, guarded(path):
        *lines, _torn = file.read().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
            good = record["sha256"] == hashlib.sha256(json.dumps(record["line"]).encode()).hexdigest()
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good or not isinstance(record["line"], dict):
            raise CheckpointError(f"{path}: line {number} is damaged: start over with --overwrite")
        found.append(record["line"])
    return found


@contextmanager
def staging(
    out: Path, *, resume: bool | None = False, overwrite: bool = False, source: Path | None = None
) -> Iterator[Path]:
    """Yield the locked partial folder of `out`; `publish` turns it into `out`.

    With `resume` it may hold an earlier run's committed work, otherwise it is empty. However the block ends, the
    folder stays if it has committed work that can be resumed (None: never), and is removed if not. CheckpointError if
    `out` may not be written (it exists, is no folder, lies in `source` ...), another run holds it, or an interrupted
    run left work behind and neither `resume` nor `overwrite` is given.
    """
    with guarded(out):
        _check_target(out, overwrite, source)
    partial, old = _beside(out, "partial"), _beside(out, "old")
    with _take(partial, out) as lock, _cleared_up(partial, lock):
        with guarded(partial):
            _fault("write", partial / LOCK)
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
            if old.exists():  # a run died while it replaced OUT: see publish
                remove(old) if out.exists() else _rename(old, out)
            _check_target(out, overwrite, source)
        kept = _worth_keeping(partial)
        if kept and not (resume or overwrite):
            ways = "continue it with the command that began it and --resume, or discard it with --overwrite"
            raise CheckpointError(f"{partial} holds an interrupted run's work: {ways}")
        # config.json goes first: with it and without a journal, a half emptied folder would look complete.
        for path in sorted(partial.iterdir(), key=lambda p: (p.name != "config.json", p.name)):
            if path.name != LOCK and (not (kept and resume) or path.suffix == ".tmp"):
                remove(path)
        try:
            yield partial
        except BaseException:
            if resume is None and _same_file(lock, partial / LOCK):
                with suppress(CheckpointError):
                    remove(partial / "config.json")
                    remove(partial / JOURNAL)  # now nothing there is worth keeping
            raise


def is_complete(partial: Path) -> bool:
    """Return whether a partial folder only waits to be published: `config.json` is there and the journal is gone."""
    return (partial / "config.json").exists() and not (partial / JOURNAL).exists()


def publish(partial: Path, out: Path, overwrite: bool = False) -> None:
    """Turn a finished partial folder into `out`, durably; with `overwrite` in the place of the folder there."""
    if os.path.lexists(out) and not overwrite:
        raise CheckpointError(f"{out} exists: choose another folder or add --overwrite")
    old = _beside(out, "old")
    with guarded(out):
        for path in sorted([*partial.glob("activations-*"), *partial.glob(".*.tmp")]):
            remove(path)
        sync_folder(partial)
        remove(partial / JOURNAL)
        sync_folder(partial)
        remove(partial / LOCK)
        if os.path.lexists(out):
            # No portable call swaps two folders: between these two renames, and only there, OUT does not exist.
            # A run killed in this gap leaves the old folder beside it, and the next one puts it back.
            _rename(out, old)
        try:
            _rename(partial, out)
        except BaseException:
            if old.exists():
                _rename(old, out)
            raise
        sync_folder(out.parent)
        remove(old)


def _beside(out: Path, what: str) -> Path:
    # The name is a function of OUT: two runs that start together meet at the same folder, and mkdir decides.
    out = Path(os.path.abspath(out))
    return out.with_name(f"{out.name}.{what}-{hashlib.sha256(os.fsencode(out.name)).hexdigest()[:8]}")


def _check_target(out: Path, overwrite: bool, source: Path | None) -> None:
    out = Path(os.path.abspath(out))
    if out in (out.parent, Path.cwd()):  # an empty name means the latter
        raise CheckpointError(f"{out} cannot be an output folder: name a new one")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} is a {'link' if out.is_symlink() else 'file'}: name a new folder")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        what = "not writable" if out.parent.is_dir() else "not a folder"
        raise CheckpointError(f"{out.parent} is {what}: make it so first, the output goes inside, or name another")
    if source is not None:
        real, from_ = out.resolve(), source.resolve()
        if real == from_ or from_ in real.parents or real in from_.parents:
            raise CheckpointError(f"{out} and the source {source} lie in each other: name a folder outside the source")
    if out.is_dir() and not overwrite:
        raise CheckpointError(f"{out} exists: choose another folder or add --overwrite")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise CheckpointError(f"{out} holds other things than a model: --overwrite would delete them, so name another")


def _take(partial: Path, out: Path) -> BinaryIO:
    """Make the partial folder if need be and lock it; a dead process holds no lock, so a stale one is taken over."""
    if partial.is_symlink():
        raise CheckpointError(f"{partial} is a link: remove it")
    with guarded(partial):
        _fault("mkdir", partial)
        with suppress(FileExistsError):
            os.mkdir(partial)
        try:
            _fault("open", partial / LOCK)
            fd = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except BaseException:
            with suppress(OSError):
                _fault("unlink", partial)
                os.rmdir(partial)  # succeeds only if it is empty
            raise
        lock = os.fdopen(fd, "r+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = lock.read(20).decode(errors="replace").strip() or "unknown"
            lock.close()
            raise CheckpointError(f"{out} is being written by process {pid}: wait for it, or stop it") from None
    if not _same_file(lock, partial / LOCK):
        lock.close()
        raise CheckpointError(f"{out} has just been written by another run: look at it, or run again")
    return lock


@contextmanager
def _cleared_up(partial: Path, lock: BinaryIO) -> Iterator[None]:
    """Remove the partial folder in the end unless it holds work that can be resumed."""
    try:
        yield
    finally:
        # After publish, a folder of this name would be another run's.
        if _same_file(lock, partial / LOCK) and not _worth_keeping(partial):
            with suppress(CheckpointError):  # the reason that brought us here matters more
                remove(partial)


def _worth_keeping(partial: Path) -> bool:
    try:
        return is_complete(partial) or len(read_journal(partial / JOURNAL)) > 1  # the first line is the identity
    except CheckpointError:
        return True  # a damaged journal is for the user to look at


def _same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


@contextmanager
def guarded(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an OSError inside into a CheckpointError that names the path, and for a full disk the bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"{path}: {(error.strerror or str(error)).lower()}: check the path and its permissions"
            ) from error
        free = shutil.disk_usage(path.absolute().parent).free
        raise CheckpointError(
            f"{path}: no space left ({needed:,} more bytes needed, {free:,} free): free some and run again, "
            "with --resume if a .partial- folder was left"
        ) from error


def create(path: Path) -> BinaryIO:
    """Open a new file, or an emptied one, for writing and reading, never through a link; raises OSError."""
    _fault("open", path)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)


def write(file: BinaryIO, data: memoryview, path: Path) -> None:
    """Write all of `data` `[bytes]` to an unbuffered file, whose name is given for the error."""
    with guarded(path, needed=len(data)):
        while data:
            _fault("write", path)
            data = data[file.write(data[:CHUNK]) :]


def sync(file: BinaryIO, path: Path) -> None:
    """Make the content of a file durable; its name is so after `sync_folder`."""
    with guarded(path):
        _fault("fsync", path)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names of the files in a folder durable."""
    with guarded(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fault("fsync", path)
            os.fsync(fd)
        finally:
            os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; links are removed, not followed."""
    with guarded(path):
        _fault("unlink", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _replacing(path: Path, needed: int) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of `path`, durably, when the block ends well."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with guarded(path, needed):
        try:
            with create(temp) as file:
                yield file
                sync(file, path)
            _rename(temp, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(CheckpointError):
                remove(temp)
            raise


def _fault(operation: str, path: Path) -> None:
    if FAULT is not None:
        FAULT(operation, path)


def _rename(src: Path, dst: Path) -> None:
    _fault("rename", dst)
    os.rename(src, dst)
