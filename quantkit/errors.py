"""The errors a user can meet. Each message names the thing, the rule and the way out.

The command line prints them as one line and exits with their code. Any other exception is a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

#: What torch and Python say in an error when the system gives no memory or no thread.
EXHAUSTED = (
    *("DefaultCPUAllocator: can't allocate memory", "can't start new thread", "Cannot allocate memory"),
    *("failed to map segment", "std::bad_alloc"),
)


class QuantkitError(Exception):
    """The base of all errors that a user can meet: a request that cannot be carried out, in one line.

    `exit_code` is the code with which the command line ends.
    """

    exit_code = 1
    _typed: str | None = None

    @property
    def typed(self) -> str:
        """The message with options as the command line spells them."""
        return str(self) if self._typed is None else self._typed

    def spell(self, spelling: Callable[[str], str]) -> None:
        """Spell the message, and those of the errors behind it, in another way; `typed` stays."""
        error: BaseException | None = self
        while error is not None:
            if isinstance(error, QuantkitError):
                error._typed, error.args = error.typed, (spelling(str(error)),)
            error = error.__cause__ or error.__context__


class LayoutError(QuantkitError):
    """A scheme or a shape that a layout cannot hold."""


class CheckpointError(QuantkitError):
    """A file, tensor or configuration that is missing, damaged, hostile or contradictory."""


class NumericError(QuantkitError):
    """A value that no number format holds: NaN, infinity, an overflowing scale, a broken Hessian."""


class KernelError(QuantkitError):
    """A product that no kernel can compute here, for its operands, the GPU or the compiler."""


class RecipeError(QuantkitError):
    """A recipe or an option that is unknown or contradicts another one."""

    exit_code = 2


class HubError(QuantkitError):
    """An upload that the hub refuses, or a hub that is not reached."""


class VerificationError(QuantkitError):
    """A folder whose files or weights are not those that were written."""

    exit_code = 3


class ThresholdError(QuantkitError):
    """An output that would miss a threshold, such as the share of weights that are quantized."""

    exit_code = 4


def require_known(kind: str, value: object, names: Collection[str]) -> None:
    """Raise a RecipeError that lists the names of a kind, if `value` is none of them."""
    if value not in tuple(names):
        raise RecipeError(f"unknown {kind} {value!r}: use one of {', '.join(names)}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error of Python or torch says that the system gives no memory or no thread."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in EXHAUSTED)


def reason(error: BaseException) -> str:
    """Shorten another library's exception to one line that fits into a message of quantkit."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__} {text}".strip() if len(text.split()) < 2 else text)[:200]


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put `name` in front of any QuantkitError raised inside: that code does not know the name of its weight."""
    try:
        yield
    except QuantkitError as error:
        raise type(error)(f"{name}: {error}") from error
