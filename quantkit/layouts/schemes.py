"""`Schemes`: the scheme and the true shape of each linear of a checkpoint, as its configuration
states them; and the reading of that configuration, which is untrusted input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, UnsetType

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError
from quantkit.layouts.expressions import (
    Patterns,
    anchored,
    check_amount,
    is_pattern,
    literal,
    pattern,
)

S = TypeVar("S", bound=msgspec.Struct)
#: Columns of a group in a config, where -1 stands for one scale per row.
GroupSize = Annotated[int, Meta(ge=-1)]
#: The exceptions of a config: entries that differ, by a pattern of names.
Dynamic = dict[str, dict[str, Any] | None] | UnsetType | None
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
        return msgspec.convert(entries, kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        name = place.strip("`").removeprefix("$.")
        types = {field.encode_name: str(field.type) for field in msgspec.structs.fields(kind)}
        if choices := re.search(r"Literal\[(.*?)\]", types.get(name, "")):
            rule += f", quantkit reads {choices[1]}"
        where = where or "the quantization config"
        place = f"{name!r:.80} in {where}" if name else where
        raise CheckpointError(f"{place}: {rule[:1].lower()}{rule[1:]}", way_out) from error


def write_dynamic(
    overrides: Iterable[tuple[str, Scheme]], settings: Callable[[Scheme], dict[str, Any]]
) -> dict[str, dict[str, Any] | None]:
    """Make `dynamic`, the exceptions in a config; LayoutError for a pattern that cannot be
    embedded.

    A key is `+:pattern` for other settings, or `-:pattern` for dense linears. A pattern is matched
    from the start of a name, and the first that matches wins. Source: the documentation of
    GPTQModel; vLLM 0.26.0 reads humming's so too.
    """
    dynamic: dict[str, dict[str, Any] | None] = {}
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
