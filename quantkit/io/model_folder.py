"""Which files of a model folder are read, and which go along with new weights (RELIABILITY 2)."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from quantkit.errors import CheckpointError, Option, Words, printable
from quantkit.io import files
from quantkit.io.json_files import AGAIN, damaged, load_json, shown
from quantkit.io.safetensors_files import NAME_LIMIT

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Beside weights of ours: how they were made, ready for `quantkit quantize --recipe`.
RECIPE = "quantkit_recipe.yaml"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: A folder that transformers reads chat templates from.
TEMPLATES = "additional_chat_templates"
#: Hashes of a source's files, which do not apply to an output.
SUMS = "SHA256SUMS"
#: Files beside config.json in which early folders state their quantization -> method, and a key
#: that identifies it.
SIDE_FILES = {
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", "w_bit"),
    "hf_quant_config.json": ("modelopt", None),
}
#: Files that an output replaces with its own, in lower case.
REPLACED = (
    "config.json",
    "readme.md",
    "quantkit_report.json",
    "verify.json",
    SUMS.lower(),
    *SIDE_FILES,
)
#: Endings of the files of tokenizers, configs and processors, and of cards and licences.
_OF_MODELS = (
    *(".bpe", ".codes", ".json", ".md", ".model", ".spm", ".tiktoken", ".tokenizer"),
    *(".tsv", ".txt", ".vocab", ".yaml", ".yml"),
)
_OF_OTHERS = (
    *("", ".csv", ".jinja", ".jsonl", ".pdf", ".rst", ".toml", ".xml"),
    *(".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp"),
)
#: Endings of the files that go along with new weights: data only, never pickles.
DATA_SUFFIXES = (*_OF_MODELS, *_OF_OTHERS)
_TERMS = ("license*", "notice*", "use_policy*")
#: Tokenizers of Mistral's own format have a version after their ending, like `tokenizer.model.v3`.
VERSIONED = re.compile(r"tokenizer\.model\.v\w+")
#: Describes an adapter. With PEFT, transformers opens the base model that the adapter names, and
#: ignores the weights beside it.
ADAPTER = "adapter_config.json"
#: Describe weight files that are left out: of an adapter, or in Mistral's own format.
FOREIGN = (ADAPTER, "params.json")
#: The most bytes of a model card that are read for its front matter.
CARD_LIMIT = 2**16
#: The most bytes of a file that goes along, unless it belongs to a tokenizer.
SMALL = 64 * 2**20
TOKENIZERS = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "tekken.json")
#: Weights that are not read; those of safetensors may lie in a folder of their own.
FOREIGN_WEIGHTS = (".onnx", ".h5", ".msgpack", ".nemo", ".npz", ".safetensors")
#: Where older models of images and text keep the chat template.
PROCESSOR_TEMPLATE = "chat_template.json"
#: Where the hub's cache keeps the repository ORG/NAME.
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def downloaded(code: bool) -> tuple[list[str], list[str]]:
    """List the patterns of the files that are downloaded of a hub repository, and of exceptions.

    These are the weights and the data at its top, chat templates and, with `code`, Python files.
    """
    endings = ("*.safetensors", *(f"*{ending}" for ending in _OF_MODELS))
    terms = (case(name) for name in _TERMS for case in (str.lower, str.upper, str.title))
    wanted = [*endings, "*.jinja", "tokenizer.model.v*", *terms, *(["*.py"] if code else [])]
    return wanted, ["consolidated*", *(f"*/{pattern}" for pattern in endings)]


def has_weights(folder: Path) -> bool:
    """Return True if a folder has safetensors weights, and all files that an index names."""
    folder = Path(os.path.realpath(folder))
    names = set(os.listdir(folder))
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    needed = {file for name in indexes for file in _weight_map(folder, name).values()}
    return needed <= names and any(name.endswith(".safetensors") for name in names)


def names_code(folder: Path) -> list[str]:
    """List the files of a tokenizer or processor that name Python code. `folder` is a real path."""
    names = (n for n in opened(folder) if n.endswith("config.json") and n != "config.json")
    return [name for name in names if b'"auto_map"' in (folder / name).read_bytes()]


def require_code(folder: Path) -> None:
    """Raise CheckpointError if a file of a tokenizer or processor names Python code of the folder
    that is not there. `folder` is a real path.
    """
    for name in names_code(folder):
        stated = json.loads((folder / name).read_text(encoding="utf-8"))
        for module in re.findall(r'"([\w.]+)\.\w+"', json.dumps(stated.get("auto_map"))):
            if not (folder / f"{module}.py").is_file():
                raise CheckpointError(
                    f"{name} names code in {module}.py, which is missing",
                    "fetch the Python files of the model too",
                    subject=folder,
                )


def untrusted(name: str) -> Words:
    """Say that the code that a file of a model folder names is not used."""
    return Words(
        f"{name} asks to run code that comes with the model, which is left out: add",
        Option("trust_remote_code", True),
        "if you trust it",
    )


def has_chat_template(folder: Path) -> bool:
    """Return True if the files of a tokenizer or processor hold a chat template, of several one
    that is the default.
    """
    for name in ("tokenizer_config.json", PROCESSOR_TEMPLATE):
        with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template")
            if isinstance(found, list):
                found = [each for each in found if each["name"] == "default"]
            if found:
                return True
    return (folder / "chat_template.jinja").is_file()


def inside(folder: Path, name: Any) -> Path:
    """Resolve the file `name` of a model folder; CheckpointError if it is missing or leads outside.

    Inside is the folder itself and, for a snapshot in the hub's cache, the `blobs` folder of the
    same repository (RELIABILITY 2). `folder` is a real path.
    """
    plain = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= NAME_LIMIT
        or not name.isprintable()
        or "\\" in name
    ):
        raise CheckpointError(f"{shown(name)} is not a file name", subject=folder)
    if plain.is_absolute() or ".." in plain.parts or str(plain) != name:
        raise CheckpointError(
            f"{shown(name)} names a file outside the model's folder",
            "download it again",
            subject=folder,
        )
    try:
        real = (folder / plain).resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{shown(name)} is missing", AGAIN, subject=folder) from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{shown(name)} cannot be opened ({shown(str(error))})", subject=folder
        ) from None
    roots = [folder] + (
        [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    )
    if not any(root in real.parents for root in roots):
        raise CheckpointError(
            f"{shown(name)} is a link out of the model's folder, which is not followed",
            "put the file itself there",
            subject=folder,
        )
    return real


def require_inside(folder: Path, listing: Iterable[str]) -> None:
    """Raise CheckpointError if a file in a model folder leads outside, or is a pipe or a device.

    Libraries open files by names of their own: tokenizers, chat templates, generation_config.json.
    So every name in the folder is checked before they get it. `folder` is a real path, `listing`
    has its names. Hidden files are not read.
    """
    for name in _with_templates(folder, listing):
        path = folder / name
        data = PurePosixPath(name.lower()).suffix in DATA_SUFFIXES and (
            name == TEMPLATES or not path.is_dir()
        )
        if name.startswith(".") or not data or not path.exists():  # a link to nothing gives nothing
            continue
        real = inside(folder, name) if path.is_symlink() or TEMPLATES in path.parts else path
        if _is_opened(name) and not (real.is_file() or real.is_dir()):
            raise CheckpointError(f"{shown(name)} is no regular file", "remove it", subject=folder)
        if _is_opened(name) and real.is_file():
            files.open_regular(real).close()  # which refuses a Git LFS pointer


def opened(folder: Path) -> list[str]:
    """List the non-weight files that libraries open by fixed names. `folder` is a real path."""
    with files.guarded(folder):
        names = _with_templates(folder, sorted(os.listdir(folder)))
        return [name for name in names if _is_opened(name) and (folder / name).is_file()]


def _with_templates(folder: Path, listing: Iterable[str]) -> list[str]:
    names = list(listing)
    if TEMPLATES in names and inside(folder, TEMPLATES).is_dir():
        names += [f"{TEMPLATES}/{name}" for name in sorted(os.listdir(folder / TEMPLATES))]
    return names


def _is_opened(name: str) -> bool:
    return name.endswith((".json", ".jinja")) or _is_of_tokenizer(name)


def _is_of_tokenizer(name: str) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in TOKENIZERS)


def shards(
    folder: Path, listing: list[str], notices: list[str]
) -> tuple[list[str], dict[str, str] | None]:
    """List the weight files of a model folder in order, and the index's tensor -> file, None
    without an index.

    `listing` has the folder's file names, sorted; `notices` name files left out. transformers reads
    the index of its own name, or a single file of weights beside an index without its shards.
    CheckpointError unless there is exactly one reading of the folder (RELIABILITY 2).
    """
    found = [
        n
        for n in listing
        if n.endswith(".safetensors") and not n.startswith(("consolidated", "adapter_"))
    ]
    indexes = [n for n in listing if n.endswith(".safetensors.index.json")]
    pickles = [n for n in listing if n.endswith(PICKLES)]
    if INDEX in indexes and len(indexes) > 1:
        notices.append(f"ignored: {', '.join(name for name in indexes if name != INDEX)}")
        indexes = [INDEX]
    if len(indexes) > 1:
        raise CheckpointError(
            f"has several indexes ({', '.join(indexes)})", "keep the right one", subject=folder
        )
    if not found and not indexes:
        raise CheckpointError(
            f"has no .safetensors weights{way_to_weights(listing)}", subject=folder
        )
    weight_map = None
    names = found
    if indexes:
        weight_map = _weight_map(folder, indexes[0])
        names = sorted(set(weight_map.values()))
        if SINGLE in found and names != [SINGLE]:
            if not set(names).isdisjoint(found):
                raise CheckpointError(
                    f"has both {SINGLE}, which transformers reads, and the files of {indexes[0]}, "
                    "which others read",
                    "remove the one that is out of date",
                    subject=folder,
                )
            notices.append(f"ignored: {indexes[0]}, whose files are not there")
            weight_map = None
    if weight_map is None and SINGLE in found:
        names = [SINGLE]
    if weight_map is None and (
        len(names) > 1 or re.search(r"-of-0*([2-9]|[1-9]\d+)\.safetensors$", names[0])
    ):
        raise CheckpointError(f"has shards ({names[0]} ...) and no {INDEX}", AGAIN, subject=folder)
    if unfinished := sorted({f"{n}.aria2" for n in names}.intersection(listing)):
        raise CheckpointError(
            f"{unfinished[0]} says that a download has not ended", "finish it", subject=folder
        )
    others = (*PICKLES, ".safetensors", ".gguf")
    left = [n for n in (*pickles, *listing) if n.endswith(others) and n not in names]
    if left:
        notices.append(f"ignored: {', '.join(dict.fromkeys(left))}")
    if any(name.lower() == ADAPTER for name in listing):
        notices.append(
            f"{ADAPTER}: an adapter that is not merged into the weights is left out; merge it to "
            "have it"
        )
    return names, weight_map


def companions(
    folder: Path, weights: Collection[str] = (), code: bool = False
) -> tuple[list[str], list[str]]:
    """Sort the files that are no `weights` into those that go along and those left
    out. Raises CheckpointError for a link out of the folder.

    Every small file of data at the top goes along, and with `code` the Python files. The caller
    gives `code` if the user trusts them. Hidden files belong to the repository, not to the model.
    """
    suffixes = (*DATA_SUFFIXES, ".py") if code else DATA_SUFFIXES
    with files.guarded(folder):
        entries = {p.name: p.is_dir() for p in folder.iterdir() if not p.name.startswith(".")}
        templates = [p.relative_to(folder).as_posix() for p in folder.glob(f"{TEMPLATES}/*.jinja")]
    names, left_out = [*templates], []
    for name, is_folder in sorted(entries.items()):
        lower = name.lower()
        if lower in REPLACED or lower.endswith(".index.json") or name in (*weights, TEMPLATES):
            continue
        data = PurePosixPath(lower).suffix in suffixes or VERSIONED.fullmatch(lower)
        if (
            is_folder
            or not data
            or lower in FOREIGN
            or not name.isprintable()
            or len(name) > NAME_LIMIT
        ):
            left_out.append(f"{name}/" if is_folder else name)
            continue
        real = inside(folder, name)
        with files.guarded(real):
            found = real.stat()
        whole = _is_of_tokenizer(name) or found.st_size <= SMALL
        whole = whole and stat.S_ISREG(found.st_mode) and not files.is_pointer(real)
        (names if whole else left_out).append(name)
    for name in templates:
        inside(folder, name)
    return sorted(names), [printable(name) for name in left_out]


def is_local(name: str, folder: Path) -> bool:
    """Return True unless `name` has the form ORG/NAME of the hub and leads to no folder from above
    `folder`.
    """
    return HUB_ID.fullmatch(name) is None or any(
        (above / name).exists() for above in folder.parents
    )


def cached_id(folder: Path) -> str | None:
    """Return the hub id of a snapshot in the hub's cache, None for any other folder."""
    found = (
        CACHED.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    )
    return f"{found[1]}/{found[2]}" if found else None


def front_matter(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Read the YAML in front of a source's model card, `{}` if it has none, and a notice if it
    cannot be read.

    CheckpointError for a link out of the folder.
    """
    if not os.path.lexists(folder / "README.md"):
        return {}, None
    with files.open_regular(inside(folder, "README.md")) as file, files.guarded(folder):
        text = file.read(CARD_LIMIT).decode("utf-8-sig", errors="replace")
    found = re.match(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", text, re.DOTALL | re.MULTILINE)
    if found is None:
        return {}, None
    try:
        stated = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        return (
            {},
            "the front matter of the source's README.md is not YAML: its licence and tags were not "
            "taken over",
        )
    return stated, None


def _weight_map(folder: Path, name: str) -> dict[str, str]:
    weight_map = load_json(inside(folder, name)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        damaged(folder / name, "has no weight_map from tensor names to files")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            kinds = [f"*{ending}" for ending in PICKLES if str(file).endswith(ending)]
            raise CheckpointError(
                f"{shown(tensor)} is in {shown(file)}: no .safetensors weights"
                f"{way_to_weights(kinds)}",
                subject=folder / name,
            )
    return {tensor: str(PurePosixPath(file)) for tensor, file in weight_map.items()}


def way_to_weights(listing: Iterable[str], model: str = "OLD") -> str:
    """Say in which other form the files of a model hold weights, and what helps.

    `listing` has the names of a folder, or the paths of the hub's repository `model`.
    """
    names = list(listing)
    pickles = [n for n in names if n.endswith(".bin") and "/" not in n]  # of transformers
    ggufs = [n for n in names if n.endswith(".gguf")]
    others = [n for n in names if n.endswith((*FOREIGN_WEIGHTS, *PICKLES))]
    if any(n.startswith("adapter_model.") for n in names):
        return ", only those of an adapter: merge it into its base model first"
    if any(n.startswith("consolidated") for n in names):
        return (
            " in Hugging Face's form, only consolidated ones: convert them with transformers first"
        )
    if any(n.endswith(".safetensors.index.json") and "/" not in n for n in names):
        return ", or not all that its index names: give another model"
    if pickles:
        return (
            f", only {pickles[0]}, a kind that can run code when read: convert it where you trust "
            "it, by python -c "
            '"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
            f"[c.from_pretrained({model!r}).save_pretrained('NEW') for c in (M, T)]\""
        )
    if ggufs:
        return f", only GGUF files: give one, as {model}:{min(ggufs)}"
    if others:
        return f" at its top, only {others[0]}: give a model as transformers saves it"
    return ": check the path" if model == "OLD" else ": give another model"
