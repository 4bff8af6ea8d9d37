"""Upload a verified folder to the hub.

Large files go first. The hub knows them by their hash, so a second attempt sends what is missing. One commit at the end
makes the whole model visible.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import HubError, Option, QuantkitError, RecipeError, Words, reason
from quantkit.io import files
from quantkit.io.model_folder import HUB_ID
from quantkit.progress import Progress
from quantkit.reporting.model_card import for_repository
from quantkit.reporting.notebook import Shown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
#: The hub makes this file in each new repository.
GIVEN = ".gitattributes"
#: Status code of the hub -> the rule and the way out.
REFUSALS = {
    401: "the hub does not know the token: make one with write access, then hf auth login or set HF_TOKEN",
    402: "the hub asks for a payment before it stores more: see the storage page of the account",
    403: "the token may not write there: use one with write access, or another name",
    404: "the hub has no such user, organization or repository that the token can see: check the name",
    409: "the name is taken, or another upload is running: choose another name, or push again",
    412: "it changed during the upload: look at it, then push again",
    413: "the hub stores no more there: see the storage page of the account",
    429: "the hub asks for fewer requests: wait a few minutes, then push again",
}


@dataclass(frozen=True)
class Pushed(Shown):
    """The repository `repository` at `url`, and what this push sent to it.

    `commit` is the new commit, None if nothing was missing. `uploaded` are the files sent, `bytes` their size. `kept`
    are the files that the repository has in another version and that people edit, so they were not replaced.
    """

    repository: str
    url: str
    private: bool
    commit: str | None
    uploaded: tuple[str, ...]
    bytes: int
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A repository of the hub as it was found: `head` is its last commit, None if there is no such repository yet.

    `contents` has path -> (size, kind of hash, hash) of its files.
    """

    api: HfApi
    repository: str
    public: bool
    private: bool
    head: str | None
    contents: Mapping[str, tuple[int, str, str]]

    def require_empty(self) -> None:
        """Raise HubError if the repository has files: a new output is not there yet."""
        self.require_only({})

    def require_only(self, same: Mapping[str, bool]) -> None:
        """Raise HubError if the repository has a file that `same` lacks or calls different."""
        others = [name for name in self.contents if not same.get(name, False)]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise HubError(
                f"holds other files ({others[0]}{more}), which are not replaced",
                "choose another name",
                "delete the repository on the hub",
                subject=self.repository,
            )


def reach(repository: str, *, public: bool = False, endpoint: str | None = None, token: str | None = None) -> Target:
    """Look at a repository of the hub, before any work; RecipeError for a name that is none, HubError otherwise.

    `endpoint` and `token` default to those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, and the login.
    """
    if HUB_ID.fullmatch(repository) is None:
        raise RecipeError(f"{repository!r} is no repository of the hub", "write it like ORG/NAME")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    with _one_line(repository, token):
        token = token or get_token()
    if token is None:
        raise HubError("no token to push with", "log in by hf auth login", "set HF_TOKEN", subject=repository)
    api = HfApi(endpoint=endpoint or os.environ.get("HF_ENDPOINT"), token=token)
    with _one_line(repository, token):
        try:
            info = api.model_info(repository)
        except RepositoryNotFoundError as error:
            if _status(error) != 404:
                raise
            return Target(api, repository, public, not public, None, {})
        tree = api.list_repo_tree(repository, recursive=True, revision=info.sha)
        found = {entry.path: entry for entry in tree if isinstance(entry, RepoFile) and entry.path != GIVEN}
    if not info.private and not public:
        raise HubError(
            "is public",
            Words("add", Option("public", True)),
            "make it private in its settings on the hub",
            subject=repository,
        )
    contents = {
        path: (entry.size, "sha256", entry.lfs.sha256) if entry.lfs else (entry.size, "git", entry.blob_id)
        for path, entry in found.items()
    }
    return Target(api, repository, public, bool(info.private), info.sha, contents)


def upload(folder: Path, names: list[str], edited: tuple[str, ...], target: Target, progress: Progress) -> Pushed:
    """Upload the files `names` of a folder that the repository lacks, in one commit.

    HubError if the repository holds other files, refuses, or is not reached. Files in `edited` may differ there.
    """
    from huggingface_hub import CommitOperationAdd

    local: dict[str, Path | bytes] = {name: folder / name for name in names}
    if CARD in local:
        with files.open_regular(folder / CARD) as file, files.guarded(folder / CARD):
            local[CARD] = for_repository(file.read().decode(errors="replace"), target.repository).encode()
    same = {name: _is_same(local[name], target.contents[name]) for name in local if name in target.contents}
    kept = tuple(name for name in edited if not same.get(name, True))
    target.require_only(same | dict.fromkeys(kept, True))
    missing = {name: content for name, content in local.items() if name not in target.contents}
    url = f"{target.api.endpoint}/{target.repository}"
    done = Pushed(target.repository, url, target.private, None, (), 0, kept)
    if not missing:
        return done
    api, repository = target.api, target.repository
    with _one_line(repository, str(api.token)), _silent_client():
        head = target.head
        if head is None:
            api.create_repo(repository, private=not target.public)
            head = api.model_info(repository).sha
        additions = [CommitOperationAdd(name, content) for name, content in missing.items()]
        for addition in progress.bar(additions, "push", len(additions)):
            api.preupload_lfs_files(repository, [addition], free_memory=False)
        commit = api.create_commit(
            repository, additions, commit_message="Upload the folder that quantkit verified", parent_commit=head
        )
    size = sum(addition.upload_info.size for addition in additions)
    return replace(done, commit=commit.oid, uploaded=tuple(missing), bytes=size)


def _is_same(content: Path | bytes, there: tuple[int, str, str]) -> bool:
    """Compare a file with one on the hub: by SHA-256 if that is stored as a large file, else by git's hash."""
    size, kind, digest = there
    if (len(content) if isinstance(content, bytes) else content.stat().st_size) != size:
        return False
    seen: Any = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if isinstance(content, bytes):
        seen.update(content)
    else:
        with files.open_regular(content) as file, files.guarded(content):
            while piece := file.read(2**20):
                seen.update(piece)
    return bool(seen.hexdigest() == digest)


@contextmanager
def _silent_client() -> Iterator[None]:
    """Run without the client's own bars, and its warnings about entries that a card could have."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def _one_line(repository: str, token: str | None) -> Iterator[None]:
    """Turn every exception of the hub's client into a HubError without the token and without signed addresses."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:  # the client, its HTTP library and its storage library each have their own
        status = _status(error)
        if status is not None:
            message = REFUSALS.get(status, f"the hub answers with HTTP {status}: push again later")
        else:
            text = re.sub(r"\?\S+", "", reason(_first(error)))
            text = text.replace(token, "...") if token else text
            message = f"the hub was not reached ({text}): push again, what has arrived is not sent a second time"
        raise HubError(message, subject=repository) from None  # the chain could print addresses


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _first(error: BaseException) -> BaseException:
    """Return the exception from which the others came."""
    return list(_causes(error))[-1]


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an exception is about, None if there was no answer."""
    codes = (getattr(getattr(found, "response", None), "status_code", None) for found in _causes(error))
    return next((code for code in codes if isinstance(code, int)), None)
