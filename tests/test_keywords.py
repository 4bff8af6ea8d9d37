"""Messages name keywords in Python, and what a public function makes of its keywords."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.api import build_recipe
from quantkit.errors import CheckpointError, Option, RecipeError, Words, about
from quantkit.keywords import api_function

FUNCTIONS = ("plan", "quantize", "prune", "pack", "convert", "verify", "load", "eval_ppl", "eval_kld")


#: Whose messages only the command line shows, or whose strings are commands of other programs.
TYPED = (
    "cli/",
    "engines/tables.py",
    "errors.py",
    "kernels/loader.py",
    "layouts/recast.py",
    "recipes/options.py",
    "serving/",
)
#: Whose options are those of a command that Python does not have.
NO_FUNCTION = ("cli/", "inference/generate.py", "text/tokenizer.py")


def modules(but: tuple[str, ...], pattern: str) -> Iterator[tuple[str, ast.Module]]:
    """Parse the modules whose text has a pattern."""
    package = Path(quantkit.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(but) and re.search(pattern, text := path.read_text()):
            yield name, ast.parse(text)


def test_no_message_spells_an_option_itself() -> None:
    wrong, spelled = [], r"(?<![\w-])--(?!set\b|help-all)[a-z][\w-]*"
    for name, tree in modules(TYPED, spelled):
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                wrong += [f"{name}:{node.lineno}: {found}" for found in re.findall(spelled, node.value)]
    assert wrong == []


def test_options_are_keywords_and_commands_are_functions() -> None:
    keywords = {
        key for name in quantkit.__all__ if callable(function := getattr(quantkit, name)) for key in keys(function)
    }
    keywords |= {"max_new_tokens", "prompt"}  # of generate, which Python does not have
    wrong, seen = [], 0
    for name, tree in modules(NO_FUNCTION, r"\b(Option|Setting|Command)\("):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
            kind, value = getattr(call.func, "id", None), getattr(call.args[0], "value", None)
            if kind in ("Option", "Setting") and isinstance(value, str):
                seen += 1
                wrong += [] if value in keywords else [f"{name}:{call.lineno}: {value} is no keyword"]
            elif kind == "Command" and isinstance(value, str):
                seen += 1
                wrong += [] if value.replace(" ", "_") in quantkit.__all__ else [f"{name}:{call.lineno}: no {value}"]
    assert wrong == [] and seen > 150


def keys(function: Any) -> list[str]:
    return [] if isinstance(function, type) else list(inspect.signature(function).parameters)


def test_an_error_is_spelled_where_it_leaves_a_public_function() -> None:
    @api_function()
    def outer() -> None:
        with about("weight"):
            inner()

    @api_function()
    def inner() -> None:
        raise CheckpointError("out exists", Words("add", Option("overwrite", True)))

    assert quantkit.pack
    with pytest.raises(CheckpointError, match=r"^weight: out exists: add overwrite=True$") as caught:
        outer()
    assert caught.value.subject == "weight"
    assert caught.value.typed == "weight: out exists: add --overwrite"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_keyword_is_in_the_signature(name: str) -> None:
    function = getattr(quantkit, name)
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY), parameter
        if parameter.kind is parameter.KEYWORD_ONLY:
            allows_none = parameter.annotation is Any or type(None) in getattr(parameter.annotation, "__args__", ())
            assert parameter.default is not parameter.empty, f"{name}: {parameter} must be given"
            assert parameter.default is not None or allows_none, f"{name}: {parameter} has no default"
        assert function.__annotations__[parameter.name] == parameter.annotation
    assert "Example:" in function.__doc__


@pytest.mark.parametrize(
    ("name", "arguments", "keywords", "message"),
    [
        ("quantize", ("a", "b"), {"grop_size": 64}, "keyword argument 'grop_size'; did you mean 'group_size'?"),
        ("convert", ("a-to-b", "c", "d"), {"overwrit": True}, "'overwrit'; did you mean 'overwrite'?"),
        ("pack", ("a", "b", "gptq"), {"colour": 1}, "pack() got an unexpected keyword argument 'colour'"),
        ("quantize", ("a",), {}, "quantize() missing 1 required positional argument: 'out'"),
        ("quantize", ("a", "b", "c"), {}, "quantize() takes 2 positional arguments but 3 were given"),
        ("quantize", ("a", "b"), {"samples": "8"}, "quantize() argument 'samples' must be int or None, not '8'"),
        ("quantize", ("a", "b"), {"asym": "yes"}, "argument 'asym' must be bool or None, not 'yes'"),
        ("quantize", ("a", "b"), {"override": "k=int4"}, "argument 'override' must be Mapping or None"),
        ("quantize", ("a", "b"), {"progress": 3}, "argument 'progress' must be Progress or Callable or None, not 3"),
        ("load", ("a",), {"dtype": "float32"}, "load() argument 'dtype' must be torch.dtype or None, not 'float32'"),
        ("plan", (7,), {}, "plan() argument 'model' must be str or Path, not 7"),
        ("eval_ppl", ("a",), {"window": "x" * 500}, "argument 'window' must be int or None, not 'xxx"),
    ],
)
def test_a_wrong_call_is_a_type_error(
    name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(quantkit, name)(*arguments, **keywords)
    assert message in str(caught.value) and len(str(caught.value)) < 200


def test_a_string_is_one_pattern() -> None:
    assert build_recipe(skip="lm_head").skip == build_recipe(skip=["lm_head"]).skip == ("lm_head", "lm_head")
    assert build_recipe(skip=None) == build_recipe(skip=()) == build_recipe()
    assert build_recipe(calib="a.txt") == build_recipe(calib=["a.txt"])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("eval_ppl", {"data": "a.txt", "tokens": -5}),  # a slice would leave the last five out
        ("eval_kld", {"against": "model", "data": "a.txt", "tokens": 0}),
        ("eval_tasks", {"tasks": "piqa", "limit": 0}),
        ("eval_tasks", {"tasks": "piqa", "shots": -1}),
        ("compare", {"out": "out", "recipes": "int4:g64:rtn", "batch_size": 0}),
    ],
)
def test_a_count_below_its_least_is_refused_as_on_the_command_line(function: str, options: dict[str, Any]) -> None:
    name, value = list(options.items())[-1]
    with pytest.raises(RecipeError, match=rf"^{name} is {value}: use an integer from \d$"):
        getattr(quantkit, function)("no such model", **options)
