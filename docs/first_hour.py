"""Write docs/first_hour.md: run each of its commands in a fresh folder, first without a network, then beside a hub.

`python docs/first_hour.py` takes some minutes. The hub is a server on this machine with one model and one data set,
and the part of the hub's HTTP interface through which they are downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/first_hour.md"
MODEL = "quantkit/demo_model"
COMMIT = "0" * 39 + "1"


class Step(NamedTuple):
    """Hold a command and how many of its first and last lines the page shows.

    `tested` says that a test compares the lines; the others depend on the machine or take long.
    """

    command: str
    first: int = 99
    last: int = 0
    tested: bool = True


QUANTIZE = f"quantize {MODEL} -o small --samples 32"
FIRST = (
    ("Is everything installed?", (Step("quantkit doctor", 4, 2, tested=False),)),
    ("The whole job on the packaged model, with its loss", (Step("quantkit demo -o demo", 0, 8, tested=False),)),
    (
        "The plan of a run. Without `--calib` and a network the packaged text calibrates, with a warning",
        (Step(f"quantkit plan {QUANTIZE.removeprefix('quantize ')}"),),
    ),
    ("Quantize, and prove the bits", (Step(f"quantkit {QUANTIZE}", 8), Step("quantkit verify small", 2, 1))),
    ("Look inside, measure, try", (
        Step("quantkit inspect small", 9),
        Step("head -n 110 LICENSE > licence.txt"),
        Step("quantkit eval ppl small --data licence.txt"),
        Step("quantkit generate small 'Return a new' --max-new-tokens 12", 2, tested=False),
    )),
    ("Another layout, and a report for the browser", (
        Step("quantkit convert compressed-tensors-to-marlin small -o small-marlin -q"),
        Step("quantkit report small --html small.html", 1),
    )),
)  # fmt: skip
MISTAKES = (
    Step(f"quantkit quantize {MODEL} -o small -q"),
    Step("quantkit eval ppl small"),
    Step(f"quantkit plan {MODEL} --format fp6 --layout gptq -q", 0, 1),
    Step("quantkit quantize meta-llama/Llama-3.2-1B -o llama-int4 -q"),
)
ONLINE = (Step("quantkit quantize your-org/small-model -o hub-int4 --calib your-org/texts --samples 32", 8),)

HEAD = """# The first hour

Written by `python docs/first_hour.py`: every command ran in a fresh folder, on two cores without a GPU.
A line `...` stands for lines that are left out. Notices on stderr are not shown. Seconds are rounded.
[The tutorial](tutorial.md) explains the steps.

## Without a network

In a clone, with `HF_HUB_OFFLINE=1` and an empty cache.
"""
WRONG = """## Commands that fail

Each error is one line that ends with what to type. [Troubleshooting](troubleshooting.md) says more.
"""
WITH = """## With a network

A model and a data set by their hub ids. (Here the hub is a server on the same machine.)
"""


def shown(step: Step, printed: str) -> list[str]:
    """Return the lines of a command's output that the page shows, with whole seconds."""
    lines = [re.sub(r"\b(\d+)\.\d+ s\b", r"\1 s", line.rstrip()) for line in printed.splitlines() if line.strip()]
    if len(lines) <= step.first + step.last:
        return lines
    return [*lines[: step.first], "...", *lines[len(lines) - step.last :]]


def console(steps: tuple[Step, ...], run: Callable[[str], str]) -> list[str]:
    """Run steps; return their block."""
    found = ["```console"]
    for step in steps:
        found += [f"$ {step.command}", *shown(step, run(step.command))]
    return [*found, "```", ""]


def runner(folder: Path, **environment: str) -> Callable[[str], str]:
    """Return a function that runs one line of a console in `folder`, with an empty cache, and gives what it prints."""
    home = folder.with_name(f"{folder.name}-home")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    given = {**clean, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}

    def run(line: str) -> str:
        words = shlex.split(line)
        command = [sys.executable, "-m", *words] if words[0] == "quantkit" else ["sh", "-c", line]
        print(line, file=sys.stderr)
        result = subprocess.run(command, cwd=folder, env=given, text=True, capture_output=True)
        if result.returncode not in (0, 1, 2):
            raise SystemExit(f"{line}\n{result.stderr}")
        errors = result.stderr[max(0, result.stderr.find("Error: ")) :] if "Error: " in result.stderr else ""
        return (result.stdout + errors).replace(str(folder), "/home/you/quantkit")

    return run


def prepare(folder: Path) -> None:
    """Give `folder` what a clone has: the licence's text and the packaged model."""
    (folder / "LICENSE").symlink_to(ROOT / "LICENSE")
    (folder / "quantkit").mkdir(parents=True)
    (folder / MODEL).symlink_to(ROOT / MODEL)


def page() -> str:
    """Run everything and return the page."""
    with tempfile.TemporaryDirectory() as temporary:
        work, online = Path(temporary, "offline"), Path(temporary, "online")
        for folder in (work, online):
            folder.mkdir()
            prepare(folder)
        run = runner(work, HF_HUB_OFFLINE="1")
        lines = [HEAD]
        for title, steps in FIRST:
            lines += [f"{title}:" if not title.endswith("?") else title, "", *console(steps, run)]
        lines += [WRONG, *console(MISTAKES, run)]
        with hub() as url:
            lines += [WITH, *console(ONLINE, runner(online, HF_ENDPOINT=url, HF_HUB_DISABLE_TELEMETRY="1"))]
    return "\n".join(lines)


def files() -> dict[str, dict[str, bytes]]:
    """Return the files of each repository on the fake hub."""
    model = {path.name: path.read_bytes() for path in (ROOT / MODEL).iterdir() if path.is_file()}
    texts = [{"text": f"{n} times {n} is {n * n}. " * 8} for n in range(200)]
    return {
        "models/your-org/small-model": model,
        "datasets/your-org/texts": {"train.jsonl": "\n".join(map(json.dumps, texts)).encode() + b"\n"},
    }


@contextmanager
def hub() -> Iterator[str]:
    """Serve `files()` as the hub does; give its address."""
    held = files()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(self.path.partition("?")[0]).strip("/")
            if found := re.fullmatch(r"api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/.*)?", path):
                repository = held.get(f"{found[1]}/{found[2]}")
                return self.send(404, b"{}") if repository is None else self.describe(found[2], found[3], repository)
            found = re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            data = held.get(f"{found[1] or 'models/'}{found[2]}", {}).get(found[4]) if found else None
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}) if data is None else self.send(200, data)

        do_HEAD = do_POST = do_GET

        def describe(self, name: str, what: str | None, repository: dict[str, bytes]) -> None:
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in repository.items()
            ]
            siblings = [{"rfilename": path} for path in repository]
            whole = {"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
            self.send(200, json.dumps(entries if what in ("tree", "paths-info") else whole).encode())

        def send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            digest = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            for key, value in {**digest, "Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    PAGE.write_text(page().rstrip("\n") + "\n", encoding="utf-8")
