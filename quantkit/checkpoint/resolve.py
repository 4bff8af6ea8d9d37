"""The folder of a model, given its path or its hub id."""

from __future__ import annotations

import sys
from pathlib import Path

from quantkit.checkpoint.gguf_source import ENDING, open_gguf
from quantkit.errors import UNREACHABLE, CheckpointError, Option, Words, is_unreachable, reason
from quantkit.io import files, model_folder
from quantkit.keys import at_home


def resolve(model: str, revision: str | None = None) -> Path:
    """Find the folder of a model: `model` itself, or a hub id's snapshot in the cache, downloaded
    if need be.

    For a GGUF file, or a folder with one and no safetensors, it is a temporary folder
    (`open_gguf`). Only safetensors files and files of data at the top are downloaded. A name that
    looks like a path never reaches the network. CheckpointError if there is no such folder and the
    hub does not give it.
    """
    model = at_home(model)
    folder = Path(model)
    if model and (folder.is_dir() or (folder.is_file() and folder.suffix.lower() == ENDING)):
        if revision is not None:
            what = "folder" if folder.is_dir() else "file"
            raise CheckpointError(
                f"{model} is a {what}, which has no revisions", Words("drop", Option("revision"))
            )
        file = _gguf_of(folder) if folder.is_dir() else folder
        return folder if file is None else open_gguf(file)
    if (
        folder.exists()
        or model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or "\\" in model
    ):
        what = "a file, not a folder" if folder.is_file() else "no such folder"
        raise CheckpointError(what, "check the path", subject=model or repr(model))
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = ["*.safetensors", *model_folder.DOWNLOADED]
    unwanted = [
        "consolidated*",
        *(f"*/{pattern}" for pattern in ("*.safetensors", *model_folder.ENDINGS)),
    ]
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
    except (
        Exception
    ) as error:  # the hub's client, its HTTP library and the disk each have their own
        if is_unreachable(error):
            why = f"{UNREACHABLE}: download the model and give its folder"
        else:
            why = f"the hub does not give it ({reason(error)}): check the name and the revision"
        raise CheckpointError(f"no folder here, and {why}", subject=model) from error


def _gguf_of(folder: Path) -> Path | None:
    """Find the only GGUF file of a folder, None beside other weights; CheckpointError
    for several.
    """
    with files.guarded(folder):
        listing = sorted(path.name for path in folder.iterdir())
    found = [each for each in listing if each.lower().endswith(ENDING)]
    if not found or any(
        each.endswith((".safetensors", ".safetensors.index.json")) for each in listing
    ):
        return None
    if len(found) > 1:
        first = folder / found[0]
        raise CheckpointError(
            f"holds several GGUF files ({', '.join(found)})",
            f"give the path of one, like {first}",
            subject=folder,
        )
    return folder / found[0]
