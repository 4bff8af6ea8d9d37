"""Poor surroundings: no home, no network, no temporary folder, few files, odd names (E1)."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tests.reliability.campaign import Family, Run
from tests.reliability.disk import may_mount
from tests.reliability.forks import Ended
from tests.reliability.samples import SHORT, digests, model, one_line, quantkit, text

ROOT = Path(__file__).resolve().parents[2]
#: A folder that nobody can make, not even root.
NOWHERE = "/proc/nowhere"
#: A hub that does not answer.
SILENT = {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9"}
ROUND = "quantize {model} --method rtn -o {out} -q"
SOLVE = " ".join(("quantize {model} --calib {text} -o {out}", *map(str, SHORT)))
PACKAGED = "quantize {model} --samples 4 --max-length 64 -o {out}"


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a command line, and how it must end: well (None), or with one line that has these words.

    Several words are asked for with rising limits, until a line had each: where memory ends hangs on the allocator.
    `variables` change those of this process (None: unset); `empty` gives none at all. `limits` are by their names in
    `resource`. `name` is the name of a copy of the model, `extra` that of one more file in a copy. `read_only` is the
    model, the cache, or the parent of the output. `closed` are descriptors. `gone` deletes the working folder.
    """

    what: str
    words: str
    refusal: str | tuple[str, ...] | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    limits: Mapping[str, int | range] = field(default_factory=dict)
    name: bytes | None = None
    extra: bytes | None = None
    read_only: str | None = None
    closed: Sequence[int] = ()
    stdout: str | None = None
    gone: bool = False
    empty: bool = False


def env(**variables: str | None) -> Mapping[str, str | None]:
    return variables


CACHES = env(HF_HOME="{cache}", XDG_CACHE_HOME="{cache}")
ASCII = env(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
#: Limits of memory around that of the imports, and what the lines say: too little for them, it ended, a run takes more.
RISING = range(336_000 * 1024, 600_000 * 1024, 4_000 * 1024)
ENDS = ("and the libraries of this command", "not enough memory", "and ulimit -d allows")
CASES = [
    Surroundings("no HOME", ROUND, variables=env(HOME=None)),
    Surroundings("no network, text from the hub", PACKAGED, variables=SILENT),
    Surroundings("no network, model from the hub", "plan org/name --method rtn -q", "org/name", variables=SILENT),
    Surroundings("read-only cache", SOLVE, variables=CACHES, read_only="cache"),
    Surroundings("no temporary folder", SOLVE, variables=env(TMPDIR=NOWHERE, TEMP=NOWHERE, TMP=NOWHERE)),
    Surroundings("64 open files", SOLVE, limits={"NOFILE": 64}),
    Surroundings("ASCII locale", ROUND, variables=ASCII),
    Surroundings("80 columns and no terminal", PACKAGED, variables=env(COLUMNS="80", TERM="dumb")),
    Surroundings("a folder whose name is not UTF-8", ROUND, name=b"m\xff\xfe"),
    Surroundings("a read-only model", ROUND, read_only="model"),
    Surroundings("stdin and stdout closed", ROUND, closed=(0, 1)),
    Surroundings("ulimit -v 400000", ROUND, "raise ulimit -v", limits={"AS": 400_000 * 1024}),
    Surroundings("a read-only folder for the output", ROUND, "is not writable", read_only="parent"),
    Surroundings("no variables at all", ROUND, empty=True),
    Surroundings("a file whose name is not UTF-8", ROUND, extra=b"notes\xff.txt"),
    Surroundings("ASCII locale and a Chinese name", ROUND, variables=ASCII, name="模型".encode()),
    Surroundings("a locale that is not there", ROUND, variables=env(LC_ALL="xx_XX.UTF-8", TZ="No/Where")),
    Surroundings("HOME is no folder", SOLVE, variables=env(HOME=NOWHERE)),
    Surroundings("a cache that cannot be made", PACKAGED, variables={**SILENT, "HF_HOME": NOWHERE}),
    Surroundings("24 open files", ROUND, limits={"NOFILE": 24}),
    Surroundings("ulimit -v 600000", "inspect {model} -q", "raise ulimit -v", limits={"AS": 600_000 * 1024}),
    Surroundings("ulimit -v 700000", "plan {model} --method rtn", "raise ulimit -v", limits={"AS": 700_000 * 1024}),
    Surroundings("ulimit -d 200000", ROUND, "raise ulimit -d", limits={"DATA": 200_000 * 1024}),
    Surroundings("ulimit -d that rises", ROUND, ENDS, limits={"DATA": RISING}),
    Surroundings("a small stack", SOLVE, limits={"STACK": 512 * 1024}),
    Surroundings("stderr closed", ROUND, closed=(2,)),
    Surroundings("all streams closed", SOLVE, closed=(0, 1, 2)),
    Surroundings("a full disk behind stdout", ROUND, "no space left", stdout="/dev/full"),
    Surroundings("a working folder that is gone", ROUND, "the working folder was deleted", gone=True),
    Surroundings("no assertions", SOLVE, variables=env(PYTHONOPTIMIZE="1")),
    Surroundings("no docstrings", ROUND, "PYTHONOPTIMIZE", variables=env(PYTHONOPTIMIZE="2")),
    Surroundings("no GPU of that number", ROUND, variables=env(CUDA_VISIBLE_DEVICES="7")),
    Surroundings("no PATH", SOLVE, variables=env(PATH="")),
]


@dataclass(frozen=True)
class Place:
    """The folders of the family: the model, the text, and the hashes of the outputs of its command lines."""

    folder: Path
    model: Path
    text: Path
    expected: dict[str, dict[str, str]]


def poor(found: Run) -> None:
    """Run each command in a process of its own, in surroundings that lack something."""
    place = Place(found.folder, model(found.folder / "model"), text(found.folder / "text.txt"), {})
    # Root writes in spite of permissions, so folders are mounted; in a container that may be forbidden.
    how = "by permissions" if os.geteuid() else "mounted" if may_mount() else "left out"
    found.facts["read-only folders"] = how
    cases = [each for each in CASES if each.read_only is None or how != "left out"]
    cases = cases if found.column != "pr" else found.random("E1").sample(cases, found.least)
    for number, line in enumerate(dict.fromkeys(each.words for each in cases if each.refusal is None)):
        out = found.folder / f"usual{number}"
        quantkit(found.folder, *line.format(model=place.model, text=place.text, out=out).split())
        place.expected[line] = digests(out)
    for surroundings in cases:
        with found.case(surroundings.what):
            if isinstance(surroundings.refusal, tuple):
                in_each_place(surroundings, surroundings.refusal, place)
            else:
                judge(surroundings, started(surroundings, place), place)


def in_each_place(surroundings: Surroundings, places: tuple[str, ...], place: Place) -> None:
    """Raise a limit until the command ended in each of some places, and in none of them in another way."""
    ((name, limits),) = surroundings.limits.items()
    assert isinstance(limits, range)
    left = {*places}
    for limit in limits:
        ended = started(replace(surroundings, limits={name: limit}), place)
        (words,) = [each for each in places if each in ended.stderr] or [places[0]]
        judge(replace(surroundings, refusal=words), ended, place)
        left -= {words}
        if not left:
            return
    raise AssertionError(f"never ended in {left}")


def judge(surroundings: Surroundings, ended: Ended, place: Place) -> None:
    """Ask for the usual bytes, or for one line and nothing written."""
    out = place.folder / "parent/out"
    if surroundings.refusal is None:
        assert ended.code == 0, f"{ended.code}: {ended.stderr}"
        assert digests(out) == place.expected[surroundings.words], "other bytes"
    else:
        assert ended.code in (1, 2), f"{ended.code}: {ended.stderr}"
        one_line(ended, str(surroundings.refusal))
        if surroundings.stdout is None:  # else the output was complete before its line could not be printed
            assert not list(out.parent.iterdir()), "something was written"


def started(surroundings: Surroundings, place: Place) -> Ended:
    """Run the command line of a case in its surroundings, in a clean folder for its output."""
    parent, cache = place.folder / "parent", place.folder / "cache"
    for folder in (parent, cache):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    source = place.model
    if surroundings.name or surroundings.extra:
        source = Path(os.fsdecode(os.path.join(os.fsencode(place.folder), surroundings.name or b"copy")))
        shutil.copytree(place.model, source)
    if surroundings.extra:
        (source / os.fsdecode(surroundings.extra)).write_text("notes")
    given = {"parent": parent, "model": source, "out": parent / "out", "text": place.text, "cache": cache}
    words = [word.format(**given) for word in surroundings.words.split()]
    variables = {} if surroundings.empty else {**os.environ, "PYTHONPATH": str(ROOT)}
    for name, value in surroundings.variables.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value.format(**given)
    here = place.folder / "here"
    here.mkdir(exist_ok=True)
    with read_only(given[surroundings.read_only] if surroundings.read_only else None):
        code, said = ran(surroundings, words, variables, here)
    return Ended(code, "", said, 0.0, 0.0)


def ran(surroundings: Surroundings, words: Sequence[str], variables: Mapping[str, str], here: Path) -> tuple[int, str]:
    """Start the process and wait for it; returns its code and what it says on stderr."""
    command = [sys.executable, "-m", "quantkit", *words]
    if surroundings.empty:  # then the package must be found without a variable
        command[1:3] = ["-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from quantkit.cli import main; main()"]
    before = prepared(surroundings, here)
    with open(surroundings.stdout or os.devnull, "w") as stdout:
        start = partial(subprocess.run, command, cwd=here, env=variables, preexec_fn=before, timeout=300)
        ended = start(stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)
    return ended.returncode, ended.stderr.decode(errors="replace")


def prepared(surroundings: Surroundings, here: Path) -> Callable[[], None]:
    """Return what the new process does before it becomes Python."""

    def prepare() -> None:
        for name, limit in surroundings.limits.items():
            assert isinstance(limit, int)
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        if surroundings.gone:
            os.rmdir(here)
        for descriptor in surroundings.closed:
            os.close(descriptor)

    return prepare


@contextmanager
def read_only(folder: Path | None) -> Iterator[None]:
    """Make a folder read-only for a while: by a mount if this is root, whom permissions do not bind."""

    def mount(*words: str) -> None:
        subprocess.run(words, capture_output=True, check=True)

    if folder is None:
        yield
    elif os.geteuid():
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
    else:
        mount("mount", "--bind", str(folder), str(folder))
        try:
            mount("mount", "-o", "remount,bind,ro", str(folder))
            yield
        finally:
            mount("umount", str(folder))


FAMILIES: list[Family] = [
    Family("E1", "poor surroundings give the usual bytes, or one line and nothing written", (6, 30, 30), poor)
]
