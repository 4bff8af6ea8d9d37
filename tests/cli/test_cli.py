"""Test the command line and the functions behind it: help, JSON, recipes, conversions, exit codes."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from quantkit import api
from quantkit.api import build_recipe
from quantkit.cli import doctor
from quantkit.cli.commands import quantkit
from quantkit.cli.parsing import Command
from quantkit.errors import RecipeError
from quantkit.recipes.files import shipped_recipes
from tests.command_line import ROOT, call, refused

# ------------------------------------------------------------------------------------------------ help and results


def test_a_page_drawn_after_verify_says_so(int4: Path, tmp_path: Path) -> None:
    folder = tmp_path / "int4"
    shutil.copytree(int4, folder, ignore=shutil.ignore_patterns("verify.json"))
    call("report", folder, "--html", tmp_path / "r.html")
    assert ">not verified<" in (tmp_path / "r.html").read_text()
    call("verify", folder)
    call("report", folder, "--html", tmp_path / "r.html")
    assert ">✓ verified<" in (tmp_path / "r.html").read_text()
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    call("verify", folder, code=3)
    call("report", folder, "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert ">✗ verification failed<" in page and weights.name in page


# ------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_a_printed_recipe_loads_as_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = build_recipe(name)
    (tmp_path / "printed.yaml").write_text(call("quantize", "--recipe", name, "--print-recipe").stdout)
    assert build_recipe(tmp_path / "printed.yaml") == recipe
    assert name in shipped_recipes()


def test_options_change_single_values_of_a_recipe() -> None:
    recipe = build_recipe("marlin-paper", damp=0.01, group_size="channel", asym=False, skip=["o_proj"], seed=None)
    assert (recipe.gptq.damp, recipe.gptq.damp_kind, recipe.scheme.group_size) == (0.01, "mean", None)
    assert recipe.skip == ("lm_head", "o_proj")  # naming one more linear must not quantize the output layer
    assert recipe.calibration.seed == 0


def test_an_override_option_precedes_those_of_the_recipe() -> None:
    base = {"overrides": {".*": "int4:g64", "v_proj": "int4:g32"}}
    recipe = build_recipe(base, override={"v_proj": "int4:channel"})
    scheme = recipe.scheme_of("model.layers.0.self_attn.v_proj")
    assert scheme is not None and scheme.group_size is None


@pytest.mark.parametrize("name", ["quantize", "prune"])
def test_the_command_and_the_function_have_the_same_options(name: str) -> None:
    arguments = {"model", "out", "recipe"}
    printed = {"print_recipe", "help_all", "settings", "as_json", "quiet", "verbose"}
    command = quantkit.commands[name]
    assert isinstance(command, Command)
    options = {param.name for param in command.params} - arguments - printed
    options |= {key.keyword for key in command.keys if key.level == "all"}
    keywords = inspect.signature(getattr(api, name)).parameters.keys() - {*arguments, "progress"}
    assert keywords == options


def test_equal_options_make_equal_recipes() -> None:
    text = call("quantize", "--print-recipe", "--asym", "--calib", "ptb", "--samples", 5).stdout
    assert build_recipe(asym=True, calib="ptb", samples=5).to_yaml() == text
    with pytest.raises(RecipeError, match="unknown option 'smaples'"):
        build_recipe(smaples=5)


# ------------------------------------------------------------------------------------------------ exit codes


def test_a_threshold_that_is_met_is_exit_code_0(tiny_llama: Path, calib: Path) -> None:
    protocol = ("--data", calib, "--window", 32, "--tokens", 256, "-q")
    call("eval", "ppl", tiny_llama, *protocol, "--max-perplexity", 1e9)
    call("eval", "kld", tiny_llama, "--against", tiny_llama, *protocol, "--max-kld", 0)


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(doctor, "diagnose", broken)
    with pytest.raises(ZeroDivisionError):
        call("doctor")


def wrapped(error: Exception) -> Exception:
    """Raise another error while one is handled, as libraries do at their imports."""
    found = AttributeError("partially initialized module")
    found.__context__ = error
    return found


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        SystemError("<built-in function x> returned NULL without setting an exception"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "a file"),
        wrapped(MemoryError()),
    ],
)
def test_out_of_memory_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy() -> None:
        raise error

    monkeypatch.setattr(doctor, "diagnose", greedy)
    assert "not enough memory or threads" in refused("doctor")


def test_a_working_folder_that_was_deleted_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert "the working folder was deleted" in refused("doctor")


def test_a_machine_without_a_folder_for_temporary_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def gettempdir() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("quantkit.cli.options.gettempdir", gettempdir)
    assert "set TMPDIR" in refused("doctor")


def test_python_without_docstrings_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    assert "-OO drops: use PYTHONOPTIMIZE=1" in refused("plan", "model")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (['{"enable_thinking": false, "depth": [1]}'], {"enable_thinking": False, "depth": [1]}),
        (
            ["enable_thinking=False", "effort=high", "n=3", "name=null"],
            {"enable_thinking": False, "effort": "high", "n": 3},
        ),
        (["date_string=26 Jul 2024", "a=b=c", "empty="], {"date_string": "26 Jul 2024", "a": "b=c", "empty": ""}),
    ],
)
def test_arguments_of_the_template_are_json_or_pairs(given: list[str], expected: dict[str, object]) -> None:
    options = [part for value in given for part in ("--template-args", value)]
    made = call("quantize", "--print-recipe", *options, "--skip-bad-records", 2).stdout
    assert made == build_recipe(template_args=expected, skip_bad_records=2).to_yaml()
    assert yaml.safe_load(made)["calibration"]["template_args"] == expected


@pytest.mark.parametrize("value", ["fast", "[1]", "{", "no name=1", "=1"])
def test_arguments_that_are_no_object_are_wrong_usage(value: str) -> None:
    result = call("quantize", "--print-recipe", "--template-args", value, code=2)
    assert "is no JSON object: write it like enable_thinking=false" in result.stderr
    result = call("quantize", "--print-recipe", "--template-args", "tokenize=true", code=2)
    assert "--template-args has tokenize, which is no argument of a chat template: drop it" in result.stderr
