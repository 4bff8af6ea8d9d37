"""Errors as data: their text for the command line and for Python, from subject, rule and ways out."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest

from quantkit.errors import (
    FILE,
    KEYS,
    CheckpointError,
    Command,
    Option,
    QuantkitError,
    Setting,
    Words,
    about,
    in_python,
)


@pytest.mark.parametrize(
    ("words", "shell", "python"),
    [
        (Option("overwrite", True), "--overwrite", "overwrite=True"),
        (Option("check", False), "--no-check", "check=False"),
        (Option("out"), "-o", "out"),
        (Option("window", 512), "--window 512", "window=512"),
        (Option("window", 1), "--window 1", "window=1"),
        (Option("window", 0), "--window 0", "window=0"),
        (Option("data", "it's"), """--data 'it'"'"'s'""", '''data="it's"'''),
        (Setting("asym", False), "--sym", "asym=False"),
        (Setting("signed", False), "--set signed=false", "signed=False"),
        (Setting("group_size", 128, "channel"), "--group-size 128 or channel", 'group_size=128 or "channel"'),
        (Setting("skip", r".*\.k_proj"), r"--skip '.*\.k_proj'", r'skip=".*\\.k_proj"'),
        (Setting("calib", FILE), "--calib FILE", "calib=FILE"),
        (Command("pack"), "quantkit pack", "quantkit.pack"),
        (Command("convert", "awq-to-gptq"), "quantkit convert awq-to-gptq", 'quantkit.convert("awq-to-gptq")'),
        (
            Command("eval ppl", FILE, Option("window", 9)),
            "quantkit eval ppl FILE --window 9",
            "quantkit.eval_ppl(FILE, window=9)",
        ),
        (Words("plain"), "plain", "plain"),
        (
            Words("use (", Option("pad", True), "), or drop", Setting("layout"), ": it"),
            "use (--pad), or drop --layout: it",
            "use (pad=True), or drop layout: it",
        ),
    ],
)
def test_words_have_a_shell_and_a_python_text(words: Words, shell: str, python: str) -> None:
    assert words == shell and words.python == python
    for again in (pickle.loads(pickle.dumps(words)), copy.copy(words), Words(words)):
        assert again == shell and in_python(again) == python
    assert json.loads(json.dumps(words)) == shell


def test_a_setting_that_is_a_key_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, "refit", "gptq.refit")
    assert Setting("refit", True) == "--set gptq.refit=true" and Setting("refit", True).python == "refit=True"
    assert Setting("refit") == "--set gptq.refit"
    assert Option("refit", True) == "--refit"


def test_an_error_is_its_subject_rule_and_ways_out() -> None:
    error = QuantkitError("breaks the rule", "do this", Words("use", Option("pad", True)), subject="w")
    assert str(error) == error.typed == "w: breaks the rule: do this, or use --pad"
    assert error.typed.python == "w: breaks the rule: do this, or use pad=True"
    again = pickle.loads(pickle.dumps(error))
    assert (again.subject, again.rule, again.ways_out) == (error.subject, error.rule, error.ways_out)
    assert str(QuantkitError("one line")) == "one line"


def test_a_name_with_control_characters_stays_in_its_line() -> None:
    name = "/a\nb\x1b[2J\u202ec\udcff é　"
    said = "/a\\nb\\x1b[2J\\u202ec\\udcff é　"
    found = CheckpointError(f"{name} is none", Words("use", Option("calib", name)), subject=Path(name))
    assert str(found) == f"{said}: {said} is none: use --calib '{said}'"
    assert Words("two", "\n", "lines") == "two\nlines"


def test_about_names_the_subject_and_keeps_the_rest() -> None:
    with pytest.raises(CheckpointError) as caught, about("file"), about("weight"):
        raise CheckpointError("is damaged", Words("add", Option("overwrite", True)))
    assert (caught.value.subject, caught.value.rule) == ("file: weight", "is damaged")
    assert caught.value.typed.python == "file: weight: is damaged: add overwrite=True"
