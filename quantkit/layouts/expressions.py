"""Regular expressions of unknown origin, matched against names of modules in bounded time.

Configs and recipes are written by strangers, and `re` has no limit: `(a+)+$` takes hours on one
name. The engine here is `regex`, which transformers requires too: it has the syntax of `re`, and a
limit of time. An engine without backtracking would refuse lookahead. Published configs use it, and
so do our own compressed-tensors configs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import regex

from quantkit.errors import CheckpointError, LayoutError

T = TypeVar("T")

#: The most seconds of processor time for one match, and for all matches of one config.
SECONDS, SECONDS_IN_ALL = 1.0, 20.0
#: The most patterns of a config, the most characters of a pattern, and of all patterns together.
#: Compiling takes time too.
MOST, LONGEST, LONGEST_IN_ALL = 10_000, 10_000, 2**20
#: Parts that `regex` reads as more than `re` does: named classes in a set, and braces that do not
#: count.
_UNLIKE = re.compile(r"\[:\^?\w+:\]|(?<!\\)\{(?!\d*,?\d*\})[^{}]*\}")


@lru_cache(maxsize=2**15)
def compiled(text: str) -> Any:
    """Compile a regular expression; ValueError if it is none, is too long, or has another meaning
    elsewhere.
    """
    if len(text) > LONGEST:
        raise ValueError(f"its {len(text)} characters are more than {LONGEST}")
    try:
        re.compile(text)  # which other readers use
        if unlike := _UNLIKE.search(text):
            raise ValueError(f"{unlike[0]} means different things to different readers")
        return regex.compile(text)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def matches(text: str, name: str, seconds: float = SECONDS) -> bool:
    """Return True if a regular expression matches a whole name; CheckpointError if that takes more
    than `seconds`.

    ValueError as for `compiled`.
    """
    try:
        return compiled(text).fullmatch(name, timeout=seconds) is not None
    except (TimeoutError, MemoryError) as error:
        raise CheckpointError(
            f"the pattern {text!r:.80} takes too long on the name {name!r:.80}",
            "write it without repetitions inside repetitions",
            "write the names in full",
        ) from error


def check_amount(patterns: Iterable[str]) -> None:
    """Raise CheckpointError for more patterns than can be compiled in seconds; names in full do not
    count.
    """
    sizes = [len(pattern) for pattern in patterns if literal(pattern) is None]
    if len(sizes) > MOST or sum(sizes) > LONGEST_IN_ALL:
        raise CheckpointError(
            f"{len(sizes)} patterns of {sum(sizes)} characters in the quantization config, the "
            f"most are {MOST} "
            f"of {LONGEST_IN_ALL}",
            "write fewer that match more, or names in full",
        )


def literal(text: str) -> str | None:
    """Give the only name that the pattern `text` matches, if it is `re.escape` of a name; else
    None.
    """
    name = re.sub(r"\\(.)", r"\1", text)
    return name if re.escape(name) == text else None


def pattern(text: str) -> str:
    """Return `text` if it is a regular expression; raise CheckpointError otherwise."""
    try:
        if literal(text) is None:
            compiled(text)
    except ValueError as error:
        raise CheckpointError(
            f"{text!r:.80} in the quantization config is no regular expression ({error!s:.80})",
            "mend it",
        ) from error
    return text


def is_pattern(text: str) -> bool:
    """Return True if `text` is a regular expression that quantkit matches."""
    try:
        pattern(text)
    except CheckpointError:
        return False
    return True


def anchored(text: str) -> str:
    """Wrap a pattern so that it matches to the end of a name; raise LayoutError if it cannot be
    embedded.
    """
    inner = f"(?:{text})$"
    if literal(text) is None and not (is_pattern(text) and is_pattern(inner)):
        raise LayoutError(
            f"override {text!r:.80} cannot stand in a config", "write it without flags at its start"
        )
    return inner


class Patterns(Generic[T]):
    """Find the value of the first of several patterns that matches a name, else a default.

    All names together have `SECONDS_IN_ALL`.
    """

    def __init__(self, default: T, values: Sequence[tuple[str, T]]) -> None:
        self._default, self._values = default, values
        self._names: dict[str, int] = {}
        self._others: list[tuple[int, str]] = []
        for i, (pattern, _) in enumerate(values):
            if (name := literal(pattern)) is None:
                self._others.append((i, pattern))
            else:
                self._names.setdefault(name, i)
        self._found: dict[str, T] = {}
        self._left = SECONDS_IN_ALL

    def of(self, name: str) -> T:
        """Give the value of a whole name. CheckpointError if matching takes too long."""
        if name not in self._found:
            place = self._search(name)
            self._found[name] = self._default if place is None else self._values[place][1]
        return self._found[name]

    def _search(self, name: str) -> int | None:
        exact = self._names.get(name)
        for i, pattern in self._others:
            if exact is not None and exact < i:
                break
            started = time.thread_time()
            found = matches(pattern, name, max(1e-3, min(SECONDS, self._left)))
            self._left -= time.thread_time() - started
            if found:
                return i
        return exact
