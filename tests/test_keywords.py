"""The Python spelling of messages, and what a public function makes of its keywords."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

import quantkit
from quantkit.api import build_recipe
from quantkit.errors import CheckpointError, QuantkitError, about, in_python
from quantkit.keywords import api_function
from quantkit.recipes.run_options import RunOptions

FUNCTIONS = ("plan", "quantize", "prune", "pack", "convert", "verify", "load", "eval_ppl", "eval_kld", "push")


@pytest.mark.parametrize(
    ("typed", "python"),
    [
        ("out exists: add --overwrite", "out exists: add overwrite=True"),
        ("drop --asym or use --format int4", 'drop asym=True or use format="int4"'),
        ("quantize with --sym, or --no-pad", "quantize with asym=False, or pad=False"),
        ("drop signed (--unsigned)", "drop signed (signed=False)"),
        ("use --layout gptq-v2 or compressed-tensors", 'use layout="gptq-v2" or "compressed-tensors"'),
        ("quantize with --group-size 128 or channel, or", 'quantize with group_size=128 or "channel", or'),
        ("--group-size channel or a divisor", 'group_size="channel" or a divisor'),
        ("use --group-size 128 or --layout awq", 'use group_size=128 or layout="awq"'),
        ("leave out --pad or --skip the weight", "leave out pad=True or skip the weight"),
        ("add --pad 2 more", "add pad=True 2 more"),
        ("dense with --skip '.*k_proj|a b'", "dense with skip='.*k_proj|a b'"),
        ("add --skip model.layers.0.mlp.", 'add skip="model.layers.0.mlp".'),
        ("add --skip lm_head, or", 'add skip="lm_head", or'),
        ("--min-share asks for 90 %, lower --min-share", "min_share asks for 90 %, lower min_share"),
        ("use --samples 22, a smaller --max-length", "use samples=22, a smaller max_length"),
        ("add --damp 0.01: a longer --calib file", "add damp=0.01: a longer calib file"),
        ("with --calib FILE, --calib FILE.jsonl", 'with calib=FILE, calib="FILE.jsonl"'),
        ("use --method rtn --clip none", 'use method="rtn" clip="none"'),
        ("add --prune 2:4, or --device cuda", 'add prune="2:4", or device="cuda"'),
        ("use quantkit pack or convert", "use quantkit.pack or convert"),
        ("compare by quantkit eval kld", "compare by quantkit.eval_kld"),
        ("quantkit pack --requantize-scales rounds them", "quantkit.pack(requantize_scales=True) rounds them"),
        ("use quantize --prune 2:4", 'use quantkit.quantize(prune="2:4")'),
        ("use convert awq-to-gptq-v2, or", 'use quantkit.convert("awq-to-gptq-v2"), or'),
        ("compare with quantize --print-recipe", "compare with Recipe.to_yaml()"),
        ("free some or use another -o", "free some or use another out"),
        # These have no Python, or are no options.
        ("use quantkit doctor --gpus 3", "use quantkit doctor --gpus 3"),
        ("quantkit generate --chat --device cpu", 'quantkit generate --chat device="cpu"'),
        ("/models/x--layout marlin: a--skip", "/models/x--layout marlin: a--skip"),
        ("---layout marlin is a line", "---layout marlin is a line"),
    ],
)
def test_a_message_in_python(typed: str, python: str) -> None:
    assert quantkit.quantize  # options are known once the functions are
    assert in_python(typed) == python
    assert in_python(python) == python


def test_an_error_is_spelled_where_it_leaves_a_public_function() -> None:
    @api_function()
    def outer() -> None:
        with about("weight"):
            inner()

    @api_function()
    def inner() -> None:
        raise CheckpointError("out exists: add --overwrite")

    assert quantkit.pack
    with pytest.raises(CheckpointError, match=r"^weight: out exists: add overwrite=True$") as caught:
        outer()
    assert caught.value.subject == "weight"
    assert caught.value.typed == "weight: out exists: add --overwrite"
    assert QuantkitError("use --pad").typed == "use --pad"


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


def test_signatures_have_types_and_defaults() -> None:
    parameters = inspect.signature(quantkit.quantize).parameters
    assert parameters["group_size"].default is None and parameters["overwrite"].default is False
    assert parameters["min_share"].default == RunOptions.min_share
    assert parameters["skip"].annotation == get_type_hints(quantkit.api.QuantizeKeywords)["skip"]
    assert inspect.signature(quantkit.pack).parameters["max_shard_size"].default == 2**31
    assert "target" in inspect.signature(quantkit.plan).parameters


@pytest.mark.parametrize(
    ("name", "arguments", "keywords", "message"),
    [
        (
            "quantize",
            ("a", "b"),
            {"grop_size": 64},
            "unexpected keyword argument 'grop_size'; did you mean 'group_size'?",
        ),
        ("convert", ("a-to-b", "c", "d"), {"overwrit": True}, "'overwrit'; did you mean 'overwrite'?"),
        ("pack", ("a", "b", "gptq"), {"colour": 1}, "pack() got an unexpected keyword argument 'colour'"),
        ("quantize", ("a",), {}, "quantize() missing 1 required positional argument: 'out'"),
        ("quantize", ("a", "b", "c"), {}, "quantize() takes 2 positional arguments but 3 were given"),
        ("quantize", ("a", "b"), {"samples": "8"}, "quantize() argument 'samples' must be int or None, not '8'"),
        ("quantize", ("a", "b"), {"asym": "yes"}, "argument 'asym' must be bool or None, not 'yes'"),
        ("quantize", ("a", "b"), {"override": "k=int4"}, "argument 'override' must be Mapping or None"),
        ("quantize", ("a", "b"), {"progress": 3}, "argument 'progress' must be Progress or Callable or None, not 3"),
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
