"""The folder of a model, given its path or its hub id."""

from __future__ import annotations

import sys
from pathlib import Path

from quantkit.errors import CheckpointError, Option, Words, reason
from quantkit.io import model_folder
from quantkit.io.hub import UNREACHABLE, is_unreachable


def resolve(model: str, revision: str | None = None) -> Path:
    """Find the folder of a model: `model` itself, or a hub id's snapshot in the cache, downloaded if need be.

    Only safetensors files and files of data at the top are downloaded. A name that looks like a path never reaches the
    network. CheckpointError if there is no such folder and the hub does not give it.
    """
    folder = Path(model)
    if model and folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"{model} is a folder, which has no revisions", Words("drop", Option("revision")))
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        what = "a file, not a folder" if folder.is_file() else "no such folder"
        raise CheckpointError(what, "check the path", subject=model or repr(model))
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = ["*.safetensors", *model_folder.DOWNLOADED]
    unwanted = ["consolidated*", *(f"*/{pattern}" for pattern in ("*.safetensors", *model_folder.ENDINGS))]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:  # the hub's client, its HTTP library and the disk each have their own
        if is_unreachable(error):
            why = f"{UNREACHABLE}: download the model and give its folder"
        else:
            why = f"the hub does not give it ({reason(error)}): check the name and the revision"
        raise CheckpointError(f"no folder here, and {why}", subject=model) from error
