"""Run commands, each given as a JSON list, in a process without what macOS and Windows do not have.

Libraries are imported before, because they look at the real platform. A file of /proc or /sys is not found.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pathlib
import platform
import shutil
import signal
import sys
from typing import Any

MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty")
FUNCTIONS = (
    *("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "statvfs", "fstatvfs", "pwrite"),
    *("pread", "preadv", "fork", "forkpty", "geteuid", "getuid", "getegid", "getgid", "killpg", "getpgid", "setsid"),
    *("mkfifo", "set_blocking", "register_at_fork", "sysconf", "getloadavg", "symlink", "fchmod", "chown", "sendfile"),
    *("copy_file_range", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "O_DIRECT", "uname", "getpriority", "nice"),
)
SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGALRM", "SIGCHLD", "SIGPIPE", "setitimer", "pthread_sigmask")


def strip() -> None:
    """Take away modules, functions, signals and /proc."""
    # Where these are missing, the standard library has other ways than here.
    machine, space = platform.uname(), shutil.disk_usage(".")
    vars(platform)["uname"], vars(shutil)["disk_usage"] = lambda: machine, lambda path: space
    vars(os)["process_cpu_count"] = os.cpu_count
    opened, opened_by_number = builtins.open, os.open
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for holder, names in ((os, FUNCTIONS), (signal, SIGNALS)):
        for name in names:
            if hasattr(holder, name):
                delattr(holder, name)

    def hidden(path: Any) -> None:
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))

    def open_(file: Any, *args: Any, **options: Any) -> Any:
        hidden(file)
        return opened(file, *args, **options)

    def open_number(path: Any, *args: Any, **options: Any) -> int:
        hidden(path)
        return opened_by_number(path, *args, **options)

    builtins.open = io.open = open_
    if accessor := vars(pathlib).get("_NormalAccessor"):  # of Python 3.10
        accessor.open = staticmethod(open_)
    os.open = open_number


def main() -> None:
    """Run the commands; the first that ends with another code than 0 ends the process."""
    import asyncio  # noqa: F401
    import logging.handlers  # noqa: F401
    import multiprocessing.context  # noqa: F401
    import random  # noqa: F401
    import subprocess  # noqa: F401
    import uuid  # noqa: F401

    commands = [json.loads(line) for line in sys.argv[1:]]
    if commands[0] != ["--help"]:
        import datasets  # noqa: F401
        import gguf  # noqa: F401
        import transformers.modeling_utils
        import transformers.models.llama.modeling_llama  # noqa: F401
    strip()
    from quantkit.cli import main as run

    for command in commands:
        print("$", *command, flush=True)
        try:
            run(command)
        except SystemExit as left:
            if left.code:
                raise


if __name__ == "__main__":
    main()
