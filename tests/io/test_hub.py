"""Errors of the hub's client: no connection, or a refusal."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from quantkit.errors import is_unreachable


class TransportError(Exception):
    """The base of what an HTTP library raises without a connection."""


class ReadTimeout(TransportError):
    pass


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [
        (ConnectionError("no route"), True),
        (TimeoutError(), True),
        (OfflineModeIsEnabled("offline"), True),
        (LocalEntryNotFoundError("not cached"), True),
        (caused(RuntimeError("while reading"), ReadTimeout("slow")), True),
        (caused(ValueError("x"), caused(ValueError("y"), ConnectionError("z"))), True),
        (FileNotFoundError("no such data set"), False),
        (caused(ValueError("unknown configuration"), KeyError("x")), False),
    ],
)
def test_a_missing_connection_is_found_in_the_chain(error: Exception, unreachable: bool) -> None:
    assert is_unreachable(error) == unreachable


def test_a_handled_error_that_was_suppressed_does_not_count() -> None:
    try:
        try:
            raise ConnectionError("first try")
        except ConnectionError:
            raise ValueError("not a data set") from None
    except ValueError as error:
        assert not is_unreachable(error)
