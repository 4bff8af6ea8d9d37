"""Upload a verified folder to the hub.

Large files go first. The hub knows them by their hash, so a second attempt sends only missing
files. One commit at the end makes the whole model visible.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import HubError, Option, QuantkitError, RecipeError, Words, reason
from quantkit.io import files
from quantkit.io.model_folder import HUB_ID
from quantkit.progress import Progress
from quantkit.reporting.model_card import for_repository

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoSibling

CARD = "README.md"
#: The hub makes this file in each new repository.
GIVEN = ".gitattributes"
#: Status code of the hub -> the rule, and the way out.
REFUSALS = {
    401: (
        "the hub does not know the token",
        "make one with write access, then hf auth login or set HF_TOKEN",
    ),
    402: (
        "the hub asks for a payment before it stores more",
        "see the storage page of the account",
    ),
    403: ("the token may not write there", "use one with write access, or another name"),
    404: (
        "the hub has no such user, organization or repository that the token can see",
        "check the name",
    ),
    409: ("the name is taken, or another upload is running", "choose another name, or push again"),
    412: ("it changed during the upload", "look at it, then push again"),
    413: ("the hub stores no more there", "see the storage page of the account"),
    429: ("the hub asks for fewer requests", "wait a few minutes, then push again"),
}


@dataclass(frozen=True)
class Pushed:
    """The repository `repository` at `url`, and what this push sent to it.

    `commit` is the new commit, None if nothing was missing. `uploaded` are the files sent, `bytes`
    their size. `kept` are the files that the repository has in another version and that people
    edit, so they were not replaced.
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
    """A repository of the hub as it was found: `head` is its last commit, None if there is no such
    repository yet.

    `contents` has the hub's entry of each file.
    """

    api: HfApi
    repository: str
    public: bool
    private: bool
    head: str | None
    contents: Mapping[str, RepoSibling]

    def require_only(self, same: Mapping[str, bool] | None = None) -> None:
        """Raise HubError if the repository has a file that `same` lacks or calls different."""
        others = [name for name in self.contents if not (same or {}).get(name, False)]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise HubError(
                f"holds other files ({others[0]}{more}), which are not replaced",
                "choose another name",
                "delete the repository on the hub",
                subject=self.repository,
            )


def reach(
    repository: str, *, public: bool = False, endpoint: str | None = None, token: str | None = None
) -> Target:
    """Look at a repository of the hub, before any work; RecipeError for a malformed name, HubError
    otherwise.

    `endpoint` and `token` default to those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, and the
    login.
    """
    if HUB_ID.fullmatch(repository) is None:
        raise RecipeError(f"{repository!r} is no repository of the hub", "write it like ORG/NAME")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    with _one_line(repository, token):
        token = token or get_token()
    if token is None:
        raise HubError(
            "no token to push with", "log in by hf auth login", "set HF_TOKEN", subject=repository
        )
    api = HfApi(endpoint=endpoint or os.environ.get("HF_ENDPOINT"), token=token)
    with _one_line(repository, token):
        try:
            info = api.model_info(repository, files_metadata=True)
        except RepositoryNotFoundError as error:
            if _status(error) != 404:
                raise
            return Target(api, repository, public, not public, None, {})
    if not info.private and not public:
        ways = Words("add", Option("public", True)), "make it private in its settings on the hub"
        raise HubError("is public", *ways, subject=repository)
    contents = {file.rfilename: file for file in info.siblings or () if file.rfilename != GIVEN}
    return Target(api, repository, public, bool(info.private), info.sha, contents)


def upload(
    folder: Path, names: list[str], edited: tuple[str, ...], target: Target, progress: Progress
) -> Pushed:
    """Upload the files `names` of a folder that the repository lacks, in one commit.

    HubError if the repository holds other files, refuses, or is not reached. Files in `edited` may
    differ there.
    """
    from huggingface_hub import CommitOperationAdd

    local: dict[str, CommitOperationAdd] = {}
    for name in names:
        with files.open_regular(folder / name) as file, files.guarded(folder / name):
            content: Path | bytes = folder / name
            if name == CARD:
                content = for_repository(
                    file.read().decode(errors="replace"), target.repository
                ).encode()
            local[name] = CommitOperationAdd(name, content)
    same = {
        name: _is_same(local[name], target.contents[name])
        for name in local
        if name in target.contents
    }
    kept = tuple(name for name in edited if not same.get(name, True))
    target.require_only(same | dict.fromkeys(kept, True))
    missing = [local[name] for name in local if name not in target.contents]
    url = f"{target.api.endpoint}/{target.repository}"
    done = Pushed(target.repository, url, target.private, None, (), 0, kept)
    if not missing:
        return done
    api, repository, head = target.api, target.repository, target.head
    with _one_line(repository, str(api.token)), _silent_client():
        if head is None:
            api.create_repo(repository, private=not target.public)
            head = api.model_info(repository).sha
        for addition in progress.bar(missing, "push", len(missing)):
            api.preupload_lfs_files(repository, [addition], free_memory=False)
        message = "Upload the folder that quantkit verified"
        commit = api.create_commit(repository, missing, commit_message=message, parent_commit=head)
    sent = tuple(addition.path_in_repo for addition in missing)
    return replace(
        done,
        commit=commit.oid,
        uploaded=sent,
        bytes=sum(addition.upload_info.size for addition in missing),
    )


def _is_same(addition: CommitOperationAdd, there: RepoSibling) -> bool:
    """Compare a file with one on the hub: by SHA-256 if that is stored as a large file, else by
    git's hash.
    """
    from huggingface_hub.utils.sha import git_hash

    if there.lfs is not None:
        return there.lfs.sha256 == addition.upload_info.sha256.hex()
    if there.size != addition.upload_info.size:
        return False
    with addition.as_file() as file:
        return there.blob_id == git_hash(file.read())


@contextmanager
def _silent_client() -> Iterator[None]:
    """Run without the client's own bars, and its warnings about entries that a card could have."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

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
    """Turn every exception of the hub's client into a HubError without the token and without signed
    addresses.
    """
    try:
        yield
    except QuantkitError:
        raise
    except (
        Exception
    ) as error:  # the client, its HTTP library and its storage library each have their own
        status = _status(error)
        if status is not None:
            rule, way = REFUSALS.get(
                status, (f"the hub answers with HTTP {status}", "push again later")
            )
        else:
            text = re.sub(r"\?\S+", "", reason(list(_causes(error))[-1]))
            text = text.replace(token, "...") if token else text
            rule, way = (
                f"the hub was not reached ({text})",
                "push again, what has arrived is not sent a second time",
            )
        raise HubError(rule, way, subject=repository) from None  # the chain could print addresses


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _status(error: BaseException) -> int | None:
    """Find the HTTP status of the answer that an exception is about, None if there was
    no answer.
    """
    codes = (
        getattr(getattr(found, "response", None), "status_code", None) for found in _causes(error)
    )
    return next((code for code in codes if isinstance(code, int)), None)
