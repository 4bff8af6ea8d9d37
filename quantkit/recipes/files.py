"""Recipes as files and options: YAML, those that come with quantkit, and `--set KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, get_args, get_origin

import yaml

from quantkit.core.formats import FORMATS
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import RecipeError, reason
from quantkit.keys import Key, section_at
from quantkit.names import Json, JsonView, Method
from quantkit.recipes.recipe import written

PACKAGE = Path(__file__).parents[1]
_COMPARE = "compare with the quantkit_recipe.yaml of an output folder"


def shipped_recipes() -> dict[str, Path]:
    """Find the recipes that come with quantkit, as name -> file."""
    packaged = PACKAGE / "configs"
    folder = packaged if packaged.is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_named(recipe: str | Path) -> JsonView:
    """Read the mapping of a YAML file or of a recipe that comes with quantkit; RecipeError if it is
    neither.
    """
    shipped = shipped_recipes()
    if not Path(recipe).is_file() and str(recipe) not in shipped:
        raise RecipeError(
            "no such recipe", f"give a YAML file or one of {', '.join(shipped)}", subject=recipe
        )
    return load(Path(recipe) if Path(recipe).is_file() else shipped[str(recipe)])


def load_named_or_scheme(recipe: str) -> JsonView:
    """Read a recipe as `load_named`, or make one of a scheme and a method, such as `fp6:g64:gptq`.

    RecipeError with the nearest names for anything else.
    """
    shipped = shipped_recipes()
    if Path(recipe).is_file() or recipe in shipped:
        return load_named(recipe)
    scheme, _, method = recipe.rpartition(":")
    if method in get_args(Method) and scheme.partition(":")[0] in FORMATS:
        return {"scheme": written(Scheme.parse(scheme)), "method": method}
    near = [*get_close_matches(recipe, shipped, 2, 0.5), "a YAML file"]
    raise RecipeError(
        f"unknown recipe {recipe!r}",
        f"use {', '.join(near)}, or a scheme with a method like int4:g64:gptq",
    )


def load(path: Path) -> Json:
    """Read the mapping of a recipe file; RecipeError if it is no YAML mapping or repeats a key."""
    try:
        with path.open("rb") as file:  # yaml finds UTF-16, and names the file in its messages
            mapping = _parsed(file, path, "recipe", _COMPARE)
    except OSError as error:
        raise RecipeError(
            f"cannot read the recipe ({error.strerror})",
            "give the path of a YAML file",
            subject=path,
        ) from error
    if not isinstance(mapping, dict):
        raise RecipeError("a recipe is a mapping of keys", _COMPARE, subject=path)
    return mapping


def _parsed(text: str | IO[bytes], subject: object, what: str, way: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except OSError:
        raise
    except Exception as error:  # yaml also raises errors of int(), date() and recursion
        raise RecipeError(f"not a YAML {what} ({reason(error)})", way, subject=subject) from error


def from_pairs(pairs: Iterable[str], keys: Iterable[Key]) -> Json:
    """Read the mapping that `--set KEY=VALUE` gives; RecipeError names an unknown key or a wrong
    value.
    """
    known = {key.name: key for key in keys}
    found: Json = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise RecipeError(f"--set {pair} has no value", "write it like --set gptq.damp=0.02")
        if name not in known:
            meant = [key.name for key in known.values() if name in (key.keyword, key.path[-1])]
            near = [*meant, *get_close_matches(name, known, 1)][:1]
            raise RecipeError(
                f"unknown key {name!r}", f"use {near[0]}" if near else "--help-all lists all keys"
            )
        key = known[name]
        like = "write it like [a, b] or {a: b}, with quotes around a text that has : or ,"
        alone = [text] if get_origin(key.type) is tuple else text
        value = _parsed(text, name, "value", like) if text[:1] in ("[", "{") else alone
        value = {"on": True, "off": False}.get(text, value) if key.is_switch else value
        found = merge(found, _nested(key.path, key.read(value, strict=False)))
    return found


def _nested(path: tuple[str, ...], value: Any) -> Json:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def merge(base: JsonView, flags: JsonView) -> Json:
    """Return `base` with `flags` merged over it, section by section; flags that are None change
    nothing.
    """
    merged = dict(base)
    for key, value in flags.items():
        if isinstance(value, Mapping):
            inner = merge(section_at(merged, key), value)
            if inner:
                merged[key] = inner
        elif value is not None:
            merged[key] = value
    return merged


class _StrictLoader(yaml.SafeLoader):
    """Refuse repeated keys, which the standard loader resolves silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is repeated", node.start_mark
            )
        return mapping
