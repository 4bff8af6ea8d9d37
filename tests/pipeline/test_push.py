"""Pushing a folder to a hub on this machine: what arrives, what is refused, and how an interrupted push continues."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import _http

import quantkit
from quantkit.checkpoint.report import REPORT
from quantkit.errors import HubError, QuantkitError, RecipeError, VerificationError
from quantkit.evaluation import verification
from tests.command_line import RTN, call, refused
from tests.pipeline.hub import TOKEN, Hub, Repository, running

NAME = "some-org/model-int4"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Files go by the large file protocol, which this hub speaks; xet's is that of a compiled library.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None))
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture(scope="module")
def made(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "int4"
    call("quantize", small_llama, "-o", out, *RTN, "-q")
    return out


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "int4"))


def contents(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    card = files["README.md"].replace(b"FOLDER", NAME.encode())
    return {".gitattributes": b"*.safetensors filter=lfs\n", **files, "README.md": card}


def test_a_pushed_folder_arrives_whole_private_and_in_one_commit(hub: Hub, folder: Path) -> None:
    done = quantkit.push(folder, NAME)
    repository = hub.repositories[NAME]
    assert repository.private and done.private
    assert repository.files == contents(folder) and len(repository.commits) == 2
    assert b"vllm serve some-org/model-int4" in repository.files["README.md"]
    assert set(done.uploaded) == {path.name for path in folder.iterdir()} and done.commit == repository.head
    assert done.url == f"{hub.url}/{NAME}"


def test_a_second_push_sends_nothing(hub: Hub, folder: Path) -> None:
    call("push", folder, NAME, "-q")
    sent = hub.count("PUT", ""), hub.count("POST", "")
    text = call("push", folder, NAME).stdout
    assert (hub.count("PUT", ""), hub.count("POST", "")) == sent
    assert text == f"{hub.url}/{NAME} (private): nothing was missing\n"
    assert json.loads(call("push", folder, NAME, "--json").stdout)["uploaded"] == []


def test_public_makes_a_public_repository(hub: Hub, folder: Path) -> None:
    call("push", folder, NAME, "--public", "-q")
    assert not hub.repositories[NAME].private
    assert "is public: add --public" in refused("push", folder, NAME)


def test_an_empty_repository_is_filled_and_stays_private(hub: Hub, folder: Path) -> None:
    hub.repositories[NAME] = Repository(private=True)
    assert "stays private" in call("push", folder, NAME, "--public").stderr
    assert hub.repositories[NAME].files == contents(folder) and hub.repositories[NAME].private


def test_a_repository_with_other_contents_is_left_as_it_is(hub: Hub, folder: Path) -> None:
    for other in ({"config.json": b"{}"}, {"weights.gguf": b"GGUF"}, {REPORT: b"x" * (folder / REPORT).stat().st_size}):
        hub.repositories[NAME] = repository = Repository(True, [other])
        said = refused("push", folder, NAME)
        assert f"{NAME}: holds other files ({next(iter(other))})" in said and "choose another name" in said
        assert repository.commits == [other]


def test_an_edited_card_and_a_newer_proof_are_kept(hub: Hub, folder: Path) -> None:
    verification.write(quantkit.verify(folder), folder)
    quantkit.push(folder, NAME)
    files = hub.repositories[NAME].files
    files["README.md"] = b"# Edited on the hub\n"
    del files["generation_config.json"]
    verification.write(quantkit.verify(folder), folder)
    done = quantkit.push(folder, NAME)
    assert set(done.kept) <= {"README.md", "verify.json"} and "README.md" in done.kept
    assert done.uploaded == ("generation_config.json",)
    assert hub.repositories[NAME].files["README.md"] == b"# Edited on the hub\n"


def test_a_lost_network_leaves_nothing_visible_and_the_next_push_sends_the_rest(hub: Hub, folder: Path) -> None:
    shards = len(list(folder.glob("*.safetensors"))) + 1  # and the tokenizer, which is large too
    assert shards > 1
    hub.fail = lambda method, path: 0 if hub.count("PUT", "/lfs/") > 1 else None
    said = refused("push", folder, NAME)
    assert f"{NAME}: the hub was not reached" in said and "not sent a second time" in said
    assert len(hub.repositories[NAME].commits) == 1 and len(hub.large) == 1
    hub.fail, before = (lambda method, path: None), hub.count("PUT", "/lfs/")
    call("push", folder, NAME, "-q")
    assert hub.count("PUT", "/lfs/") - before == shards - 1
    assert hub.repositories[NAME].files == contents(folder)


STATUS = {
    401: "hf auth login",
    403: "may not write",
    409: "name is taken",
    412: "changed during the upload",
    413: "stores no more",
    429: "fewer requests",
    500: "HTTP 500",
}
PLACES = ("/api/repos/create", "/preupload/", "/objects/batch", "/lfs/", "/commit/")


@pytest.mark.parametrize(
    ("status", "place"), [*((status, "/commit/") for status in STATUS), *((403, place) for place in PLACES[:-1])]
)
def test_a_refusal_is_one_line_without_the_token(status: int, place: str, hub: Hub, folder: Path) -> None:
    hub.fail = lambda method, path: status if place in path else None
    said = refused("push", folder, NAME)
    assert f"{NAME}: " in said and STATUS[status] in said
    assert TOKEN not in said and "Bearer" not in said.replace("Bearer ...", "") and "signed" not in said


def test_an_unknown_token_is_refused_before_the_work(hub: Hub, small_llama: Path, tmp_path: Path) -> None:
    hub.fail = lambda method, path: 401
    said = refused("quantize", small_llama, *RTN, "--push-to", NAME, out=tmp_path / "out")
    assert "the hub does not know the token" in said and TOKEN not in said


def test_without_a_token_nothing_is_asked(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "no token to push with: log in by hf auth login" in refused("push", folder, NAME)
    assert hub.seen == []


@pytest.mark.parametrize("name", ["model", "a/b/c", "/a/b", "a b/c", "../x", ""])
def test_a_name_that_is_none_is_wrong_usage(name: str, hub: Hub, folder: Path) -> None:
    with pytest.raises(RecipeError, match="ORG/NAME"):
        quantkit.push(folder, name)
    assert hub.seen == []


def test_a_hub_that_is_not_there_is_one_line(hub: Hub, folder: Path) -> None:
    with pytest.raises(HubError, match="the hub was not reached") as caught:
        quantkit.push(folder, NAME, endpoint="http://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_a_damaged_folder_is_not_pushed(hub: Hub, folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "is not what was written" in refused("push", folder, NAME, code=3)
    assert hub.repositories == {}
    with pytest.raises(VerificationError):
        quantkit.push(folder, NAME)


def test_a_file_that_is_not_of_the_output_stays_here(hub: Hub, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    assert "notes.txt: is not a file that" in call("push", folder, NAME).stderr
    assert "notes.txt" not in hub.repositories[NAME].files


def test_only_outputs_of_quantkit_are_pushed(hub: Hub, small_llama: Path) -> None:
    assert f"has no {REPORT}" in refused("push", small_llama, NAME)
    assert hub.repositories == {}


def test_commands_push_what_they_wrote(hub: Hub, small_llama: Path, made: Path, tmp_path: Path) -> None:
    done = call("quantize", small_llama, "-o", tmp_path / "a", *RTN, "--push-to", "o/a")
    assert f"{hub.url}/o/a (private)" in done.stderr and done.stdout.startswith("done ")
    call("pack", made, "--layout", "gptq", "-o", tmp_path / "b", "--push-to", "o/b", "-q")
    call("convert", "compressed-tensors-to-marlin", made, "-o", tmp_path / "c", "--push-to", "o/c", "--public", "-q")
    call("prune", small_llama, "--method", "magnitude", "-o", tmp_path / "d", "--push-to", "o/d", "-q")
    quantkit.quantize(small_llama, tmp_path / "e", method="rtn", push_to="o/e")
    assert {
        name: (repository.private, REPORT in repository.files) for name, repository in hub.repositories.items()
    } == {**{f"o/{name}": (True, True) for name in "abde"}, "o/c": (False, True)}


def test_a_taken_name_is_found_before_the_work(hub: Hub, small_llama: Path, made: Path, tmp_path: Path) -> None:
    hub.repositories[NAME] = Repository(True, [{"config.json": b"{}"}])
    commands = (("quantize", small_llama, *RTN), ("pack", made, "--layout", "gptq"))
    for words in commands:
        assert "holds other files" in refused(*words, "--push-to", NAME, out=tmp_path / "out")
    with pytest.raises(QuantkitError, match="holds other files"):
        quantkit.quantize(small_llama, tmp_path / "out", method="rtn", push_to=NAME)
    assert not list(tmp_path.glob("out*"))


def test_public_alone_is_wrong_usage(small_llama: Path, tmp_path: Path) -> None:
    result = call("quantize", small_llama, *RTN, "--public", "-o", tmp_path / "out", code=2)
    assert "--public needs --push-to" in result.stderr
