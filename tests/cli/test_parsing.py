"""Help and wrong usage need no torch, options have sections, and a wrong word is answered by the nearest one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import get_args

import click
import pytest

from quantkit import names
from quantkit.api import build_recipe
from quantkit.cli.commands import quantkit
from quantkit.cli.parsing import OTHERS, SECTIONS, Command, did_you_mean
from quantkit.core.formats import FORMATS
from quantkit.errors import RecipeError
from quantkit.kernels import MATMULS
from quantkit.layouts import LAYOUTS
from tests.command_line import ROOT, call, commands

HEAVY = ("torch", "numpy", "transformers", "datasets", "tqdm", "yaml", "huggingface_hub")
#: Command lines that are answered without torch, besides the help of each command.
LIGHT = [
    ["--version"],
    [],
    ["quantise"],
    ["quantize"],
    ["quantize", "model"],
    ["quantize", "model", "--layot", "marlin"],
    ["pack", "model", "--layout", "marln", "-o", "out"],
    ["convert", "gptq-to-marlin"],
    ["eval", "ppl"],
]
#: Run command lines in one process; print those after which a heavy module is loaded.
PROBE = """
import contextlib, io, json, sys
from quantkit.cli.commands import quantkit
lines, heavy = json.loads(sys.argv[1])
for line in lines:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            quantkit(line)
    loaded = [name for name in heavy if name in sys.modules]
    if loaded:
        sys.exit(f"quantkit {' '.join(line)} imports {loaded}")
"""


def test_help_and_wrong_usage_import_nothing_heavy() -> None:
    lines = [[*path, "--help"] for path, _ in [((), quantkit), *commands(quantkit)]] + LIGHT
    probe = [sys.executable, "-c", PROBE, json.dumps([lines, HEAVY])]
    done = subprocess.run(probe, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        ("ppl", "model", "--max-perplexity", "nan"),
        ("ppl", "model", "--max-perplexity", "-5"),
        ("kld", "model", "--against", "model", "--max-kld", "nan"),
    ],
)
def test_a_limit_that_no_run_can_keep_is_refused_before_the_run(line: tuple[str, ...]) -> None:
    assert f"Invalid value for '{line[-2]}'" in call("eval", *line, code=2).stderr


def test_the_names_of_choices_are_those_of_the_tables() -> None:
    assert tuple(FORMATS) == names.FORMATS
    assert tuple(LAYOUTS) == names.LAYOUTS
    assert tuple(MATMULS) == tuple(names.KERNELS)


def test_options_that_decide_the_output_are_in_sections() -> None:
    sectioned = ("quantize", "prune", "plan", "pack", "convert")
    evaluations = quantkit.commands["eval"]
    assert isinstance(evaluations, click.Group)
    for command in [*(quantkit.commands[name] for name in sectioned), *evaluations.commands.values()]:
        assert isinstance(command, Command)
        found = command.sections(click.Context(command, **quantkit.context_settings))
        assert list(found) == [name for name in (*SECTIONS, OTHERS) if name in found] and len(found) > 2
        assert {option.name for option in found[OTHERS]} - {"as_json", "quiet", "verbose", "help_all"} == {
            option.name for option in found[OTHERS] if "--help" in option.opts
        }


def test_help_shows_at_most_twenty_options() -> None:
    usual = {"as_json", "quiet", "verbose", "help_all", "_click_default_help"}
    for name in ("quantize", "prune", "plan"):
        command = quantkit.commands[name]
        assert isinstance(command, Command)
        context = click.Context(command, **quantkit.context_settings)
        shown = [option for options in command.sections(context).values() for option in options]
        assert len({str(option.name) for option in shown} - usual) <= 20, name


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("quantise", "Did you mean 'quantize'?"),
        ("eval pl", "Did you mean 'ppl'?"),
        ("nonsense", None),
        ("quantize m --layout marln -o o", "Did you mean 'marlin'?"),
        ("quantize m --layout Marlin -o o", "Did you mean 'marlin'?"),
        ("quantize m --layout exl3 -o o", None),
        ("quantize m --sampels 3 -o o", "Did you mean '--samples'?"),
        ("quantize m --calibration wikitext2 -o o", "Did you mean '--calib'?"),
        ("quantize m --target marlin -o o", "Did you mean '--layout marlin'?"),
        ("quantize m --trust-remote -o o", "Did you mean '--trust-remote-code'?"),
        ("serve m", "Use vllm serve FOLDER"),
        ("quantize m --layout autoawq -o o", "Did you mean 'awq'?"),
        ("plan m --gpu 3090", "Did you mean 'rtx3090'?"),
        ("quantize m --num_calibration_samples 8 -o o", "Did you mean '--samples'?"),
        ("quantize m --dtype bf16 -o o", "Use --dense-dtype bfloat16."),
        ("eval ppl m --max-length 8", "Use --window 2048."),
        ("eval kld m --reference m", "Use --against MODEL."),
        ("eval ppl --model m", "Give CHECKPOINT by itself."),
        ("convert m --to marlin -o o", "Give A-to-B by itself."),
        ("generate m -n 5", "Use --max-new-tokens 64."),
        ("quantize m -k 5 -o o", None),
        ("quantize m --no-refit -o o", "--no-refit is now --set gptq.refit=false."),
        ("quantize m -o o --override a=int4:g64 --override a=int8:g64", "--override gives 'a' two schemes: leave one"),
        ("quantize m -o o --recipe int4-best --method rtn", "--set tune=0 --set output_aware=false"),
        ("compare m --group-size 64 -o o", "Use --set scheme.group_size=VALUE."),
        ("prune m --group-size 64 -o o", None),
        ("quantize --print-recipe --set damp=1", "unknown key 'damp': use gptq.damp"),
        ("quantize --print-recipe --set gptq.damp", "write it like --set gptq.damp=0.02"),
        ("quantize --print-recipe --set gptq.damp=two", "gptq.damp is 'two': use a number above 0 and up to 1"),
        ("quantize --print-recipe --set skip=[a", "{a: b}, with quotes around a text that has : or ,"),
        ("quantize --print-recipe --set overrides={a:,a:}", "with quotes around a text that has : or ,"),
        ("quantize m -o o --recipe=", None),
        ("prune m -o o --set pad=true", "unknown key 'pad': --help-all lists all keys"),
        ("quantize m -o o --nbits 3", "Use --format int3."),
        ("prune m -o o --prune 2:4", "Leave it out: this command always keeps two of each four weights."),
        ("quantize m -o o --sparsity-type 2:4", "Use --prune 2:4."),
        ("plan m --format w8a16", "Did you mean 'int8'?"),
        ("plan m --format awq", "Did you mean '--layout awq'?"),
        ("pack m -o o --layout exl2", "quantkit does not write it: ExLlamaV2 does."),
        ("pack m -o o --layout marlin_24", "Did you mean 'marlin24'?"),
        ("plan m --group-size 0", "--group-size is 0: use channel or an integer from 1"),
        ("prune m -o o --samples -3", "--samples is -3: use an integer from 1"),
    ],
)
def test_a_wrong_word_is_answered_by_the_nearest_one(line: str, near: str | None) -> None:
    error = call(*line.split(), code=2).stderr.splitlines()[-1]
    assert error.endswith(near) if near else "Did you mean" not in error


def test_every_word_of_a_list_is_nearest_to_itself() -> None:
    for words in (LAYOUTS, FORMATS, quantkit.commands, get_args(names.Rule)):
        assert [did_you_mean(word, words) for word in words] == [f" Did you mean {word!r}?" for word in words]


def test_every_command_and_group_shows_all_of_its_help() -> None:
    for path, command in [((), quantkit), *commands(quantkit)]:
        printed = call(*path, "--help-all").stdout
        assert "Example:" in printed and ("Keys of --set" in printed) is bool(getattr(command, "keys", ())), path


def test_python_names_keywords_and_files_their_keys() -> None:
    with pytest.raises(RecipeError) as error:
        build_recipe(samples=0)
    assert error.value.typed.python == "samples is 0: use an integer from 1"
    with pytest.raises(RecipeError, match=r"^calibration\.samples is 0: use"):
        build_recipe({"calibration": {"samples": 0}})
