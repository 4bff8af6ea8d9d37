"""Output folders that appear complete or not at all.

A run works in a sibling of its output folder, `OUT.partial-<8 hex>`: final shard files, a journal
with one line for each committed unit of work, each with its own digest, and activation snapshots.
The last step renames it to OUT (RELIABILITY 1 and 2).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from quantkit.errors import CheckpointError, Option, Words
from quantkit.io import files
from quantkit.names import Json

LOCK = "lock"
#: Takes the place of LOCK's own lock where the file system has none: its existence is the lock.
SOFT_LOCK = "soft-lock"
NO_LOCKS = (
    "this file system has no file locks: a lock file takes their place, remove it if a run was "
    "killed"
)
NO_FOLDER_SYNC = (
    "this file system cannot make file names durable: a power cut just after the end may lose the "
    "output"
)


@contextmanager
def staging(
    out: Path,
    *,
    resume: bool | None = False,
    overwrite: bool = False,
    source: Path | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[Path]:
    """Yield the locked partial folder of `out`; `publish` turns it into `out`.

    With `resume` it may hold an earlier run's committed work, otherwise it is empty. However the
    block ends, the folder stays if it has committed work that can be resumed (None: never), and is
    removed if not. `notice` is called with a sentence for each thing that the file system cannot
    do. CheckpointError if `out` may not be written (it exists, is no folder, lies in `source` ...),
    another run holds it, or an interrupted run left work behind and neither `resume` nor
    `overwrite` is given.
    """
    with files.guarded(out):
        _check_target(out, overwrite, source)
    partial, old = _beside(out, "partial"), _beside(out, "old")
    with _locked(partial, out, notice) as lock, _cleared_up(partial, lock):
        with files.guarded(partial):
            files.fault("write", partial / LOCK)
            lock.seek(0)
            lock.truncate()
            lock.write(f"{os.getpid()}\n".encode())
            if old.exists():  # a run died while it replaced OUT: see publish
                files.remove(old) if out.exists() else files.rename(old, out)
            _check_target(out, overwrite, source)
        # A power cut must not lose the folder's own name, and all committed work with it.
        if not (files.sync_folder(partial) and files.sync_folder(partial.parent)):
            notice(NO_FOLDER_SYNC)
        kept = _worth_keeping(partial)
        _require_leave(partial, kept, resume, overwrite)
        # config.json goes first: with it and without a journal, a half emptied folder would look
        # complete.
        for path in sorted(partial.iterdir(), key=lambda p: (p.name != "config.json", p.name)):
            if path.name not in (LOCK, SOFT_LOCK) and (
                not (kept and resume) or path.suffix == ".tmp"
            ):
                files.remove(path)
                if path.name == "config.json":
                    files.sync_folder(
                        partial
                    )  # a power cut must not undo this removal and keep the later ones
        try:
            yield partial
        except BaseException:
            # publish takes the lock away before it renames
            if resume is None and (
                not (partial / LOCK).exists() or _same_file(lock, partial / LOCK)
            ):
                with suppress(CheckpointError):
                    files.remove(partial / "config.json")
                    files.remove(partial / JOURNAL)  # now nothing there is worth keeping
                    files.remove(partial)
            raise


def check_staging(
    out: Path, *, resume: bool = False, overwrite: bool = False, source: Path | None = None
) -> Path | None:
    """Raise the error that `staging` would raise for `out`, without writing.

    Returns the partial folder of an interrupted run, which would be continued or discarded; None
    without one.
    """
    with files.guarded(out):
        _check_target(out, overwrite, source)
    partial = _beside(out, "partial")
    if partial.is_symlink():
        raise CheckpointError(f"{partial} is a link", "remove it")
    if not partial.is_dir():
        return None
    with files.guarded(partial):
        if _is_locked(partial):
            raise _is_being_written(out, partial / LOCK)
    kept = _worth_keeping(partial)
    _require_leave(partial, kept, resume, overwrite)
    return partial if kept else None


def is_complete(partial: Path) -> bool:
    """Say whether a partial folder only waits to be published: `config.json` is there and the
    journal is gone.
    """
    return (partial / "config.json").exists() and not (partial / JOURNAL).exists()


def is_resumable(out: Path) -> bool:
    """Say whether an interrupted run left committed work beside `out`."""
    return _worth_keeping(_beside(out, "partial"))


def publish(partial: Path, out: Path, overwrite: bool = False) -> None:
    """Turn a finished partial folder into `out`, durably; with `overwrite` in the place of the
    folder there.
    """
    if os.path.lexists(out) and not overwrite:
        raise CheckpointError(
            f"{out} exists", Words("choose another folder or add", Option("overwrite", True))
        )
    out, old = _absolute(out), _beside(out, "old")
    with files.guarded(out):
        for path in sorted([*partial.glob("activations-*"), *partial.glob(".*.tmp")]):
            files.remove(path)
        files.sync_folder(partial)
        files.remove(partial / JOURNAL)
        files.sync_folder(partial)
        files.remove(partial / LOCK)
        files.remove(partial / SOFT_LOCK)
        files.sync_folder(
            partial
        )  # else a power cut could leave the lock file in the renamed folder
        if os.path.lexists(out):
            # No portable call swaps two folders: between these two renames, and only there, OUT
            # does not exist. A run that is killed here leaves the old folder beside `out`, and the
            # next run restores it.
            files.rename(out, old)
        try:
            files.rename(partial, out)
        except BaseException:
            if old.exists():
                files.rename(old, out)
            raise
        files.sync_folder(out.parent)
        files.remove(old)


def _beside(out: Path, what: str) -> Path:
    # The name is a function of OUT: two runs that start together meet at the same folder, and mkdir
    # decides.
    out = _absolute(out)
    return out.with_name(
        f"{out.name}.{what}-{hashlib.sha256(os.fsencode(out.name)).hexdigest()[:8]}"
    )


def _absolute(out: Path) -> Path:
    """Return the absolute path of an output, in which `..` leads where the system finds it."""
    nameless = out.name in ("", "..")
    return Path(os.path.realpath(out if nameless else out.parent), "" if nameless else out.name)


def _check_target(out: Path, overwrite: bool, source: Path | None) -> None:
    out = _absolute(out)
    if out in (Path.cwd(), *Path.cwd().parents):  # an empty name means the first
        raise CheckpointError(f"{out} cannot be an output folder", "name a new one")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(
            f"{out} is a {'link' if out.is_symlink() else 'file'}", "name a new folder"
        )
    if not out.parent.is_dir() or not files.is_writable(out.parent):
        what, way = (
            ("not writable", "make it so") if out.parent.is_dir() else ("no folder", "make it")
        )
        raise CheckpointError(
            f"{out.parent} is {what}", f"{way} first, the output goes inside", "name another"
        )
    if source is not None:
        real, from_ = out.resolve(), source.resolve()
        if real == from_ or from_ in real.parents or real in from_.parents:
            raise CheckpointError(
                f"{out} and the source {source} lie in each other",
                "name a folder outside the source",
            )
    if out.is_dir() and not overwrite:
        raise CheckpointError(
            f"{out} exists", Words("choose another folder or add", Option("overwrite", True))
        )
    if out.is_dir() and not files.is_writable(out):  # its files could not be removed at the end
        raise CheckpointError(f"{out} is not writable", "make it so first", "name another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise CheckpointError(
            f"{out} holds other things than a model",
            Words(Option("overwrite", True), "would delete them, so name another"),
        )


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Lock a folder against other processes. Returns False if another process holds the lock."""
    with ExitStack() as stack:
        with files.guarded(folder / LOCK):
            file = stack.enter_context(files.create(folder / LOCK, emptied=False))
        yield _lock(file, folder, stack, lambda notice: None)


@contextmanager
def _locked(partial: Path, out: Path, notice: Callable[[str], None]) -> Iterator[BinaryIO]:
    """Make the partial folder if need be and lock it; a dead process holds no lock, so a stale one
    is taken over.
    """
    if partial.is_symlink():
        raise CheckpointError(f"{partial} is a link", "remove it")
    with ExitStack() as stack:
        with files.guarded(partial):
            files.fault("mkdir", partial)
            with suppress(FileExistsError):
                os.mkdir(partial)
            try:
                with files.guarded(
                    partial / LOCK
                ):  # before the folder is removed, which would free an inode
                    lock = stack.enter_context(files.create(partial / LOCK, emptied=False))
            except BaseException:
                with suppress(OSError):
                    files.fault("unlink", partial)
                    os.rmdir(partial)  # succeeds only if it is empty
                raise
            if not _lock(lock, partial, stack, notice):
                raise _is_being_written(out, partial / LOCK)
        if not _same_file(lock, partial / LOCK):
            raise CheckpointError(
                f"{out} has just been written by another run", "look at it", "run again"
            )
        yield lock


def _is_locked(partial: Path) -> bool:
    """Return whether another process holds a partial folder, as `_lock` would find; nothing is
    created.
    """
    if not (partial / LOCK).exists():
        return False
    with files.open_regular(partial / LOCK) as file:
        locked = _flock(file, "LOCK_SH")  # shared: two checks do not refuse each other
    return (partial / SOFT_LOCK).exists() if locked is None else not locked


def _is_being_written(out: Path, lock: Path) -> CheckpointError:
    pid = lock.read_bytes()[:20].decode(errors="replace").strip() or "unknown"
    return CheckpointError(f"{out} is being written by process {pid}", "wait for it", "stop it")


def _lock(file: BinaryIO, partial: Path, stack: ExitStack, notice: Callable[[str], None]) -> bool:
    """Lock an open file until `stack` closes; False if another process holds it."""
    if (locked := _flock(file, "LOCK_EX")) is not None:
        return locked
    from filelock import SoftFileLock, Timeout

    try:
        stack.enter_context(SoftFileLock(partial / SOFT_LOCK, timeout=0))
    except Timeout:
        return False
    notice(NO_LOCKS)
    return True


def _flock(file: IO[bytes], kind: str) -> bool | None:
    """Lock an open file, False if another process holds it; None where the system or the file
    system has no locks.
    """
    try:
        import fcntl

        fcntl.flock(file, getattr(fcntl, kind) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except ImportError:  # Windows
        return None
    except OSError as error:
        if error.errno not in files.UNSUPPORTED:
            raise
        return None
    return True


@contextmanager
def _cleared_up(partial: Path, lock: BinaryIO) -> Iterator[None]:
    """Remove the partial folder in the end unless it holds work that can be resumed."""
    try:
        yield
    finally:
        # After publish, a folder of this name would be another run's.
        if _same_file(lock, partial / LOCK) and not _worth_keeping(partial):
            with suppress(CheckpointError):  # the first error matters more
                files.remove(partial)


def _require_leave(partial: Path, kept: bool, resume: bool | None, overwrite: bool) -> None:
    """Raise CheckpointError if `partial` has resumable work, and neither `resume` nor `overwrite`
    was given.
    """
    if kept and not (resume or overwrite):
        raise CheckpointError(
            f"{partial} holds an interrupted run's work",
            Words("if quantize or prune began it, continue that with", Option("resume", True)),
            Words("discard it with", Option("overwrite", True)),
        )


def _worth_keeping(partial: Path) -> bool:
    """Say whether a partial folder, or one of the folders that a run with a target makes in it, has
    committed work.
    """
    try:
        lines = read_journal(partial / JOURNAL)
        if len(lines) == 1:  # the identity
            return any(_worth_keeping(path) for path in partial.iterdir() if path.is_dir())
        return bool(lines) or is_complete(partial)
    except CheckpointError:
        return True  # a damaged journal is for the user to look at


def _same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


JOURNAL = "journal.jsonl"


def append_journal(path: Path, line: Json) -> None:
    """Append one line to a journal and make it durable; first cut off an unfinished line that a
    crash left.
    """
    text = json.dumps(line)
    data = f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "line": {text}}}\n'.encode()
    with files.guarded(path, needed=len(data)), files.create(path, emptied=False) as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            files.truncate(file, whole, path)
        file.seek(whole)
        files.write(file, memoryview(data), path)
        files.sync(file, path)
        if not whole:
            files.sync_folder(path.parent)


def read_journal(path: Path) -> list[Json]:
    """Read a journal's lines, [] if there is none, without an unfinished last line; CheckpointError
    if damaged.
    """
    if not os.path.lexists(path):
        return []
    with files.open_regular(path) as file, files.guarded(path):
        *lines, _torn = file.read().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
            good = (
                record["sha256"] == hashlib.sha256(json.dumps(record["line"]).encode()).hexdigest()
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good or not isinstance(record["line"], dict):
            raise CheckpointError(
                f"line {number} is damaged",
                Words("start over with", Option("overwrite", True)),
                subject=path,
            )
        found.append(record["line"])
    return found
