"""The Python spelling of the API: signatures that editors and notebooks complete, and errors that
name keywords.

The command line has "use --group-size 128" where an error of an `api_function` says "use
group_size=128".
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from quantkit.core.torch_settings import usual_settings
from quantkit.errors import QuantkitError
from quantkit.keys import Key, at_home, keys_of

P = ParamSpec("P")
R = TypeVar("R")


def api_function(
    *kinds: type[Any], keys: Iterable[Key] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of the Python API: its signature lists the keywords, and its errors name
    them.

    In the place of `**options` it has the options that the dataclasses `kinds` declare, and `keys`
    of a recipe, which are None by default. `keywords` has the type of each, as Python source.
    """
    listed = [key for key in keys if key.level != "key"]
    defaults: dict[str, Any] = {key.keyword: None for key in listed}
    types = {key.keyword: f"{key.annotation.removesuffix(' | None')} | None" for key in listed}
    for key in (key for kind in kinds for key in keys_of(kind) if key.default is not ...):
        defaults[key.keyword], types[key.keyword] = key.default, key.annotation

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _spelled_out(function, types, defaults)
        classes = {
            name: _classes(parameter.annotation) for name, parameter in signature.parameters.items()
        }
        named = list(classes)
        paths = {name for name, found in classes.items() if Path in found}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in [*zip(signature.parameters, args, strict=False), *kwargs.items()]:
                if name not in classes:
                    raise TypeError(_unexpected(function.__name__, name, named))
                if not isinstance(value, classes[name]):
                    raise TypeError(_mistyped(function.__name__, name, classes[name], value))
            values: Any = [
                at_home(value) if name in paths else value
                for name, value in zip(named, args, strict=False)
            ]
            values += args[len(named) :]
            options: Any = {
                name: at_home(value) if name in paths else value for name, value in kwargs.items()
            }
            try:
                with usual_settings():
                    return function(*values, **options)
            except QuantkitError as error:
                error.to_python()
                raise

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.keywords = types  # type: ignore[attr-defined]
        call.__annotations__ = {
            name: parameter.annotation for name, parameter in signature.parameters.items()
        } | {"return": signature.return_annotation}
        return call

    return decorate


def _spelled_out(
    function: Callable[..., Any], types: Mapping[str, str], defaults: Mapping[str, Any]
) -> inspect.Signature:
    """Make the signature of a function, with its types, and each option as a keyword."""
    signature = inspect.signature(function)
    found = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    found = [each.replace(annotation=_type(each.annotation, function)) for each in found]
    found += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default in defaults.items()
        for kind in [_type(types[name], api_function)]
    ]
    return signature.replace(parameters=found)


def _type(text: str, at: Callable[..., Any]) -> Any:
    """Evaluate an annotation in the module of a function."""
    return get_type_hints(SimpleNamespace(__annotations__={"": text}), at.__globals__)[""]


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
