"""Run one program, which standard input holds, in limits and namespaces of its own.

`sandbox` starts this file as a script, so it needs nothing but the standard library. Its first
process opens the namespaces, the second is in them and sees to it that they end, the third becomes
the program. Each dies with the one before it. The program writes to standard output, its descriptor
3, that it passed. Standard error says why it was not started, and exit code 124 that its time was
over.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

#: Mount, cgroup, host name, IPC, user, process and network namespaces: CLONE_NEW* of linux/sched.h.
NAMESPACES = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
READ_ONLY_NOSUID = 1 | 2
SET_DEATH_SIGNAL, SET_NO_NEW_PRIVILEGES = 1, 38
#: The only folder that can be written.
FOLDER = "/tmp"
#: The exit code if a program took too long.
LATE = 124
libc: Any = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the program by the JSON object in the first argument: the fields of `Sandbox`, `paths`
    and `argv`.
    """
    spec = json.loads(sys.argv[1])
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    # Root's processes are not limited in number, so the program gets another user. No two programs
    # share one.
    user = 50_000 + os.getpid() % 10_000 if os.geteuid() == 0 else os.geteuid()
    if not spec["namespaces"]:
        os.chown(".", user if os.geteuid() == 0 else -1, -1)
        wait(start(spec, user, "."), spec["seconds"])
    mapped, left = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(left[1])
        if os.read(left[0], 1):
            map_users(child, user)
            os.write(mapped[1], b"1")
        wait(child)
    os.close(mapped[1])
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    call("unshare", NAMESPACES)
    os.write(left[1], b"1")
    os.read(mapped[0], 1)
    write("/proc/sys/user/max_user_namespaces", "0")  # in one of its own the program could mount
    change_root(spec)
    wait(start(spec, user, FOLDER), spec["seconds"])


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; OSError if it fails."""
    if (
        getattr(libc, name)(
            *(value.encode() if isinstance(value, str) else value for value in arguments)
        )
        < 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def map_users(child: int, user: int) -> None:
    """Let the child's namespace know the program's user, and root if this process is root's."""
    group = user if os.geteuid() == 0 else os.getegid()
    above = "0 0 1\n" if os.geteuid() == 0 else ""
    if not above:
        write(f"/proc/{child}/setgroups", "deny")
    write(f"/proc/{child}/uid_map", f"{above}{user} {user} 1\n")
    write(f"/proc/{child}/gid_map", f"{above}{group} {group} 1\n")


def change_root(spec: dict[str, Any]) -> None:
    """Make a root folder of the paths that a program needs, read-only, and of one empty folder in
    memory.
    """
    root = os.getcwd()
    call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    call("mount", "tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in spec["paths"]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            write(target, "")
        call("mount", path, target, None, BIND | RECURSIVE, None)
    os.makedirs(root + FOLDER, exist_ok=True)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NOSUID)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, root, AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    call(
        "mount",
        "tmpfs",
        root + FOLDER,
        "tmpfs",
        NOSUID | NODEV,
        f"size={spec['disk']},nr_inodes=4096,mode=1777",
    )
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)


def start(spec: dict[str, Any], user: int, folder: str) -> int:
    """Start the program in `folder` as a child that is another `user`'s; return its number."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.chdir(folder)
    # A new user namespace counts processes from none; outside of one, all of the user count.
    most = spec["processes"] + (0 if spec["namespaces"] or os.geteuid() == 0 else threads_of(user))
    limits = {
        "CPU": spec["cpu"],
        "AS": spec["memory"],
        "FSIZE": spec["file"],
        "NOFILE": spec["files"],
    }
    for name, limit in {**limits, "NPROC": most, "CORE": 0}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    environment = {
        "HOME": os.getcwd(),
        "PATH": "/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "UV_THREADPOOL_SIZE": "1",
    }
    os.dup2(1, 3)
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        return os.execve(spec["argv"][0], spec["argv"], environment)
    except OSError:
        os.dup2(errors, 2)
        raise


def threads_of(user: int) -> int:
    """Count the threads of a user."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += (
                len(os.listdir(f"/proc/{name}/task"))
                if os.stat(f"/proc/{name}").st_uid == user
                else 0
            )
        except OSError:  # it has ended
            continue
    return found


def wait(child: int, seconds: float = 0) -> None:
    """Wait for a child, kill its group after so many seconds if any are given, and end."""
    late = []

    def kill(*_: Any) -> None:
        late.append(child)
        with suppress(ProcessLookupError):  # it has no group yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    status = os.waitpid(child, 0)[1]
    os._exit(
        LATE
        if late or (os.WIFEXITED(status) and not seconds and os.WEXITSTATUS(status) == LATE)
        else 0
    )


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        os.write(2, f"{error.filename or 'namespaces'}: {error.strerror or error}".encode())
        os._exit(1)
