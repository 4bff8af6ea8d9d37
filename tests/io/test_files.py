"""What can go wrong while writing one file: a kill, a full disk, links, a damaged journal or snapshot."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.io.files import PIECE, hash_of, hash_of_file, write_atomic
from quantkit.io.staging import JOURNAL, append_journal, read_journal
from tests.faults import Killed, count, failing, faults, killer
from tests.folders import sha256

PACKAGE = Path(files.__file__).parents[1]


# ------------------------------------------------------------------------------------------------ the one writer

WRITERS = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "mkfifo", "mknod", "touch", "unlink", "rmdir", "removedirs"),
    *("rename", "renames", "rmtree", "copyfile", "copytree", "copy2", "move", "symlink_to", "hardlink_to", "symlink"),
    *("link", "truncate", "ftruncate", "save_file", "save_pretrained", "tofile", "to_csv", "fdopen"),
}
OWNED = {("os", "remove"), ("os", "open"), ("os", "replace"), ("torch", "save"), ("numpy", "save"), ("np", "save")}
OWNED |= {("json", "dump"), ("pickle", "dump"), ("shutil", "copy"), ("yaml", "safe_dump_all"), ("os", "write")}


def writing_calls(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
        modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        for_writing = any(isinstance(m, str) and set(m) <= set("rwxab+t") and set(m) & set("wxa+") for m in modes)
        path_replace = name == "replace" and len(node.args) == 1 and not node.keywords and owner != "dataclasses"
        if any("devnull" in ast.unparse(a) or "sys.stderr" in ast.unparse(a) for a in node.args):
            continue
        if name in WRITERS or (owner, name) in OWNED or (name == "open" and for_writing) or path_replace:
            found.append(f"line {node.lineno}: {owner}.{name}")
    return found


#: The modules that write for all others, and one that makes a private temporary folder, which no run publishes.
EXEMPT = (
    *("files.py", "journal.py", "staging.py", "gguf_source.py"),
    *("engine_check.py", "engine_child.py"),
)


def test_no_other_module_writes() -> None:
    others = [p for p in PACKAGE.rglob("*.py") if p.name not in EXEMPT]
    assert len(others) > 10
    found = {str(p.relative_to(PACKAGE)): writing_calls(ast.parse(p.read_text())) for p in others}
    # Calls through the functions of `files` are allowed.
    found = {p: [c for c in calls if "files." not in c] for p, calls in found.items()}
    assert {p: calls for p, calls in found.items() if calls} == {}


# ------------------------------------------------------------------------------------------------ single files


def test_a_kill_at_any_step_of_write_atomic_leaves_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    steps = count(lambda: write_atomic(path, b"new"))
    assert steps >= 4
    for step in range(1, steps + 1):
        path.write_bytes(b"old")
        with faults(killer(step)), pytest.raises(Killed):
            write_atomic(path, b"new")
        assert path.read_bytes() in (b"old", b"new")


def test_copy_does_not_follow_links_or_wait_for_pipes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(CheckpointError):
            files.copy_atomic(tmp_path / name, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_write_never_goes_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    write_atomic(tmp_path / "link", b"new")
    assert target.read_bytes() == b"mine" and not (tmp_path / "link").is_symlink()
    (tmp_path / "other").symlink_to(target)
    with pytest.raises(CheckpointError):
        files.mapped_tensor(tmp_path / "other", (1,), torch.uint8)
    assert target.read_bytes() == b"mine"


def test_a_large_write_in_short_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 7)
    data = bytes(range(256))
    write_atomic(tmp_path / "a", data)
    files.copy_atomic(tmp_path / "a", tmp_path / "below" / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "below" / "b").read_bytes() == data


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_saved_tensors_come_back_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(35).to(dtype).view(7, 5)
    sha256 = files.save_tensor(tmp_path / "t", tensor.t())
    assert torch.equal(files.load_tensor(tmp_path / "t", (5, 7), dtype, sha256), tensor.t())


def test_a_damaged_snapshot_is_never_returned(tmp_path: Path) -> None:
    sha256 = files.save_tensor(tmp_path / "t", torch.arange(8.0))
    good = (tmp_path / "t").read_bytes()
    for bad in (good[:-1], good + b"\0", b"", bytes([good[0] ^ 1]) + good[1:]):
        (tmp_path / "t").write_bytes(bad)
        with pytest.raises(CheckpointError, match="recompute"):
            files.load_tensor(tmp_path / "t", (8,), torch.float32, sha256)
    (tmp_path / "t").unlink()
    with pytest.raises(CheckpointError):
        files.load_tensor(tmp_path / "t", (8,), torch.float32, sha256)


def test_a_mapped_tensor_lives_in_its_file(tmp_path: Path) -> None:
    tensor = files.mapped_tensor(tmp_path / "t", (3, 4), torch.bfloat16)
    tensor.copy_(torch.arange(12).view(3, 4))
    assert (tmp_path / "t").read_bytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "t").stat().st_blocks > 0  # really reserved: a full disk must show before the mapping is used


def test_an_error_names_path_and_bytes(tmp_path: Path) -> None:
    with (
        faults(failing(2, errno.ENOSPC, once=False)),
        pytest.raises(CheckpointError, match=r"file: no space left \(12,345 more bytes needed, [\d,]+ free\)"),
    ):
        write_atomic(tmp_path / "file", bytes(12345))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="missing/file: no such file"):
        write_atomic(tmp_path / "missing" / "file", b"")


def test_a_lost_disk_or_network_and_a_limit_of_the_shell_leave_a_run_to_be_resumed(tmp_path: Path) -> None:
    ways = dict.fromkeys((errno.ESTALE, errno.EIO, errno.ENOTCONN), "the network")
    for number, way in (ways | {errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n"}).items():
        with faults(failing(2, number, once=False)), pytest.raises(CheckpointError, match=rf"{way}.*--resume"):
            write_atomic(tmp_path / "file", b"1")


def test_a_disk_without_inodes_is_told_from_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    fields = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")
    counted = {name: getattr(found, name) for name in fields}
    for files_, free, words in ((1000, 0, "no inodes left"), (1000, 5, "no space left"), (0, 0, "no space left")):
        state = SimpleNamespace(**{**counted, "f_files": files_, "f_ffree": free, "f_favail": free})
        with monkeypatch.context() as patched, faults(failing(2, errno.ENOSPC, once=False)):
            patched.setattr(os, "statvfs", lambda path, state=state: state)
            with pytest.raises(CheckpointError, match=words) as caught:
                write_atomic(tmp_path / "file", b"1")
        assert "bytes" in str(caught.value) and "--resume" in str(caught.value)


# ------------------------------------------------------------------------------------------------ the journal


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    append_journal(path, {"a": 1})
    whole = path.read_bytes()
    append_journal(path, {"b": [1.5, None, "ü\n"]})
    both = path.read_bytes()
    for cut in range(len(whole), len(both)):
        path.write_bytes(both[:cut])
        assert read_journal(path) == [{"a": 1}]
    append_journal(path, {"b": [1.5, None, "ü\n"]})
    assert path.read_bytes() == both
    assert read_journal(path) == [{"a": 1}, {"b": [1.5, None, "ü\n"]}]
    path.write_bytes(whole + b'{"sha256": "' + b"0" * 10_000)  # longer than what follows
    append_journal(path, {"c": 2})
    assert read_journal(path) == [{"a": 1}, {"c": 2}]


@pytest.mark.parametrize("text", [b"[]\n", b"null\n", b"{}\n", b'{"line": 1, "sha256": "6"}\n', b"[" * 10**5 + b"\n"])
def test_a_strange_journal_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(text)
    with pytest.raises(CheckpointError, match="line 1 is damaged"):
        read_journal(tmp_path / JOURNAL)


# ------------------------------------------------------------------------------------------------ hashes

#: Of the published test vectors: bytes 0, 1, ... 250, 0, 1, ... of so many bytes.
PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_hashes_are_those_that_others_compute(size: int, tmp_path: Path) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "x").write_bytes(data)
    assert hash_of(data) == hash_of_file(tmp_path / "x") == f"blake3:{PUBLISHED[size]}"


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1])
def test_pieces_are_hashed_as_the_whole_in_either_kind(size: int, tmp_path: Path) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "x").write_bytes(data)
    assert hash_of_file(tmp_path / "x") == hash_of_file(tmp_path / "x", hash_of(b"")) == hash_of(data)
    assert hash_of_file(tmp_path / "x", "0" * 64) == sha256(tmp_path / "x")


@pytest.mark.parametrize("like", [None, 5, [], "", "0" * 63, "0" * 65, "blake3:" + "0" * 64, "sha1:" + "0" * 40])
def test_only_a_sha256_asks_for_another(like: object, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert hash_of_file(tmp_path / "x", like) == f"blake3:{PUBLISHED[0]}"
