"""Help texts, error texts, exit codes and keys are those that were frozen."""

from __future__ import annotations

from tests.promises.keys import keys
from tests.promises.running import ERROR_TEXTS, HELP, Work, differences, frozen, read_blocks
from tests.promises.words import errors, helps


def test_help_texts_are_the_frozen_ones(work: Work) -> None:
    assert differences(helps(work), read_blocks(HELP)) == {}


def test_errors_have_the_frozen_text_and_code(work: Work) -> None:
    found = errors(work)
    assert differences(found, read_blocks(ERROR_TEXTS)) == {}
    assert {text[: text.index("]") + 1] for text in found.values()} == {"[1]", "[2]", "[3]", "[4]"}


def test_keys_of_reports_and_json_are_the_frozen_ones(work: Work) -> None:
    found, expected = keys(work), frozen()["keys"]
    assert found.keys() == expected.keys()
    for command, paths in found.items():
        gone, new = set(expected[command]) - set(paths), set(paths) - set(expected[command])
        assert not gone and not new, f"{command}: gone {sorted(gone)}, new {sorted(new)}"
