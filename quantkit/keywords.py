"""The Python spelling of the API: signatures that editors and notebooks complete, and errors that
name keywords.

The command line has "use --group-size 128" where an error of an `api_function` says "use
group_size=128".
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from quantkit.errors import QuantkitError
from quantkit.keys import at_home

P = ParamSpec("P")
R = TypeVar("R")


def api_function(*like: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of the Python API: its signature lists the keywords, and its errors name
    them.

    Keywords of an unpacked TypedDict have the defaults of the dataclasses or functions `like`, else
    None.
    """
    defaults = {
        name: parameter.default
        for function in like
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _spelled_out(function, defaults)
        kinds = {
            name: _classes(parameter.annotation) for name, parameter in signature.parameters.items()
        }
        named, paths = list(kinds), {name for name, classes in kinds.items() if Path in classes}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in [*zip(signature.parameters, args, strict=False), *kwargs.items()]:
                if name not in signature.parameters:
                    raise TypeError(
                        _unexpected(function.__name__, name, list(signature.parameters))
                    )
                if not isinstance(value, kinds[name]):
                    raise TypeError(_mistyped(function.__name__, name, kinds[name], value))
            values: Any = [
                at_home(value) if name in paths else value
                for name, value in zip(named, args, strict=False)
            ]
            values += args[len(named) :]
            options: Any = {
                name: at_home(value) if name in paths else value for name, value in kwargs.items()
            }
            try:
                return function(*values, **options)
            except QuantkitError as error:
                error.to_python()
                raise

        call.__signature__ = signature  # type: ignore[attr-defined]
        annotations = {
            name: parameter.annotation for name, parameter in signature.parameters.items()
        }
        call.__annotations__ = {**annotations, "return": signature.return_annotation}
        return call

    return decorate


def _spelled_out(function: Callable[..., Any], defaults: dict[str, Any]) -> inspect.Signature:
    """Make the signature of a function, with its types, and each key of an unpacked TypedDict as a
    keyword.
    """
    found: list[inspect.Parameter] = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords = function.__globals__[
                parameter.annotation.removeprefix("Unpack[").removesuffix("]")
            ]
            for name, kind in get_type_hints(keywords).items():
                found.append(
                    inspect.Parameter(
                        name, parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind
                    )
                )
        else:
            holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            found.append(
                parameter.replace(
                    annotation=get_type_hints(holder, function.__globals__)[parameter.name]
                )
            )
    return signature.replace(parameters=found)


def _classes(kind: Any) -> tuple[type, ...]:
    """List the classes of a type's values; for a Literal, the classes of its members."""
    if kind is Any:
        return (object,)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return tuple(dict.fromkeys(cls for part in get_args(kind) for cls in _classes(part)))
    if origin is Literal:
        return tuple({type(member) for member in get_args(kind)})
    return (float, int) if kind is float else (origin or kind,)


def _mistyped(function: str, name: str, kinds: tuple[type, ...], value: object) -> str:
    spelled = {"NoneType": "None", "dtype": "torch.dtype"}
    names = (spelled.get(kind.__name__, kind.__name__) for kind in kinds)
    return f"{function}() argument {name!r} must be {' or '.join(names)}, not {value!r:.80}"


def _unexpected(function: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}{hint}"
