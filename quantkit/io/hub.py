"""The Hugging Face hub: snapshots of models, and the reasons why it does not give one."""

from __future__ import annotations

import errno
import json
import os
import re
import ssl
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from socket import EAI_AGAIN, EAI_FAIL, EAI_NONAME
from typing import Literal
from urllib.request import getproxies

from quantkit.errors import CheckpointError, Option, Words, reason
from quantkit.io import model_folder

Kind = Literal["model", "data set", "code"]
#: Code of a model that lies in another repository, as `org/name--file.Class`.
OTHER_HOME = re.compile(r'"([\w.-]+/[\w.-]+)--')
#: Classes of exceptions for a missing connection, by name: the hub's client has had three HTTP
#: libraries, each with classes of its own.
UNCONNECTED = {"ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError"}
#: Classes of exceptions for an answer that did not come in time, by name.
LATE = {"TimeoutException", "TimeoutError", "Timeout"}
FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
#: Variables that forbid connections to the hub.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
LOGIN = "log in by `hf auth login`, or set HF_TOKEN"
NOT_GIVEN, CHECK = "the hub does not give it", "check the name and the revision"
ELSEWHERE = "download the model and give its folder"


def snapshot(
    model: str, revision: str | None, trust_remote_code: bool, only: str | None = None
) -> Path:
    """Find the snapshot of a hub id in the cache, downloaded if need be; CheckpointError if there
    is none with weights, or with files `only`, which is a pattern of names.

    Python files are downloaded only if the user trusts them.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted, unwanted = model_folder.downloaded(trust_remote_code) if only is None else ([only], [])
    part = False
    try:
        folder = Path(
            snapshot_download(
                model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
        part = folder.is_dir() and any(folder.iterdir())  # there is none if no file matches
        if part and (model_folder.has_weights(folder) if only is None else any(folder.glob(only))):
            return folder
        listing = HfApi().list_repo_files(model, revision=revision)
    except CheckpointError:
        raise
    except Exception as error:  # the client, its HTTP library and the disk each have their own
        rule, *ways = reasons(error, model, part=part) or (f"{NOT_GIVEN} ({reason(error)})", CHECK)
        raise CheckpointError(f"no folder here, and {rule}", *ways, subject=model) from error
    if only is not None:
        files = ", ".join(name for name in listing if name.endswith(".gguf")) or "no GGUF file"
        raise CheckpointError(f"has no file {only}, it has {files}", subject=model)
    raise CheckpointError(
        f"has no .safetensors weights{model_folder.way_to_weights(listing, model)}", subject=model
    )


def reasons_of_data(error: BaseException, name: str) -> tuple[str, ...]:
    """Give the rule and the ways out for a data set that does not load, empty for other reasons.

    The library of data sets hides the causes of its exceptions, so the hub is asked once more.
    """
    from huggingface_hub import HfApi

    if isinstance(error, FileNotFoundError | ConnectionError):
        try:
            HfApi().auth_check(name, repo_type="dataset")
        except Exception as cause:  # as above
            return reasons(cause, name, "data set") or reasons(error, name, "data set")
    return reasons(error, name, "data set")


def reasons_of_code(error: BaseException, file: Path, rule: str) -> tuple[str, ...]:
    """Give the rule and the ways out for trusted code that `file` of a model names and that fails.

    `rule` holds if the hub is not the reason.
    """
    home = OTHER_HOME.search(file.read_text(encoding="utf-8", errors="replace"))
    if home and (found := reasons(error, home[1], "code")):
        return (f"its code lies in {home[1]}, and {found[0]}", *found[1:])
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] != "transformers":
        return rule, "install the packages that it names"
    return rule, "fetch its Python files again", "use the transformers that they were written for"


def reasons(
    error: BaseException, name: str, kind: Kind = "model", *, part: bool = False
) -> tuple[str, ...]:
    """Give the rule and the ways out for an exception of the hub's client: the first row that
    holds. Empty if it is of another kind.

    `part` says that the cache holds some files of the repository.
    """
    from huggingface_hub import constants, errors

    chain = list(_causes(error))
    text = " ".join(map(str, chain))
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'data set' else ''}{name}"
    beside = f"put its Python files into the model's folder and drop {name}-- in its auto_map"
    elsewhere = {"model": (ELSEWHERE,), "data set": (), "code": (beside,)}[kind]

    def is_a(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in chain)

    def is_named(names: Collection[str]) -> bool:
        return any(base.__name__ in names for each in chain for base in type(each).__mro__)

    def failed(codes: Collection[int]) -> str | None:
        for each in chain:  # some downloads report an error of the system as text
            if any(
                code == getattr(each, "errno", 0) or os.strerror(code) in str(each)
                for code in codes
            ):
                return str(getattr(each, "filename", None) or constants.HF_HUB_CACHE)
        return None

    codes = (getattr(getattr(each, "response", None), "status_code", None) for each in chain)
    status = next((code for code in codes if isinstance(code, int) and code >= 400), 0)
    full, forbidden = failed(FULL), failed(FORBIDDEN)
    lost = [each for each in chain if isinstance(each, OSError) and each.errno in MISPLACED]
    misplaced = next((str(each) for each in lost if each.filename), None)
    authority = os.environ.get("SSL_CERT_FILE")
    untrusted = is_a(ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in text
    misread = isinstance(error, ValueError | ImportError) and "proxy" in str(error).lower()
    misread |= kind == "model" and isinstance(error, json.JSONDecodeError)  # a page of theirs
    silent = is_named(UNCONNECTED)
    offline = silent and (constants.HF_HUB_OFFLINE or is_a(errors.OfflineModeIsEnabled))
    variable = next((each for each in OFFLINE if os.environ.get(each)), OFFLINE[0])
    used = {"HTTPS_PROXY": "https" in getproxies(), "HF_ENDPOINT": os.environ.get("HF_ENDPOINT")}
    known = [each for each, is_set in used.items() if is_set]
    check = (f"check {' and '.join(known)}",) if known else ()
    part = part or is_named({"IncompleteSnapshotError"})
    held = "only a part of it is cached" if part else "nothing is cached"
    cache = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    if kind == "model" and silent and not part and (there := [*cache.glob("snapshots/*")]):
        held = "this revision of it is not cached"
        elsewhere = (
            Words("use one that is, by", Option("revision", *sorted(path.name for path in there))),
            *elsewhere,
        )
    rows: tuple[tuple[object, tuple[str, ...]], ...] = (
        (
            is_a(errors.GatedRepoError),
            ("it is gated", f"accept the terms at {page}, then {LOGIN}"),
        ),
        (is_a(errors.DisabledRepoError), ("the hub has closed this repository", f"see {page}")),
        (
            is_a(errors.RevisionNotFoundError),
            ("the hub has it, and not this revision", Words("check", Option("revision"))),
        ),
        (
            is_a(errors.RepositoryNotFoundError) or status == 404,
            (
                f"the hub shows no {kind} of this name",
                "check the name",
                f"if it is private, {LOGIN}",
            ),
        ),
        (
            is_a(errors.HFValidationError),
            (
                f"this is no hub id ({reason(error)})",
                "write it org/name, a GGUF file in it org/name:FILE.gguf",
                "check the path",
            ),
        ),
        (
            status in (401, 403),
            (f"the hub refuses the token that is set, or wants one ({status})", LOGIN),
        ),
        (
            status == 429,
            ("the hub gets too many requests from here (429)", "try again later", LOGIN),
        ),
        (
            status == 408 or status >= 500,
            (f"the hub has a fault of its own ({status})", "try again later"),
        ),
        (status not in (0, 407), (f"{NOT_GIVEN} ({status})", CHECK)),
        (
            untrusted or (lost and authority and not os.path.isfile(authority)),
            (
                f"SSL_CERT_FILE names no file ({authority})"
                if lost
                else "the certificate of the hub is not trusted here",
                "set SSL_CERT_FILE to the file of your network's certificate authority",
            ),
        ),
        (
            full,
            (
                f"the disk of the cache is full ({full})",
                "free space there",
                "set HF_HOME to a folder with more space",
            ),
        ),
        (
            forbidden,
            (
                f"no permission to write {forbidden}",
                "give yourself the permission",
                "set HF_HOME to a folder of yours",
            ),
        ),
        (
            misplaced,
            (f"the cache cannot be kept there ({misplaced})", "set HF_HOME to a folder of yours"),
        ),
        (
            is_named({"ProxyError"}) or is_a(errors.FileMetadataError) or misread or status == 407,
            (
                f"a proxy or mirror does not pass the hub's answer on ({reason(chain[-1])})",
                "check the variables HTTPS_PROXY, NO_PROXY and HF_ENDPOINT",
            ),
        ),
        (
            is_named(LATE),
            (
                "the hub does not answer in time",
                "try again",
                "set HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT to more seconds",
            ),
        ),
        (
            any(f"[Errno {code}]" in text for code in (EAI_AGAIN, EAI_FAIL, EAI_NONAME)),
            (
                f"the address {constants.ENDPOINT} is not found and {held}",
                "check the network's DNS, and HF_ENDPOINT if it is set",
                *elsewhere,
            ),
        ),
        (offline, (f"{variable} is set and {held}", "unset it", *elsewhere)),
        (silent, (f"the hub cannot be reached and {held}", *check, *elsewhere)),
    )
    return next((found for holds, found in rows if holds), ())


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
