"""The Python spelling of the API: signatures that editors and notebooks complete, and errors that name keywords.

Messages are written for the command line: "use --group-size 128". An `api_function` raises them as Python has it:
"use group_size=128".
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from quantkit import errors
from quantkit.errors import QuantkitError
from quantkit.names import FORMATS, LAYOUTS, Clip, Method, Metric, Rule

P = ParamSpec("P")
R = TypeVar("R")

#: The names of all API functions, of their keywords, and of those that are true or false.
_functions: set[str] = set()
_keywords: set[str] = set()
_switches: set[str] = set()

#: An option that switches a keyword off, besides those that begin with `--no-`.
_OFF = {"sym": "asym", "unsigned": "signed"}
#: Options without a keyword, and the Python that does the same.
_OTHERS = {"quantize --print-recipe": "Recipe.to_yaml()"}
#: Words that are the value of the option in front of them; other words go on with the sentence.
_CHOICES = (
    *LAYOUTS,
    *FORMATS,
    *(word for choices in (Method, Rule, Clip, Metric) for word in get_args(choices)),
    *("channel", "static", "off", "own", "fixed", "mean", "routed", "all", "stop", "auto", "cpu", "cuda"),
)
_WORDS = f"(?:{'|'.join(sorted(map(re.escape, _CHOICES), key=len, reverse=True))})"
_CHOICE = rf"{_WORDS}(?![\w-])"
#: A value: in quotes, a choice, a placeholder like FILE, or a word with a digit, dot, star or underscore in it.
_VALUE = rf"'[^'\n]*'|{_CHOICE}|[A-Z]+(?:\.\w+)?(?!\w)|(?=[^\s,;()]*[\d._*])[^\s,;()]*[^\s,;():.]"
_OPTION = rf"(?<![\w/-])--(?P<name>[a-z][a-z-]*)(?:[ ](?P<value>{_VALUE}))?(?P<more>(?:[ ]or[ ]{_CHOICE})*)"
_OPTIONS = re.compile(_OPTION)
_CALLED = re.compile(rf"(?:quantkit )?(?P<name>eval \w+|\w+)(?P<options>(?: {re.sub(r'[?]P<.*?>', '?:', _OPTION)})+)")
_COMMAND = re.compile(r"\bquantkit (?P<name>eval \w+|\w+)")
_PAIR = re.compile(rf"(?:\bquantkit )?\bconvert (?P<pair>{_WORDS}-to-{_CHOICE})")


def api_function(*like: Callable[..., Any], **given: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of the Python API: keywords in its signature, and errors in Python's terms.

    Keywords that are an unpacked TypedDict have the `given` defaults, or those of the functions `like`, or else None.
    """
    defaults = {
        name: parameter.default
        for function in like
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    } | given

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _spelled_out(function, defaults)
        kinds = {name: _classes(parameter.annotation) for name, parameter in signature.parameters.items()}
        _functions.add(function.__name__)
        _switches.update(name for name, classes in kinds.items() if bool in classes)
        _keywords.update(kinds)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in [*zip(signature.parameters, args, strict=False), *kwargs.items()]:
                if name not in signature.parameters:
                    raise TypeError(_unexpected(function.__name__, name, list(signature.parameters)))
                if not isinstance(value, kinds[name]):
                    raise TypeError(_mistyped(function.__name__, name, kinds[name], value))
            try:
                return function(*args, **kwargs)
            except QuantkitError as error:
                error.to_python()
                raise

        call.__signature__ = signature  # type: ignore[attr-defined]
        annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        call.__annotations__ = {**annotations, "return": signature.return_annotation}
        return call

    return decorate


def _old(text: str) -> str:
    """Spell the options and commands of a message as keywords and functions; those that have none stay."""
    for other, python in _OTHERS.items():
        text = text.replace(other, python)
    text = _PAIR.sub(r'quantkit.convert("\g<pair>")', text)
    text = _CALLED.sub(_call, text)
    text = _OPTIONS.sub(_keyword, text)
    text = _COMMAND.sub(_named, text)
    return re.sub(r"(?<=another )-o\b", "out", text)


def _named(found: re.Match[str]) -> str:
    """Spell a command as the function."""
    function = _function(found["name"])
    return found[0] if function is None else f"quantkit.{function}"


def _call(found: re.Match[str]) -> str:
    """Spell a command and its options as a call of the function."""
    function = _function(found["name"])
    options = list(_OPTIONS.finditer(found["options"]))
    spelled = [_keyword(option) for option in options]
    if function is None or any(keyword.startswith("--") for keyword in spelled):
        return found[0]
    return f"quantkit.{function}({', '.join(spelled)})"


def _function(command: str) -> str | None:
    name = command.replace(" ", "_")
    return name if name in _functions else None


def _keyword(found: re.Match[str]) -> str:
    """Spell an option as a keyword: with its value, alone if the sentence gives none, or with True or False."""
    option, value, more = found["name"], found["value"], found["more"]
    off = _OFF.get(option) or option.removeprefix("no-")
    name = option.replace("-", "_")
    if name not in _keywords:
        name = off.replace("-", "_")
        return found[0] if name not in _keywords else f"{name}=False{_rest(value, more)}"
    if name in _switches:
        return f"{name}=True{_rest(value, more)}"
    if value is None:
        return name + more
    others = (f" or {_literal(word)}" for word in more.split(" or ")[1:])
    return f"{name}={_literal(value)}{''.join(others)}"


def _rest(value: str | None, more: str) -> str:
    """Keep the text after a switch, because a switch takes no value."""
    return f" {value}{more}" if value is not None else more


def _literal(value: str) -> str:
    is_code = value[0] == "'" or value.isupper() or re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value)
    return value if is_code else f'"{value}"'


def _spelled_out(function: Callable[..., Any], defaults: dict[str, Any]) -> inspect.Signature:
    """Make the signature of a function, with its types, and each key of an unpacked TypedDict as a keyword."""
    found: list[inspect.Parameter] = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords = function.__globals__[parameter.annotation.removeprefix("Unpack[").removesuffix("]")]
            for name, kind in get_type_hints(keywords).items():
                found.append(
                    inspect.Parameter(name, parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind)
                )
        else:
            holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            found.append(parameter.replace(annotation=get_type_hints(holder, function.__globals__)[parameter.name]))
    return signature.replace(parameters=found)


def _classes(kind: Any) -> tuple[type, ...]:
    """List the classes of the values of a type; of a choice, those of its members."""
    if kind is Any:
        return (object,)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return tuple(dict.fromkeys(cls for part in get_args(kind) for cls in _classes(part)))
    if origin is Literal:
        return tuple({type(member) for member in get_args(kind)})
    return (float, int) if kind is float else (origin or kind,)


def _mistyped(function: str, name: str, kinds: tuple[type, ...], value: object) -> str:
    names = ("None" if kind is NoneType else kind.__name__ for kind in kinds)
    return f"{function}() argument {name!r} must be {' or '.join(names)}, not {value!r:.80}"


def _unexpected(function: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}{hint}"


errors.LEGACY.append(_old)  # for sentences of rooms that are not converted yet
