"""A hub that gives nothing is named with its true reason, and with what helps."""

from __future__ import annotations

import errno
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import EAI_NONAME
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import constants

from quantkit.checkpoint.origin import resolve
from quantkit.errors import CheckpointError
from quantkit.io import hub
from quantkit.text.sources import load_documents

COMMIT = "a" * 40
FOLDER = {"config.json": b"{}", "model.safetensors": b"w", "README.md": b"words"}
CODE = {"modeling_own.py": b"1", "custom_generate/generate.py": b"2"}
WORDS = {"bpe.codes": b"b", "source.spm": b"s", "prophetnet.tokenizer": b"p", "vocab.tsv": b"v", "LICENSE": b"l"}
UNNEEDED = {"train.jsonl": b"d", "onnx/config.json": b"{}", "x.bin": b"b", "original/model.safetensors": b"w"}
Repositories = dict[str, Mapping[str, bytes] | tuple[int, Mapping[str, str]]]


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for `repositories`: with files, or with a status and headers."""

    repositories: ClassVar[Repositories] = {}

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        found = next((held for name, held in self.repositories.items() if f"org/{name}" in path), None)
        status, data, headers = 404, b"{}", dict[str, str]()
        if isinstance(found, tuple):
            status, headers = found[0], dict(found[1])
        elif found is not None and path.startswith("/api/"):
            files = [{"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in found.items()]
            facts = {"id": "org/x", "sha": COMMIT, "siblings": [], "private": False, "tags": []}
            status, data = 200, json.dumps(files if "/tree/" in path else facts).encode()
            headers = {"Content-Type": "application/json"}
        elif found is not None and (name := path.partition(f"{COMMIT}/")[2]) in found:
            status, data = 200, found[name]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


Serve = Callable[[Repositories], None]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve repositories of `org` on this machine, with an empty cache."""
    handler = type("Handler", (Hub,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's attempts
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield lambda repositories: setattr(handler, "repositories", repositories)
    server.shutdown()
    server.server_close()


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(model, **options)
    return str(caught.value)


def test_what_a_tokenizer_needs_is_downloaded_and_code_only_if_it_is_trusted(serve: Serve) -> None:
    serve({"x": {**FOLDER, **CODE, **WORDS, **UNNEEDED}})
    for trusted, code in ((False, {}), (True, CODE)):
        folder = resolve("org/x", trust_remote_code=trusted)
        got = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert got == {*FOLDER, *WORDS, *code}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"model.bin": b"PK"}, "only model.bin, a kind that can run code when read: convert it where you trust it"),
        ({"model.ckpt": b"PK"}, "only model.ckpt: give a model as transformers saves it"),
        ({"model.bin": b"PK"}, "from_pretrained('org/x')"),
        ({"Q4/m.gguf": b"G", "Q8/m.gguf": b"G"}, "only GGUF files: give one, as org/x:Q4/m.gguf"),
        ({"onnx/model.onnx": b"O"}, "only onnx/model.onnx: give a model as transformers saves it"),
        ({"consolidated.safetensors": b"w"}, "convert them with transformers first"),
        ({"adapter_model.bin": b"PK"}, "merge it into its base model"),
        ({}, "has no .safetensors weights: give another model"),
        (
            {"model.safetensors.index.json": b'{"weight_map":{"a":"m-1.safetensors"}}'},
            "or not all that its index names",
        ),
    ],
)
def test_a_repository_without_weights_is_told_by_what_it_holds(
    files: dict[str, bytes], says: str, serve: Serve
) -> None:
    serve({"x": {"config.json": b"{}", **files}})
    assert says in refusal("org/x")


def test_a_repository_without_any_file_of_the_wanted_names_is_told(serve: Serve) -> None:
    serve({"x": {"m.gguf": b"G"}})
    assert "only GGUF files: give one, as org/x:m.gguf" in refusal("org/x")
    assert "has no file n.gguf, it has m.gguf" in refusal("org/x:n.gguf")


@pytest.mark.parametrize("address", ["https://huggingface.co/org/x", "hf.co/org/x", "hf://org/x"])
def test_an_address_of_the_hub_is_written_as_an_id(address: str) -> None:
    assert "no such file or folder: write a model of the hub as org/name" in refusal(address)
    with pytest.raises(CheckpointError, match=r"no such text: .* or write a data set of the hub as org/name"):
        load_documents(address)


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "it is gated: accept the terms at http"),
        (401, {"X-Error-Code": "RepoNotFound"}, "no model of this name: check the name, or if it is private, log in"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "refuses the token that is set"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "closed this repository: see http"),
        (403, {}, "the hub refuses the token that is set, or wants one (403): log in by `hf auth login`"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "has it, and not this revision: check --revision"),
        (503, {}, "the hub has a fault of its own (503): try again later"),
        (404, {}, "no model of this name"),
        (407, {}, "a proxy or mirror does not pass the hub's answer on"),
        (408, {}, "the hub has a fault of its own (408): try again later"),
        (451, {}, "the hub does not give it (451): check the name and the revision"),
    ],
)
def test_each_refusal_of_the_hub_has_its_line(status: int, headers: dict[str, str], says: str, serve: Serve) -> None:
    serve({"x": (status, headers)})
    assert says in refusal("org/x")


def raised(error: Exception, *causes: Exception) -> Exception:
    chain = [error, *causes]
    for outer, inner in zip(chain, causes, strict=False):
        outer.__cause__ = inner
    return error


def named(name: str, base: type[Exception] = OSError) -> Exception:
    made: Exception = type(name, (base,), {})(name)
    return made


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/c/blobs/x"), "is full (/c/blobs/x): free space there"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "free space there"),
        (PermissionError(errno.EACCES, "Permission denied", "/c/x"), "no permission to write /c/x: give yourself"),
        (OSError(errno.EROFS, "Read-only file system", "/c/x"), "set HF_HOME to a folder of yours"),
        (raised(named("ConnectError"), ssl.SSLCertVerificationError("self-signed")), "set SSL_CERT_FILE"),
        (FileNotFoundError(errno.ENOENT, "No such", "/proc/x"), "the cache cannot be kept there ([Errno 2] No such"),
        (NotADirectoryError(errno.ENOTDIR, "Not a", "/c/x"), "set HF_HOME to a folder of yours"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "does not pass the hub's answer on (Expecting"),
        (named("ProxyError"), "a proxy or mirror does not pass the hub's answer on (ProxyError ProxyError): check"),
        (ValueError("Unknown scheme for proxy URL"), "check the variables HTTPS_PROXY"),
        (raised(named("ReadTimeout"), named("TimeoutException")), "does not answer in time: try again"),
        (raised(OSError("y"), ConnectionError(f"[Errno {EAI_NONAME}] Name or service not known")), "is not found and"),
        (raised(ValueError("x"), ConnectionError("refused")), "cannot be reached and nothing is cached"),
        (ValueError("anything else"), "the hub does not give it (anything else): check the name and the revision"),
    ],
)
def test_a_machine_that_cannot_download_is_told_why(
    error: Exception, says: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert says in refusal("org/x")


def test_variables_that_lead_nowhere_are_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    assert hub.reasons(OSError(errno.ENOENT, "No such file"), "org/x")[0].startswith("SSL_CERT_FILE names no file")
    assert "check HF_ENDPOINT" in hub.reasons(ConnectionError("refused"), "org/x")


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_part_of_a_snapshot_is_not_taken_offline(lost: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    serve({"x": {"config.json": b"{}", "model.safetensors.index.json": index, **dict.fromkeys(shards, b"w")}})
    folder = resolve("org/x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert resolve("org/x") == folder
    (folder / lost).unlink()
    assert "TRANSFORMERS_OFFLINE is set and only a part of it is cached: unset it" in refusal("org/x")


def test_a_revision_that_is_not_cached_names_those_that_are(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve({"x": FOLDER})
    resolve("org/x", revision="v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    says = f"is set and this revision of it is not cached: unset it, or use one that is, by --revision {COMMIT}, or"
    for revision in (None, "v2", "b" * 40):
        assert says in refusal("org/x", revision=revision)
    assert "nothing is cached: unset it, or download" in refusal("org/y", revision="v1")
    assert resolve("org/x", revision=COMMIT) == resolve("org/x", revision="v1")


def test_a_handled_error_that_was_suppressed_is_no_reason() -> None:
    with pytest.raises(ValueError, match="not a data set") as caught:
        try:
            raise ConnectionError("first try")
        except ConnectionError:
            raise ValueError("not a data set") from None
    assert hub.reasons(caught.value, "org/x") == ()


def test_a_data_set_has_the_reasons_of_a_model(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(
        {
            "gated": (403, {"X-Error-Code": "GatedRepo"}),
            "busy": (429, {}),
            "lost": (404, {"X-Error-Code": "RepoNotFound"}),
        }
    )
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", constants.ENDPOINT)
    says = {
        "gated": f"accept the terms at {constants.ENDPOINT}/datasets/org/gated",
        "busy": "(429)",
        "lost": "no data set of this name",
    }
    for name, words in says.items():
        with pytest.raises(CheckpointError) as caught:
            load_documents(f"org/{name}:part")
        assert words in str(caught.value) and "--calib FILE" in str(caught.value)


def test_forms_of_names_of_other_programs_and_lost_files_are_told(serve: Serve) -> None:
    serve({})
    assert "a GGUF file in it org/name:FILE.gguf" in refusal("org/name:Q4_K_M")
    assert "no such file or folder: check the path" in refusal("models/lost.gguf")
