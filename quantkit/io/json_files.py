"""JSON files of unknown origin, read in exactly one way or refused (RELIABILITY 1.6).

Entries of a model's config that could run code or fill the memory are refused before a library
reads it.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import CheckpointError, Option, Words
from quantkit.io import files
from quantkit.names import Json

DEPTH_LIMIT = 64
AGAIN = "download it again"
#: Numbers that JSON lacks. A config.json has them as Python's bare words, or as transformers'
#: tagged values.
SPECIAL_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
FLOAT_TAG = "__float__"

#: The largest JSON file that is read.
MOST_BYTES = 100 * 2**20
_SHORT = reprlib.Repr()
_SHORT.maxstring = 100
_SHORT.maxother = 100


def load_json(path: Path, *, special_floats: bool = False) -> Json:
    """Read the object of a JSON file; CheckpointError if it is larger than `MOST_BYTES` or
    ambiguous.

    Refused: other encodings than UTF-8, duplicate keys, numbers that are too large, nesting deeper
    than 64, unpaired surrogates, and the words NaN and Infinity unless `special_floats` allows
    them.
    """
    with files.guarded(path):
        real = path.resolve(strict=True)
    with files.open_regular(real) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise CheckpointError(
                f"{size} bytes of JSON are more than the limit of {MOST_BYTES}", subject=path
            )
        data = files.read_exactly(file, 0, size, path).numpy().tobytes()
    require_no_mark(data, path)
    return parse(data, path, special_floats)


def dump_json(value: Mapping[str, Any], *, special_floats: bool = False) -> bytes:
    """Write JSON to bytes; ValueError for NaN and infinity unless `special_floats` allows them, as
    `load_json`.
    """
    return (
        json.dumps(value, indent=2, ensure_ascii=False, allow_nan=special_floats).encode() + b"\n"
    )


def without_folders(value: Any, names: Mapping[Path, str]) -> Any:
    """Copy a JSON value with the names of folders in the place of their paths: it is read on other
    machines.
    """
    if isinstance(value, str):
        for path, name in names.items():
            value = value.replace(str(path), name) if os.sep in str(path) else value
        return value
    if isinstance(value, dict):
        return {key: without_folders(child, names) for key, child in value.items()}
    return [without_folders(child, names) for child in value] if isinstance(value, list) else value


def decode_floats(value: Any) -> Any:
    """Copy a JSON value with numbers in the place of transformers' tags, such as `{"__float__":
    "Infinity"}`.
    """
    if isinstance(value, list):
        return list(map(decode_floats, value))
    if not isinstance(value, dict):
        return value
    tagged = value.get(FLOAT_TAG) if len(value) == 1 else None
    if isinstance(tagged, str) and tagged in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[tagged]
    return {key: decode_floats(child) for key, child in value.items()}


def parse(data: bytes, path: Path, special_floats: bool = False) -> Json:
    """Parse the bytes of a JSON object. Raises CheckpointError, naming `path`, as
    `load_json` does.
    """

    def number(text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"the number {text[:20]} is too large")
        return value

    def integer(text: str) -> float:
        if text == "-0":  # other readers take it for a float
            return -0.0
        if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
            raise ValueError(f"the number {text[:20]} is too large")
        return int(text)

    def constant(text: str) -> float:
        if not special_floats:
            raise ValueError(f"{text} is not JSON")
        return SPECIAL_FLOATS[text]

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        found: Json = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {shown(key)} is there twice")
            found[key] = value
        return found

    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=unique,
            parse_float=number,
            parse_int=integer,
            parse_constant=constant,
        )
    except RecursionError:
        raise CheckpointError(
            f"JSON nested deeper than {DEPTH_LIMIT}", AGAIN, subject=path
        ) from None
    except ValueError as error:
        raise CheckpointError(f"not the JSON it should be ({error})", AGAIN, subject=path) from None
    if not isinstance(value, dict):
        raise CheckpointError("holds no JSON object", AGAIN, subject=path)
    for key, child in entries(value, path):
        for text in (key, child):
            # Half of a surrogate pair is legal in JSON, and then cannot be printed or written
            # again.
            if (
                isinstance(text, str)
                and not text.isascii()
                and any("\ud800" <= c <= "\udfff" for c in text)
            ):
                raise CheckpointError(
                    f"has an unpaired surrogate in {shown(text)}", AGAIN, subject=path
                )
    return value


def require_no_mark(data: bytes, path: Path) -> None:
    """Raise CheckpointError for a text that begins with a byte order mark, as PowerShell writes it:
    transformers reads UTF-8 without one.
    """
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise CheckpointError(
            "begins with a byte order mark, with which transformers cannot read it",
            "save it as UTF-8 without one",
            subject=path,
        )


def entries(value: Any, path: Path, depth: int = 0, named: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all that a JSON value holds at any depth; entries of a list have the
    list's key.
    """
    if depth > DEPTH_LIMIT:
        raise CheckpointError(f"JSON nested deeper than {DEPTH_LIMIT}", AGAIN, subject=path)
    children = (
        ((str(key), v) for key, v in value.items())
        if isinstance(value, dict)
        else ((named, v) for v in value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield key, child
        if isinstance(child, (dict, list)):
            yield from entries(child, path, depth + 1, key)


def shown(value: Any) -> str:
    """Format an untrusted value as one short printable line."""
    return _SHORT.repr(value)


def damaged(path: Path, problem: str) -> NoReturn:
    """Raise CheckpointError for a file that was damaged on its way."""
    raise CheckpointError(problem, AGAIN, subject=path)


#: Keys of a config by their meaning: counts of layers, counts of smaller parts, sizes.
_LAYERS = re.compile(r"(layers?|blocks?|depths?|stages)$")
_PARTS = re.compile(r"(experts|heads?|groups?|labels|codebooks)$")
_SIZE = re.compile(r"(size|dims?|rank|width|embd|inner|model|ctx|positions|words)$|^d_")
#: Numbers by which a model divides, or that leave no token.
_POSITIVE = re.compile(r"(norm_?eps(ilon)?|max_position_embeddings|n_positions)$")
#: Numbers up to these are not compared with the weights: such a model is built in seconds.
_FREE_LAYERS, _FREE_PARTS, _FREE_SIZE = 1000, 2**16, 2**24


#: Names of code for a model that writes text, in an `auto_map`.
WRITERS = re.compile("AutoModelFor(CausalLM|Seq2SeqLM|SpeechSeq2Seq|ImageTextToText|MultimodalLM)")


def drop_auto_map(config: Json, trust_remote_code: bool = False) -> list[str]:
    """Remove each `auto_map` beside a model type that transformers has code for; return a notice
    for each.

    They stay if the user trusts the code, and there is some for the model itself: transformers
    refuses its own model with a config of other code.
    """
    named = config.get("auto_map")
    if trust_remote_code and isinstance(named, dict) and any(map(WRITERS.fullmatch, named)):
        return []
    objects = [
        config,
        *(child for _, child in entries(config, Path("config.json")) if isinstance(child, dict)),
    ]
    asking = [
        found
        for found in objects
        if "auto_map" in found and isinstance(found.get("model_type"), str)
    ]
    if not asking:
        return []
    from transformers import CONFIG_MAPPING

    known = [found for found in asking if found["model_type"] in CONFIG_MAPPING]
    for found in known:
        del found["auto_map"]
    return [
        f"auto_map is ignored: transformers has its own code for {shown(found['model_type'])}"
        for found in known
    ]


#: transformers' own implementations of attention and experts, which a config may name.
OWN_IMPLEMENTATIONS = re.compile(
    r"(paged\|)?(eager|sdpa|flex_attention|flash_attention_\d)"
    r"|(batched|grouped)_mm|deepgemm|sonicmoe"
)


def check_config(config: Json, path: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config whose keys, at any depth, make transformers load code (RELIABILITY 1.6).

    These are `auto_map` and `trust_remote_code`, unless the user trusts the model's code, and
    always the name of an attention or expert implementation that is not transformers' own. True,
    false and null name nothing; an object has a name for each part of the model.
    """
    for key, value in entries(config, path):
        if key in ("auto_map", "trust_remote_code") and not trust_remote_code:
            raise CheckpointError(
                f"{key} asks to run code that comes with the model",
                Words("add", Option("trust_remote_code", True), "if you trust it"),
                "remove the key if the model works without",
                subject=path,
            )
        implementation = key.lstrip("_").startswith(
            ("attn_implementation", "experts_implementation")
        )
        for named in value.values() if isinstance(value, dict) else (value,):
            own = isinstance(named, str) and OWN_IMPLEMENTATIONS.fullmatch(named)
            if implementation and not (own or named is None or isinstance(named, bool)):
                raise CheckpointError(
                    f"{shown(key)} is {shown(named)}, which can make a library load foreign code",
                    "name one of transformers' own, such as sdpa",
                    "remove the key",
                    subject=path,
                )
    for key, value in entries(config, path):
        if key == "model_type" and not (value is None or isinstance(value, str)):
            raise CheckpointError(
                f"model_type is {shown(value)}, and must be text",
                "fetch the folder again",
                subject=path,
            )


def check_sizes(config: Json, path: Path, tensors: int, nbytes: int) -> None:
    """Refuse counts and sizes that weight files of `tensors` tensors in `nbytes` bytes cannot have,
    and numbers of zero or less that must be positive.

    A library would build such a model before it compares any tensor, for hours or until memory is
    full.
    """
    for key, value in entries(config, path):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        most = _FREE_LAYERS if _LAYERS.search(key) else _FREE_PARTS if _PARTS.search(key) else None
        if most is not None and value > most + tensors:
            held = f"the weight files hold {tensors} tensors"
        elif _SIZE.search(key) and value > max(
            _FREE_SIZE, 8 * nbytes
        ):  # no weight has less than a bit
            held = f"the weight files hold {nbytes} bytes"
        elif value <= 0 and _POSITIVE.search(key):
            held = "must be above 0"
        else:
            continue
        raise CheckpointError(
            f"{shown(key)} is {value}, and {held}",
            "mend the entry",
            "fetch the folder again",
            subject=path,
        )
