"""Help texts, error texts, exit codes and keys are those that were frozen."""

from __future__ import annotations

from quantkit.errors import QuantkitError
from tests.promises.keys import keys
from tests.promises.running import ERROR_TEXTS, HELP, Work, differences, frozen, read_blocks
from tests.promises.words import errors, errors_in_python, helps


def test_help_texts_are_the_frozen_ones(work: Work) -> None:
    assert differences(helps(work), read_blocks(HELP)) == {}


def test_errors_have_the_frozen_text_and_code(work: Work) -> None:
    found = errors(work)
    assert differences(found, read_blocks(ERROR_TEXTS)) == {}
    assert {text[: text.index("]") + 1] for text in found.values()} == {"[1]", "[2]", "[3]", "[4]"}


def test_errors_in_python_name_keywords(work: Work) -> None:
    frozen_texts, compared = read_blocks(ERROR_TEXTS), 0
    found = errors_in_python(work)
    assert len(found) > 100
    for line, error in found.items():
        assert "--" not in str(error), f"{line}: {error}"
        _, _, text = frozen_texts[line].replace("\n       ", "\n").partition("Error: ")
        if isinstance(error, QuantkitError) and "..." not in text and "see above" not in text:
            same = error.typed.replace(str(work.folder), "WORK") == text
            compared += same
            by_command = "Usage: " in frozen_texts[line] or "is an option of quantkit" in text
            assert same or by_command, f"{line}: {error.typed}"
    assert compared > 80


def test_keys_of_reports_and_json_are_the_frozen_ones(work: Work) -> None:
    found, expected = keys(work), frozen()["keys"]
    assert found.keys() == expected.keys()
    for command, paths in found.items():
        gone, new = set(expected[command]) - set(paths), set(paths) - set(expected[command])
        assert not gone and not new, f"{command}: gone {sorted(gone)}, new {sorted(new)}"
