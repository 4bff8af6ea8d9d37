"""Programs that attack the machine are contained, and nothing of them is left."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import QuantkitError
from quantkit.evaluation.sandbox import Sandbox

#: Programs that pass if what they try is denied, with the seconds that they may take.
CONTAINED = {
    "a fork bomb": """
import os
for _ in range(100):
    try:
        if os.fork() == 0:
            while True:
                pass
    except OSError:
        break
else:
    raise SystemError("it has 100 children")
""",
    "threads without end": """
import threading, time
try:
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    raise SystemError("it has 100 threads")
except RuntimeError:
    pass
""",
    "filling the disk": """
written = 0
try:
    for number in range(10_000):
        with open(f"file{number}", "wb") as file:
            for _ in range(64):
                written += file.write(bytes(2**20))
except OSError:
    pass
assert written < 2**27, written
""",
    "filling the memory": """
try:
    held = [bytearray(2**26) for _ in range(64)]
    raise SystemError("it holds 4 GiB")
except MemoryError:
    pass
""",
    "reading the home folder": """
import os
for path in (SECRET, "/etc/passwd", "/proc/self/environ", "/sys/kernel", "/root", "/dev/sda", os.path.dirname(SECRET)):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError:
        continue
    if path != "/root" or os.path.exists(os.path.join("/root", ".bashrc")):
        raise SystemError(path)
assert not set(os.environ) - {"HOME", "PATH", "PYTHONHASHSEED", "UV_THREADPOOL_SIZE", "LC_CTYPE"}, os.environ
""",
    "opening a socket": """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), 1)
    raise SystemError("it is connected")
except OSError:
    pass
""",
    "killing its parent": """
import os, signal
for number in (os.getppid(), PARENT, 0, -1, -os.getpid()):
    if number > 1:
        try:
            os.kill(number, signal.SIGKILL)
            raise SystemError(number)
        except OSError:
            pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(0, signal.SIGTERM)
try:
    os.kill(-1, signal.SIGKILL)
except OSError:
    pass
""",
    "writing outside": """
import os
for path in (SECRET, "/usr/x", "/etc/x", "/x", "/dev/x", os.path.join(os.path.dirname(os.__file__), "x")):
    try:
        open(path, "w").write("x")
    except OSError:
        continue
    raise SystemError(path)
open("here", "w").write("x")
""",
    "huge output": """
import os, sys
for _ in range(200):
    print("x" * 2**20)
    print("x" * 2**20, file=sys.stderr)
""",
    "flooding the verdict": """
import os
try:
    for _ in range(10_000):
        os.write(3, bytes(2**20))
    raise SystemError("it wrote 10 GiB")
except OSError:
    os.ftruncate(3, 0)
    os.lseek(3, 0, 0)
""",
    "importing ctypes": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setuid(0) and libc.setgid(0) and os.getuid() != 0
for flags in (0x10000000, 0x10020000, 0x20000000, 0x40000000):
    assert libc.unshare(flags) == -1, hex(flags)
assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == -1
assert libc.umount2(b"/usr", 2) == -1
assert libc.chroot(b"/tmp") == -1
assert libc.ptrace(16, PARENT, 0, 0) == -1
assert libc.sethostname(b"x", 1) == -1
""",
}
#: The same in JavaScript.
JAVASCRIPT = {
    "a fork bomb": """
const {spawn} = require("child_process")
let denied = 0
for (let i = 0; i < 100; i++) spawn("/bin/sleep", ["60"], {stdio: "ignore"}).on("error", () => denied++).unref()
process.on("beforeExit", () => { if (denied < 90) process.exit(1) })
""",
    "children that leave its session": """
const {spawn} = require("child_process")
spawn("/bin/sleep", ["60"], {detached: true, stdio: "ignore"}).unref()
""",
    "filling the disk": """
const fs = require("fs")
let written = 0
try {
  for (let i = 0; i < 10000; i++) {
    const file = fs.openSync(`file${i}`, "w")
    for (let j = 0; j < 8; j++) written += fs.writeSync(file, Buffer.alloc(2 ** 20))
    fs.closeSync(file)
  }
} catch (error) { if (error.code !== "ENOSPC") throw error }
if (written > 2 ** 27) throw written
""",
    "filling the memory": """
const held = []
try {
  for (let i = 0; i < 64; i++) held.push(Buffer.alloc(2 ** 26, 1))
} catch (error) { held.push(error) }
if (held.length > 28) throw held.length
""",
    "reading the home folder": """
const fs = require("fs"), {dirname} = require("path")
for (const path of [SECRET, dirname(SECRET), "/etc/passwd", "/proc/self/environ", "/sys/kernel"])
  if (fs.existsSync(path)) throw path
if (process.env.USER || process.env.HOME !== "/tmp") throw process.env
""",
    "opening a socket": """
require("net").connect(PORT, "127.0.0.1").on("connect", () => process.exit(1)).on("error", () => 0)
""",
    "killing its parent": """
for (const number of [process.ppid, PARENT, -process.pid]) {
  let denied = number <= 1 && number >= 0
  try { denied || process.kill(number, "SIGKILL") } catch { denied = true }
  if (!denied) throw number
}
""",
    "writing outside": """
const fs = require("fs"), {dirname} = require("path")
for (const path of [SECRET, "/usr/x", "/etc/x", "/x", "/dev/x", dirname(process.execPath) + "/x"]) {
  let written = true
  try { fs.writeFileSync(path, "x") } catch { written = false }
  if (written) throw path
}
fs.writeFileSync("here", "x")
""",
    "huge output": """
for (let i = 0; i < 200; i++) { console.log("x".repeat(2 ** 20)); console.error("x".repeat(2 ** 20)) }
""",
}
#: Programs that do not end.
ENDLESS = {
    "an endless loop": "while True: pass",
    "ignoring SIGTERM": """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(60)
""",
    "children that leave its session": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
time.sleep(60)
""",
}


def inside() -> set[str]:
    """List the processes in a process namespace below this one."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        if re.search(r"^NSpid:\t\d+\t\d+", text, re.MULTILINE):
            found.add(path.parent.name)
    return found


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return contained()


@pytest.fixture(scope="module")
def node() -> Sandbox:
    return contained(language="JavaScript")


@cache
def contained(**options: Any) -> Sandbox:
    found = Sandbox(20, **options)
    try:
        found.require()
    except QuantkitError as error:
        pytest.skip(f"cannot run here: {error.rule}")
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Processes of this test end within a second."""
    before = inside()
    yield
    for _ in range(100):
        if not inside() - before:
            return
        time.sleep(0.01)
    assert inside() - before == set()


@pytest.mark.parametrize("attack", CONTAINED)
def test_an_attack_is_denied(attack: str, sandbox: Sandbox, tmp_path: Path) -> None:
    denied(CONTAINED[attack], "{} = {!r}\n", sandbox, tmp_path)


@pytest.mark.parametrize("attack", JAVASCRIPT)
def test_an_attack_in_javascript_is_denied(attack: str, node: Sandbox, tmp_path: Path) -> None:
    denied(JAVASCRIPT[attack], "const {} = {!r}\n", node, tmp_path)


def denied(attack: str, assign: str, sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        known = {"SECRET": str(secret), "PORT": server.getsockname()[1], "PARENT": os.getpid()}
        assert sandbox.run("".join(assign.format(*each) for each in known.items()) + attack) == "passed"
        with pytest.raises(BlockingIOError):
            server.accept()
    assert secret.read_text() == "untouched" and os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("program", ["for (;;) {}", "setInterval(() => 0, 9); process.on('SIGTERM', () => 0)"])
def test_javascript_without_end_is_ended(program: str, node: Sandbox) -> None:
    assert Sandbox(seconds=1, language="JavaScript").run(program) == "timed out"


def test_javascript_whose_heap_grows_dies_within_its_limit(node: Sandbox) -> None:
    assert node.run("const held = []; for (;;) held.push(new Array(1e6).fill(0.5))") == "failed"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**21


@pytest.mark.parametrize("attack", ENDLESS)
def test_a_program_without_end_is_ended_with_its_children(attack: str, sandbox: Sandbox) -> None:
    begun = time.monotonic()
    assert Sandbox(seconds=1).run(ENDLESS[attack]) == "timed out"
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("assert 1 + 1 == 2", "passed"),
        ("assert 1 + 1 == 3", "failed"),
        ("this is no program", "failed"),
        ("raise SystemExit(0)", "failed"),  # it ends before its tests
        ("import os; os._exit(0)", "failed"),
        ("import os; os.kill(os.getpid(), 9); os.abort()", "failed"),
        ("input()", "failed"),
        ("import numpy", "failed"),
        ("if __name__ == '__main__': raise SystemError", "passed"),
        ("print('passed', flush=True); assert 0", "failed"),
        ("x = '\\ud800'", "passed"),
        ("import math, re, collections, itertools, hashlib, heapq, random, typing, sys, decimal", "passed"),
    ],
)
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_passes_only_at_its_end(program: str, verdict: str, namespaces: bool, sandbox: Sandbox) -> None:
    weaker = Sandbox(seconds=20, namespaces=namespaces)
    if not namespaces:
        try:
            weaker.require()
        except QuantkitError as error:
            pytest.skip(f"this Python cannot be run by another user: {error.rule}")
    assert weaker.run(program) == verdict


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("console.assert(1 + 1 === 2)", "passed"),
        ("console.assert(1 + 1 === 3)", "failed"),  # which node itself would only print
        ("require('node:assert').deepEqual([1], [2])", "failed"),
        ("this is no program", "failed"),
        ("process.exit(0)", "failed"),
        ("process.exitCode = 1", "failed"),
        ("setTimeout(() => process.exit(0), 10)", "failed"),
        ("setTimeout(() => { throw 1 }, 10)", "failed"),
        ("Promise.reject(1)", "failed"),
        ("setTimeout(() => console.log('later'), 10)", "passed"),
        ("console.log('passed'); throw 1", "failed"),
        ("const fs = 1, assert = 2, require_ = require('module')", "passed"),
        ("if (require.main === module) throw 1", "passed"),
        ("require('js-md5')", "failed"),
        ("const x = '\ud800'", "passed"),
    ],
)
@pytest.mark.parametrize("namespaces", [True, False])
def test_javascript_passes_only_at_its_end(program: str, verdict: str, namespaces: bool, node: Sandbox) -> None:
    assert contained(namespaces=namespaces, language="JavaScript").run(program) == verdict


def test_hashes_of_texts_are_the_same_in_every_run(sandbox: Sandbox) -> None:
    ask = [sys.executable, "-c", "print(hash('quantkit'))"]
    here = subprocess.run(ask, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True).stdout
    assert sandbox.run(f"assert hash('quantkit') == {here}") == "passed"


def test_a_kernel_without_namespaces_is_refused_with_the_way_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    text = Path("quantkit/evaluation/sandbox_process.py").read_text()
    script.write_text(text.replace("NAMESPACES = ", "NAMESPACES = 1 | "))  # a flag that no kernel knows
    monkeypatch.setattr("quantkit.evaluation.sandbox.SCRIPT", script)
    with pytest.raises(QuantkitError, match=r"cannot be contained here \(unshare: Invalid argument\): add --no-namesp"):
        Sandbox().require()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs are another user's")
def test_a_python_that_only_root_may_read_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    python = tmp_path / "home" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys._base_executable} "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    monkeypatch.setattr(sys, "_base_executable", str(python))
    with pytest.raises(QuantkitError, match=r"python: Permission denied\): use a Python that every user may read, "):
        Sandbox(namespaces=False).require()
