"""A hub on this machine: the part of its HTTP interface through which a folder is pushed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_secretsecretsecret"
LARGE = (".safetensors", "tokenizer.json")
ATTRIBUTES = b"*.safetensors filter=lfs\n"


@dataclass
class Repository:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": ATTRIBUTES}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def head(self) -> str:
        return f"{len(self.commits):040x}"


@dataclass
class Hub:
    """Contents of a fake hub: repositories, and large files by hash. `fail` may answer a request with a status code.

    The status 0 closes the connection without an answer. `seen` has (method, path) of every request.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    fail: Callable[[str, str], int | None] = lambda method, path: None

    def count(self, method: str, part: str) -> int:
        return sum(method == m and part in path for m, path in self.seen)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # the body would wait 40 ms for the receipt of the headers

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            hub.seen.append((self.command, path))
            status = hub.fail(self.command, path)
            if status == 0:
                self.close_connection = True
                return
            if status is None and "/lfs/" not in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status = 401
            if status is not None:
                # A hub may answer with anything, also with what it was sent.
                self.answer(status, {"error": f"no, {self.headers.get('Authorization')}"})
                return
            self.answer(*answer(hub, self.command, path, body))

        do_GET = do_POST = do_PUT = handle_any

        def answer(self, status: int, value: Any, code: str = "") -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(hub: Hub, method: str, path: str, body: bytes) -> tuple[int, Any] | tuple[int, Any, str]:
    """Answer one request as the hub's documented interface does."""
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repositories:
            return 409, {"error": "You already created this model repo"}
        hub.repositories[name] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, {"url": f"{hub.url}/{name}"}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if found := re.fullmatch(r"/lfs/(\w+)", path):
        if method == "POST":  # the hub checks that the file has arrived
            return (200, {}) if json.loads(body)["oid"] in hub.large else (404, {})
        if hashlib.sha256(body).hexdigest() != found[1]:
            return 400, {"error": "another hash"}
        hub.large[found[1]] = body
        return 200, {}
    if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
        return 200, {"transfer": "basic", "objects": [batch(hub, each) for each in json.loads(body)["objects"]]}
    found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/([\w%]+))?", path)
    repository = hub.repositories.get(found[1]) if found else None
    if found is None or repository is None:
        return 404, {"error": "Repository not found"}, "RepoNotFound"
    what = found[2] or "revision"
    if what == "revision":
        siblings = [entry(name, data) for name, data in repository.files.items()]
        known = {"id": found[1], "private": repository.private, "sha": repository.head, "tags": []}
        return 200, {**known, "siblings": siblings}
    if what == "preupload":
        return 200, {"files": [mode(repository, each["path"]) for each in json.loads(body)["files"]]}
    assert what == "commit", path
    return commit(hub, found[1], [json.loads(line) for line in body.splitlines()])


def batch(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    known = {"oid": asked["oid"], "size": asked["size"]}
    where = {"href": f"{hub.url}/lfs/{asked['oid']}"}
    signed = {"href": f"{hub.url}/lfs/{asked['oid']}?X-Signature=signedsigned"}
    return known if asked["oid"] in hub.large else {**known, "actions": {"upload": signed, "verify": where}}


def entry(name: str, data: bytes) -> dict[str, Any]:
    size, git = len(data), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    known = {"rfilename": name, "size": size, "blobId": git}
    if not name.endswith(LARGE):
        return known
    lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
    return {**known, "blobId": "0" * 40, "lfs": lfs}


def mode(repository: Repository, name: str) -> dict[str, Any]:
    return {"path": name, "uploadMode": "lfs" if name.endswith(LARGE) else "regular", "shouldIgnore": False}


def commit(hub: Hub, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
    repository = hub.repositories[name]
    header, *operations = lines
    if header["value"].get("parentCommit", repository.head) != repository.head:
        return 412, {"error": "A commit has happened since"}
    files = dict(repository.files)
    for line in operations:
        value = line["value"]
        is_large = line["key"] == "lfsFile"
        assert is_large == value["path"].endswith(LARGE)
        files[value["path"]] = hub.large[value["oid"]] if is_large else base64.b64decode(value["content"])
    repository.commits.append(files)
    return 200, {
        "commitUrl": f"{hub.url}/{name}/commit/{repository.head}",
        "commitOid": repository.head,
        "success": True,
    }
