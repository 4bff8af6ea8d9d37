"""The errors a user can meet; each message names the thing, the rule and the way out.

The command line prints them as one line and exits with their code. Any other exception is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class QuantkitError(Exception):
    """A request that cannot be carried out, said in one line."""

    exit_code = 1


class LayoutError(QuantkitError):
    """A scheme or a shape that a layout cannot hold."""


class CheckpointError(QuantkitError):
    """A file, tensor or configuration that is missing, damaged, hostile or contradictory."""


class NumericError(QuantkitError):
    """A value that no number format can carry: NaN, infinity, an overflowing scale, a broken Hessian."""


class KernelError(QuantkitError):
    """A multiplication that no kernel can carry out here: operands, GPU or compiler are not what it needs."""


class RecipeError(QuantkitError):
    """A recipe or an option that is unknown or contradicts another one."""

    exit_code = 2


def reason(error: BaseException) -> str:
    """Return what another library's exception says as one short line, to stand inside a message of ours."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__} {text}".strip() if len(text.split()) < 2 else text)[:200]


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put `name` in front of any QuantkitError raised inside, by code that does not know whose weight it handles."""
    try:
        yield
    except QuantkitError as error:
        raise type(error)(f"{name}: {error}") from error
