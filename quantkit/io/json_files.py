"""JSON files of unknown origin, read in exactly one way or refused (RELIABILITY 1.6)."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import CheckpointError
from quantkit.io import files

DEPTH_LIMIT = 64
AGAIN = "download it again"
#: Numbers that JSON lacks. A config.json has them bare, as Python writes them, or as transformers
#: does, behind a tag.
SPECIAL_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
FLOAT_TAG = "__float__"

#: The largest JSON file that is read.
MOST_BYTES = 100 * 2**20
_SHORT = reprlib.Repr()
_SHORT.maxstring = 100
_SHORT.maxother = 100


def load_json(path: Path, *, special_floats: bool = False) -> dict[str, Any]:
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
        return parse(
            files.read_exactly(file, 0, size, path).numpy().tobytes(), path, special_floats
        )


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


def parse(data: bytes, path: Path, special_floats: bool = False) -> dict[str, Any]:
    """Parse the bytes of a JSON object. Raises CheckpointError, naming `path`, as
    `load_json` does.
    """

    def number(text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"the number {text[:20]} is too large")
        return value

    def integer(text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
            raise ValueError(f"the number {text[:20]} is too large")
        return int(text)

    def constant(text: str) -> float:
        if not special_floats:
            raise ValueError(f"{text} is not JSON")
        return SPECIAL_FLOATS[text]

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
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


def entries(value: Any, path: Path, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all that a JSON value holds at any depth; list entries have the key
    "".
    """
    if depth > DEPTH_LIMIT:
        raise CheckpointError(f"JSON nested deeper than {DEPTH_LIMIT}", AGAIN, subject=path)
    children = (
        value.items()
        if isinstance(value, dict)
        else (("", v) for v in value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield key, child
        if isinstance(child, (dict, list)):
            yield from entries(child, path, depth + 1)


def shown(value: Any) -> str:
    """Format an untrusted value as one short printable line."""
    return _SHORT.repr(value)


def damaged(path: Path, problem: str) -> NoReturn:
    """Raise CheckpointError for a file that was damaged on its way."""
    raise CheckpointError(problem, AGAIN, subject=path)
