"""Errors for users, and the options that their messages name.

An error has a subject (`subject`), the broken rule (`rule`) and remedies (`ways_out`):

    raise LayoutError(
        "MARLIN is symmetric only",
        Words("drop", Setting("asym", True)),
        Words("use", Setting("layout", "gptq-v2")),
        subject=name,
    )

A text that names an option is `Words`. `str(error)` is the text of the command line, "use --layout
gptq-v2"; `error.python` names keywords, 'use layout="gptq-v2"'. A text without options is a plain
string. An f-string makes a plain string of `Words`, so put `Words` together with `Words`. The
command line prints an error as one line and exits with its code. Any other exception is a bug.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

_Words = TypeVar("_Words", bound="Words")

#: Messages of torch, Python and other libraries for a lack of memory or threads.
EXHAUSTED = (
    "DefaultCPUAllocator: can't allocate memory",
    "can't start new thread",
    "Cannot allocate memory",
    "failed to map segment",
    "std::bad_alloc",
    # So Python calls an extension that found no memory.
    "error return without exception set",
    "without setting an exception",
)
#: Control characters, marks that turn the direction of a text, and bytes that are no text.
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: The recipe's keys by keyword, for settings that the command line has only as `--set KEY=VALUE`.
#: The schema of the recipe fills this table.
KEYS: dict[str, str] = {}
#: Options with another name than their keyword: options of an output, and switches that are off.
OUT, OFF = {"out": "-o"}, {"asym": "--sym", "signed": "--unsigned"}


class Words(str):
    """A text that names options: itself as the command line has it, `python` as the API has it.

    The parts are joined by spaces, except before punctuation and after an open bracket:
    `Words("use", option, ", or")`.
    """

    parts: tuple[Any, ...]

    def __new__(cls: type[_Words], *parts: object) -> _Words:
        unspelled = super().__new__(cls)
        unspelled.parts = parts
        words = super().__new__(cls, unspelled.spelled())
        words.parts = parts
        return words

    def __getnewargs__(self) -> tuple[Any, ...]:  # for pickle and copy
        return self.parts

    def spelled(self) -> str:
        """Spell it for the command line anew: a constant may be older than the recipe's `KEYS`."""
        return _joined(map(_shell, self.parts))

    @property
    def python(self) -> str:
        """The text as the API has it."""
        return _joined(map(in_python, self.parts))


class Option(Words):
    """An option of a command, and the keyword of the function that does the same.

    `Option("window", 9)` is `--window 9` or `window=9`. `Option("check", False)` is `--no-check` or
    `check=False`. `Option("window")` is only the name. Several values are alternatives. A
    placeholder is `Words("FILE")`.
    """

    @property
    def name(self) -> str:
        """The keyword."""
        return str(self.parts[0])

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, which are alternatives; none if the option is only named."""
        return self.parts[1:]

    def spelled(self) -> str:
        flag = self.name.replace("_", "-")
        if self.values and self.values[0] is False:
            return OFF.get(self.name, f"--no-{flag}")
        values = " or ".join(_quoted(value) for value in self.values if value is not True)
        return f"{OUT.get(self.name, f'--{flag}')} {values}".rstrip()

    @property
    def python(self) -> str:
        return (
            f"{self.name}={' or '.join(map(_literal, self.values))}" if self.values else self.name
        )


class Setting(Option):
    """An option of the recipe: one of `quantize` and its like, or a key that `--set` takes
    (`KEYS`).

    `Setting("damp", 0.02)` is `--set gptq.damp=0.02` or, in Python, `damp=0.02`.
    """

    def spelled(self) -> str:
        if self.name not in KEYS:
            return super().spelled()
        values = (
            str(value).lower() if isinstance(value, bool) else _quoted(value)
            for value in self.values
        )
        return f"--set {KEYS[self.name]}{'=' if self.values else ''}{' or '.join(values)}"


class Command(Words):
    """A command with its arguments and options, and the call that does the same: `quantkit eval
    ppl`, `eval_ppl`.
    """

    def spelled(self) -> str:
        return " ".join(["quantkit", self.parts[0], *map(_quoted, self.parts[1:])])

    @property
    def python(self) -> str:
        call = f"({', '.join(map(_literal, self.parts[1:]))})" if self.parts[1:] else ""
        return f"quantkit.{self.parts[0].replace(' ', '_')}{call}"


def in_python(text: object) -> str:
    """Spell a text for a Python caller: keywords instead of options."""
    return text.python if isinstance(text, Words) else _plain(text)


def printable(text: str) -> str:
    """Escape what a name may hold: control characters, which end a line or steer a terminal, and
    what is no text.
    """
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _plain(text: object) -> str:
    return "\n" if text == "\n" else printable(str(text))


def _shell(text: object) -> str:
    return text.spelled() if isinstance(text, Words) else _plain(text)


def _joined(parts: Iterable[str]) -> str:
    text = ""
    for part in parts:
        text += (
            f" {part}"
            if text and part and part[0] not in ",;:.)\n" and text[-1] not in "(\n"
            else part
        )
    return text


def _quoted(value: object) -> str:
    return _shell(value) if isinstance(value, Words) else shlex.quote(printable(str(value)))


def _literal(value: object) -> str:
    is_text = isinstance(value, str) and not isinstance(value, Words)
    return json.dumps(value, ensure_ascii=False) if is_text else in_python(value)


#: Values that the user chooses.
FILE, NAME = Words("FILE"), Words("NAME")


class QuantkitError(Exception):
    """Base class of errors for users: a request that cannot be carried out, in one line.

    `subject` is the tensor, file or option that it is about, or None. `rule` is the broken rule,
    and each of `ways_out` an instruction that helps. `exit_code` is the exit code of the command
    line. `str` gives the text of the command line, or that of the API `for_python`.
    """

    exit_code = 1
    for_python = False

    def __init__(self, rule: str, *ways_out: str, subject: object = None) -> None:
        super().__init__(rule, *ways_out)
        self.rule, self.ways_out = rule, ways_out
        self.subject = (
            None if subject is None else subject if isinstance(subject, str) else str(subject)
        )

    @property
    def typed(self) -> Words:
        """The message as the command line has it, `subject: rule: way, or way`."""
        subject = () if self.subject is None else (self.subject or "''", ":")
        ways = [part for way in self.ways_out for part in (", or", way)]
        return Words(*subject, self.rule, *([":", *ways[1:]] if ways else ()))

    def __str__(self) -> str:
        return self.typed.python if self.for_python else self.typed

    def to_python(self) -> None:
        """Make this error and its causes name keywords instead of options. `typed` stays."""
        error: BaseException | None = self
        while error is not None:
            if isinstance(error, QuantkitError):
                error.for_python = True
            error = error.__cause__ or error.__context__


class LayoutError(QuantkitError):
    """A scheme or a shape that a layout cannot hold."""


class CheckpointError(QuantkitError):
    """A file, tensor or configuration that is missing, damaged, hostile or contradictory."""


class NumericError(QuantkitError):
    """A value that no number format holds: NaN, infinity, an overflowing scale, a
    broken Hessian.
    """


class KernelError(QuantkitError):
    """A product that no kernel can compute here, for its operands, the GPU or the compiler."""


class RecipeError(QuantkitError):
    """A recipe or an option that is unknown or contradicts another one."""

    exit_code = 2


class ThresholdError(QuantkitError):
    """An output that would miss a threshold, such as the share of weights that are quantized."""

    exit_code = 4


def more_samples(samples: int, tokens: int, needed: int, documents: int | None = None) -> Words:
    """Say how many calibration sequences to use for `needed` tokens, with a tenth to spare:
    `samples` gave `tokens`.

    `documents` is how many the text has, if that is known: more samples than these may ask for a
    longer text.
    """
    count = -(-11 * samples * needed // (10 * tokens))
    longer = (
        ()
        if documents is None or count <= documents
        else ("and, if the text has fewer, a longer", Setting("calib"))
    )
    return Words("use", Setting("samples", count), *longer)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or its cause, is a lack of memory or threads."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError, *((torch.OutOfMemoryError,) if torch else ()))
    chain: list[BaseException] = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) and earlier not in chain:
        chain.append(earlier)
    return any(
        isinstance(each, kinds) or any(words in str(each) for words in EXHAUSTED) for each in chain
    )


def reason(error: BaseException) -> str:
    """Shorten another library's exception to one line that fits into a message of quantkit."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__} {text}".strip() if len(text.split()) < 2 else text)[:200]


@contextmanager
def named_by_key(keys: Mapping[str, str]) -> Iterator[None]:
    """Spell these keywords as `--set KEY=VALUE` too, in a command without their options."""
    before = KEYS.copy()
    KEYS.update(keys)
    try:
        yield
    finally:
        KEYS.clear()
        KEYS.update(before)


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put `name` in front of the subject of any QuantkitError raised inside: that code does not
    know its weight.
    """
    try:
        yield
    except QuantkitError as error:
        error.subject = name if error.subject is None else Words(name, ":", error.subject)
        raise
