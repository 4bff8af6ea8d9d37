"""Run commands that stop in the middle: `python -m tests.promises.stopping CASES`, with CASES in JSON.

Each case is a list: a folder, the signal that the command sends itself, the share of its changes of the disk after
which it does, and its words. Imports take seconds and are done once: each case is a fork of this process. The first
case has signal 0: it counts the changes. Events of Python's audit count them, so no module of quantkit is named.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def is_change(event: str, args: tuple[Any, ...]) -> bool:
    if event not in CHANGES or ".partial-" not in str(args[0]):
        return False
    return event != "open" or (isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR)))


def run(folder: str, number: int, at: int, words: list[str]) -> None:
    """Be the command; never returns."""
    code: Any = 1
    seen = itertools.count(1)  # its numbers differ in all threads

    def count(event: str, args: tuple[Any, ...]) -> None:
        if is_change(event, args) and next(seen) == at and number:
            os.kill(os.getpid(), number)

    os.chdir(folder)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT, 0o600), stream)
    sys.argv = ["quantkit", *words]
    sys.addaudithook(count)
    try:
        runpy.run_module("quantkit", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    if not number:
        Path("changes.txt").write_text(str(next(seen) - 1))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    from tests.promises.running import Work

    cases = json.loads(sys.argv[1])
    Work(Path(cases[0][0])).done("plan two --method rtn")  # imports what every case needs, and starts no thread
    totals: dict[str, int] = {}
    codes = []
    for folder, number, share, words in cases:
        at = int(share * totals.get(words[0], 0))
        pid = os.fork()
        if pid == 0:
            run(folder, number, at, words)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if not number:
            totals[words[0]] = int((Path(folder) / "changes.txt").read_text())
    print(json.dumps({"codes": codes, "totals": totals}))


if __name__ == "__main__":
    main()
