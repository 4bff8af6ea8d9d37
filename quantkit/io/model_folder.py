"""Which files of a model folder are read (RELIABILITY 2)."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.io import files
from quantkit.io.json_files import AGAIN, damaged, load_json, shown
from quantkit.io.safetensors_header import NAME_LIMIT

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Beside weights of ours: how they were made, ready for `quantkit run`.
RECIPE = "quantkit_recipe.yaml"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: Files that are copied beside the new weights: data only, never code or pickles, and no old model card.
COMPANIONS = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map*", "added_tokens*"),
    *("chat_template*", "additional_chat_templates/*.jinja", "generation_config.json", "*processor_config.json"),
    *("license*", "notice*", "use_policy*", RECIPE),
)
DATA_SUFFIXES = ("", ".yaml", ".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")


def inside(folder: Path, name: Any) -> Path:
    """Resolve the file `name` of a model folder; CheckpointError if it is missing or leads outside.

    Inside is the folder itself and, for a snapshot in the hub's cache, the `blobs` folder of the same repository
    (RELIABILITY 2). `folder` is a real path.
    """
    plain = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT or not name.isprintable() or "\\" in name:
        raise CheckpointError(f"{folder}: {shown(name)} is not a file name")
    if plain.is_absolute() or ".." in plain.parts or str(plain) != name:
        raise CheckpointError(f"{folder}: {shown(name)} names a file outside the model's folder, which is not read")
    try:
        real = (folder / plain).resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {shown(name)} is missing: {AGAIN}") from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: {shown(name)} cannot be opened ({shown(str(error))})") from None
    roots = [folder] + ([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])
    if not any(root in real.parents for root in roots):
        raise CheckpointError(f"{folder}: {shown(name)} is a link out of the model's folder, which is not followed")
    return real


def shards(folder: Path, listing: list[str], notices: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """List the weight files of a model folder in order, and the index's tensor -> file, None without an index.

    `listing` has the folder's file names, sorted; what is left out is told in `notices`. CheckpointError unless there
    is exactly one reading of the folder: one index, or one file of weights (RELIABILITY 2).
    """
    found = [n for n in listing if n.endswith(".safetensors") and not n.startswith(("consolidated", "adapter_"))]
    indexes = [n for n in listing if n.endswith(".safetensors.index.json")]
    pickles = [n for n in listing if n.endswith(PICKLES)]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder}: has several indexes ({', '.join(indexes)}): keep the right one")
    if not found and not indexes:
        raise CheckpointError(f"{folder}: has no .safetensors weights{_way_to_weights(listing, pickles)}")
    weight_map = None
    names = found
    if indexes:
        weight_map = _weight_map(folder, indexes[0])
        names = sorted(set(weight_map.values()))
        if SINGLE in found and names != [SINGLE]:
            raise CheckpointError(f"{folder}: has both {SINGLE} and {indexes[0]}: remove the one that is out of date")
    elif SINGLE in found:
        names = [SINGLE]
    if weight_map is None and (len(names) > 1 or re.search(r"-of-0*([2-9]|[1-9]\d+)\.safetensors$", names[0])):
        raise CheckpointError(f"{folder}: has shards ({names[0]} ...) and no {INDEX}: {AGAIN}")
    left = [n for n in (*pickles, *listing) if n.endswith((*PICKLES, ".safetensors")) and n not in names]
    if left:
        notices.append(f"ignored: {', '.join(dict.fromkeys(left))}")
    return names, weight_map


def companions(folder: Path) -> list[str]:
    """List the files that are copied beside new weights; CheckpointError for a link out of the folder."""
    with files.guarded(folder):
        listing = [p.relative_to(folder).as_posix() for p in (*folder.glob("*"), *folder.glob("*/*.jinja"))]
    names = (n for n in sorted(listing) if any(fnmatch(n.lower(), pattern) for pattern in COMPANIONS))
    return [n for n in names if Path(n).suffix.lower() in DATA_SUFFIXES and inside(folder, n).is_file()]


def _weight_map(folder: Path, name: str) -> dict[str, str]:
    path = inside(folder, name)
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        damaged(folder / name, "has no weight_map from tensor names to files")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{folder / name}: {shown(tensor)} is in {shown(file)}: only .safetensors are read")
    return weight_map


def _way_to_weights(listing: list[str], pickles: list[str]) -> str:
    if "adapter_model.safetensors" in listing:
        return ", only those of an adapter: merge it into its base model first"
    if any(n.startswith("consolidated") for n in listing):
        return " in Hugging Face's form, only consolidated ones: convert them with transformers first"
    if pickles:
        return (
            f", only {pickles[0]}, a kind that can run code when read: convert it where you trust it, by python -c "
            "\"from transformers import AutoModelForCausalLM as M; M.from_pretrained('OLD').save_pretrained('NEW')\""
        )
    return ": check the path"
