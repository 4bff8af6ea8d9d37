"""Every write to the disk: atomic, durable, and with one-line errors (RELIABILITY 1); and hashes.

Only this module and its neighbours `staging` and `safetensors_files` write. Every operation first
calls `FAULT`, through which tests stop a run or fill the disk at any point.

Reports and journals list a hash of each file, text that names its kind: `blake3:<hex>`. BLAKE3 has
256 bits like SHA-256 and is several times as fast. Older reports list SHA-256 without a prefix.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from blake3 import blake3
from torch import Tensor

from quantkit.core.formats import raw_bytes
from quantkit.errors import CheckpointError, Option, Words

#: The way out when a disk was full.
AGAIN = Words("run again, with", Option("resume", True), "if a .partial- folder was left")
FAULT: Callable[[str, Path], None] | None = None
"""Called with "open", "write", "fsync", "rename", "mkdir" or "unlink" and a path, before each."""

#: Bytes that a GPU hands over at a time.
CHUNK = 64 * 2**20
#: The beginning of the text that Git LFS leaves in the place of a large file.
POINTER = b"version https://git-lfs"
#: Error numbers of system calls that a file system, such as some network mounts, does not support.
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
#: The way out by error number, if it is not the path: of a limit, of a disk that fails, and of a
#: network folder that is no longer there.
WAYS_OUT = {
    errno.EFBIG: Words("raise ulimit -f, or use another disk, and", AGAIN),
    errno.EMFILE: Words("raise ulimit -n and", AGAIN),
    **dict.fromkeys(
        (errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT),
        Words("check the disk, or the network of that folder, and", AGAIN),
    ),
}
#: Flags that Windows lacks, and one that other systems lack.
O_NOFOLLOW, O_NONBLOCK, O_DIRECTORY, O_BINARY = (
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "O_BINARY")
)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one,
    never a part.
    """
    with _replacing(path, needed=len(data)) as file:
        write(file, memoryview(data), path)


def is_writable(folder: Path) -> bool:
    """Return True if files can be made in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def copy_atomic(src: Path, dst: Path) -> None:
    """Copy the bytes of a regular file as `write_atomic` does, making the folder of `dst` if it is
    missing.
    """
    if not dst.parent.exists():
        make_folder(dst.parent)
    with (
        open_regular(src) as source,
        _replacing(dst, needed=os.fstat(source.fileno()).st_size) as file,
    ):
        while chunk := source.read(PIECE):
            write(file, memoryview(chunk), dst)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder; CheckpointError if it exists or its parent does not, unless `parents` allows
    both.
    """
    with guarded(path):
        fault("mkdir", path)
        path.mkdir(parents=parents, exist_ok=parents)
        sync_folder(path.parent)


def save_tensor(path: Path, *tensors: Tensor, durable: bool = True) -> str:
    """Write the raw bytes of tensors as `write_atomic` does; returns their BLAKE3, which
    `load_tensor` asks for.

    A tensor on a GPU is contiguous, and is copied in chunks. Without `durable` no disk is waited
    for, and a power cut may damage the file.
    """
    seen = blake3()
    with _replacing(path, sum(tensor.nbytes for tensor in tensors), durable) as file:
        for tensor in tensors:
            for data in _chunks(tensor):
                seen.update(data)
                write(file, data, path)
    return seen.hexdigest()


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the raw bytes of a tensor; each chunk is valid until the next one is taken."""
    if not tensor.is_cuda:
        data = raw_bytes(tensor).numpy().data
        yield from (data[i : i + PIECE] for i in range(0, len(data), PIECE))
        return
    # Pinned memory that is used again: a fresh copy would spend its time on page faults.
    host = torch.empty(min(CHUNK, tensor.nbytes), dtype=torch.uint8, pin_memory=True)
    for part in tensor.view(-1).view(torch.uint8).split(CHUNK):
        yield host[: len(part)].copy_(part).numpy().data


def load_tensor(path: Path, shape: tuple[int, ...], dtype: torch.dtype, digest: object) -> Tensor:
    """Read back a file of `save_tensor`. CheckpointError if the file is missing, short, long or
    changed.
    """
    size = prod(shape) * dtype.itemsize
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise CheckpointError(
                f"not the {size} bytes that were written", "recompute it", subject=path
            )
        data = read_exactly(file, 0, size, path)
    if blake3(data.numpy().data).hexdigest() != digest:
        raise CheckpointError(
            "its bytes changed since they were written", "recompute it", subject=path
        )
    return data.view(dtype).reshape(shape)


def mapped_tensor(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a new tensor whose memory is the file `path`, for data past a budget of RAM; its
    content is undefined.
    """
    size = prod(shape) * dtype.itemsize
    with guarded(path, needed=size), create(path) as file:
        fault("write", path)
        os.ftruncate(file.fileno(), size)
        if size and hasattr(os, "posix_fallocate"):
            with _where_supported():  # a full disk shows here: later it would kill the process
                os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).reshape(shape)


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; CheckpointError for links, folders, FIFOs, devices,
    unreadable files and Git LFS pointers.
    """
    with guarded(path):
        # Looked at before it is opened: opening a FIFO or a device can block or have effects.
        file: FileIO | None = None
        if stat.S_ISREG(os.lstat(path).st_mode):
            fd = os.open(path, os.O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_BINARY)
            file = os.fdopen(fd, "rb", buffering=0)
        if file is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError("not a regular file", "put the file itself there", subject=path)
        require_no_pointer(file.read(len(POINTER)), path)
        file.seek(0)
        return file


def require_no_pointer(start: bytes, path: Path) -> None:
    """Raise CheckpointError for a file that begins as a Git LFS pointer."""
    if start.startswith(POINTER):
        raise CheckpointError(
            "is a Git LFS pointer, and the file itself was not fetched",
            "run git lfs pull in its folder",
            "download it again with hf download",
            subject=path,
        )


def is_pointer(path: Path) -> bool:
    """Return True if a regular file is a Git LFS pointer instead of the data."""
    with guarded(path), path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def read_exactly(file: FileIO, start: int, size: int, path: Path) -> Tensor:
    """Return `size` bytes from offset `start` as a uint8 tensor `[size]`; CheckpointError if the
    file is shorter.
    """
    view = (data := torch.empty([size], dtype=torch.uint8)).numpy().data
    with guarded(path):
        file.seek(start)
        while view:
            got = file.readinto(view[:PIECE])
            if not got:
                raise CheckpointError(
                    f"ends {len(view)} bytes too early", "download it again", subject=path
                )
            view = view[got:]
    return data


@contextmanager
def guarded(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an OSError inside into a CheckpointError that names the path, and for a full disk the
    bytes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                (error.strerror or str(error)).lower(),
                WAYS_OUT.get(error.errno or 0, "check the path and its permissions"),
                subject=path,
            ) from error
        folder = path.absolute().parent
        free = shutil.disk_usage(folder).free
        if free > needed and _lacks_inodes(folder):
            raise CheckpointError(
                f"no inodes left for more files, though {free:,} bytes are free",
                Words("remove files on that disk and", AGAIN),
                subject=path,
            ) from error
        raise CheckpointError(
            f"no space left ({needed:,} more bytes needed, {free:,} free)",
            Words("free some and", AGAIN),
            subject=path,
        ) from error


def _lacks_inodes(folder: Path) -> bool:
    """Return True if the file system of a folder counts inodes and has none left."""
    found = os.statvfs(folder) if hasattr(os, "statvfs") else None
    return found is not None and found.f_files > 0 and found.f_favail == 0


def create(path: Path, *, emptied: bool = True) -> FileIO:
    """Open a file for writing and reading, new, emptied or as it is; never through a link.

    It raises OSError.
    """
    fault("open", path)
    flags = os.O_RDWR | os.O_CREAT | O_NOFOLLOW | O_BINARY | (os.O_TRUNC if emptied else 0)
    return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)


def write(file: BinaryIO, data: memoryview, path: Path) -> None:
    """Write all of `data` `[bytes]` to an unbuffered file, whose name is given for the error."""
    with guarded(path, needed=len(data)):
        while data:
            fault("write", path)
            data = data[file.write(data[:PIECE]) :]


def truncate(file: BinaryIO, size: int, path: Path) -> None:
    """Cut off what lies behind the first `size` bytes of a file."""
    with guarded(path):
        fault("write", path)
        file.truncate(size)


def sync(file: BinaryIO, path: Path) -> None:
    """Make the content of a file durable; its name is so after `sync_folder`."""
    with guarded(path):
        fault("fsync", path)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> bool:
    """Make the names of the files in a folder durable; False if the file system has no
    such call.
    """
    if not O_DIRECTORY:  # Windows opens no folders
        return False
    with guarded(path):
        fd = os.open(path, os.O_RDONLY | O_DIRECTORY)
        try:
            with _where_supported() as missing:
                fault("fsync", path)
                os.fsync(fd)
        finally:
            os.close(fd)
    return not missing


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; links are removed, not followed."""
    with guarded(path):
        fault("unlink", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder unless it holds anything."""
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _replacing(path: Path, needed: int, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of `path`, durably or soon, when the block
    ends well.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with guarded(path, needed):
        try:
            with create(temp) as file:
                yield file
                if durable:
                    sync(file, path)
            rename(temp, path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            with suppress(CheckpointError):
                remove(temp)
            raise


@contextmanager
def _where_supported() -> Iterator[list[OSError]]:
    """Catch the error of a call that the file system does not have, and append it to the yielded
    list.
    """
    dropped: list[OSError] = []
    try:
        yield dropped
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        dropped.append(error)


def fault(operation: str, path: Path) -> None:
    """Let a test act before an operation on the disk."""
    if FAULT is not None:
        FAULT(operation, path)


def rename(src: Path, dst: Path) -> None:
    """Rename a file or a folder; raises OSError."""
    fault("rename", dst)
    os.rename(src, dst)


KIND = "blake3"
#: Bytes that are read, hashed or written at a time: few enough to stay in a core's cache meanwhile.
#: From 2 MiB on, Linux was seen to take up to ten times as long to write them.
PIECE = 2**20


def hash_of(data: bytes) -> str:
    """Hash bytes."""
    return f"{KIND}:{blake3(data).hexdigest()}"


def begin_tensor(name: str, dtype: str, shape: Sequence[int]) -> blake3:
    """Begin the BLAKE3 of a tensor: of a line of JSON, `[name, dtype of safetensors, shape]`, and
    of its bytes.
    """
    entry = json.dumps([name, dtype, list(shape)], ensure_ascii=False, separators=(",", ":"))
    return blake3(f"{entry}\n".encode())


def hash_of_file(
    path: Path,
    like: object = None,
    see: Callable[[int, memoryview], None] = lambda start, piece: None,
    borders: Sequence[int] = (),
) -> str:
    """Hash a regular file, with SHA-256 if `like`, a recorded hash, is one, and else with BLAKE3.

    `see` is given every piece that was read and where it starts. No piece goes over one of the
    ascending `borders`. CheckpointError if the file cannot be read.
    """
    older = isinstance(like, str) and re.fullmatch("[0-9a-f]{64}", like)
    seen: Any = hashlib.sha256() if older else blake3()
    buffer, start = memoryview(bytearray(PIECE)), 0
    with open_regular(path) as file, guarded(path):
        for end in (*borders, None):
            while size := file.readinto(buffer if end is None else buffer[: end - start]):
                seen.update(buffer[:size])
                see(start, buffer[:size])
                start += size
    return str(seen.hexdigest()) if older else f"{KIND}:{seen.hexdigest()}"
