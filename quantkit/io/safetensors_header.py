"""Untrusted bytes in, checked facts out: safetensors headers, JSON files, paths named by an index, config keys.

Everything here runs before a library sees the file (RELIABILITY 1.5, 1.6 and 2): sizes are compared with the file
before anything is allocated, JSON has one meaning only, and no path leads out of the model's folder. A safetensors
file is an 8-byte length, a JSON header and the tensors' bytes; `tensorfile` is the writing side of the same format.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch

from quantkit.errors import CheckpointError
from quantkit.io import files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADER_LIMIT = 100 * 2**20
TENSORS_LIMIT = 10**6
NAME_LIMIT = 512
RANK_LIMIT = 8
DEPTH_LIMIT = 64

AGAIN = "download it again"

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Beside weights of ours: how they were made, ready for `quantkit run`.
RECIPE = "quantkit_recipe.yaml"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: What else of a source folder goes along with the weights: data only, never code or pickles, no old model card.
COMPANIONS = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map*", "added_tokens*"),
    *("chat_template*", "additional_chat_templates/*.jinja", "generation_config.json", "*processor_config.json"),
    *("license*", "notice*", "use_policy*", RECIPE),
)
DATA_SUFFIXES = ("", ".yaml", ".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor; `start` and `end` are offsets of its bytes in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors of a safetensors file in file order, and its metadata.

    CheckpointError for anything but a regular file whose header is well formed and covers the whole file: known
    dtypes, ranks up to 8, byte ranges of the right size that follow each other without gaps from the header's end to
    the file's end, no name twice, no name that is not printable.
    """
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 10:
            _bad(path, f"is {size} bytes long and no safetensors file")
        length = int.from_bytes(files.read_exactly(file, 0, 8, path).numpy().tobytes(), "little")
        if length > HEADER_LIMIT or length > size - 8:
            _bad(path, f"states a header of {length} bytes, it has {size} and the limit is {HEADER_LIMIT}")
        header = files.read_exactly(file, 8, length, path).numpy().tobytes()
    return parse_header(header, size - 8 - length, path)


def parse_header(header: bytes, data_bytes: int, path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return what `read_header` does, of a header's bytes in front of `data_bytes` bytes; `path` is for the errors."""
    entries = _parse(header, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _bad(path, "has __metadata__ that is not text")
    if len(entries) > TENSORS_LIMIT:
        _bad(path, f"lists {len(entries)} tensors, the limit is {TENSORS_LIMIT}")
    first = 8 + len(header)
    tensors = [(name, _tensor_info(name, entry, first, path)) for name, entry in entries.items()]
    tensors.sort(key=lambda item: (item[1].start, item[1].end))
    end = first
    for name, info in tensors:
        if info.start != end:
            _bad(path, f"has bytes of {shown(name)} at {info.start}, where {end} is due")
        end = info.end
    if end != first + data_bytes:
        _bad(path, f"should end at byte {end} and ends at {first + data_bytes}")
    return dict(tensors), metadata


def _tensor_info(name: str, entry: Any, first: int, path: Path) -> TensorInfo:
    if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
        _bad(path, f"has a tensor name that is empty, too long or not printable: {shown(name)}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _bad(path, f"does not say dtype, shape and data_offsets of {shown(name)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {shown(name)} has dtype {shown(dtype)}: quantkit reads {', '.join(DTYPES)}, convert it first"
        )
    if not _sizes(shape) or len(shape) > RANK_LIMIT:
        _bad(path, f"gives {shown(name)} the shape {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2:
        _bad(path, f"gives {shown(name)} the byte range {shown(offsets)}")
    size = DTYPES[dtype].itemsize
    for n in shape:
        size *= n
    if offsets[1] - offsets[0] != size:
        _bad(path, f"gives {shown(name)} {offsets[1] - offsets[0]} bytes, {dtype} {shape} has {size}")
    return TensorInfo(DTYPES[dtype], tuple(shape), first + offsets[0], first + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def load_json(path: Path, limit: int = 100 * 2**20) -> dict[str, Any]:
    """Return the object of a JSON file; CheckpointError if it is larger than `limit` or can be read in two ways.

    Refused: other encodings than UTF-8, duplicate keys, NaN and infinite numbers, integers past 64 bits, nesting
    deeper than 64, unpaired surrogates.
    """
    with files.guarded(path):
        real = path.resolve(strict=True)
    with files.open_regular(real) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes of JSON are more than the limit of {limit}")
        value = _parse(files.read_exactly(file, 0, size, path).numpy().tobytes(), path)
    for key, child in _entries(value, path):
        for text in (key, child):
            # Half of a surrogate pair is legal in JSON, and then cannot be printed or written again.
            if isinstance(text, str) and not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise CheckpointError(f"{path}: has an unpaired surrogate in {shown(text)}: {AGAIN}")
    return value


def dump_json(value: Mapping[str, Any]) -> bytes:
    """Return a JSON file's bytes; ValueError for NaN and infinity, which `load_json` would not read back."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    def number(text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"the number {text[:20]} is too large")
        return value

    def integer(text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
            raise ValueError(f"the number {text[:20]} is too large")
        return int(text)

    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {shown(key)} is there twice")
            found[key] = value
        return found

    try:
        value = json.loads(
            data.decode(), object_pairs_hook=unique, parse_float=number, parse_int=integer, parse_constant=constant
        )
    except RecursionError:
        raise CheckpointError(f"{path}: JSON nested deeper than {DEPTH_LIMIT}: {AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not the JSON it should be ({error}): {AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object: {AGAIN}")
    return value


def _entries(value: Any, path: Path, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all that a JSON value holds at any depth; list entries have the key ""."""
    if depth > DEPTH_LIMIT:
        raise CheckpointError(f"{path}: JSON nested deeper than {DEPTH_LIMIT}: {AGAIN}")
    children = value.items() if isinstance(value, dict) else (("", v) for v in value) if isinstance(value, list) else ()
    for key, child in children:
        yield key, child
        if isinstance(child, (dict, list)):
            yield from _entries(child, path, depth + 1)


def check_config(config: dict[str, Any], path: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config whose keys, at any depth, make transformers load code (RELIABILITY 1.6).

    These are `auto_map` and `trust_remote_code`, unless the user trusts the model's code, and always what names an
    attention or expert implementation (a kernel from elsewhere); true, false and null in the latter name nothing.
    """
    for key, value in _entries(config, path):
        if key in ("auto_map", "trust_remote_code") and not trust_remote_code:
            raise CheckpointError(
                f"{path}: {key} asks to run code that comes with the model: add --trust-remote-code if you trust it, "
                "or remove the key if the model works without"
            )
        implementation = key.lstrip("_").startswith(("attn_implementation", "experts_implementation"))
        if implementation and not (value is None or isinstance(value, bool)):
            raise CheckpointError(f"{path}: {shown(key)} can make a library load foreign code: remove the key")


def inside(folder: Path, name: Any) -> Path:
    """Return the real path of the file `name` of a model folder; CheckpointError if it is missing or leads outside.

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
    """Return the weight files of a model folder in order, and the index's tensor -> file, None without an index.

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
    """Return the names of the files that go along with a folder's weights; CheckpointError for a link out of it."""
    with files.guarded(folder):
        listing = [p.relative_to(folder).as_posix() for p in (*folder.glob("*"), *folder.glob("*/*.jinja"))]
    names = (n for n in sorted(listing) if any(fnmatch(n.lower(), pattern) for pattern in COMPANIONS))
    return [n for n in names if Path(n).suffix.lower() in DATA_SUFFIXES and inside(folder, n).is_file()]


def _weight_map(folder: Path, name: str) -> dict[str, str]:
    path = inside(folder, name)
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _bad(folder / name, "has no weight_map from tensor names to files")
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


_SHORT = reprlib.Repr()
_SHORT.maxstring = 100
_SHORT.maxother = 100


def shown(value: Any) -> str:
    """Return an untrusted value as one short printable line."""
    return _SHORT.repr(value)


def _bad(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}: {AGAIN}")
