"""Programs that a model wrote, each run in a process of its own that can do no harm.

With namespaces a program sees Python, node and the system's libraries, read-only, and an empty
folder in memory; no network, no other process, no home folder. Limits bound its time, the memory of
each process, processes and files. Not contained: flaws of the kernel, and memory that belongs to no
process (System V's shared memory) until the program ends. A program that searches its file
descriptors can forge its verdict; nothing else depends on that.

Without namespaces only the limits hold: a program may read and write what its user may, use the
network, and leave processes behind. Root's programs run as another user.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

from quantkit.errors import Option, QuantkitError, Words

Verdict = Literal["passed", "failed", "timed out"]
Language = Literal["Python", "JavaScript"]
SCRIPT = Path(__file__).with_name("sandbox_process.py")
#: The exit code of the script if a program took too long, and the seconds after which the script
#: itself is killed.
LATE, GRACE = 124, 10
#: What a program can read: Python, the system's libraries, and devices without a state.
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
#: A program comes by standard input, and tells of its end through a descriptor of its own, because
#: it may print.
PYTHON = """
import os, sys
exec(compile(sys.stdin.read(), "program", "exec"), {"__name__": "program"})
os.write(3, b"passed")
"""
#: The same for JavaScript: `exit` does not call listeners of beforeExit, and node's own
#: console.assert only prints.
NODE = """
const fs = require("fs")
console.assert = require("assert").ok
const names = ["exports", "require", "module"]
require("vm").compileFunction(fs.readFileSync(0, "utf8"), names)({}, require, {exports: {}})
process.once("beforeExit", code => code || fs.writeSync(3, "passed"))
"""
#: Bytes of its address space that node only reserves, and options for few threads and a heap within
#: the limit.
RESERVED, NODE_OPTIONS = 2**30, ("--v8-pool-size=1", "--max-old-space-size=1024")


@dataclass(frozen=True)
class Sandbox:
    """Limits of a program: `seconds` of wall time, `processes` and threads, and bytes of its
    `disk`.

    Of each process: bytes of `memory` (node gets more, which it reserves), bytes of a `file`, and
    open `files`.
    """

    seconds: float = 5.0
    namespaces: bool = True
    memory: int = 2**30
    processes: int = 8
    file: int = 2**24
    files: int = 64
    disk: int = 2**26
    language: Language = "Python"

    def require(self) -> None:
        """Raise QuantkitError if programs cannot be contained here, or for JavaScript
        without node.
        """
        if self.language == "JavaScript" and shutil.which("node") is None:
            raise QuantkitError(
                "the problems are in JavaScript, and node is not installed", "install Node.js"
            )
        try:
            verdict = self.run("")
        except QuantkitError as error:
            ways = ["run in a container"]
            if self.namespaces:
                ways.insert(
                    0, Words("add", Option("namespaces", False), "to contain them by limits alone")
                )
            elif os.geteuid() == 0 and error.rule.endswith(
                "Permission denied"
            ):  # root's programs are another user's
                ways = ["use a Python that every user may read", "run as another user than root"]
            raise QuantkitError(
                f"programs cannot be contained here ({error.rule})", *ways
            ) from error
        if verdict != "passed":
            raise QuantkitError(
                f"a {self.language} program that does nothing {verdict} here",
                Words("raise", Option("timeout")),
            )

    def run(self, program: str) -> Verdict:
        """Run a program; it passed if it reached its end. QuantkitError if it cannot be started."""
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        homes = {
            os.path.realpath(path)
            for path in (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(python))
        }
        argv, memory = [python, "-s", "-S", "-B", "-c", PYTHON], self.memory
        if self.language == "JavaScript":
            node = os.path.realpath(shutil.which("node") or "node")
            argv, memory = [node, *NODE_OPTIONS, "-e", NODE], memory + RESERVED
            homes.add(node)
        paths = [path for path in (*SYSTEM, *DEVICES) if os.path.lexists(path)]
        paths += [
            home
            for home in sorted(homes)
            if not any(Path(home).is_relative_to(path) for path in paths)
        ]
        spec = {
            **vars(self),
            "cpu": math.ceil(self.seconds) + 1,
            "memory": memory,
            "paths": paths,
            "argv": argv,
        }
        with ExitStack() as stack:
            folder = stack.enter_context(
                TemporaryDirectory(prefix="quantkit-", ignore_cleanup_errors=True)
            )
            source, out, errors = (stack.enter_context(TemporaryFile()) for _ in range(3))
            source.write(program.encode(errors="replace"))
            source.seek(0)
            process = subprocess.Popen(
                [python, "-I", "-S", str(SCRIPT), json.dumps(spec)],
                cwd=folder,
                env={},
                stdin=source,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
            try:
                late = process.wait(self.seconds + GRACE) == LATE
            except subprocess.TimeoutExpired:
                return "timed out"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            errors.seek(0)
            if why := errors.read(2000).decode(errors="replace").strip():
                raise QuantkitError(why.splitlines()[-1][:200])
            if late:
                return "timed out"
            out.seek(0)
            return "passed" if out.read(7) == b"passed" else "failed"
