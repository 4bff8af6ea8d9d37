"""`Schemes`: the scheme and the true shape of each linear of a checkpoint, as its configuration
states them; and the reading of that configuration, which is untrusted input.

Strangers also write the regular expressions that name linears, in configs and in recipes. They are
matched in bounded time: `re` has no limit, and `(a+)+$` takes hours on one name. The engine here is
`regex`, which transformers requires too: it has the syntax of `re`, and a limit of time. An engine
without backtracking would refuse lookahead. Published configs use it, and so do our own
compressed-tensors configs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Generic, TypeVar

import regex
from msgspec import Meta, Struct, UnsetType, ValidationError, convert, structs

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError
from quantkit.names import Json

T = TypeVar("T")

#: The most seconds of processor time for one match, and for all matches of one config.
SECONDS, SECONDS_IN_ALL = 1.0, 20.0
#: The most patterns of a config, the most characters of a pattern, and of all patterns together.
#: Compiling takes time too.
MOST, LONGEST, LONGEST_IN_ALL = 10_000, 10_000, 2**20
#: Parts that readers do not read alike: named classes in a set, braces that do not count, and flags
#: behind the start, which Python 3.10 takes.
_UNLIKE = re.compile(r"\[:\^?\w+:\]|(?<!\\)\{(?!\d*,?\d*\})[^{}]*\}|(?<!\\)\(\?[aiLmsux]+\)")
_FLAGS_FIRST = re.compile(r"^(\(\?[aiLmsux]+\))+")


@lru_cache(maxsize=2**15)
def compiled(text: str) -> Any:
    """Compile a regular expression; ValueError if it is none, is too long, or has another meaning
    elsewhere.
    """
    if len(text) > LONGEST:
        raise ValueError(f"its {len(text)} characters are more than {LONGEST}")
    try:
        re.compile(text)  # which other readers use
        if unlike := _UNLIKE.search(_FLAGS_FIRST.sub("", text)):
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
            f"most are {MOST} of {LONGEST_IN_ALL}",
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


S = TypeVar("S", bound=Struct)
#: Columns of a group in a config, where -1 stands for one scale per row.
GroupSize = Annotated[int, Meta(ge=-1)]
#: The exceptions of a config: entries that differ, by a pattern of names.
Dynamic = dict[str, Json | None] | UnsetType | None
#: The last names of output heads.
HEADS = ("lm_head", "embed_out")
ANY_HEAD = rf"(?:.*\.)?(?:{'|'.join(HEADS)})"
#: The last names of token embeddings, which headers do not tell from linears.
EMBEDDINGS = (
    r"(?:.*\.)?"
    r"(?:embed_tokens(?:_per_layer)?|embed_in|embeddings|wte|word_embeddings|tok_embeddings|shared)"
)
#: The way out for weights of a method that is not read.
ORIGINAL = "give the original model, which the model card names as base_model"


@dataclass(frozen=True)
class Schemes:
    """The default scheme of a checkpoint's quantized linears, exceptions by module name, and the
    dense linears.

    `overrides` are (regular expression, scheme) pairs, matched against the whole module name; the
    first match wins. `ignore` lists the names of dense modules, or patterns `re:...`, as public
    readers expect them. `padded` are (module name, true shape `[n, k]`) pairs of linears stored
    larger, with zeros; only the `quantkit` key has them.
    """

    default: Scheme
    overrides: tuple[tuple[str, Scheme], ...] = ()
    ignore: tuple[str, ...] = ()
    padded: tuple[tuple[str, tuple[int, int]], ...] = ()

    def of(self, module: str) -> Scheme:
        """Give the scheme of the linear called `module`; CheckpointError if the patterns take too
        long.
        """
        return self._patterns.of(module)

    @cached_property
    def _patterns(self) -> Patterns[Scheme]:
        return Patterns(self.default, self.overrides)

    @property
    def quantizes_head(self) -> bool:
        """True if the output head is quantized too: `ignore` has none of the names that models give
        it.
        """
        return not any(map(is_head, self.ignore))


def is_head(module: str) -> bool:
    """Return True if a module has the name of an output head."""
    return module.rpartition(".")[2] in HEADS


def is_embedding(module: str) -> bool:
    """Return True if a module has the name of token embeddings."""
    return re.fullmatch(EMBEDDINGS, module) is not None


def key_of(module: str) -> str:
    """Return the key of a recipe that gives a module outside the blocks its scheme, by its name."""
    return "embeddings" if is_embedding(module) else "head" if is_head(module) else ""


def read(kind: type[S], entries: object, where: str = "", way_out: str = ORIGINAL) -> S:
    """Convert the entries of a config to a struct; CheckpointError names the entry that is wrong,
    and its rule.
    """
    try:
        return convert(entries, kind)
    except ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        name = place.strip("`").removeprefix("$.")
        types = {field.encode_name: str(field.type) for field in structs.fields(kind)}
        if choices := re.search(r"Literal\[(.*?)\]", types.get(name, "")):
            rule += f", quantkit reads {choices[1]}"
        where = where or "the quantization config"
        place = f"{name!r:.80} in {where}" if name else where
        raise CheckpointError(f"{place}: {rule[:1].lower()}{rule[1:]}", way_out) from error


def write_dynamic(
    overrides: Iterable[tuple[str, Scheme]], settings: Callable[[Scheme], Json]
) -> dict[str, Json | None]:
    """Make `dynamic`, the exceptions in a config; LayoutError for a pattern that cannot be
    embedded.

    A key is `+:pattern` for other settings, or `-:pattern` for dense linears. A pattern is matched
    from the start of a name, and the first that matches wins. Source: the documentation of
    GPTQModel; vLLM 0.26.0 reads humming's so too.
    """
    dynamic: dict[str, Json | None] = {}
    for text, scheme in overrides:
        dynamic.setdefault(f"+:^{anchored(text)}", settings(scheme))
    return dynamic


def read_dynamic(
    dynamic: Dynamic, scheme_of: Callable[[Mapping[str, Any]], Scheme]
) -> tuple[tuple[tuple[str, Scheme], ...], tuple[str, ...]]:
    """Read overrides and the entries for `ignore`; `scheme_of` reads the scheme that an exception's
    settings make of the default one.
    """
    overrides: list[tuple[str, Scheme]] = []
    ignore: list[str] = []
    starts = {key: key.removeprefix("+:").removeprefix("-:") for key in dynamic or ()}
    ours = {
        key: it[1]
        for key, start in starts.items()
        if (it := re.fullmatch(r"\^\(\?:(.*)\)\$", start))
    }
    check_amount((starts | ours).values())
    for key, changes in (dynamic or {}).items():
        own = ours.get(key)
        if own is None or not is_pattern(own):
            own = pattern(f"(?:{starts[key]}).*")
        if key.startswith("-:"):
            ignore.append(literal(own) or f"re:{own}")
        else:
            overrides.append((own, scheme_of(changes or {})))
    return tuple(overrides), tuple(ignore)
