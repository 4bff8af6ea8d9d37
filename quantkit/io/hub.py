"""An unreachable hub and a refusal are different errors, because their remedies differ."""

from __future__ import annotations

UNREACHABLE = "the hub cannot be reached and nothing is cached"
#: Classes of exceptions for a missing connection, by name: the hub's client has had three HTTP
#: libraries, each with classes of its own.
MISSING = {"ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError"}


def is_unreachable(error: BaseException) -> bool:
    """Return True if an exception of the hub's client, or one of its causes, is a missing
    connection.
    """
    cause: BaseException | None = error
    while cause is not None:
        if MISSING.intersection(kind.__name__ for kind in type(cause).__mro__):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
