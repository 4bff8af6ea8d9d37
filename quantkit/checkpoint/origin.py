"""The folder of a model, given its path or its hub id, and the facts that its outputs inherit from
it: hub id, licence, language, tags and config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.checkpoint.gguf_source import ENDING, PART, add_tokenizer, open_gguf
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.report import CARD_KEYS
from quantkit.errors import CheckpointError, Option, Words, reason
from quantkit.io import files, hub, model_folder
from quantkit.io.json_files import AGAIN, dump_json
from quantkit.keys import at_home
from quantkit.layouts import LAYOUTS

#: A GGUF file of a hub repository.
HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+):([^:]+\.gguf)", re.IGNORECASE)


def resolve(
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    described: bool = False,
) -> Path:
    """Find the folder of a model: `model` itself, or a hub id's snapshot in the cache, downloaded
    if need be.

    For a GGUF file (`FILE.gguf`, of a hub repository `ORG/NAME:FILE.gguf`), or a folder with one
    and no safetensors, it is a temporary folder (`open_gguf`, which describes `described`). Of a
    hub id only safetensors files and files of data at the top are downloaded, and Python files if
    they are trusted; of a GGUF model only its files. A name that looks like a path never reaches
    the network. CheckpointError if there is no such folder and the hub does not give it.
    """
    model = at_home(model)
    folder = Path(model)
    named = None if folder.exists() else HUB_FILE.fullmatch(model)
    if named is not None:
        wanted = PART.sub(r"\1-*-of-\3.gguf", named[2])
        found = hub.snapshot(named[1], revision, trust_remote_code, wanted)
        return open_gguf(found / named[2], described)
    if model and (folder.is_dir() or (folder.is_file() and folder.suffix.lower() == ENDING)):
        if revision is not None:
            what = "folder" if folder.is_dir() else "file"
            raise CheckpointError(
                f"{model} is a {what}, which has no revisions", Words("drop", Option("revision"))
            )
        file = _gguf_of(folder) if folder.is_dir() else folder
        return folder if file is None else open_gguf(file, described)
    if (
        folder.exists()
        or model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or "\\" in model
    ):
        what = "a file, not a folder" if folder.is_file() else "no such folder"
        is_address = "://" in model or model.startswith(("huggingface.co/", "hf.co/"))
        way = "write a model of the hub as org/name" if is_address else "check the path"
        raise CheckpointError(what, way, subject=model or repr(model))
    return hub.snapshot(model, revision, trust_remote_code)


def _gguf_of(folder: Path) -> Path | None:
    """Find the GGUF file of a folder. None if the folder has other weights; CheckpointError for
    several GGUF files.
    """
    with files.guarded(folder):
        listing = sorted(path.name for path in folder.iterdir())
    found = [each for each in listing if each.lower().endswith(ENDING)]
    if not found or any(
        each.endswith((".safetensors", ".safetensors.index.json")) for each in listing
    ):
        return None
    models = {part[1] if (part := PART.fullmatch(each)) else each for each in found}
    if len(models) > 1:
        first = folder / found[0]
        raise CheckpointError(
            f"holds several GGUF files ({', '.join(found)})",
            f"give the path of one, like {first}",
            subject=folder,
        )
    return folder / found[0]


#: Keys under which transformers writes the folder that a config or tokenizer was read from.
PATHS = ("_name_or_path", "name_or_path")


def name_of(model: str | Path) -> str:
    """Name a model for a report: by its hub id, also of a snapshot in the hub's cache, or a folder
    by its last name.
    """
    folder = Path(model)
    if not folder.is_dir():
        return folder.name if folder.is_file() else str(model)
    real = folder.resolve()
    return model_folder.cached_id(real) or real.name


def origin(
    src: Checkpoint, model: str | Path, revision: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Collect the facts about a source that its outputs hand on: name, revision, hub id, licence,
    language, tags.

    `base_model` is the hub id if it is known. `relation` is "quantized" if the id is the source's
    own. A folder may also name the model that it was trained from. Facts that the source does not
    state are absent. An unreadable model card leads to a notice.
    """
    stated, notice = model_folder.front_matter(src.path)
    found: dict[str, Any] = {"name": name_of(model), "revision": revision}
    cached = model_folder.cached_id(src.path)
    given = None if Path(model).exists() else HUB_FILE.sub(r"\1", str(model))
    ours = cached or given
    theirs = (
        _first_id(stated.get("base_model"), src),
        _first_id(src.config.get("_name_or_path"), src),
    )
    if src.layout is not None:  # the source was quantized from the model that its card names
        found |= (
            {"base_model": theirs[0], "relation": "quantized"}
            if theirs[0]
            else {"base_model": ours}
        )
    elif ours:
        found |= {"base_model": ours, "relation": "quantized"}
    else:
        found["base_model"] = theirs[1] or theirs[0]
    found |= {key: words for key in CARD_KEYS if (words := _words(stated.get(key)))}
    if isinstance(tags := found.get("tags"), list):
        found["tags"] = [tag for tag in tags if tag not in LAYOUTS]
    known = {
        key: value
        for key, value in found.items()
        if value is not None or key in ("name", "revision")
    }
    return known, [notice] if notice else []


def without_paths(value: Any, folder: Path) -> Any:
    """Copy a config without the local paths that transformers left in it; hub ids stay."""
    if isinstance(value, list):
        return [without_paths(child, folder) for child in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_paths(child, folder)
        for key, child in value.items()
        if not (key in PATHS and isinstance(child, str) and model_folder.is_local(child, folder))
    }


def without_local_paths(folder: Path, name: str) -> bytes | None:
    """Return the text of a config without its local paths; None if it has no local path."""
    if not name.endswith(".json") or name in ("tokenizer.json", "vocab.json"):
        return None
    path = model_folder.inside(folder, name)
    with files.open_regular(path) as file, files.guarded(path):
        text = file.readall()
    if b'name_or_path"' not in text:
        return None
    try:  # not by load_json: tokenizers state their longest length as 10^30
        stated = json.loads(text)
        clean = without_paths(stated, folder)
        return None if clean == stated else dump_json(clean, special_floats=True)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not the JSON it should be ({reason(error)})", AGAIN, subject=path
        ) from error


class Companions(NamedTuple):
    """Hold the files that go along with new weights: the new text of changed files, and the names
    of the rest.
    """

    texts: dict[str, bytes | None]
    left_out: list[str]


def companions_of(src: Checkpoint) -> Companions:
    """List the files of a source that go along; CheckpointError for a link out of the folder."""
    add_tokenizer(src.path)
    weights = [path.name for path in src.files()]
    names, left_out = model_folder.companions(src.path, weights, src.trusted)
    return Companions({name: without_local_paths(src.path, name) for name in names}, left_out)


def _first_id(stated: Any, src: Checkpoint) -> str | None:
    names = stated if isinstance(stated, list) else [stated]
    ids = [
        name
        for name in names
        if isinstance(name, str) and not model_folder.is_local(name, src.path)
    ]
    return ids[0] if ids and len(names) == 1 else None


def _words(stated: Any) -> str | list[str] | None:
    """Return a value of the front matter if it is a word or a list of words, else None."""
    if isinstance(stated, list) and all(isinstance(word, str) for word in stated):
        return [_printable(word) for word in stated[:40]]
    return _printable(stated) if isinstance(stated, str) else None


def _printable(word: str) -> str:
    return re.sub(r"[^\x20-\x7e\xa0-\uffff]", " ", word)[:100]
