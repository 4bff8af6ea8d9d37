"""Declare the keys of a recipe and the options of all commands: fields of dataclasses that say
everything about them.

The command line, the signatures of the API, the YAML file and its checks, the pages and the
identity of a run read these declarations. A new option is thus one field.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from quantkit.errors import FILE, Option, RecipeError, Setting, Words
from quantkit.names import Json, JsonView

#: An option of `--help`, one that `--help-all` lists, a key that is `--set KEY=VALUE` there (for
#: options of a run: an option), or a key of a recipe that has no keyword in Python.
Level = Literal["shown", "option", "all", "key"]
#: Levels of the keys that have an option of their own.
OPTIONS: tuple[Level, ...] = ("shown", "option")
#: Numbers with bounds.
Positive = Annotated[int, msgspec.Meta(ge=1)]
TwoOrMore = Annotated[int, msgspec.Meta(ge=2)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
#: Names of options in other tools, without dashes, and the options here that do the same: a command
#: names the first that it has.
FOREIGN: Mapping[str, tuple[Option, ...]] = {
    "bit bits wbits wbit nbits weightbits loadin4bit qtype quanttype quantization outtype scheme": (
        Setting("format", "int4"),
    ),
    "dataset datasets datasetname datasetpath data calibdataset text calib": (
        Setting("calib", FILE),
        Option("data", FILE),
    ),
    "seqlen seqlength sequencelength maxseqlen maxseqlength maxlength contextlength ctxsize "
    "nctx blocksize": (
        Setting("max_length", 2048),
        Option("window", 2048),
        Option("max_new_tokens", 64),
    ),
    "numsamples nsample limit": (
        Setting("samples", 128),
        Option("limit", 128),
        Option("tokens", 8192),
    ),
    "dtype torchdtype": (Setting("dense_dtype", "bfloat16"),),
    "reference ref base basemodel baseline original": (Option("against", Words("MODEL")),),
    "fewshot numfewshot nshot": (Option("shots", 5),),
    "n npredict ntokens tokens": (Option("max_new_tokens", 64),),
    "to target format": (Setting("layout", Words("LAYOUT")), Option("pair")),
    "prune sparsity ratio sparsityratio sparsitytype maskstructure": (Setting("prune", "2:4"),),
    "qgroupsize wgroup": (Setting("group_size", 128),),
    "zeropoint zeropoints asymmetric": (Setting("asym", True),),
    "symmetric": (Setting("asym", False),),
    "descact": (Setting("act_order", "static"),),
    "percdamp damppercent dampingfrac": (Setting("damp", 0.02),),
    "algorithm algo quantmethod": (Setting("method", "gptq"),),
    "ignore exclude modulestonotconvert": (Setting("skip", Words("REGEX")),),
    "savedir savepath savepretrained save exportpath dest": (Option("out", Words("OUT")),),
    "modelpath modelid modelname model pretrained": (Option("model"), Option("checkpoint")),
    "prompt input": (Option("prompt"),),
    "force": (Option("overwrite", True),),
    "gpu cuda usegpu": (Option("device", "cuda"),),
    "mode": (Setting("layout", Words("LAYOUT")),),
}


def same_elsewhere(word: str, known: Collection[str]) -> Option | None:
    """Find which of the `known` keywords does what an option of this name does in other tools."""
    bare = word.replace("-", "").replace("_", "").lower()
    for words, options in FOREIGN.items():
        if bare in words.split():
            return next((option for option in options if option.name in known), None)
    return None


@dataclass(frozen=True)
class Key:
    """One option, and how each surface spells it.

    `help` is a phrase for the command line. docs/recipes.md adds `more`, and in `when` the reason
    to change the key. `usual` describes a default that depends on other keys. `keyword` is the name
    in Python and of a flag, if it differs from the key's. `negated` says that the keyword is the
    opposite of the key. `form` is the type in a file, and `typed` the annotation of the keyword, if
    they differ from the field's. `metavar` stands for a value in help, and decides what a shell
    completes (`cli.options.VALUES`). A key that `may_lack` is left out of a file while it has its
    default. `pruning`: whether `prune` has the key too, or its type there. `choices` are the usual
    keys of the `module:variable` named by `table`: a program may have registered more there.
    `keys_of` fills in `path`, `type` and `default`, which is `...` for a key that has none.
    """

    help: str
    level: Level = "all"
    section: str = "Method"
    more: str = ""
    when: str = ""
    usual: str = ""
    keyword: str = ""
    negated: bool = False
    form: Any = None
    typed: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    table: str = ""
    may_lack: bool = False
    pruning: Any = False
    path: tuple[str, ...] = ()
    type: Any = None
    default: Any = ...

    @property
    def name(self) -> str:
        """The key as a recipe has it: `gptq.damp`."""
        return ".".join(self.path)

    @property
    def values(self) -> tuple[str, ...]:
        """The values to choose from; none if the key is free."""
        literals = [part for part in _parts(self.type) if get_origin(part) is Literal]
        return self.choices or tuple(value for part in literals for value in get_args(part))

    @property
    def known(self) -> Collection[str]:
        """The choices, including any that a program has registered."""
        module, _, variable = self.table.partition(":")
        return cast(
            "Collection[str]", getattr(import_module(module), variable) if module else self.choices
        )

    @property
    def number(self) -> type[int] | type[float] | None:
        """The kind of number that the key is; None for anything else."""
        bases = [
            get_args(part)[0] if get_origin(part) is Annotated else part
            for part in _parts(self.type)
        ]
        return next((base for base in bases if base in (int, float)), None)

    @property
    def bounds(self) -> msgspec.Meta | None:
        """The bounds of the number; None if it has none."""
        bounded = (part for part in _parts(self.type) if get_origin(part) is Annotated)
        return next((get_args(part)[1] for part in bounded), None)

    @property
    def kind(self) -> str:
        """The word for a value in help."""
        return (
            "true|false"
            if self.is_switch
            else {int: "N", float: "X"}.get(self.number or str, "TEXT")
        )

    @property
    def is_switch(self) -> bool:
        """Whether the key is on or off."""
        return bool in _parts(self.type)

    @property
    def annotation(self) -> str:
        """The type of the keyword, as Python source."""
        if self.typed:
            return self.typed
        named = {str(Any): "Any", str(NoneType): "None"}
        words = []
        for part in _parts(self.type):
            base = get_args(part)[0] if get_origin(part) is Annotated else part
            literals = ", ".join(f'"{value}"' for value in get_args(base))
            words.append(
                f"Literal[{literals}]"
                if get_origin(base) is Literal
                else named.get(str(base), base.__name__)
            )
        return " | ".join(words)

    @property
    def default_text(self) -> str:
        """The default, as help shows it."""
        if self.usual or self.default is ... or self.default is None:
            return self.usual
        value = (not self.default) if self.negated else self.default
        return shown(list(value) if isinstance(value, tuple) else value)

    @property
    def help_text(self) -> str:
        """The help and the default as one sentence."""
        return f"{self.help} [{self.default_text}]." if self.default_text else f"{self.help}."

    def read(self, value: Any, strict: bool = True, named: str = "") -> Any:
        """Convert a value of a file, or of a shell if not `strict`, to that of the field;
        RecipeError if it is none, with the name that the user gave, usually the key's.
        """
        named = named or self.name
        if value is False and "off" in self.values:
            value = "off"  # YAML reads an unquoted off as False
        if self.number is float and re.fullmatch(r"[-+]?(\d+[eE][-+]?\d+|\.\d+)", str(value)):
            value = float(value)  # YAML reads 1e-2 as a text, and JSON has no .5
        try:
            found = msgspec.convert(value, self.type, strict=strict)
            msgspec.json.encode(found)
        except UnicodeEncodeError:
            raise RecipeError(
                Words(named, f"is {value!r}, and the report is UTF-8"), "rename it"
            ) from None
        except (msgspec.ValidationError, OverflowError):
            with suppress(msgspec.ValidationError):  # as a file would have it
                value = value if strict else msgspec.convert(value, int | float, strict=False)
            raise RecipeError(Words(named, f"is {value!r}"), f"use {self.rule}") from None
        if self.choices and found is not None and found not in self.known:
            raise RecipeError(Words(named, f"is {value!r}"), f"use {self.rule}")
        return msgspec.to_builtins(found) if isinstance(found, dict) else found  # YAML reads dates

    @property
    def rule(self) -> str:
        """The values that the key takes, in words."""
        free = [part for part in _parts(self.type) if get_origin(part) is not Literal]
        words = [*map(_described, free if not self.choices else [])]
        named = (
            [f"one of {', '.join(self.values)}"]
            if len(self.values) > 1
            else [f"{v!r} in quotes" if ":" in v else v for v in self.values]
        )
        return " or ".join([*named, *filter(None, dict.fromkeys(words))])


def key(help: str, *, default: Any = MISSING, **about: Any) -> Any:
    """Declare a field that is an option; `about` has the other fields of `Key`."""
    return field(default=default, metadata={"key": Key(help, **about)})


def option(help: str, *, default: Any = MISSING, **about: Any) -> Any:
    """Declare a field that is an option which `--help` shows."""
    return key(help, default=default, level="shown", **about)


def section(help: str, kind: type, heading: str = "", pruning: bool = False) -> Any:
    """Declare a field with keys of its own, the fields of the dataclass `kind`.

    `heading` and `pruning` are for all of them.
    """
    return field(metadata={"section": (help, kind, heading, pruning)})


def keys_of(declared: type[Any], *above: str) -> tuple[Key, ...]:
    """List the keys that a dataclass and its sections declare, in the order of a file."""
    return _keys(cast(Hashable, declared), above)


@cache
def _keys(declared: Any, above: tuple[str, ...]) -> tuple[Key, ...]:
    found: list[Key] = []
    for each in fields(declared):
        if "section" in each.metadata:
            _, kind, heading, pruning = each.metadata["section"]
            found += [
                replace(k, section=heading or k.section, pruning=pruning or k.pruning)
                for k in keys_of(kind, *above, each.name)
            ]
        elif "key" in each.metadata:
            declaration: Key = each.metadata["key"]
            found.append(
                replace(
                    declaration,
                    path=(*above, each.name),
                    keyword=declaration.keyword or each.name,
                    type=declaration.form or _type(declared, each.name),
                    default=... if each.default is MISSING else each.default,
                )
            )
    return tuple(found)


def read(mapping: JsonView, keys: Iterable[Key]) -> Json:
    """Check and convert the values of a mapping, section by section; RecipeError names an unknown
    key or value.
    """
    within: dict[str, list[Key]] = {}
    sections: dict[str, str] = {}
    for each in keys:
        within.setdefault(each.path[0], []).append(each)
        if len(each.path) > 1:
            sections |= dict.fromkeys((each.name, each.path[1]), each.path[0])
    refuse_unknown(mapping, within, "the recipe", sections)
    found: Json = {}
    for name, value in mapping.items():
        first = within[name][0]
        if len(first.path) == 1:
            found[name] = first.read(value)
        else:
            inner, known = section_at(mapping, name), {each.path[1]: each for each in within[name]}
            refuse_unknown(inner, known, name, sections)
            found[name] = {key: known[key].read(each) for key, each in inner.items()}
    return found


def section_at(mapping: JsonView, name: str) -> JsonView:
    """Return the section `name` of a mapping, empty if there is none; RecipeError if it has no
    keys.
    """
    found = {} if mapping.get(name) is None else mapping[name]
    if not isinstance(found, Mapping):
        raise RecipeError(f"{name} is {found!r}", "it must be a section of keys")
    return found


def refuse_unknown(
    mapping: JsonView, known: Iterable[str], where: str, sections: Mapping[str, str]
) -> None:
    """Raise RecipeError if a mapping has an unknown key, which may be one of other `sections`."""
    names = list(known)
    unknown = [str(name) for name in mapping if name not in names]
    if unknown:
        section = sections.get(unknown[0])
        way = f"write it in {section}" if section else f"known are {', '.join(names)}"
        raise RecipeError(f"unknown key {unknown[0]!r} in {where}", way)


def built(options: JsonView, *kinds: type[Any]) -> tuple[list[Any], Json]:
    """Make the dataclasses that declare options from their keywords; return them and the other
    options. RecipeError for a wrong value.

    Each option belongs to the first dataclass that declares it. Paths become texts, and what can be
    iterated a tuple.
    """
    rest, found = dict(options), []
    for kind in kinds:
        names = [each.keyword for each in keys_of(kind) if each.keyword in rest]
        found.append(kind(**{name: _plain(rest.pop(name)) for name in names}))
    return found, rest


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return (
        value if isinstance(value, str | Mapping) or not isinstance(value, Iterable) else (*value,)
    )


def check(declared: Any, *above: str) -> None:
    """Check the values of a dataclass by its declarations; RecipeError if one is out of range."""
    for each in keys_of(type(declared), *above):
        each.read(getattr(declared, each.path[-1]))


def shown(value: Any) -> str:
    """Return a value of a recipe as messages and help show it."""
    if isinstance(value, Mapping):
        return shown([f"{name}={each}" for name, each in value.items()])
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


class Checked:
    """A dataclass of options; RecipeError for a value out of range."""

    def __post_init__(self) -> None:
        check(self)


def _type(declared: type, name: str) -> Any:
    """Evaluate one field's annotation in its module. Other annotations may name imports for type
    checkers only.
    """
    home = next(each for each in declared.__mro__ if name in vars(each).get("__annotations__", {}))
    holder = SimpleNamespace(__annotations__={name: home.__annotations__[name]})
    return get_type_hints(holder, vars(sys.modules[home.__module__]), include_extras=True)[name]


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or only the type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _described(kind: Any) -> str:
    """Say in words which values a type has; nothing for None."""
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)
        limits = {"from": bounds.ge, "above": bounds.gt, "up to": bounds.le}
        words = " and ".join(
            f"{word} {limit}" for word, limit in limits.items() if limit is not None
        )
        return f"{_described(base)} {words}"
    if get_origin(kind) in (tuple, list):
        return "a list of texts"
    if get_origin(kind) in (dict, Mapping):
        return "a mapping of texts" if get_args(kind)[1:] == (str,) else "a mapping"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a text",
        NoneType: "",
    }
    return names.get(kind, str(kind))


def at_home(value: Any) -> Any:
    """Expand `~` at the start of a path, or of each path of a list, as a shell does; other values
    stay.
    """
    if isinstance(value, str | Path):
        return type(value)(os.path.expanduser(value)) if str(value).startswith("~") else value
    return type(value)(map(at_home, value)) if isinstance(value, list | tuple) else value
